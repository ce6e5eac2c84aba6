"""Multi-label losses, ZLPR and binary cross entropy, without the matrix of scores.

Scores are computed in slabs: all rows, some labels. So each row of the weight's gradient comes from
one product, accumulated in float32 and rounded once. Listed labels are set to -inf in their slab
and added with their exact scores. This avoids the cancellation of subtracting them from sums.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer import kernels
from lastlayer._checks import check_chunk, check_linear, check_reduction
from lastlayer._processes import IGNORED, Shards, local_part
from lastlayer._torch import (
    accumulation_dtype,
    autocast_dtype,
    eager,
    gradient_sum_dtype,
    in_autocast_dtype,
    in_dtype,
    keeps_float32,
    without_autocast,
)
from lastlayer.fused.function import (
    Call,
    Engine,
    Operands,
    Result,
    RowScale,
    fused_loss,
    normalized_factors,
)
from lastlayer.fused.label_lists import Lists, check_lists, sorted_lists
from lastlayer.fused.rows import (
    NOT_SPREAD,
    SPREAD_SCHEMA,
    gradients_by_products,
    has_few_scores_on_gpu,
    is_spread,
    spread_classes,
)
from lastlayer.fused.scores import (
    FEW_SCORES,
    LayerProducts,
    as_chunk,
    classes_at_a_time,
    fits_one_cpu_product,
    missing_columns,
    part_of,
    scores_into,
    slab_stride,
)
from lastlayer.kernels import LARGE, empty
from lastlayer.kernels.label_loss import reference as label_reference

# On a CPU, scores of fewer bytes than this are all computed at once.
_ONE_SLAB_BYTES = LARGE


def linear_zlpr_loss(
    hidden: Tensor,
    weight: Tensor,
    positives: Tensor,
    bias: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    values: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    chunk_classes: int | str = "auto",
    process_group: Any = None,
    hidden_grad: str = "sum",
) -> Tensor:
    r"""``zlpr_loss_from_indices(hidden @ weight.T + bias, positives)`` without the scores.

    .. math:: L = \log\Bigl(1 + \sum_j (1 - t_j)\, e^{s_j}\Bigr)
                + \log\Bigl(1 + \sum_j t_j\, e^{-s_j}\Bigr), \qquad s = W h + b

    Choose it for a multi-label layer of more than a few thousand labels. It holds the scores of
    all rows for a slab of labels at a time: 0.9 GB on a GPU, 8 MB on a CPU, and about a quarter of
    that with ``chunk_classes="low"``. No dense target is made. The gradient of the weight is
    accumulated in float32 and rounded once.

    Cost: between three and four products of n × d × v: every score is needed twice, and all but
    those of the last slab are recomputed. Gradients are computed in the forward pass and scaled in
    backward; with ``reduction="none"`` they are computed in backward. There is no host sync.

    Args:
        hidden: ``(*batch, d)``, float16, bfloat16, float32 or float64.
        weight: ``(v, d)``, one row per label, as in ``nn.Linear``; keeps its dtype under autocast.
        positives: the labels that are on, class ids of any integer dtype: ``(*batch, m)``, padded
            with ``ignore_index``; or all lists concatenated, ``(k,)``, with ``offsets``.
            Duplicates count once, and a list may be empty.
        bias: ``(v,)``; -inf masks a label out.
        offsets: ``(n + 1,)`` integers: row i lists ``positives[offsets[i] : offsets[i + 1]]``.
        values: the label of each listed class, in [0, 1] and of the shape of ``positives``;
            ``1 - label_smoothing`` where it is None. No gradient flows to it.
        label_smoothing: the label of every class that is not listed, from 0 to below 1/2.
        ignore_index: the id used as padding; None if there is no padding.
        reduction: "mean" over the rows, "sum" or "none".
        chunk_classes: labels per slab, "auto" or "low".
        process_group: for labels that are sharded over processes; a DTensor as weight does the
            same. See :func:`linear_cross_entropy`.
        hidden_grad: "sum" or "part", for the same.

    Returns:
        The loss in float32, or in float64 from float64.

    Example:
        >>> import torch
        >>> hidden, weight = torch.zeros(2, 8), torch.zeros(100, 8)
        >>> positives = torch.tensor([[3, 99], [5, -100]])
        >>> linear_zlpr_loss(hidden, weight, positives, reduction="none")
        tensor([5.6937, 5.2983])

    Reference:
        Su et al., ZLPR: A Novel Loss for Multi-label Classification, 2022, arXiv:2208.02955.
    """
    return _label_loss(
        "zlpr", hidden, weight, positives, bias, offsets, values, label_smoothing, ignore_index,
        reduction, chunk_classes, process_group=process_group, hidden_grad=hidden_grad,
    )  # fmt: skip


def linear_bce_loss(
    hidden: Tensor, weight: Tensor, positives: Tensor, bias: Tensor | None = None, *,
    offsets: Tensor | None = None, values: Tensor | None = None, label_smoothing: float = 0.0,
    ignore_index: int | None = -100, reduction: str = "mean", chunk_classes: int | str = "auto",
    process_group: Any = None, hidden_grad: str = "sum",
) -> Tensor:  # fmt: skip
    r"""The binary cross entropy of ``hidden @ weight.T + bias``, without the scores.

    .. math:: L = \sum_j \log(1 + e^{s_j}) - t_j s_j, \qquad s = W h + b

    The loss of a row is the sum over its labels. Choose it if labels are independent and you need
    their probabilities :math:`\sigma(s)`. If few of many labels are on, :func:`linear_zlpr_loss`
    balances positive and negative labels better.

    Cost: three products of n × d × v, one less than ZLPR may take: labels do not depend on each
    other, so each slab is computed once. With ``reduction="none"`` backward recomputes the scores.

    Args:
        hidden: ``(*batch, d)``; all arguments are as in :func:`linear_zlpr_loss`.
        weight: ``(v, d)``.
        positives: ``(*batch, m)``, or ``(k,)`` with ``offsets``.
        bias: ``(v,)``.
        offsets: ``(n + 1,)``.
        values: the label of each listed class.
        label_smoothing: the label of every other class.
        ignore_index: the id used as padding.
        reduction: "mean" over the rows, "sum" or "none".
        chunk_classes: labels per slab, "auto" or "low".
        process_group: for labels that are sharded over processes.
        hidden_grad: "sum" or "part", for the same.

    Returns:
        The loss in float32, or in float64 from float64.

    Example:
        >>> import torch
        >>> hidden, weight = torch.zeros(2, 8), torch.zeros(100, 8)
        >>> linear_bce_loss(hidden, weight, torch.tensor([[3, 99], [5, -100]]))
        tensor(69.3147)
    """
    return _label_loss(
        "bce", hidden, weight, positives, bias, offsets, values, label_smoothing, ignore_index,
        reduction, chunk_classes, process_group=process_group, hidden_grad=hidden_grad,
    )  # fmt: skip


def asymmetric_label_loss(
    hidden: Tensor, weight: Tensor, positives: Tensor, bias: Tensor | None,
    numbers: tuple[float, ...], **options: Any,
) -> Tensor:  # fmt: skip
    """:func:`lastlayer.asymmetric_loss` in the form of :func:`linear_bce_loss`; no smoothing.

    ``numbers`` are its ``gamma_negative``, ``gamma_positive``, ``margin`` and ``focus_gradient``.
    """
    return _label_loss(
        "asymmetric", hidden, weight, positives, bias, label_smoothing=0.0, numbers=numbers,
        **options,
    )  # fmt: skip


def _label_loss(
    loss: str,
    hidden: Any,
    weight: Any,
    positives: Any,
    bias: Any,
    offsets: Any,
    values: Any,
    label_smoothing: Any,
    ignore_index: Any,
    reduction: Any,
    chunk_classes: Any,
    numbers: tuple[float, ...] = (),
    process_group: Any = None,
    hidden_grad: Any = "sum",
) -> Tensor:
    shards, spread = None, NOT_SPREAD
    if hidden_grad != "sum" or is_spread(weight, process_group):
        if torch.compiler.is_compiling():
            return _eager_loss(
                loss, hidden, weight, positives, bias, offsets, values, label_smoothing,
                ignore_index, reduction, chunk_classes, numbers, process_group, hidden_grad,
            )  # fmt: skip
        shards = spread_classes(weight, process_group, hidden_grad)
        weight, bias = local_part(weight), local_part(bias)
        hidden = shards.seen(hidden, hidden_grad)
        shards = None if shards.processes == 1 else shards
        spread = shards or NOT_SPREAD
    check_linear(hidden, weight, bias, empty=shards is not None)
    check_reduction(reduction)
    check_chunk(chunk_classes, "chunk_classes")
    lists = check_lists(
        hidden, weight.shape[0] if shards is None else shards.n_classes, positives, offsets,
        values, ignore_index, label_smoothing,
    )  # fmt: skip
    if shards is not None:
        # A label of another process is padding here.
        place = shards.local(lists[0], ignore_index)
        lists = torch.where(place < 0, IGNORED, place), *lists[1:]
        ignore_index = IGNORED
    batch, rows = hidden.shape[:-1], in_autocast_dtype(hidden)
    rows = rows if len(batch) == 1 else rows.reshape(batch.numel(), hidden.shape[-1])
    plain = loss == "bce" and shards is None and not label_smoothing and chunk_classes == "auto"
    if plain and lists[1] is None and lists[2] is None and reduction != "none":
        of_torch = _bce_by_torch(rows, weight, bias, lists[0], ignore_index, reduction)
        if of_torch is not None:
            return of_torch
    (made,) = fused_loss(
        LABELS, (rows, weight, bias, *lists),
        (loss, float(label_smoothing), ignore_index, str(chunk_classes), list(numbers), *spread),
        reduction,
    )  # fmt: skip
    return made.reshape(batch) if reduction == "none" and len(batch) != 1 else made


def _bce_by_torch(
    rows: Tensor, weight: Tensor, bias: Tensor | None, positives: Tensor,
    ignore_index: int | None, reduction: str,
) -> Tensor | None:  # fmt: skip
    """The loss of a small problem on a CPU by torch's operations; None where these do not fit."""
    n, dtype = rows.shape[0], rows.dtype
    alike = weight.dtype == dtype and (bias is None or bias.dtype == dtype)
    if not n or not alike or autocast_dtype(rows) is not None:
        return None
    if not fits_one_cpu_product(rows, weight.shape[0], "auto") or n * len(weight) > FEW_SCORES:
        return None
    if ignore_index is not None and ignore_index >= 0:
        positives = positives.masked_fill(positives == ignore_index, -1)
    scores = functional.linear(rows, weight, bias)
    labels = _dense(scores, positives, None)
    total = functional.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
    # torch's loss is NaN where a score is infinite.
    if not math.isfinite(total.item()):
        return None
    return total / n if reduction == "mean" else total


class _LabelRule(ABC):
    """A multi-label loss that is computed from slabs of scores, which it may overwrite.

    With ``two_passes`` the gradient of a label depends on all labels: the first pass calls
    :meth:`accumulate` for each slab, the second :meth:`to_gradient_`. Otherwise there is only the
    second pass.
    """

    two_passes = False
    normalisers: Any = None
    """Sums over all labels that gradients need, for losses with two passes."""
    shards: Shards | None = None
    """How labels are sharded. With one pass, :meth:`losses` covers this process's labels only."""

    def accumulate(self, scores: Tensor) -> None:  # noqa: B027 - for losses with two passes
        """Adds a slab to the sums over all labels, in the first of two passes."""

    @abstractmethod
    def finish_sums(self, lists: Lists, at_listed: Tensor) -> None:
        """Adds the listed labels with their exact scores; called before any gradient."""

    @abstractmethod
    def finish_sums_without_labels(self, n: int, like: Tensor) -> None:
        """:meth:`finish_sums` for ``n`` rows in a process that has no labels."""

    @abstractmethod
    def to_gradient_(self, scores: Tensor, scale: Tensor | None) -> None:
        """Replaces a slab by its gradient if ``scale``, the factor of each row, is given."""

    @abstractmethod
    def of_listed(self, lists: Lists, at_listed: Tensor, scale: Tensor) -> Tensor:
        """The gradient of each listed label; undefined for entries that do not count."""

    @abstractmethod
    def losses(self) -> Tensor:
        """The loss of each row, after all slabs."""

    def reduced(self, scale: RowScale, reduction: str) -> Tensor:
        """The reduced loss over all processes; reducing first keeps the communication small."""
        made = scale.reduce(self.losses(), reduction)
        return made if self.shards is None or self.two_passes else self.shards.sum(made)


class _Zlpr(_LabelRule):
    """``log(1 + sum (1 - t) e^s) + log(1 + sum t e^-s)``; the two terms are the normalisers."""

    two_passes = True

    def __init__(self, label_smoothing: float, normalisers: Tensor | None, *_: float) -> None:
        self.normalisers = normalisers
        self._log_rest = math.log1p(-label_smoothing)
        self._log_some = math.log(label_smoothing) if label_smoothing else None
        self._above: list[Tensor] = []
        self._below: list[Tensor] = []

    def accumulate(self, scores: Tensor) -> None:
        above, below = kernels.zlpr.slab_sums("auto", scores, self._log_some is not None)
        self._above.append(above)
        self._below.append(below)

    def finish_sums(self, lists: Lists, at_listed: Tensor) -> None:
        if self.normalisers is not None:
            return
        above, terms = _logsumexp(self._above), -at_listed
        if self._log_some is not None:
            above = above + self._log_rest
        labels = lists.labels(at_listed.dtype)
        if labels is not None:
            above = torch.logaddexp(above, lists.logsumexp(torch.log1p(-labels) + at_listed))
            terms = torch.log(labels) + terms
        below = lists.logsumexp(terms)
        if self._log_some is not None:
            below = torch.logaddexp(below, _logsumexp(self._below) + self._log_some)
        self._normalise(torch.stack([above, below]))

    def finish_sums_without_labels(self, n: int, like: Tensor) -> None:
        if self.normalisers is None:
            self._normalise(like.new_full((2, n), -torch.inf))

    def _normalise(self, both: Tensor) -> None:
        both = both if self.shards is None else self.shards.logsumexp(both)
        self.normalisers = torch.logaddexp(both, both.new_zeros(()))

    def to_gradient_(self, scores: Tensor, scale: Tensor | None) -> None:
        if scale is None:
            return
        above, below = self.normalisers.unbind()
        if self._log_some is None:
            kernels.zlpr.slab_gradient_("auto", scores, scale, above, None)
        else:
            above, below = above - self._log_rest, below - self._log_some
            kernels.zlpr.slab_gradient_("auto", scores, scale, above, below)

    def of_listed(self, lists: Lists, at_listed: Tensor, scale: Tensor) -> Tensor:
        above, below = self.normalisers.unbind()
        labels = lists.labels(at_listed.dtype)
        if labels is None:
            return torch.exp(-at_listed - lists.of_rows(below)) * lists.of_rows(-scale)
        gradient = torch.exp(torch.log1p(-labels) + at_listed - lists.of_rows(above))
        gradient -= torch.exp(torch.log(labels) - at_listed - lists.of_rows(below))
        return gradient * lists.of_rows(scale)

    def losses(self) -> Tensor:
        made: Tensor = self.normalisers.sum(0)
        return made


class _Bce(_LabelRule):
    """``sum softplus(s) - t s``: labels are independent."""

    def __init__(self, label_smoothing: float, _: Tensor | None, *numbers: float) -> None:
        self._label_smoothing, self._numbers = label_smoothing, numbers
        self._terms: list[Tensor] = []

    def finish_sums(self, lists: Lists, at_listed: Tensor) -> None:
        # softplus(-s) for a label of 1: softplus(s) - s would cancel.
        own = functional.logsigmoid(at_listed)
        labels = lists.labels(at_listed.dtype)
        if labels is not None:
            own = labels * own + (1.0 - labels) * functional.logsigmoid(-at_listed)
        self._terms.append(lists.sum(own).neg_())

    def finish_sums_without_labels(self, n: int, like: Tensor) -> None:
        self._terms.append(like.new_zeros(n))

    def to_gradient_(self, scores: Tensor, scale: Tensor | None) -> None:
        options = *self._options(), self._label_smoothing
        self._terms.append(kernels.label_loss.slab_("auto", scores, *options, scale))

    def of_listed(self, lists: Lists, at_listed: Tensor, scale: Tensor) -> Tensor:
        labels = lists.labels(at_listed.dtype)
        if labels is None:
            return torch.sigmoid(-at_listed) * lists.of_rows(-scale)
        return (torch.sigmoid(at_listed) - labels) * lists.of_rows(scale)

    def of_all(
        self, scores: Tensor, labels: Tensor, factors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Losses of rows with dense labels, and their gradient if row factors are given."""
        *numbers, focus_gradient = self._options()
        given = scores, labels, None, *numbers
        losses, _ = kernels.label_loss.forward("auto", *given)
        if factors is None:
            return losses, None
        return losses, kernels.label_loss.backward("auto", *given, focus_gradient, factors)

    def _options(self) -> tuple[float, float, float, bool]:
        return 0.0, 0.0, 0.0, True

    def losses(self) -> Tensor:
        total = self._terms[0]
        for each in self._terms[1:]:
            total = total + each
        return total


class _Asymmetric(_Bce):
    """The asymmetric loss, with focusing powers and a margin; unlisted labels are 0."""

    def finish_sums(self, lists: Lists, at_listed: Tensor) -> None:
        own = label_reference.losses_of(
            at_listed.unsqueeze(-1), self._labels(lists, at_listed).unsqueeze(-1), None,
            *self._options(),
        )  # fmt: skip
        self._terms.append(lists.sum(own))

    def of_listed(self, lists: Lists, at_listed: Tensor, scale: Tensor) -> Tensor:
        labels = self._labels(lists, at_listed)
        made = label_reference.gradient(at_listed, labels, None, *self._options())
        return made * lists.of_rows(scale)

    def _labels(self, lists: Lists, at_listed: Tensor) -> Tensor:
        labels = lists.labels(at_listed.dtype)
        return torch.ones_like(at_listed) if labels is None else labels

    def _options(self) -> tuple[float, float, float, bool]:
        gamma_negative, gamma_positive, margin, focus_gradient = self._numbers
        return gamma_negative, gamma_positive, margin, bool(focus_gradient)


# Arguments: label smoothing, the normalisers of all rows (None if not known), numeric options.
_RULES: dict[str, Callable[..., _LabelRule]] = {
    "zlpr": _Zlpr, "bce": _Bce, "asymmetric": _Asymmetric,
}  # fmt: skip


def _logsumexp(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).logsumexp(0)


class _LabelsEngine(Engine):
    """Operands: hidden, weight, bias; positives, offsets, values.

    With ``reduction="none"`` the forward pass saves the normalisers of ZLPR; backward gets them
    after the operands.
    """

    name = "linear_label_loss"
    schema = (
        "str loss, float label_smoothing, int? ignore_index, str chunk_classes, float[] numbers"
        + SPREAD_SCHEMA
    )
    n_constants = 3
    instead = "a loss on scores, such as lastlayer.zlpr_loss_from_indices"

    def compute(self, call: Call) -> Result:
        operands, options, reduction, wanted, upstream = call
        hidden, weight, bias, positives, offsets, values, *known = operands
        name, label_smoothing, ignore_index, chunk, numbers, *spread = options
        (n, _), n_classes, dtype = hidden.shape, weight.shape[0], hidden.dtype
        shards = Shards(*spread) if spread[0] else None
        if reduction != "none" and shards is None:
            if _is_small(call):
                return _at_once(call)
            if _is_small_on_gpu(call):
                return _in_few_launches(call)
        rule = _RULES[name](label_smoothing, known[0] if known else None, *numbers)
        rule.shards = shards
        if not n_classes:
            return _without_labels(call, rule)
        at_a_time = classes_at_a_time(as_chunk(chunk), hidden, n_classes)
        with without_autocast(hidden):
            scale, factors, size = RowScale.of(None, reduction, n), None, None
            if call.makes_gradients:
                factors, size = normalized_factors(scale.factors(hidden, n, upstream), dtype)
            biases = None if bias is None else in_dtype(bias, dtype)
            vectors, width = in_dtype(weight, dtype), hidden.shape[1]
            if more := missing_columns(vectors, n):
                hidden, vectors = (functional.pad(each, (0, more)) for each in (hidden, vectors))
            slabs = _Slabs(hidden, vectors, biases, at_a_time)
            accumulates = rule.two_passes and not known
            order = slabs.all[::-1] if rule.two_passes else slabs.all
            # Launched first: the GPU computes it while the host prepares the lists.
            slabs.score(slabs.all[0] if accumulates else order[0])
            lists = sorted_lists(
                positives, offsets, values, n, n_classes, ignore_index, label_smoothing
            )
            at_listed = slabs.leave_out(lists)
            for slab in slabs.all if accumulates else ():
                rule.accumulate(slabs.marked(slab))
            rule.finish_sums(lists, at_listed)
            if factors is None:
                for slab in () if rule.two_passes else order:
                    rule.to_gradient_(slabs.marked(slab), None)
                pieces: tuple[Tensor | None, ...] = (None,) * 3
            else:
                gradients = _Gradients(slabs, wanted, gradient_sum_dtype(weight.dtype))
                own = in_dtype(rule.of_listed(lists, at_listed, factors), dtype).view(-1)
                for slab in order:
                    scores = slabs.marked(slab)
                    rule.to_gradient_(scores, factors)
                    slabs.put(slab, own)
                    gradients.add(slab, scores)
                pieces = gradients.finished(bias, width)
            loss = rule.reduced(scale, reduction)
        if reduction == "none" and upstream is None:
            pieces = (rule.normalisers,) if rule.two_passes else ()
        return Result(loss, pieces, (), size)

    def fake(self, call: Call) -> Result:
        made = super().fake(call)
        if call.reduction != "none" or call.upstream is not None:
            return made
        left = (made.loss.new_empty(2, *made.loss.shape),) if call.options[0] == "zlpr" else ()
        return made._replace(pieces=left)

    def _registered(self, operands: Operands, upstream: Tensor | None, *rest: Any) -> list[Tensor]:
        """Also checks values, which cannot be read while the call is traced."""
        hidden, weight, _, positives, offsets, values = operands[:6]
        check_lists(hidden, weight.shape[0], positives, offsets, values, rest[2], rest[1])
        return super()._registered(operands, upstream, *rest)


LABELS, _eager_loss = _LabelsEngine(), eager(_label_loss)


def _without_labels(call: Call, rule: _LabelRule) -> Result:
    """The result in a process without labels: the loss of the others, and zero gradients."""
    hidden, weight, bias = call.operands[:3]
    scale = RowScale.of(None, call.reduction, hidden.shape[0])
    rule.finish_sums_without_labels(
        hidden.shape[0], hidden.new_empty(0, dtype=accumulation_dtype(hidden.dtype))
    )
    loss = rule.reduced(scale, call.reduction)
    if call.reduction == "none" and call.upstream is None:
        return Result(loss, (rule.normalisers,) if rule.two_passes else ())
    return Result(loss, [
        None if each is None or not wanted else torch.zeros_like(each)
        for each, wanted in zip((hidden, weight, bias), call.wanted, strict=True)
    ])  # fmt: skip


def _is_small(call: Call) -> bool:
    """Whether to compute all scores at once on a CPU."""
    hidden, weight = call.operands[:2]
    size: int = hidden.shape[0] * weight.shape[0] * hidden.itemsize
    if not _are_binary(call):
        return False
    if call.options[0] != "zlpr":
        # Needs a dense matrix of labels in addition to the scores.
        return size > 0 and fits_one_cpu_product(hidden, weight.shape[0], "auto")
    return size < _ONE_SLAB_BYTES and bool(hidden.is_cpu) and bool(hidden.itemsize >= 4)


def _is_small_on_gpu(call: Call) -> bool:
    """Whether the host needs more time for slabs than a GPU for all scores."""
    hidden, weight = call.operands[:2]
    if not _are_binary(call) or not has_few_scores_on_gpu(hidden, weight.shape[0]):
        return False
    # Listed labels need exact scores, which TF32 does not have.
    return hidden.dtype == torch.bfloat16 or keeps_float32(hidden)


def _are_binary(call: Call) -> bool:
    """Whether labels are 0 and 1, and slabs are not asked for: the dense kernels support that."""
    _, label_smoothing, _, chunk, *_ = call.options
    return call.operands[5] is None and not label_smoothing and bool(chunk == "auto")


def _at_once(call: Call) -> Result:
    """The loss from all scores at once, which takes the least host time."""
    hidden, weight, bias = call.operands[:3]
    n, dtype, wanted = hidden.shape[0], hidden.dtype, call.wanted
    with without_autocast(hidden):
        biases = None if bias is None else in_dtype(bias, dtype)
        layer = LayerProducts([in_dtype(weight, dtype)], biases, n)
        loss, gradient = _loss_of_scores(call, layer.scores(hidden, dtype))
        pieces: list[Tensor | None] = [None] * 3
        if gradient is not None:
            pieces[0] = layer.hidden_gradient(None, gradient) if wanted[0] else None
            if wanted[1]:
                made = layer.new_weight_gradient(gradient, hidden, dtype)
                pieces[1] = in_dtype(made, gradient_sum_dtype(weight.dtype))
            if wanted[2]:
                pieces[2] = in_dtype(gradient.sum(0), gradient_sum_dtype(bias.dtype))
        return Result(loss, pieces)


def _in_few_launches(call: Call) -> Result:
    """A small problem on a GPU: one product, the kernels of stored scores, and two products."""
    hidden, weight, bias = call.operands[:3]
    n, dtype = hidden.shape[0], hidden.dtype
    with without_autocast(hidden):
        vectors = in_dtype(weight, dtype)
        biases = None if bias is None else in_dtype(bias, dtype)
        scores = hidden.new_empty(n, weight.shape[0], dtype=accumulation_dtype(dtype))
        loss, gradient = _loss_of_scores(call, scores_into(scores, hidden, vectors, biases))
        if gradient is None:
            return Result(loss, (None,) * 3)
        pieces = gradients_by_products(gradient, hidden, vectors, weight, bias, call.wanted)
        return Result(loss, pieces)


def _loss_of_scores(call: Call, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """The reduced loss of labels of 0 and 1, and the gradient of all scores if any is wanted."""
    positives, offsets = call.operands[3:5]
    name, _, ignore_index, _, numbers, *_ = call.options
    scale, factors = RowScale.of(None, call.reduction, scores.shape[0]), None
    if ignore_index is not None and ignore_index >= 0:
        positives = positives.masked_fill(positives == ignore_index, -1)
    if any(call.wanted):
        factors = scale.factors(scores, scores.shape[0])
    if name == "zlpr":
        losses, gradient = _zlpr_of(scores, positives, offsets, factors)
    else:
        rule = (_Bce if name == "bce" else _Asymmetric)(0.0, None, *numbers)
        losses, gradient = rule.of_all(scores, _dense(scores, positives, offsets), factors)
    return scale.reduce(losses, call.reduction), gradient


def _zlpr_of(
    scores: Tensor, positives: Tensor, offsets: Tensor | None, factors: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Losses of rows of scores, and their gradient if row factors are given."""
    given = None, [each for each in (positives, offsets) if each is not None], None, None, 0.0
    losses, stats, _ = kernels.zlpr.forward("auto", scores, *given)
    if factors is None:
        return losses, None
    return losses, kernels.zlpr.backward("auto", scores, *given, stats, factors)


def _dense(scores: Tensor, positives: Tensor, offsets: Tensor | None) -> Tensor:
    """Dense labels in the shape of the scores, 1 for listed classes; negative ids are padding."""
    n, n_classes = scores.shape
    if offsets is not None:
        lists = sorted_lists(positives, offsets, None, n, n_classes, None, 0.0)
        return lists.dense(positives.new_zeros(1), scores, 0.0)
    # The additional last column takes the padding.
    ids = torch.where(positives < 0, n_classes, positives)
    if not ids.is_cpu:
        # Ids out of range, which are not checked on a GPU, do not count.
        ids = ids.clamp(max=n_classes)
    labels = scores.new_zeros(n, n_classes + 1).scatter_(1, ids, 1.0)
    return labels[:, :n_classes].contiguous()


class _Slabs:
    """Scores of all rows, some labels (one slab) at a time, in one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: int) -> None:
        self.hidden, self.weight, self._bias, self._classes = hidden, weight, bias, classes
        self._layers: dict[int, LayerProducts] = {}
        n, n_classes = hidden.shape[0], weight.shape[0]
        self.all = [slice(a, min(n_classes, a + classes)) for a in range(0, n_classes, classes)]
        # A full slab comes last: the last slab is not recomputed.
        if len(self.all) > 1 and n_classes % classes:
            self.all[-2:] = self.all[:-3:-1]
        self._stride = slab_stride(hidden, classes)
        # The additional last element takes writes that belong to other slabs.
        self._outside = n * self._stride
        self._memory = empty((self._outside + 1,), hidden.dtype, hidden.device)
        self.memory = self._memory[:-1].view(n, self._stride)
        self._held: slice | None = None
        self._is_marked = False

    def score(self, slab: slice) -> None:
        """Computes the scores of a slab."""
        self.layer(slab).scores_into(self.memory, self.hidden)
        self._held, self._is_marked = slab, False

    def layer(self, slab: slice) -> LayerProducts:
        """The matrix products with the vectors of a slab's labels."""
        layer = self._layers.get(slab.start)
        if layer is None:
            bias = None if self._bias is None else part_of(self._bias, slab)
            layer = LayerProducts([part_of(self.weight, slab)], bias, self.hidden.shape[0])
            self._layers[slab.start] = layer
        return layer

    def leave_out(self, lists: Lists) -> Tensor:
        """Returns the exact score of each listed label; :meth:`marked` then masks these labels."""
        classes, hidden = lists.classes, self.hidden
        if len(self.all) == 1:
            place = lists.places(classes, self._stride)
            self._place = place.masked_fill_(lists.absent.view(-1), self._outside)
            if hidden.device.type == "cpu" and hidden.itemsize >= 4 and self._held is not None:
                # CPU scores in float32 are exact enough; a GPU may have used TF32.
                return self._memory[self._place].view(classes.shape)
        else:
            # Entries that do not count are negative, and so are in no slab.
            self._slab_of = classes.div(self._classes, rounding_mode="floor").view(-1)
            self._place = lists.places(classes.remainder(self._classes), self._stride)
        return lists.scores(hidden, self.weight, self._bias)

    def marked(self, slab: slice) -> Tensor:
        """Scores ``(n, labels of the slab)``, -inf where a label is listed."""
        if self._held != slab:
            self.score(slab)
        if not self._is_marked:
            self.put(slab, -torch.inf)
            self._is_marked = True
        return self.layer(slab).scores_in(self.memory)

    def put(self, slab: slice, values: Tensor | float) -> None:
        """Writes one value for each listed label of the slab."""
        place = self._place
        if len(self.all) > 1:
            inside = self._slab_of == slab.start // self._classes
            place = torch.where(inside, place, self._outside)
        self._memory.scatter_(0, place, values)


class _Gradients:
    """Accumulates the gradients of hidden, weight and bias over slabs."""

    def __init__(self, slabs: _Slabs, wanted: Sequence[bool], weight_dtype: torch.dtype) -> None:
        self._slabs, self._rows, self._wanted = slabs, slabs.hidden, wanted
        self._whole, self._weight_dtype = len(slabs.all) == 1, weight_dtype
        self._wide = accumulation_dtype(slabs.weight.dtype)
        self._hidden: Tensor | None = None
        self._weight: Tensor | None = None
        self._bias: dict[int, Tensor] = {}

    def add(self, slab: slice, gradient: Tensor) -> None:
        of_hidden, of_weight, of_bias = self._wanted
        layer = self._slabs.layer(slab)
        if of_bias:
            self._bias[slab.start] = gradient.sum(0, dtype=self._wide)
        gradient = layer.padded(self._slabs.memory)
        if of_weight:
            if self._weight is None:
                # On a GPU no product of float16 has a bfloat16 result, nor the reverse.
                native = self._weight_dtype in (gradient.dtype, self._wide)
                dtype = self._weight_dtype if native else self._wide
                self._weight = empty(self._slabs.weight.shape, dtype, gradient.device)
            layer.weight_gradient([part_of(self._weight, slab)], gradient, self._rows)
        if of_hidden:
            adds = self._hidden is not None
            if self._hidden is None and not (self._whole and gradient.dtype == self._wide):
                self._hidden = self._rows.new_empty(self._rows.shape, dtype=self._wide)
            self._hidden = layer.hidden_gradient(self._hidden, gradient, adds)

    def finished(
        self, bias: Tensor | None, width: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden and weight, without padding columns, and of bias."""
        of_hidden, of_weight, of_bias = self._hidden, self._weight, None
        if width != self._rows.shape[1]:
            of_hidden, of_weight = (
                None if each is None else each[:, :width].contiguous()
                for each in (of_hidden, of_weight)
            )
        if of_hidden is not None:
            of_hidden = in_dtype(of_hidden, self._rows.dtype)
        if of_weight is not None:
            of_weight = in_dtype(of_weight, self._weight_dtype)
        if self._bias and bias is not None:
            parts = [part for _, part in sorted(self._bias.items())]
            of_bias = parts[0] if self._whole else torch.cat(parts)
            of_bias = in_dtype(of_bias, gradient_sum_dtype(bias.dtype))
        return of_hidden, of_weight, of_bias
