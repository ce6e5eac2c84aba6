"""Computes what processes exchange in a training step of each kind of head, without running it."""

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lastlayer._checks import check_int
from lastlayer._processes import received_bytes
from lastlayer._torch import accumulation_dtype
from lastlayer.fused.scores import rows_at_a_time
from lastlayer.fused.spread import TOLD
from lastlayer.heads import EntmaxHead, Head, MultiLabel, SelfNormalized, TopKSoftmaxHead
from lastlayer.parallel.class_parallel import ClassParallel
from lastlayer.parallel.families import (
    _FAMILIES,
    BandsFamily,
    ClustersFamily,
    Family,
    LinearFamily,
    SampledFamily,
    SpelledFamily,
    TreeFamily,
    family_of,
)
from lastlayer.parallel.sampler_tables import spreadable_tables
from lastlayer.samplers import Unigram

# Bytes of a class id, and of a row count.
ID = 8


class Exchange(NamedTuple):
    """Collective calls of one kind in a training step.

    Attributes:
        what: what is sent, such as "hidden states".
        call: "all_gather", "all_reduce", "reduce_scatter" or "all_to_all".
        when: "forward" or "backward".
        rounds: number of calls.
        nbytes: bytes that a process receives in all of them.
        floats_per_row: numbers that a process sends per row of the batch before the gradient is
            known; 0 for hidden states and for anything not sent per row.
        at_most: whether the size depends on the data, so that ``nbytes`` is an upper bound.
    """

    what: str
    call: str
    when: str
    rounds: int
    nbytes: float
    floats_per_row: int = 0
    at_most: bool = False


@dataclass(frozen=True)
class Communication:
    """Everything that processes exchange in a training step of a head.

    Attributes:
        ranks: number of processes.
        rows: rows of each process.
        exchanges: the exchanges, in the order in which they happen.
    """

    ranks: int
    rows: int
    exchanges: tuple[Exchange, ...]

    def _of(self, when: str) -> list[Exchange]:
        return [each for each in self.exchanges if each.when == when]

    @property
    def bytes_forward(self) -> int:
        """Bytes that a process receives in forward."""
        return round(sum(each.nbytes for each in self._of("forward")))

    @property
    def bytes_backward(self) -> int:
        """The same in backward."""
        return round(sum(each.nbytes for each in self._of("backward")))

    @property
    def rounds_forward(self) -> int:
        """Calls in forward, each of which waits for all processes."""
        return sum(each.rounds for each in self._of("forward"))

    @property
    def rounds_backward(self) -> int:
        """The same in backward."""
        return sum(each.rounds for each in self._of("backward"))

    @property
    def floats_per_row(self) -> int:
        """Numbers that a process sends per row before the gradient of the row is known."""
        return sum(each.floats_per_row for each in self.exchanges)

    def calls(self, when: str) -> dict[str, tuple[int, float]]:
        """Number of calls and bytes of each kind of call, as in ``CountedCommunication``."""
        made: dict[str, tuple[int, float]] = {}
        for each in self._of(when):
            rounds, nbytes = made.get(each.call, (0, 0.0))
            made[each.call] = rounds + each.rounds, nbytes + each.nbytes
        return made

    def __str__(self) -> str:
        lines = []
        for each in self.exchanges:
            most = "at most " if each.at_most else ""
            times = f"{each.rounds} × " if each.rounds > 1 else ""
            size = as_bytes(each.nbytes)
            lines.append(f"{each.when:8}  {times}{each.call} of {each.what}: {most}{size}")
        return "\n".join(lines) or "nothing is sent"


def communication(
    head: Head,
    mesh: Any,
    rows: int,
    *,
    shared: bool = False,
    even_rows: bool = False,
    targets: int = 1,
    asked: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | None = None,
) -> Communication:
    """Computes what the processes of ``ClassParallel(head, mesh)`` exchange in a training step.

    The figures are for ``reduction="mean"`` and "sum"; with "none" everything that is sent per row
    is sent again in backward. Ignored rows count here, although they are not always sent. Nothing
    is allocated, so the head may be on the meta device.

    Args:
        head: the head; or a :class:`ClassParallel`, whose own options are then used.
        mesh: a ``DeviceMesh`` of one dimension, or the number of processes.
        rows: rows of each process in a step: batch size times sequence length.
        shared: whether all processes have the same rows, ``ClassParallel(rows="shared")``.
        even_rows: as in :class:`ClassParallel`.
        targets: number of targets per row, for multi-label heads.
        asked: for sampled heads, the number of different classes that a process looks up; by
            default the maximum, all draws and one class per target.
        dtype: dtype of the hidden states; by default that of the parameters.
        device: "cpu" or "cuda", which determines the number of rows per chunk; by default that of
            the mesh or of the parameters.

    Example:
        >>> from lastlayer import heads, parallel
        >>> head = heads.FullSoftmax(512, 100_000_000, device="meta")
        >>> made = parallel.communication(head, 64, rows=128)
        >>> made.floats_per_row
        1
        >>> print(made)
        forward   all_gather of number of rows: 1.51 kB
        forward   all_gather of hidden states: 16.5 MB
        forward   all_gather of targets: 64.5 kB
        forward   64 × all_gather of logsumexp: 2.06 MB
        forward   all_reduce of loss: 8 B
        backward  reduce_scatter of gradient of hidden: 16.5 MB

    Raises:
        TypeError: if this type of head cannot be sharded.
        ValueError: if the options of the head do not allow it.
    """
    ranks, kind = ranks_of(mesh)
    if isinstance(head, ClassParallel):
        shared, even_rows, head = head.rows == "shared", head.even_rows, head.head
    family = planned_family(head)
    made = _Made(
        head, ranks, check_int("rows", rows, least=0), shared, dtype or head_dtype(head),
        device_of(head, device or kind),
    )  # fmt: skip
    targets = check_int("targets", targets)
    if ranks == 1:
        return Communication(1, rows, ())
    if not shared and not even_rows:
        made.add("number of rows", "all_gather", 3 * ID)
    elif not shared and (isinstance(head, MultiLabel) or targets > 1):
        made.add("number of targets", "all_gather", ID)
    if moves_vectors(family, ranks, rows, shared, targets):
        made.sampled(asked, targets)
        made.shared_parameters(family)
        return made.finished()
    size = made.hidden_bytes
    if not shared:
        made.add("hidden states", "all_gather", size / ranks)
        made.add("targets", "all_gather", rows * targets * ID)
    if isinstance(family, SampledFamily):
        made.drawn()
    elif isinstance(family, LinearFamily):
        made.linear()
    elif isinstance(family, SpelledFamily | BandsFamily):
        most = sum(-(-each // ranks) for each in family.table_sizes())
        made.softmax(most, float(head.label_smoothing))  # type: ignore[arg-type]
    elif isinstance(family, ClustersFamily):
        made.clusters(family)
    elif isinstance(family, TreeFamily):
        made.tree()
    call = "all_reduce" if shared else "reduce_scatter"
    made.add("gradient of hidden", call, size, when="backward")
    made.shared_parameters(family)
    return made.finished()


class _Made:
    """Collects the exchanges of a step."""

    def __init__(
        self, head: Any, ranks: int, rows: int, shared: bool, dtype: torch.dtype, device: str
    ) -> None:
        self.head, self.ranks, self.rows, self.shared = head, ranks, rows, shared
        self.n = rows if shared else rows * ranks
        self.hidden_bytes = self.n * head.in_features * dtype.itemsize
        self.float = accumulation_dtype(dtype).itemsize
        self._like = row_like(self.n, head.in_features, dtype, device)
        self._exchanges: list[Exchange] = []

    def finished(self) -> Communication:
        ordered = sorted(self._exchanges, key=lambda each: each.when == "backward")
        return Communication(self.ranks, self.rows, tuple(ordered))

    def add(
        self, what: str, call: str, nbytes: float, *, when: str = "forward", rounds: int = 1,
        floats: int = 0, at_most: bool = False,
    ) -> None:  # fmt: skip
        received = received_bytes(call, nbytes, self.ranks)
        self._exchanges.append(Exchange(what, call, when, rounds, received, floats, at_most))

    def per_row(
        self, what: str, floats: int, most: int, when: str = "forward", copies: float = 1.0
    ) -> None:
        """Adds an all-gather of ``floats`` numbers per row, one call per chunk of rows."""
        size = floats * self.n * self.float
        if when == "backward":
            # floats_per_row counts only what is sent before the gradient is known.
            floats = 0
        rounds = self.chunks(most, copies)
        self.add(what, "all_gather", size, when=when, rounds=rounds, floats=floats)

    def chunks(self, most: int, copies: float = 1.0) -> int:
        """Number of chunks of all rows, if a process has at most ``most`` classes."""
        step = rows_at_a_time(getattr(self.head, "chunk_rows", "auto"), self._like, most, copies)
        return max(1, -(-self.n // step))

    def loss(self, times: int = 1) -> None:
        self.add("loss", "all_reduce", times * self.float, rounds=times)

    def softmax(self, most: int, smoothing: float) -> None:
        if smoothing:
            self.add("class weights", "all_reduce", self.float)
        self.per_row("logsumexp", 1, most)
        self.loss()

    def linear(self) -> None:
        head, most = self.head, -(-self.head.n_classes // self.ranks)
        if isinstance(head, MultiLabel):
            if head.loss == "zlpr":
                size = 2 * self.n * self.float
                self.add("logsumexp of both terms", "all_gather", size, floats=2)
            elif head._needs_dense_labels:
                self.dense_labels(most)
            else:
                self.loss()
            return
        if getattr(head, "class_weight", None) is not None:
            size = self.n * self.float
            self.add("class weight of the target", "all_reduce", size, floats=1)
        if isinstance(head, SelfNormalized) and head.fraction < 1.0:
            self.add("scores of targets", "all_reduce", self.n * self.float, floats=1)
            # The full softmax is computed for this many rows.
            self.n = math.ceil(head.fraction * self.n)
        if isinstance(head, EntmaxHead) and head.alpha != 1.0:
            self.per_row("candidates", TOLD + 1, most)
            self.loss()
        elif isinstance(head, TopKSoftmaxHead) and head.k < head.n_classes:
            self.per_row("best scores", min(head.k, most), most)
            self.loss()
        else:
            self.softmax(most, float(getattr(head, "label_smoothing", 0.0)))

    def dense_labels(self, most: int) -> None:
        """Losses of each row; backward repeats the exchanges of sparsemax."""
        size, chunks = self.n * self.float, self.chunks(most, self.head._copies)
        for when in ("forward", "backward") if self.head.loss == "sparsemax" else ():
            floats = 1 if when == "forward" else 0
            what = "number of labels"
            self.add(what, "all_reduce", size, when=when, rounds=chunks, floats=floats)
            self.per_row("candidates", TOLD + 1, most, when, self.head._copies)
        self.add("losses of rows", "all_reduce", size, floats=1)

    def clusters(self, family: ClustersFamily) -> None:
        head, (top, *tails) = self.head, family.table_sizes()
        self.per_row("logsumexp of the top", 1, -(-top // self.ranks))
        if tails:
            # Only for rows whose target is in a cluster, over the classes of that cluster.
            size, chunks = self.n * self.float, self.chunks(-(-max(tails) // self.ranks))
            self.add(
                "logsumexp of the clusters", "all_gather", size, rounds=len(tails) + chunks - 1,
                floats=1, at_most=True,
            )  # fmt: skip
        self.loss(1 + len(tails))
        if head.label_smoothing:
            size = self.n * self.float
            self.add("class weight of the target", "all_reduce", size, floats=1)
            for each in (top, *tails):
                self.softmax(-(-each // self.ranks), 1.0)

    def tree(self) -> None:
        """The loss, or that of each path, and vectors of nodes that span two processes."""
        head = self.head
        beyond = rows_beyond(head.tree, self.ranks)
        if any(beyond):
            self.looked_up(max(beyond), at_most=True)
        if head.tree.overlaps:
            paths = int(np.diff(head.tree.class_start).max())
            size = paths * self.n * self.float
            self.add("log-probabilities of paths", "all_reduce", size, floats=paths)
        else:
            self.loss()

    def drawn(self) -> None:
        """Gathered rows compared with each process's draws; backward recomputes the scores."""
        most = -(-self.head._classes_per_step() // self.ranks)
        for when in ("forward", "backward"):
            self.per_row("logsumexp of draws", 1, most, when)
        self.add("scores of targets", "all_reduce", self.n * self.float, floats=1)
        self.sampler_tables(self.n, together=True)

    def sampled(self, asked: int | None, targets: int) -> None:
        head, here = self.head, self.rows
        if self.shared:
            here = -(-here // self.ranks)
        drawn = head._classes_per_step() + getattr(head, "n_head", 0)
        most = min(head.n_classes, drawn + here * targets)
        self.looked_up(most if asked is None else asked, at_most=asked is None)
        self.sampler_tables(here * targets, together=False)
        self.add("loss and number of rows", "all_reduce", 2 * self.float)
        if self.shared:
            self.add("gradient of hidden", "all_reduce", self.hidden_bytes, when="backward")

    def sampler_tables(self, targets: int, *, together: bool) -> None:
        """Lookups in the sharded tables of a sampler, for draws and for targets.

        Args:
            targets: number of targets that a process looks up.
            together: whether all processes look up the same targets.
        """
        head = self.head
        sampler: Any = getattr(head, "sampler", None)
        if not spreadable_tables(sampler) or getattr(head, "unique", False):
            # Draws without replacement use an unsharded table instead, computed once.
            return
        tables = 2 if isinstance(sampler, Unigram) and head._reads_log_prob else 1
        self.add(
            "sampler entries of draws", "all_reduce", tables * head.n_samples * ID, rounds=tables
        )
        asked = [targets] if head._reads_targets() else []
        if asked and head.n_head and not head._has_tail_sampler and head.correction == "exact":
            asked.append(head.n_head)
        for n in asked:
            if together:
                self.add("sampler entries of targets", "all_reduce", n * ID)
                continue
            # Each class is looked up once, even if several rows have it as their target.
            size = min(n, sampler.n_classes) * ID
            self.add("number of sampler entries", "all_to_all", self.ranks * ID)
            for what in ("indices of sampler entries", "sampler entries"):
                self.add(what, "all_to_all", size, at_most=True)

    def shared_parameters(self, family: Family) -> None:
        """Gradients of replicated parameters, in one call."""
        names = {*family.names}
        sizes = [
            each.nbytes
            for name, each in self.head.named_parameters()
            if name not in names and each.requires_grad
        ]
        if sizes:
            self.add(
                "gradients of replicated parameters", "all_reduce", sum(sizes), when="backward"
            )

    def looked_up(self, classes: int, *, at_most: bool) -> None:
        """Lookups of ``classes`` class vectors, and their gradients."""
        head = self.head
        row = sum(
            each.nbytes / max(1, each.shape[0])
            for each in (head.weight, head.bias)
            if each is not None
        )
        self.add("number of classes", "all_to_all", self.ranks * ID)
        self.add("class ids", "all_to_all", classes * ID, at_most=at_most)
        self.add("class vectors", "all_to_all", classes * row, at_most=at_most)
        self.add(
            "gradients of class vectors", "all_to_all", classes * row, when="backward",
            at_most=at_most,
        )  # fmt: skip


def planned_family(head: Any) -> Family:
    """The family of a head, without processes; raises an error if it cannot be sharded."""
    if isinstance(head, Head):
        # A family changes its head, so it gets a copy.
        head = copy.copy(head)
    for kind, family in _FAMILIES:
        if isinstance(head, kind) and issubclass(family, SpelledFamily):
            made: Family = family.__new__(family)
            made.head = head
            return made
    return family_of(head, SimpleNamespace(get_group=lambda: None), "auto")


def moves_vectors(family: Family, ranks: int, rows: int, shared: bool, targets: int) -> bool:
    """Whether class vectors are sent rather than the ``rows`` rows of each process."""
    each = -(-rows // ranks) if shared else rows
    return family.moves_vectors((each,) * ranks, targets > 1)


def rows_beyond(tree: Any, ranks: int) -> list[int]:
    """For each process, the number of rows of its last node that other processes have."""
    arity = np.asarray(tree.arity)
    start = np.concatenate([[0], np.cumsum(np.where(arity == 2, 1, arity))])
    total = int(start[-1])
    size = -(-total // ranks)
    ends = np.minimum(total, size * np.arange(1, ranks + 1))
    begins = np.minimum(total, size * np.arange(ranks))
    first, last = (np.searchsorted(start[:-1], each) for each in (begins, ends))
    return [
        int(max(0, start[b] - end)) if b > a else 0
        for a, b, end in zip(first, last, ends, strict=True)
    ]


def ranks_of(mesh: Any) -> tuple[int, str | None]:
    """The number of processes, and the device type if ``mesh`` is a DeviceMesh."""
    if hasattr(mesh, "device_type"):
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh: expected one dimension, got {mesh.ndim}; select one, such as "
                'mesh["classes"]'
            )
        return mesh.size(), mesh.device_type
    return check_int("mesh", mesh), None


def head_dtype(head: Any) -> torch.dtype:
    """The dtype of the parameters."""
    dtype: torch.dtype = next(head.parameters()).dtype
    return dtype


def device_of(head: Any, device: str | None) -> str:
    """The device type of a head: as given, else that of its parameters, "cuda" if that is meta."""
    kind = next(head.parameters()).device.type if device is None else device
    return "cuda" if kind == "meta" else kind


def row_like(n: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of the shape and device of hidden states that takes no memory."""
    if device == "cpu":
        return torch.empty(1, 1, dtype=dtype, device="cpu").expand(n, width)
    return torch.empty(n, width, dtype=dtype, device="meta")


def as_bytes(number: float) -> str:
    """A human-readable number of bytes, with three digits."""
    if number < 999.5:
        return f"{number:.0f} B"
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while number >= 999.5 and len(units) > 1:
        number /= 1000.0
        units.pop(0)
    return f"{number:#.3g}".rstrip(".") + f" {units[0]}"
