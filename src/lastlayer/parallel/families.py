"""How the classes of each kind of head are sharded over processes.

A family lists the parameters of a head that have one row per class, and computes the loss and the
log-probabilities of this process's classes. Everything else is common to all heads and is in
:mod:`lastlayer.parallel.class_parallel`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid, pad

from lastlayer._processes import (
    ELSEWHERE,
    IGNORED,
    Layout,
    Shards,
    all_in_all,
    gathered,
    in_all,
    local_part,
    sum_of_parts,
    summed,
)
from lastlayer._torch import accumulation_dtype, in_dtype, without_autocast
from lastlayer.fused import linear_cross_entropy
from lastlayer.fused.cross_entropy import shaped
from lastlayer.fused.function import RowScale
from lastlayer.fused.label_lists import check_lists, sorted_lists
from lastlayer.fused.paths import TreeTables
from lastlayer.fused.recompute import in_chunks
from lastlayer.fused.sampled import Rule, sampled_loss
from lastlayer.fused.scores import row_chunks, wide_scores
from lastlayer.fused.spread import spread_logsumexp
from lastlayer.heads import (
    AdaptiveImportanceSampling,
    AdaptiveSoftmax,
    CharCNNSoftmax,
    DifferentiatedSoftmax,
    EntmaxHead,
    FullSoftmax,
    Head,
    HierarchicalSoftmax,
    ImportanceSampling,
    MultiLabel,
    NegativeSampling,
    PartialSoftmax,
    SampledSoftmax,
    SelfNormalized,
    TopKSoftmaxHead,
)
from lastlayer.heads.sampled.base import ComparedHead, SampledHead
from lastlayer.parallel.lookup import looked_up
from lastlayer.parallel.maps import (
    spread_log_entmax,
    spread_log_softmax,
    spread_sparsemax_loss,
    spread_topk_log_softmax,
)
from lastlayer.parallel.sampler_tables import (
    BY_CLASS,
    SpreadTables,
    spreadable_tables,
    with_spread_tables,
)


def family_of(head: Head, mesh: Any, assignment: str) -> "Family":
    """The family of a head; raises an error for a head that cannot be sharded."""
    for kind, family in _FAMILIES:
        if isinstance(head, kind):
            made: Family = family(head, mesh, assignment)
            return made
    raise TypeError(
        "head: expected a head whose classes can be sharded over processes, got "
        f"{type(head).__name__}; use DistributedDataParallel or fully_shard for it"
    )


@contextmanager
def swapped(module: torch.nn.Module, tensors: dict[str, Any]) -> Iterator[None]:
    """A context that replaces parameters and buffers, by name, with other tensors."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        held: dict[str, Any] = owner._parameters if last in owner._parameters else owner._buffers
        before.append((held, last, held[last]))
        held[last] = tensor
    try:
        yield
    finally:
        for held, last, tensor in reversed(before):
            held[last] = tensor


@contextmanager
def with_option(head: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an option of the head has another value."""
    before = getattr(head, name)
    setattr(head, name, value)
    try:
        yield
    finally:
        setattr(head, name, before)


class Family:
    """A head, some of whose parameters are sharded by rows over the processes of a mesh."""

    head: Any

    def __init__(self, head: Head, mesh: Any, assignment: str) -> None:
        self.head, self.mesh, self.group = head, mesh, mesh.get_group()
        self.layout = self.chosen_layout(assignment)

    def chosen_layout(self, assignment: str) -> Layout:
        if assignment == "spread":
            raise ValueError(
                f"assignment: expected 'auto' or 'contiguous' for {type(self.head).__name__}, "
                "whose tables are not in the order of the class ids, got 'spread'"
            )
        return Layout(self.head.n_classes)

    def prepare(self) -> None:
        """Called before tables are sharded; replaces parts that other heads may share."""

    @property
    def names(self) -> list[str]:
        """Names of the parameters and buffers of the head that are sharded."""
        raise NotImplementedError

    def by_class(self, name: str) -> bool:  # noqa: ARG002 - for tables in another order
        """Whether a table has one row per class, in the order of the layout."""
        return False

    def table_sizes(self) -> list[int]:
        """Number of rows of each table of classes; each process has a range of each of them."""
        return [self.head.n_classes]

    @cached_property
    def shards(self) -> list[Shards]:
        """How each of these tables is sharded."""
        return [Shards.even(self.group, size) for size in self.table_sizes()]

    @property
    def scores_per_row(self) -> int:
        """The most scores of one row that a process holds in :meth:`log_probs`."""
        return max(shard.most for shard in self.shards)

    @cached_property
    def classes(self) -> Tensor:
        """The class ids of this process, one per column of :meth:`log_probs`."""
        shard = self.shards[0]
        device = next(self.head.parameters()).device
        rows = torch.arange(shard.first, shard.first + shard.here, device=device)
        return self.layout.classes_at(rows)

    def moves_vectors(self, counts: tuple[int, ...], several: bool) -> bool:  # noqa: ARG002
        """Whether rows stay in their process and class vectors are looked up.

        Args:
            counts: number of rows of each process.
            several: whether rows have more than one target.
        """
        return False

    def shared_tensors(self) -> dict[str, Tensor]:
        """Replicated parameters, with gradients that are summed over processes."""
        names = {*self.names}
        every = {
            name: each
            for name, each in self.head.named_parameters()
            if name not in names and each.requires_grad
        }
        made = all_in_all([*every.values()], self.group) if every else ()
        return dict(zip(every, made, strict=True))

    def loss(self, hidden: Tensor, target: Tensor, **given: Any) -> Tensor:
        """The loss of rows that all processes have, with this process's part of the gradients."""
        head, rows = self.head, self.layout.rows_of(target)
        ignored = head.ignore_index
        if ignored is not None and self.layout.step != 1:
            # As a row, this number may be that of another class.
            rows, ignored = rows.masked_fill(target == ignored, IGNORED), IGNORED
        with swapped(head, self.shared_tensors()), with_option(head, "ignore_index", ignored):
            made: Tensor = head(hidden, rows, **given)
            return made

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors that :meth:`log_probs` needs besides rows, by name, in ``dtype``.

        By default all parameters: of sharded ones the part of this process; the gradients of
        replicated ones are summed over processes.
        """
        shared, names = self.shared_tensors(), {*self.names}
        return {
            name: in_dtype(local_part(each) if name in names else shared.get(name, each), dtype)
            for name, each in self.head.named_parameters()
        }

    def log_probs(self, rows: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """Log-probabilities of this process's classes, normalised over those of all processes.

        The gradients of rows and of replicated tensors are this process's part of them. All
        processes take part in the exchanges of backward, even one without classes.
        """
        raise NotImplementedError

    def log_probs_of(self, rows: Tensor, chosen: Tensor) -> Tensor | None:  # noqa: ARG002
        """Log-probabilities of chosen classes ``(n, k)``, if not all of a row are needed for them.

        All processes return the same; gradients are as in :meth:`log_probs`.
        """
        return None

    def ranks(self, rows: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What orders the classes of :meth:`Head.topk`, and their :meth:`log_probs`."""
        logs = self.log_probs(rows, tensors)
        return logs, logs


class LinearFamily(Family):
    """One vector per class: softmax, entmax and top-k softmax."""

    def chosen_layout(self, assignment: str) -> Layout:
        n_classes = self.head.n_classes
        return Layout.spread(n_classes) if assignment == "spread" else Layout(n_classes)

    @property
    def names(self) -> list[str]:
        named = ("weight", "bias", "class_weight")
        return [name for name in named if getattr(self.head, name, None) is not None]

    def by_class(self, name: str) -> bool:  # noqa: ARG002
        return True

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        head = self.head
        weight, bias = local_part(head.weight), local_part(head.bias)
        if isinstance(head, NegativeSampling):
            log_q = self.log_q()
            bias = log_q if bias is None else bias + log_q
        made = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return {name: in_dtype(each, dtype) for name, each in made.items()}

    def log_q(self) -> Tensor:
        """Log-probabilities of this process's classes under the sampler of a sampled head."""
        raise NotImplementedError

    def log_probs(self, rows: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        head = self.head
        scores = wide_scores(rows, tensors["weight"], tensors.get("bias"))
        cap, temperature = head._softcap_and_temperature()
        if cap or temperature != 1.0:
            scores = shaped(scores, cap, temperature)[0]
        return self._normalised(scores)

    def _normalised(self, scores: Tensor) -> Tensor:
        """Log-probabilities from scores."""
        head, shard = self.head, self.shards[0]
        if isinstance(head, EntmaxHead) and head.alpha != 1.0:
            return spread_log_entmax(shard, scores, head.alpha)
        if isinstance(head, TopKSoftmaxHead) and head.k < head.n_classes:
            return spread_topk_log_softmax(shard, scores, head.k)
        return spread_log_softmax(shard, scores)

    def columns_of(self, classes: Tensor) -> Tensor:
        """Columns of classes in this process; negative for classes of other processes."""
        shard = self.shards[0]
        place = self.layout.rows_of(classes) - shard.first
        return torch.where((place >= 0) & (place < shard.here), place, ELSEWHERE)


class LabelsFamily(LinearFamily):
    """Many labels per row."""

    def __init__(self, head: MultiLabel, mesh: Any, assignment: str) -> None:
        super().__init__(head, mesh, assignment)
        if head.calibrator is not None:
            _refuse("calibrator=None, since calibrators work in a single process", head)

    def ranks(self, rows: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        scores = wide_scores(rows, tensors["weight"], tensors.get("bias"))
        return scores, self._normalised(scores)

    def _normalised(self, scores: Tensor) -> Tensor:
        if self.head.loss == "sparsemax":
            return spread_log_entmax(self.shards[0], scores, 2.0)
        alone: Tensor = self.head._log_probs(scores)
        return alone

    def loss(self, hidden: Tensor, target: Tensor, **given: Any) -> Tensor:
        if self.head._needs_dense_labels:
            return self._dense_loss(hidden, target, **given)
        return super().loss(hidden, target, **given)

    def _dense_loss(self, rows: Tensor, target: Tensor, values: Tensor | None = None) -> Tensor:
        """The loss from dense scores and labels of this process, a chunk of rows at a time."""
        head, shard, n = self.head, self.shards[0], len(rows)
        target, _, values = check_lists(
            rows, head.n_classes, target, None, values, head.ignore_index, head.label_smoothing
        )
        place = torch.where(target == head.ignore_index, ELSEWHERE, self.columns_of(target))
        lists = sorted_lists(place, None, values, n, shard.here, None, head.label_smoothing)

        def losses_of(some: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            scores = wide_scores(some, weight, bias)
            labels = torch.zeros_like(scores)
            if shard.here:
                labels = lists.dense(ids[:1], scores, head.label_smoothing)
            if head.loss == "sparsemax":
                return spread_sparsemax_loss(shard, scores, labels)
            alone: Tensor = head._losses_of(scores, labels)
            return alone

        with without_autocast(rows):
            tensors, ids = self.tensors(rows.dtype), torch.arange(n, device=rows.device)
            chunks = [*row_chunks(rows, shard.most, head.chunk_rows, head._copies)]
            operands = tensors["weight"], tensors.get("bias")
            parts = in_chunks(losses_of, rows, [ids], operands, chunks)
        counted = torch.ones(n, dtype=torch.bool, device=rows.device)
        if head.loss == "sparsemax" and not head.label_smoothing:
            # Rows without labels have no target distribution, and loss 0.
            positive = target != head.ignore_index
            counted = (positive if values is None else positive & (values > 0)).any(-1)
        scale = RowScale.of(counted.to(parts.dtype), head.reduction, n)
        return scale.reduce(sum_of_parts(parts, self.group), head.reduction)


class SelfNormalizedFamily(LinearFamily):
    """A softmax that also needs the score, and the class weight, of each row's target."""

    def __init__(self, head: SelfNormalized, mesh: Any, assignment: str) -> None:
        super().__init__(head, mesh, assignment)
        head._target_scores_spread = self._target_scores
        head._class_weights_spread = self._class_weights

    def _targets_here(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The rows whose target this process has, and the index of the target here."""
        place = self.shards[0].local(target, None)
        rows = (place >= 0).nonzero().squeeze(-1)
        return rows, place[rows]

    def _target_scores(self, rows: Tensor, target: Tensor, factor: Tensor) -> Tensor:
        """``factor`` times the score of each row's target."""
        weight, bias = local_part(self.head.weight), local_part(self.head.bias)
        here, place = self._targets_here(target)
        scores = (rows[here].to(factor.dtype) * weight[place].to(factor.dtype)).sum(-1)
        scores = scores if bias is None else scores + bias[place].to(factor.dtype)
        found = torch.zeros_like(factor).index_add(0, here, scores * factor[here])
        return sum_of_parts(found, self.group)

    def _class_weights(self, target: Tensor) -> Tensor:
        weights = local_part(self.head.class_weight)
        here, place = self._targets_here(target)
        found = weights.new_zeros(target.shape).index_copy_(0, here, weights[place])
        return summed(found, self.group)


class SampledFamily(LinearFamily):
    """Sampled heads: a training step uses few classes, the same draws in every process.

    If these are fewer than the rows of all processes, rows stay in their process, and the vectors
    of targets and draws are looked up. Otherwise rows are gathered, and each process scores them
    against those draws whose vectors it has.
    """

    def __init__(self, head: Head, mesh: Any, assignment: str) -> None:
        super().__init__(head, mesh, "spread" if assignment == "auto" else assignment)
        if isinstance(head, (AdaptiveImportanceSampling, PartialSoftmax)):
            _refuse("a head that does not select its classes by the scores of all of them", head)
        if isinstance(head, ImportanceSampling) and head.target_ess is not None:
            _refuse("target_ess=None, a fixed number of samples", head)
        if head.sparse:
            _refuse("sparse=False, since a DTensor has no row-sparse gradient", head)
        if isinstance(head, SampledHead) and head.per_rank:
            _refuse("per_rank=False, since all processes draw the same classes", head)
        self._rows_travel = False
        # None if the sampler has no tables to shard.
        self._tables: SpreadTables | None = None
        head._compare_spread = self.compare  # type: ignore[assignment]

    def prepare(self) -> None:
        sampler: Any = getattr(self.head, "sampler", None)
        if spreadable_tables(sampler):
            same = sampler.n_classes == self.head.n_classes
            self._tables = SpreadTables(self.group, self.layout if same else None)
            self.head.sampler = with_spread_tables(sampler, self._tables)

    @property
    def names(self) -> list[str]:
        tables = spreadable_tables(getattr(self.head, "sampler", None))
        return [*super().names, *(f"sampler.{name}" for name in tables)]

    def by_class(self, name: str) -> bool:
        owner, _, table = name.rpartition(".")
        if owner != "sampler":
            return True
        return table in BY_CLASS and self.head.sampler.n_classes == self.head.n_classes

    def log_q(self) -> Tensor:
        sampler = self.head.sampler
        with nullcontext() if self._tables is None else self._tables.asked_by("here"):
            found: Tensor = sampler._log_prob(self.classes, None)
            return found

    def moves_vectors(self, counts: tuple[int, ...], several: bool) -> bool:
        head = self.head
        if head._takes_all():
            return False
        # Gathering rows is implemented for a softmax with one target per row.
        by_rows = isinstance(head, SampledSoftmax) and not head.n_head and not several
        vectors, total, processes = head._classes_per_step() + max(counts), sum(counts), len(counts)
        # Numbers that a process receives in each direction. Gathered rows also exchange one
        # logsumexp per row and process.
        dearer = vectors * head.in_features > total * (head.in_features + processes)
        self._rows_travel = by_rows and processes > 1 and dearer
        if self._tables is not None:
            # Gathered rows are the same in all processes, and so are their targets.
            self._tables.asking = "all" if self._rows_travel else "each"
        return not self._rows_travel

    def compare(
        self, rows: Tensor, target: Tensor, ids: Tensor, log_expected: Tensor, rule: Rule,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """``ComparedHead._compare`` with the classes of all processes."""
        if self._rows_travel:
            return self._compare_here(rows, target, ids, log_expected, rule, **more), None
        head = self.head
        weight, bias, target, ids = self._vectors(target, ids)
        return sampled_loss(
            rows, weight, bias, target, ids, log_expected, rule, reduction=head.reduction,
            chunk_rows=head.chunk_rows, **more,
        )  # fmt: skip

    def _vectors(self, target: Tensor, ids: Tensor) -> tuple[Any, Any, Tensor, Tensor]:
        """Vectors and biases of a step's classes, and targets and ids as indices into them."""
        shard, head = self.shards[0], self.head
        weight, bias = local_part(head.weight), local_part(head.bias)
        if shard.processes == 1:
            rows = self.layout.rows_of(target), self.layout.rows_of(ids)
            return weight, bias, *rows
        asked = torch.cat([ids.flatten(), target.clamp(min=0).flatten()])
        needed, places = torch.unique(self.layout.rows_of(asked), return_inverse=True)
        tables = [each for each in (weight, bias) if each is not None]
        found = looked_up(shard, needed, *tables)
        of_ids, of_target = places[: ids.numel()], places[ids.numel() :]
        of_target = torch.where(target < 0, target, of_target.view(target.shape))
        return found[0], found[1] if bias is not None else None, of_target, of_ids.view(ids.shape)

    def _compare_here(
        self, rows: Tensor, target: Tensor, ids: Tensor, log_expected: Tensor, rule: Rule, *,
        n_exact: int = 0, temperature: float = 1.0, shift: Tensor | None = None,
        target_log_expected: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The loss of gathered rows: each process scores the draws that it has.

        Processes exchange the logsumexp of each row's draws and the score of its target.
        """
        del n_exact
        head, shard, dtype = self.head, self.shards[0], accumulation_dtype(rows.dtype)
        target = target.squeeze(1)
        columns, place, times = torch.unique(
            self.layout.rows_of(ids), return_inverse=True, return_counts=True
        )
        less = log_expected.new_empty(len(columns)).index_copy_(0, place, log_expected).to(dtype)
        own = self.columns_of(target)
        at = torch.searchsorted(columns, self.layout.rows_of(target)).clamp(max=len(columns) - 1)
        hit = (columns[at] == self.layout.rows_of(target)) & (target >= 0)
        # The draws are sorted, so those of this process are a contiguous range.
        bounds = torch.tensor([shard.first, shard.first + shard.here], device=ids.device)
        first, last = torch.searchsorted(columns, bounds).tolist()
        mine = columns[first:last] - shard.first
        weight, bias = local_part(head.weight), local_part(head.bias)
        added = (times[first:last].to(dtype).log() - less[first:last]) * temperature
        added = added if bias is None else added + bias[mine].to(dtype)
        inside = hit & (at >= first) & (at < last)
        left_out = torch.where(inside, at - first, ELSEWHERE)
        widest = shard._replace(most=-(-len(columns) // shard.processes))
        total = spread_logsumexp(
            widest, rows, in_dtype(weight[mine], rows.dtype), in_dtype(added, rows.dtype), left_out,
            temperature, head.chunk_rows,
        )  # fmt: skip
        if rule.average:
            # Divide by the number of draws of each row that are not its target.
            total = total - (len(ids) - torch.where(hit, times[at], 0)).clamp(min=1).to(dtype).log()
        total = total if shift is None else total + shift.to(dtype)
        here = (own >= 0).nonzero().squeeze(-1)
        vectors = weight[own[here]].to(dtype)
        scores = (rows[here].to(dtype) * vectors).sum(-1)
        scores = scores if bias is None else scores + bias[own[here]].to(dtype)
        exact = total.new_zeros(len(rows)).index_add(0, here, scores / temperature)
        exact = sum_of_parts(exact, self.group)
        if target_log_expected is not None:
            exact = exact - target_log_expected.squeeze(1).to(dtype)
        counted = target >= 0
        losses = torch.where(counted, -logsigmoid(exact - total), 0.0)
        return RowScale.of(counted.to(dtype), head.reduction, len(rows)).reduce(
            losses, head.reduction
        )

    def loss(self, hidden: Tensor, target: Tensor, **given: Any) -> Tensor:
        several = target.dim() == hidden.dim()
        if not self.head._takes_all():
            # Each process computes the loss of all gathered rows. The gradients of its part of the
            # classes add up to the full gradients, so nothing is divided.
            made: Tensor = self.head(hidden, target, **given)
            return made
        if several or isinstance(self.head, NegativeSampling):
            return self._loss_of_log_probs(hidden, target)
        return super().loss(hidden, target, **given)

    def _loss_of_log_probs(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The exact loss in eval mode, for heads that compute it from log-probabilities."""
        head = self.head
        classes = target if target.dim() == hidden.dim() else target.unsqueeze(-1)
        counts = torch.ones_like(classes, dtype=torch.bool)
        if head.ignore_index is not None:
            counts = classes != head.ignore_index
        logs = self.log_probs(hidden, self.tensors(hidden.dtype))
        own = chosen_here(logs, self.columns_of(classes.masked_fill(~counts, 0)))
        found = sum_of_parts(own, self.group)
        of_row = -torch.where(counts, found, 0.0).sum(-1) / counts.sum(-1).clamp(min=1)
        return RowScale.of(counts.any(-1).to(of_row.dtype), head.reduction, len(of_row)).reduce(
            of_row, head.reduction
        )


class SpelledFamily(Family):
    """Class vectors computed from spellings: each process computes those of its own classes."""

    def __init__(self, head: CharCNNSoftmax, mesh: Any, assignment: str) -> None:
        super().__init__(head, mesh, assignment)
        shard = self.shards[0]
        self._mine = head.spellings[shard.first : shard.first + shard.here]
        # Replaces the words of all classes, also after the head has moved to another device.
        head._make_tables = self._make_tables  # type: ignore[method-assign]
        head._make_ready()

    def _make_tables(self, device: torch.device) -> None:
        head, words = self.head, self._mine
        made = head.cnn.spell(words, head.max_length, head.chunk_classes, device) if words else []
        head.words, head._kept = made, None

    @property
    def names(self) -> list[str]:
        return [name for name in ("bias", "corrections") if getattr(self.head, name) is not None]

    def _vectors(self) -> Tensor:
        head = self.head
        with swapped(head, {name: local_part(head.get_parameter(name)) for name in self.names}):
            if not self._mine:
                # An empty part, but still a function of the parameters: their gradients are summed
                # over all processes. Multiplying before the sum makes each gradient contiguous.
                # Autograd copies one that is not, and before torch 2.13 copying a DTensor was a
                # collective call, which the other processes do not make.
                total = torch.stack([(0.0 * each).sum() for each in head.parameters()]).sum()
                return total.expand(0, head.in_features)
            made: Tensor = head._made_vectors()
            return made

    def loss(self, hidden: Tensor, target: Tensor, **given: Any) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        head = self.head
        with swapped(head, self.shared_tensors()):
            shape = head.n_classes, head.in_features
            weight = DTensor.from_local(
                self._vectors(), self.mesh, [Shard(0)], run_check=False,
                shape=torch.Size(shape), stride=(shape[1], 1),
            )  # fmt: skip
            return linear_cross_entropy(
                hidden, weight, target, head.bias, ignore_index=head.ignore_index,
                reduction=head.reduction, label_smoothing=head.label_smoothing,
                chunk_rows=head.chunk_rows, hidden_grad="part", **given,
            )  # fmt: skip

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        with swapped(self.head, self.shared_tensors()):
            made, bias = {"vectors": self._vectors()}, local_part(self.head.bias)
        if bias is not None:
            made["bias"] = bias
        return {name: in_dtype(each, dtype) for name, each in made.items()}

    def log_probs(self, rows: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        scores = wide_scores(rows, tensors["vectors"], tensors.get("bias"))
        return spread_log_softmax(self.shards[0], scores)


class BandsFamily(Family):
    """The differentiated softmax: each process has a range of every band."""

    @property
    def names(self) -> list[str]:
        return [f"weights.{i}" for i in range(len(self.head.weights))]

    def table_sizes(self) -> list[int]:
        return [last - first for first, last in self.head._groups]

    @cached_property
    def _places(self) -> Tensor:
        """Indices of this process's classes in the order of the bands, one per column."""
        device = next(self.head.parameters()).device
        ranges = [
            torch.arange(first + shard.first, first + shard.first + shard.here, device=device)
            for (first, _), shard in zip(self.head._groups, self.shards, strict=True)
        ]
        return torch.cat(ranges)

    @cached_property
    def classes(self) -> Tensor:
        found: Tensor = self.head._classes_at(self._places)
        return found

    def loss(self, hidden: Tensor, target: Tensor, **given: Any) -> Tensor:
        head = self.head
        columns = torch.full((head.n_classes,), ELSEWHERE, device=target.device)
        columns[self.classes] = torch.arange(len(self.classes), device=target.device)
        tensors = self.shared_tensors() | {"places": columns}
        if head.bias is not None:
            tensors["bias"] = tensors.get("bias", head.bias)[self._places]
        with swapped(head, tensors):
            made: Tensor = head(hidden, target, **given)
            return made

    def log_probs(self, rows: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        projection, bias = tensors.get("projection"), tensors.get("bias")
        seen = rows if projection is None else linear(rows, projection)
        scores = torch.cat([
            wide_scores(seen[:, part], tensors[f"weights.{i}"], None)
            for i, part in enumerate(self.head._seen_by)
        ], -1)  # fmt: skip
        if bias is not None:
            scores = scores + bias[self._places].to(scores.dtype)
        return spread_log_softmax(self.shards[0], scores)


class ClustersFamily(Family):
    """The adaptive softmax: each process has a range of the top and of every cluster."""

    @property
    def names(self) -> list[str]:
        biases = [] if self.head.head_bias is None else ["head_bias"]
        return ["head_weight", *biases, *(f"tails.{i}" for i in range(len(self.head.tails)))]

    def table_sizes(self) -> list[int]:
        head = self.head
        return [head.head_weight.shape[0], *(last - first for first, last in head._clusters)]

    @cached_property
    def classes(self) -> Tensor:
        head, (top, *below) = self.head, self.shards
        device = next(head.parameters()).device
        last = min(top.first + top.here, head._n_top)
        ranges = [torch.arange(top.first, max(top.first, last), device=device)]
        for (first, _), shard in zip(head._clusters, below, strict=True):
            begin = first + shard.first
            ranges.append(torch.arange(begin, begin + shard.here, device=device))
        found: Tensor = head._classes_at(torch.cat(ranges))
        return found

    def loss(self, hidden: Tensor, target: Tensor, **given: Any) -> Tensor:
        del given
        head, counted = self.head, torch.ones_like(target, dtype=torch.bool)
        if head.ignore_index is not None:
            counted = target != head.ignore_index
        place = head._places_of(target.masked_fill(~counted, 0))
        cluster = torch.bucketize(place, head.cutoffs, right=True) - 1
        column = torch.where(cluster < 0, place, head._n_top + cluster)
        dtype = accumulation_dtype(hidden.dtype)
        scale = RowScale.of(counted.to(dtype), head.reduction, len(target))
        factors = scale.factors(hidden, len(target))
        part = 1.0 - head.label_smoothing
        shared = self.shared_tensors()
        losses = self._one(
            hidden, head.head_weight, column, head.head_bias, factors * part, counted
        )
        for i, (projection, tail) in enumerate(zip(head.projections, head.tails, strict=True)):
            some = (counted & (cluster == i)).nonzero().squeeze(-1)
            narrow = linear(hidden[some], shared.get(f"projections.{i}", projection))
            inner = place[some] - head._clusters[i][0]
            below = self._one(narrow, tail, inner, None, (factors * part)[some], None)
            losses = losses.index_add(0, some, below) if losses.dim() else losses + below
        if head.label_smoothing:
            losses = losses + self._spread_evenly(hidden, factors, counted, shared)
        return losses

    def _one(
        self, rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, factors: Tensor,
        counted: Tensor | None, **more: Any,
    ) -> Tensor:  # fmt: skip
        """The loss of the top or of one cluster."""
        head = self.head
        if counted is not None:
            target = torch.where(counted, target, IGNORED)
        return linear_cross_entropy(
            rows, weight, target, bias, row_weight=factors, chunk_rows=head.chunk_rows,
            ignore_index=None if counted is None else IGNORED, hidden_grad="part",
            reduction="none" if head.reduction == "none" else "sum", **more,
        )  # fmt: skip

    def _spread_evenly(
        self, hidden: Tensor, factors: Tensor, counted: Tensor, shared: dict[str, Tensor]
    ) -> Tensor:
        """The term of label smoothing: minus the mean log-probability of all classes."""
        from torch.distributed.tensor import Shard, distribute_tensor

        head = self.head
        share = factors * (head.label_smoothing / head.n_classes)
        anything = torch.zeros_like(counted, dtype=torch.int64)
        # The column of a cluster counts once for each of its classes.
        times = torch.ones(head.head_weight.shape[0], dtype=factors.dtype, device=hidden.device)
        for i, (first, last) in enumerate(head._clusters, head._n_top):
            times[i] = last - first
        smooth = {"label_smoothing": 1.0}
        total = self._one(
            hidden, head.head_weight, anything, head.head_bias, share * len(times), counted,
            class_weight=distribute_tensor(times, self.mesh, [Shard(0)]), **smooth,
        )  # fmt: skip
        rows = torch.where(counted.unsqueeze(-1), hidden, 0.0)
        for i, (projection, tail) in enumerate(zip(head.projections, head.tails, strict=True)):
            narrow = linear(rows, shared.get(f"projections.{i}", projection))
            total = total + self._one(
                narrow, tail, anything, None, share * tail.shape[0], counted, **smooth
            )
        return total

    def log_probs(self, rows: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        (top, *below), n_top = self.shards, self.head._n_top
        scores = wide_scores(rows, tensors["head_weight"], tensors.get("head_bias"))
        made = spread_log_softmax(top, scores)
        # The last columns of the top are the clusters. Their log-probabilities are sent to all
        # processes.
        cut = max(0, min(top.here, n_top - top.first))
        here = top.here - cut
        first = top.first + cut - n_top if here else 0
        clusters = pad(made[:, cut:], (first, len(below) - first - here))
        clusters = in_all(sum_of_parts(clusters, self.group), self.group)
        parts = [made[:, :cut]]
        for i, shard in enumerate(below):
            narrow = linear(rows, tensors[f"projections.{i}"])
            inside = spread_log_softmax(shard, wide_scores(narrow, tensors[f"tails.{i}"], None))
            parts.append(inside + clusters[:, i : i + 1])
        return torch.cat(parts, -1)


class TreeFamily(Family):
    """The hierarchical softmax: each process has a range of nodes; their losses are summed."""

    def __init__(self, head: HierarchicalSoftmax, mesh: Any, assignment: str) -> None:
        super().__init__(head, mesh, assignment)
        if head.sparse:
            _refuse("sparse=False, since a DTensor has no row-sparse gradient", head)
        self._part: tuple[torch.device, TreeTables] | None = None

    @property
    def names(self) -> list[str]:
        return ["weight"] if self.head.bias is None else ["weight", "bias"]

    @cached_property
    def _rows(self) -> Shards:
        """How the rows of the weight are sharded."""
        return Shards.even(self.group, self.head.weight.shape[0])

    @cached_property
    def _nodes(self) -> tuple[int, int]:
        """The range of nodes whose first row this process has."""
        start, shard = self.head._tables.row_start, self._rows
        bounds = torch.tensor([shard.first, shard.first + shard.here], device=start.device)
        first, last = torch.searchsorted(start[:-1].contiguous(), bounds).tolist()
        return first, last

    @cached_property
    def _beyond(self) -> tuple[slice, Tensor, bool]:
        """Local rows that its nodes use, rows of other processes that its last node needs.

        The third value is whether any process needs rows of others.
        """
        tables, shard, (first, last) = self.head._tables, self._rows, self._nodes
        begin, end = tables.row_start[first].item(), tables.row_start[last].item()
        stop = shard.first + shard.here
        rows = torch.arange(min(end, stop), end, device=tables.row_start.device)
        if first == last:
            return slice(0, 0), rows[:0], bool(summed(rows.new_zeros(1), self.group))
        any_beyond = bool(summed(torch.tensor([len(rows)], device=rows.device), self.group))
        return slice(int(begin) - shard.first, int(min(end, stop)) - shard.first), rows, any_beyond

    def _local(self) -> tuple[TreeTables, Tensor, Tensor | None]:
        """Tables of this process's nodes, and all of their vectors and biases."""
        head, device = self.head, self.head._tables.path_start.device
        if self._part is None or self._part[0] != device:
            self._part = device, head._tables.part(*self._nodes)
        used, rows, any_beyond = self._beyond
        weight, bias = local_part(head.weight), local_part(head.bias)
        parts = [None if each is None else each[used] for each in (weight, bias)]
        if any_beyond:
            tables = [each for each in (weight, bias) if each is not None]
            found = iter(looked_up(self._rows, rows, *tables))
            parts = [None if each is None else torch.cat([each, next(found)]) for each in parts]
        return self._part[1], parts[0], parts[1]  # type: ignore[return-value]

    def loss(self, hidden: Tensor, target: Tensor, **given: Any) -> Tensor:
        del given
        head, counted = self.head, torch.ones_like(target, dtype=torch.bool)
        if head.ignore_index is not None:
            counted = target != head.ignore_index
        paths, there = self._paths_of(target.masked_fill(~counted, 0))
        losses = self._path_losses(self._local(), hidden, paths, there & counted.unsqueeze(-1))
        scale = RowScale.of(counted.to(losses.dtype), head.reduction, len(target))
        if not head.tree.overlaps:
            return sum_of_parts(scale.reduce(losses.squeeze(-1), head.reduction), self.group)
        logs = (-sum_of_parts(losses, self.group)).masked_fill(~there, -torch.inf)
        return scale.reduce(torch.where(counted, -logs.logsumexp(-1), 0.0), head.reduction)

    def _paths_of(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """The paths of each class ``(*classes, paths)``, and a mask that is False for padding."""
        tables = self.head._tables
        if not tables.overlaps:
            return classes.unsqueeze(-1), torch.ones_like(classes, dtype=torch.bool).unsqueeze(-1)
        first, end = tables.class_start[classes], tables.class_start[classes + 1]
        steps = torch.arange(tables.most_paths, device=classes.device)
        paths = first.unsqueeze(-1) + steps
        there = paths < end.unsqueeze(-1)
        return torch.where(there, paths, 0), there

    def _path_losses(self, local: Any, hidden: Tensor, paths: Tensor, asked: Tensor) -> Tensor:
        """What this process's nodes add to the loss of each path; 0 where none is asked for.

        Args:
            local: the nodes of this process, from :meth:`_local`.
            hidden: ``(n, in_features)``.
            paths: ``(n, *)``, any number of paths of each row.
            asked: bool, of the shape of ``paths``.
        """
        tables, weight, bias = local
        here = tables.path_start[paths + 1] > tables.path_start[paths]
        places = (here & asked).nonzero(as_tuple=True)
        # Without a node on any path, the losses must still be functions of all parameters.
        losses = (
            hidden[:, :0].sum(-1) + weight[:0].sum() + (0.0 if bias is None else bias[:0].sum())
        )
        losses = in_dtype(losses, accumulation_dtype(hidden.dtype))
        losses = losses.view(-1, *(1 for _ in paths.shape[1:])).expand(paths.shape)
        if len(places[0]):
            made = self.head._part_losses(tables, weight, bias, hidden[places[0]], paths[places])
            losses = losses.index_put(places, made)
        return losses

    def log_probs_of(self, rows: Tensor, chosen: Tensor) -> Tensor | None:
        head, k = self.head, chosen.shape[1]
        tables, dtype = head._tables, accumulation_dtype(rows.dtype)
        if k * tables.most_paths * tables.longest > tables.n_rows:
            # All nodes are fewer than those on the paths.
            return None
        part, *vectors = self._local()
        local = part, *(None if each is None else in_dtype(each, dtype) for each in vectors)
        rows, made = in_dtype(rows, dtype), []
        held = k * tables.most_paths * (head.in_features + tables.longest)
        for some in row_chunks(rows, held, head.chunk_rows, 1.0):
            paths, there = self._paths_of(chosen[some])
            made.append(self._path_losses(local, rows[some], paths, there))
        logs = -sum_of_parts(torch.cat(made), self.group)
        if not tables.overlaps:
            return logs.squeeze(-1)
        there = self._paths_of(chosen)[1]
        return logs.masked_fill(~there, -torch.inf).logsumexp(-1)

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return super().tensors(accumulation_dtype(dtype))

    @property
    def scores_per_row(self) -> int:
        # Every process gathers the scores of all nodes.
        rows: int = self.head.weight.shape[0]
        return rows

    def log_probs(self, rows: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        rows, mine = in_dtype(rows, accumulation_dtype(rows.dtype)), self.shards[0]
        scores = wide_scores(rows, tensors["weight"], tensors.get("bias"))
        every = gathered(scores.t(), self._rows.shares).t()
        made: Tensor = self.head._from_scores(every)[:, mine.first : mine.first + mine.here]
        return made.contiguous()


def chosen_here(logs: Tensor, columns: Tensor) -> Tensor:
    """``logs`` at the given columns of each row, ``(n, k)``; 0 for negative columns."""
    if not logs.shape[1]:
        # Still a function of logs: all processes must take part in the exchanges of backward.
        return logs.new_zeros(columns.shape) + logs.sum()
    return torch.where(columns < 0, 0.0, logs.gather(-1, columns.clamp(min=0)))


def _refuse(expected: str, head: Head) -> None:
    raise ValueError(
        f"head: expected {expected}, to shard its classes over processes, got "
        f"{type(head).__name__}({head.extra_repr()})"
    )


_FAMILIES: list[tuple[Any, Any]] = [
    (ComparedHead, SampledFamily),
    (FullSoftmax, LinearFamily),
    (EntmaxHead, LinearFamily),
    (TopKSoftmaxHead, LinearFamily),
    (SelfNormalized, SelfNormalizedFamily),
    (MultiLabel, LabelsFamily),
    (CharCNNSoftmax, SpelledFamily),
    (DifferentiatedSoftmax, BandsFamily),
    (AdaptiveSoftmax, ClustersFamily),
    (HierarchicalSoftmax, TreeFamily),
]
