"""Compares layouts of a head over processes by memory and communication."""

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
# A layout that takes more work to set up must save this fraction of the bytes.
_WORTH = 0.2
# Bytes per class that draws without replacement store in every process.
_UNIQUE_BYTES = 16


class Memory(NamedTuple):
    """Bytes of a head in one process at the peak of a training step.

    Attributes:
        weights: parameters that the process stores, and tables such as those of a sampler.
        gradients: their gradients.
        optimizer: the state of the optimiser.
        gathered: temporary tensors received from other processes: whole tables and their gradient
            with FSDP2, rows or class vectors and their gradients with class-parallel.
        scores: the scores of one chunk.
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
        memory: bytes in memory.
        bytes_forward: bytes that a process receives in forward.
        bytes_backward: the same in backward.
        rounds_forward: calls in forward, each of which waits for all processes.
        rounds_backward: the same in backward.
        seconds: time of the transfers alone; None without a bandwidth.
        fits: whether it fits into memory; None without a limit.
        refused: why the layout is not possible; empty if it is.
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
        """Number of calls in a step."""
        return self.rounds_forward + self.rounds_backward

    def as_json(self) -> dict[str, Any]:
        """A dict that ``json`` can write."""
        if self.refused:
            return {"name": self.name, "refused": self.refused}
        made = self._asdict() | {"memory": self.memory._asdict(), "nbytes": self.nbytes}
        made["memory"]["total"] = self.memory.total
        return {name: each for name, each in made.items() if name != "refused"}


@dataclass(frozen=True)
class Plan:
    """The cost of each layout of a head, and which one to use; ``print(plan)`` shows a table.

    Attributes:
        head: the class of the head.
        n_classes: number of classes.
        in_features: size of the hidden state.
        ranks: number of processes.
        rows: rows of each process in a step.
        shared: whether all processes have the same rows.
        dtype: dtype of the parameters.
        layout: the recommended layout: "replicate" (DDP), "fsdp" (FSDP2) or "class-parallel".
        why: the reason, in a sentence.
        layouts: the cost of each layout.
        communication: what class-parallel sends, in detail; None if it is not possible.
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
        """The cost of a layout, by name."""
        for each in self.layouts:
            if each.name == name:
                return each
        raise KeyError(f"name: expected one of {LAYOUTS}, got {name!r}")

    @property
    def chosen(self) -> LayoutCost:
        """The cost of the recommended layout."""
        return self[self.layout]

    def as_json(self) -> dict[str, Any]:
        """A dict that ``json`` can write."""
        return {
            "head": self.head, "classes": self.n_classes, "hidden": self.in_features,
            "ranks": self.ranks, "rows": self.rows, "shared": self.shared,
            "dtype": str(self.dtype).removeprefix("torch."), "layout": self.layout,
            "why": self.why, "layouts": [each.as_json() for each in self.layouts],
        }  # fmt: skip

    def title(self) -> str:
        """The head and the processes, in one line."""
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

    are the bytes that a process receives in a step of a softmax, with :math:`f = (P - 1) / P`, W
    the bytes of the head, N the rows of all processes, D the hidden size and b the bytes per number
    of a hidden state. So class-parallel sends less than DDP while N is below the number of classes,
    whatever the hidden size, as long as P is small compared with 2 D.

    The plan is computed, not measured. The head may be on the meta device; nothing is allocated. Of
    the layouts that fit into memory, the one that sends the fewest bytes is recommended; a layout
    that takes more work to set up must send at least 20% less.

    Args:
        head: the head; for a :class:`ClassParallel`, the head in it.
        mesh: a ``DeviceMesh`` of one dimension, or the number of processes.
        rows: rows of each process in a step: batch size times sequence length.
        shared: whether all processes have the same rows, as in tensor parallelism.
        optimizer_slots: numbers per parameter in the optimiser's state: 2 for Adam, 1 for SGD with
            momentum or Adagrad.
        gbps: bandwidth of a process in gigabits per second, to compute the time of the transfers.
        memory: gigabytes (10⁹ bytes) per process that the head may use; None for no limit.
        targets: number of targets per row, for multi-label heads.
        dtype: dtype of the hidden states; by default that of the parameters.
        device: "cpu" or "cuda", which determines the chunks of scores; by default that of the mesh
            or of the parameters.

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
        # Number of classes of each softmax.
        self.tables = [head.n_classes]
        if isinstance(head, AdaptiveSoftmax | DifferentiatedSoftmax):
            self.tables = planned_family(head).table_sizes()

    def replicated(self, targets: int) -> LayoutCost:
        """DDP: every process has the whole head; gradients are summed."""
        gradients, sent, rounds = self.whole, 0.0, 0
        if self.sparse:
            touched = self._touched(self.rows, targets)
            row = self.whole / max(1, self.head.weight.shape[0])
            gradients = round(touched * row)
            sent = received_bytes("all_gather", touched * (row + ID), self.ranks)
            rounds = 2
        elif not self.shared:
            # With shared rows, gradients are equal in all processes.
            sent, rounds = received_bytes("all_reduce", self.whole, self.ranks), 1
        scores = self._scores(self.rows, 1)
        weights = self.whole + self._buffers(set())
        memory = Memory(weights, gradients, self.slots * self.whole, 0, scores)
        return LayoutCost(LAYOUTS[0], memory, 0, round(sent), 0, rounds if self.ranks > 1 else 0)

    def fully_sharded(self) -> LayoutCost:
        """FSDP2: every process has a part of each table; whole tables are gathered for use."""
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
        """Every process has a part of the classes; rows or class vectors are sent."""
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
        """Bytes of buffers, such as tables of a sampler; those named in ``spread`` are sharded."""
        made = sum(
            self._part(each) if name in spread else int(each.nbytes)
            for name, each in self.head.named_buffers()
        )
        if getattr(self.head, "unique", False):
            # The inclusion probability of each class, and their cumulative sum.
            made += _UNIQUE_BYTES * self.head.sampler.n_classes
        return made

    def _part(self, tensor: Any) -> int:
        """Bytes of one part of a tensor whose rows are sharded evenly."""
        if not tensor.dim() or not tensor.shape[0]:
            return int(tensor.nbytes)
        rows: int = -(-tensor.shape[0] // self.ranks)
        return rows * int(tensor.nbytes // tensor.shape[0])

    def _touched(self, rows: int, targets: int) -> int:
        """The largest number of class vectors that a step of a sampled head or a tree uses."""
        head = self.head
        if isinstance(head, HierarchicalSoftmax):
            longest = head.tree.max_depth * max(1, head.tree.max_arity - 1)
            return int(min(head.weight.shape[0], rows * targets * longest))
        drawn = head._classes_per_step() + getattr(head, "n_head", 0)
        return int(min(head.n_classes, drawn + rows * targets))

    def _scores(self, n: int, parts: int) -> int:
        """Bytes of one chunk of scores, with the classes sharded into ``parts``."""
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
        # All bands are stored at once; the clusters of an adaptive softmax reuse one buffer.
        classes = max(sizes) if isinstance(head, AdaptiveSoftmax) else sum(sizes)
        made = size * classes * rows_at_a_time(getattr(head, "chunk_rows", "auto"), like, classes)
        if isinstance(head, CharCNNSoftmax):
            # Class vectors are computed from the spellings, and have a gradient.
            made += 2 * classes * head.in_features * size
        return int(made)


def _reason(error: Exception) -> str:
    """The reason in an error message, without the name of the argument and the head."""
    return str(error).partition(": ")[2].partition(", to shard its")[0]


def _choice(
    layouts: tuple[LayoutCost, ...], ranks: int, shared: bool, memory: float | None
) -> tuple[str, str]:
    """The name of the recommended layout, and the reason."""
    possible = [each for each in layouts if not each.refused]
    whole = possible[0]
    if ranks == 1:
        return whole.name, "there is one process, which has all classes"
    fitting = [each for each in possible if each.fits is not False]
    if not fitting:
        least = min(possible, key=lambda each: each.memory.total)
        return least.name, (
            f"none fits into {memory:g} GB per process; this one needs the least, "
            f"{as_bytes(least.memory.total)}; use more processes or a smaller hidden size"
        )
    best = fitting[0]
    for each in fitting[1:]:
        if each.nbytes < (1.0 - _WORTH) * best.nbytes:
            best = each
    spread = layouts[-1]
    if shared and not spread.refused and spread.fits is not False:
        return spread.name, (
            "all processes have the same rows, so each computes a part of the classes instead of "
            "repeating the same work"
        )
    others = [each for each in fitting if each is not best]
    nearest = min(others, key=lambda each: each.nbytes, default=None)
    told = f"a step sends {as_bytes(best.nbytes)} to each process"
    if nearest is not None and best.nbytes < nearest.nbytes:
        times = nearest.nbytes / max(1, best.nbytes)
        shown = f"{times:,.0f}" if times >= 100 else f"{times:.2g}"
        told += f", {shown} times less than {nearest.name} ({as_bytes(nearest.nbytes)})"
    elif nearest is not None:
        told += f", about as much as {nearest.name} ({as_bytes(nearest.nbytes)}), and is simpler"
    large = [each for each in possible if each.fits is False]
    if large:
        sizes = " and ".join(f"{each.name} takes {as_bytes(each.memory.total)}" for each in large)
        told += f"; {sizes}, more than the {memory:g} GB of a process"
    return best.name, told
