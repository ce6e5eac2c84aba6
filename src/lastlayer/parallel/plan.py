"""Which layout of a head over processes to take: memory and communication of each, counted."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lastlayer._checks import check_int, check_positive
from lastlayer._processes import received_bytes
from lastlayer.fused.scores import budget_bytes, classes_at_a_time, rows_at_a_time
from lastlayer.heads import (
    AdaptiveSoftmax,
    CharCNNSoftmax,
    DifferentiatedSoftmax,
    Head,
    HierarchicalSoftmax,
    MultiLabel,
)
from lastlayer.heads.sampled.base import ComparedHead
from lastlayer.parallel.class_parallel import ClassParallel
from lastlayer.parallel.communication import (
    ID,
    Communication,
    as_bytes,
    communication,
    device_of,
    head_dtype,
    moves_vectors,
    planned_family,
    ranks_of,
    row_like,
)
from lastlayer.parallel.families import Family

LAYOUTS = ("replicate", "fsdp", "class-parallel")
# A layout that is more work to set up has to save this share of the bytes.
_WORTH = 0.2
# Of each class, what draws without replacement keep in every process.
_UNIQUE_BYTES = 16


class Memory(NamedTuple):
    """Bytes of a head in one process at the peak of a training step.

    Attributes:
        weights: parameters that the process keeps, and tables such as those of a sampler.
        gradients: their gradients.
        optimizer: the state of the optimiser.
        gathered: what comes from other processes and is freed: whole tables with FSDP2, rows or
            class vectors and their gradients with class-parallel.
        scores: the scores that are held at a time.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    scores: int

    @property
    def total(self) -> int:
        return sum(self)


class LayoutCost(NamedTuple):
    """What a layout costs each process in a training step.

    Attributes:
        name: "replicate", "fsdp" or "class-parallel".
        memory: bytes.
        bytes_forward: bytes that a process receives in forward.
        bytes_backward: the same in backward.
        rounds_forward: calls in forward, each of which waits for all processes.
        rounds_backward: the same in backward.
        seconds: of the transfers alone, where the bandwidth was given.
        fits: whether the memory is enough, where it was given.
        refused: why the layout is not possible; empty where it is.
    """

    name: str
    memory: Memory = Memory(0, 0, 0, 0, 0)
    bytes_forward: int = 0
    bytes_backward: int = 0
    rounds_forward: int = 0
    rounds_backward: int = 0
    seconds: float | None = None
    fits: bool | None = None
    refused: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that a process receives in a step."""
        return self.bytes_forward + self.bytes_backward

    @property
    def rounds(self) -> int:
        """Calls in a step."""
        return self.rounds_forward + self.rounds_backward

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        if self.refused:
            return {"name": self.name, "refused": self.refused}
        made = self._asdict() | {"memory": self.memory._asdict(), "nbytes": self.nbytes}
        made["memory"]["total"] = self.memory.total
        return {name: each for name, each in made.items() if name != "refused"}


@dataclass(frozen=True)
class Plan:
    """What each layout of a head costs, and which one to take; ``print(plan)``.

    Attributes:
        head: the class of the head.
        n_classes: number of classes.
        in_features: size of the hidden state.
        ranks: number of processes.
        rows: rows of each process in a step.
        shared: whether all processes have the same rows.
        dtype: of the parameters.
        layout: "replicate" (DDP), "fsdp" (FSDP2) or "class-parallel".
        why: the reason, in a sentence.
        layouts: the cost of each.
        communication: what class-parallel sends, in detail; None where it is not possible.
    """

    head: str
    n_classes: int
    in_features: int
    ranks: int
    rows: int
    shared: bool
    dtype: torch.dtype
    layout: str
    why: str
    layouts: tuple[LayoutCost, ...]
    communication: Communication | None

    def __getitem__(self, name: str) -> LayoutCost:
        """The cost of a layout, by its name."""
        for each in self.layouts:
            if each.name == name:
                return each
        raise KeyError(f"name: expected one of {LAYOUTS}, got {name!r}")

    @property
    def chosen(self) -> LayoutCost:
        """The cost of the layout to take."""
        return self[self.layout]

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "head": self.head, "classes": self.n_classes, "hidden": self.in_features,
            "ranks": self.ranks, "rows": self.rows, "shared": self.shared,
            "dtype": str(self.dtype).removeprefix("torch."), "layout": self.layout,
            "why": self.why, "layouts": [each.as_json() for each in self.layouts],
        }  # fmt: skip

    def title(self) -> str:
        """The problem in a line."""
        rows = f"the same {self.rows:,}" if self.shared else f"{self.rows:,}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.head}({self.in_features:,}, {self.n_classes:,}) in {dtype}, {self.ranks:,} "
            f"processes with {rows} rows each"
        )

    def __str__(self) -> str:
        header: tuple[str, ...] = (
            "per process", "weights", "grads", "state", "gathered", "scores", "memory", "traffic",
            "rounds", "",
        )  # fmt: skip
        table = [header]
        for each in self.layouts:
            if each.refused:
                table.append((each.name, *[""] * 8, f"not possible: {each.refused}"))
                continue
            fits = {None: "", True: "fits", False: "too large"}[each.fits]
            sizes = *each.memory, each.memory.total, each.nbytes
            table.append((each.name, *map(as_bytes, sizes), str(each.rounds), fits))
        widths = [max(len(row[i]) for row in table) for i in range(len(header) - 1)]
        lines = [
            "  ".join([
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)),
                row[-1],
            ]).rstrip()
            for row in table
        ]  # fmt: skip
        return "\n".join([self.title(), *lines, f"{self.layout}: {self.why}"])


def plan(
    head: Head,
    mesh: Any,
    *,
    rows: int,
    shared: bool = False,
    optimizer_slots: int = 2,
    gbps: float | None = None,
    memory: float | None = None,
    targets: int = 1,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Plan:
    r"""Memory and communication of a head over processes: DDP, FSDP2 or :class:`ClassParallel`.

    .. math:: \text{DDP: } 2 f W, \qquad \text{FSDP2: } 3 f W, \qquad
              \text{class-parallel: } 2 f N D b + 4 N (P - 1)

    are bytes that a process receives in a step of a softmax, with :math:`f = (P - 1) / P`,
    W the bytes of the head and N rows of all processes. So class-parallel sends less than DDP while
    :math:`N < V`, whatever the hidden size, as long as P is small beside 2 D.

    It counts and measures nothing; a head on the meta device will do, and no memory is taken. Of
    layouts that fit, the one with the fewest bytes is taken, and of these the simplest.

    Args:
        head: the head; a :class:`ClassParallel` counts as the head in it.
        mesh: a ``DeviceMesh`` of one dimension, or the number of processes.
        rows: rows of each process in a step: batch size times length.
        shared: whether all processes have the same rows, as inside of tensor parallelism.
        optimizer_slots: numbers per parameter that the optimiser keeps: 2 of Adam, 1 of SGD with
            momentum or Adagrad.
        gbps: bandwidth of a process in gigabits per second, to turn bytes into seconds.
        memory: gigabytes (10⁹ bytes) of each process that the head may take; None for no limit.
        targets: targets of each row, for many labels.
        dtype: of the hidden states; that of the parameters by default.
        device: "cpu" or "cuda", which decides how many scores are held at a time.

    Example:
        >>> from lastlayer import heads, parallel
        >>> head = heads.FullSoftmax(512, 29_000_000, device="meta")
        >>> made = parallel.plan(head, 64, rows=128, memory=80)
        >>> made.layout, made["class-parallel"].rounds
        ('class-parallel', 21)
    """
    ranks, kind = ranks_of(mesh)
    if isinstance(head, ClassParallel):
        shared, head = head.rows == "shared", head.head
    if not isinstance(head, Head):
        raise TypeError(f"head: expected a lastlayer head, got {type(head).__name__}")
    rows, slots = check_int("rows", rows), check_int("optimizer_slots", optimizer_slots, least=0)
    gbps = None if gbps is None else check_positive("gbps", gbps)
    limit = None if memory is None else 1e9 * check_positive("memory", memory)
    sizes = _Sizes(head, ranks, rows, shared, slots, dtype or head_dtype(head),
                   device_of(head, device or kind))  # fmt: skip
    made: Communication | None = None
    spread: LayoutCost
    try:
        family = planned_family(head)
        made = communication(
            head, ranks, rows, shared=shared, targets=targets, dtype=dtype, device=sizes.device
        )
        spread = sizes.class_parallel(family, made, targets)
    except (TypeError, ValueError) as error:
        spread = LayoutCost(LAYOUTS[2], refused=_reason(error))
    found = [sizes.replicated(targets), sizes.fully_sharded(), spread]
    layouts = tuple(
        each if each.refused else each._replace(
            seconds=None if gbps is None else each.nbytes * 8 / (gbps * 1e9),
            fits=None if limit is None else each.memory.total <= limit,
        )
        for each in found
    )  # fmt: skip
    layout, why = _choice(layouts, ranks, shared, memory)
    return Plan(
        type(head).__name__, head.n_classes, head.in_features, ranks, rows, shared,
        head_dtype(head), layout, why, layouts, made,
    )  # fmt: skip


class _Sizes:
    """Bytes of a head in each layout."""

    def __init__(
        self, head: Any, ranks: int, rows: int, shared: bool, slots: int, dtype: torch.dtype,
        device: str,
    ) -> None:  # fmt: skip
        self.head, self.ranks, self.rows, self.shared = head, ranks, rows, shared
        self.slots, self.dtype, self.device = slots, dtype, device
        self.parameters = dict(head.named_parameters())
        self.whole = sum(each.nbytes for each in self.parameters.values())
        self.sparse = bool(getattr(head, "sparse", False))
        # Classes of each softmax that a row may be scored by.
        self.tables = [head.n_classes]
        if isinstance(head, AdaptiveSoftmax | DifferentiatedSoftmax):
            self.tables = planned_family(head).table_sizes()

    def replicated(self, targets: int) -> LayoutCost:
        """DDP: all of it in every process, and gradients that are summed."""
        gradients, sent, rounds = self.whole, 0.0, 0
        if self.sparse:
            touched = self._touched(self.rows, targets)
            row = self.whole / max(1, self.head.weight.shape[0])
            gradients = round(touched * row)
            sent = received_bytes("all_gather", touched * (row + ID), self.ranks)
            rounds = 2
        elif not self.shared:
            # Where all have the same rows, they have the same gradients.
            sent, rounds = received_bytes("all_reduce", self.whole, self.ranks), 1
        scores = self._scores(self.rows, 1)
        weights = self.whole + self._buffers(set())
        memory = Memory(weights, gradients, self.slots * self.whole, 0, scores)
        return LayoutCost(LAYOUTS[0], memory, 0, round(sent), 0, rounds if self.ranks > 1 else 0)

    def fully_sharded(self) -> LayoutCost:
        """FSDP2: a part of each in every process; whole tables are gathered to be used."""
        if self.sparse:
            return LayoutCost(LAYOUTS[1], refused="FSDP2 reduces dense gradients, not sparse=True")
        part = sum(self._part(each) for each in self.parameters.values())
        once = round(received_bytes("reduce_scatter", self.whole, self.ranks))
        gathered = 2 * self.whole if self.ranks > 1 else 0
        scores = self._scores(self.rows, 1)
        # Buffers are not sharded.
        weights = part + self._buffers(set())
        memory = Memory(weights, part, self.slots * part, gathered, scores)
        rounds = (1, 2) if self.ranks > 1 else (0, 0)
        return LayoutCost(LAYOUTS[1], memory, once, 2 * once, *rounds)

    def class_parallel(self, family: Family, made: Communication, targets: int) -> LayoutCost:
        """A range of the classes in every process; rows or class vectors travel."""
        names = {*family.names}
        part = sum(
            self._part(each) if name in names else each.nbytes
            for name, each in self.parameters.items()
        )
        n = self.rows if self.shared else self.rows * self.ranks
        if moves_vectors(family, self.ranks, self.rows, self.shared, targets):
            here = -(-self.rows // self.ranks) if self.shared else self.rows
            row = self.whole / max(1, self.head.weight.shape[0])
            gathered = 2 * self._touched(here, targets) * row
            scores = self._scores(here, 1)
        else:
            # Hidden states of all processes, and their gradients.
            gathered = 2 * n * self.head.in_features * self.dtype.itemsize
            scores = self._scores(n, self.ranks)
        weights = part + self._buffers(names)
        memory = Memory(weights, part, self.slots * part, round(gathered), scores)
        return LayoutCost(
            LAYOUTS[2], memory, made.bytes_forward, made.bytes_backward, made.rounds_forward,
            made.rounds_backward,
        )  # fmt: skip

    def _buffers(self, spread: set[str]) -> int:
        """Of tables that are no parameters, such as those of a sampler; some are spread."""
        made = sum(
            self._part(each) if name in spread else int(each.nbytes)
            for name, each in self.head.named_buffers()
        )
        if getattr(self.head, "unique", False):
            # Of each class how probable it is that it is drawn, and the sum up to it.
            made += _UNIQUE_BYTES * self.head.sampler.n_classes
        return made

    def _part(self, tensor: Any) -> int:
        """Of a tensor whose rows are spread evenly."""
        if not tensor.dim() or not tensor.shape[0]:
            return int(tensor.nbytes)
        rows: int = -(-tensor.shape[0] // self.ranks)
        return rows * int(tensor.nbytes // tensor.shape[0])

    def _touched(self, rows: int, targets: int) -> int:
        """The most class vectors that a step of a sampled head or of a tree looks at."""
        head = self.head
        if isinstance(head, HierarchicalSoftmax):
            longest = head.tree.max_depth * max(1, head.tree.max_arity - 1)
            return int(min(head.weight.shape[0], rows * targets * longest))
        drawn = head._classes_per_step() + getattr(head, "n_head", 0)
        return int(min(head.n_classes, drawn + rows * targets))

    def _scores(self, n: int, parts: int) -> int:
        """Bytes of scores at a time, of tables that are spread over so many processes."""
        head, like = self.head, row_like(n, self.head.in_features, self.dtype, self.device)
        size, sizes = self.dtype.itemsize, [-(-each // parts) for each in self.tables]
        if isinstance(head, HierarchicalSoftmax):
            children = head.tree.max_arity if head.tree.max_arity > 2 else 1
            return 4 * n * int(head.tree.max_depth) * int(children)
        if isinstance(head, ComparedHead) and not head._takes_all():
            budget = budget_bytes("sampled", "auto", like)
            return int(min(budget, n * size * (1 + head._classes_per_step())))
        if isinstance(head, MultiLabel):
            return int(n * size * classes_at_a_time("auto", like, sizes[0]))
        # Bands are side by side; the clusters of an adaptive softmax share their memory.
        classes = max(sizes) if isinstance(head, AdaptiveSoftmax) else sum(sizes)
        made = size * classes * rows_at_a_time(getattr(head, "chunk_rows", "auto"), like, classes)
        if isinstance(head, CharCNNSoftmax):
            # Class vectors are made of the spellings, and have a gradient.
            made += 2 * classes * head.in_features * size
        return int(made)


def _reason(error: Exception) -> str:
    """Of a refusal, without what is known here."""
    return str(error).partition(": ")[2].partition(", to spread its")[0]


def _choice(
    layouts: tuple[LayoutCost, ...], ranks: int, shared: bool, memory: float | None
) -> tuple[str, str]:
    """The name of the layout to take, and the reason."""
    possible = [each for each in layouts if not each.refused]
    whole = possible[0]
    if ranks == 1:
        return whole.name, "there is one process, which has all classes"
    fitting = [each for each in possible if each.fits is not False]
    if not fitting:
        least = min(possible, key=lambda each: each.memory.total)
        return least.name, (
            f"none fits into {memory:g} GB per process; this one needs the least, "
            f"{as_bytes(least.memory.total)}: take more processes or a smaller hidden size"
        )
    best = fitting[0]
    for each in fitting[1:]:
        if each.nbytes < (1.0 - _WORTH) * best.nbytes:
            best = each
    spread = layouts[-1]
    if shared and not spread.refused and spread.fits is not False:
        return spread.name, (
            "all processes have the same rows: each scores a part of the classes, instead of all "
            "of them doing the same work"
        )
    others = [each for each in fitting if each is not best]
    nearest = min(others, key=lambda each: each.nbytes, default=None)
    told = f"a step sends {as_bytes(best.nbytes)} to each process"
    if nearest is not None and best.nbytes < nearest.nbytes:
        times = nearest.nbytes / max(1, best.nbytes)
        shown = f"{times:,.0f}" if times >= 100 else f"{times:.2g}"
        told += f", {shown} times less than {nearest.name} ({as_bytes(nearest.nbytes)})"
    elif nearest is not None:
        told += f", about what {nearest.name} sends ({as_bytes(nearest.nbytes)}), and it is simpler"
    large = [each for each in possible if each.fits is False]
    if large:
        sizes = " and ".join(f"{each.name} takes {as_bytes(each.memory.total)}" for each in large)
        told += f"; {sizes}, more than the {memory:g} GB of a process"
    return best.name, told
