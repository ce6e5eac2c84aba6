"""The losses of sparsemax, entmax and top-k softmax.

One engine computes the losses and their gradients, including that of a learned alpha. Targets that
need a gradient, rows without classes and transforms of ``torch.func`` go through the torch
operations of :mod:`lastlayer.losses.fenchel_young`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import (
    check_alpha,
    check_alpha_shape,
    check_ignore_index,
    check_k,
    check_scores,
)
from lastlayer._torch import accumulation_dtype, in_dtype, in_functorch
from lastlayer.fused.function import (
    Call,
    Engine,
    Grads,
    Result,
    RowScale,
    fused_loss,
    normalized_factors,
)
from lastlayer.losses._module import LossModule
from lastlayer.losses.fenchel_young import check_loss, general_loss, score_gradient
from lastlayer.maps.entmax import entmax
from lastlayer.maps.topk import topk_softmax
from lastlayer.maps.tsallis import tsallis_entropy, tsallis_entropy_alpha_slope

# Maximum number of half-precision scores per chunk that is converted to float32.
_WIDENED = 1 << 24


def sparsemax_loss(
    scores: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`lastlayer.sparsemax`, which is ``entmax_loss`` at alpha 2.

    .. math:: L(\theta, y) = \tfrac12 \|\theta - y\|^2
              - \tfrac12 \|\theta - \mathrm{sparsemax}(\theta)\|^2

    It is zero once the target class leads all others by a margin of 1. For two classes it is the
    Huber classification loss. For several labels per row pass the uniform distribution over the
    positives.

    Cost: on CUDA scores are read once in forward (twice for distributions) and once in backward,
    which writes the gradient; nothing of their size is stored in between. On a CPU the forward pass
    also computes the gradient, and stores it.

    Args:
        scores: ``(*batch, n)``; -inf masks a class out.
        target: class ids ``(*batch)``, of any integer dtype, or distributions ``(*batch, n)``.
        class_weight: one weight per class, ``(n,)``, as in ``torch.nn.functional.cross_entropy``.
        ignore_index: rows with this class id are ignored; None if every row counts.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> sparsemax_loss(torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
        tensor(0.0625)

    Reference:
        Martins and Astudillo, From Softmax to Sparsemax, ICML 2016, arXiv:1602.02068.
    """
    return entmax_loss(
        scores,
        target,
        2.0,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
    )


def entmax_loss(
    scores: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`lastlayer.entmax`.

    .. math:: L(\theta, y) = \langle p - y, \theta \rangle + H_\alpha(p) - H_\alpha(y),
              \quad p = \mathrm{entmax}_\alpha(\theta),
              \quad H_\alpha(p) = \tfrac{1}{\alpha(\alpha-1)} \textstyle\sum_i (p_i - p_i^\alpha)

    alpha = 1 is the cross entropy (minus the entropy of a soft target). Above 1 the loss is zero
    once the target class leads by 1/(alpha - 1), so that easy examples have no gradient.

    Choose it to train a model that predicts with :func:`lastlayer.entmax` at the same alpha. A
    learnable alpha gets exact gradients, at first and second order.

    Cost: that of :func:`lastlayer.sparsemax_loss`. A learned alpha, and any alpha other than 1.5
    and 2, also takes an exp and a log per score that may be in the support.

    Args:
        scores: ``(*batch, n)``; -inf masks a class out.
        target: class ids ``(*batch)``, of any integer dtype, or distributions ``(*batch, n)``.
        alpha: a number of at least 1, or a floating tensor that broadcasts to ``(*batch, 1)``.
        class_weight: one weight per class, ``(n,)``, as in ``torch.nn.functional.cross_entropy``.
        ignore_index: rows with this class id are ignored; None if every row counts.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> entmax_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([0]))
        tensor(0.)

    Reference:
        Peters, Niculae and Martins, Sparse Sequence-to-Sequence Models, ACL 2019,
        arXiv:1905.05702.
    """
    check_alpha(alpha)
    row_alpha = None
    if isinstance(alpha, Tensor):
        check_scores(scores)
        check_alpha_shape(alpha, scores, scores.dim() - 1)
        row_alpha = in_dtype(alpha, accumulation_dtype(scores.dtype))
        row_alpha = row_alpha.expand(*scores.shape[:-1], 1).squeeze(-1)
        alpha = math.nan
    return _loss(
        scores, target, float(alpha), row_alpha, 0, class_weight, ignore_index, reduction
    )  # fmt: skip


def topk_softmax_loss(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`lastlayer.topk_softmax`.

    .. math:: L(\theta, y) = \log \sum_{j \in \Omega_k} e^{\theta_j} - \theta_y

    where :math:`\Omega_k` holds the k largest scores: the cross entropy with a normaliser over
    these only. A target outside the k largest is still raised, with gradient -1. For class ids the
    loss is never negative. For a target distribution its Shannon entropy, a constant, is
    subtracted; a distribution over more than k classes cannot be matched by any k of them, and the
    loss may then be negative, but its gradient is exact.

    Choose it to train a model that predicts with :func:`lastlayer.topk_softmax`, or as a loss that
    gives no gradient to classes that are already ranked below k.

    Cost: one forward of the map, O(n) per row, which also computes the gradient; it is stored until
    backward. Distributions take one more pass.

    Args:
        scores: ``(*batch, n)``; -inf masks a class out.
        target: class ids ``(*batch)``, of any integer dtype, or distributions ``(*batch, n)``.
        k: number of classes in the normaliser, at least 1; n or more is the cross entropy.
        class_weight: one weight per class, ``(n,)``, as in ``torch.nn.functional.cross_entropy``.
        ignore_index: rows with this class id are ignored; None if every row counts.
        reduction: "mean" over the rows that are not ignored, "sum" or "none".

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> import torch
        >>> topk_softmax_loss(torch.tensor([[0.0, 0.0, -1.0]]), torch.tensor([0]), k=2)
        tensor(0.6931)

    Reference:
        Su, spaces.ac.cn/archives/8046 (sparse softmax).
    """
    return _loss(scores, target, 1.0, None, check_k(k), class_weight, ignore_index, reduction)


def _loss(
    scores: Tensor,
    target: Tensor,
    alpha: float,
    row_alpha: Tensor | None,
    k: int,
    class_weight: Tensor | None,
    ignore_index: int | None,
    reduction: str,
) -> Tensor:
    """The loss of entmax, or of softmax over the k largest scores if k is not 0.

    ``row_alpha`` has one alpha per row; ``alpha`` is used if it is None.
    """
    target, by_class, ignore_index = check_loss(
        scores, target, class_weight, ignore_index, reduction
    )
    if scores.shape[-1] and not target.requires_grad and not in_functorch():
        operands = scores, row_alpha, target, class_weight
        return fused_loss(_ENGINE, operands, (alpha, k, ignore_index, False), reduction)[0]
    slope = None
    if row_alpha is not None:
        slope = lambda probs: tsallis_entropy_alpha_slope(probs, row_alpha)  # noqa: E731
    return general_loss(
        scores,
        target,
        by_class,
        lambda rows: _map(rows, alpha, row_alpha, k),
        lambda probs: tsallis_entropy(probs, alpha if row_alpha is None else row_alpha),
        class_weight,
        ignore_index,
        reduction,
        parameter=row_alpha,
        entropy_slope=slope,
    )


def label_loss(scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Sparsemax loss against the distribution proportional to ``labels``; arguments are checked."""
    return fused_loss(_ENGINE, (scores, None, labels, None), (2.0, 0, None, True), reduction)[0]


def _map(rows: Tensor, alpha: float, row_alpha: Tensor | None, k: int) -> Tensor:
    if k:
        return topk_softmax(rows, k)
    return entmax(rows, alpha if row_alpha is None else row_alpha.unsqueeze(-1))


class _ScoreLoss(Engine):
    """Operands: scores ``(*batch, n)``; alphas ``(*batch)``; ids or distributions; class weights.

    The Triton kernels return a few numbers per row, from which backward computes the gradient.
    Otherwise forward computes the gradient, and stores it even with ``reduction="none"``.
    """

    name = "score_loss"
    schema = "float alpha, int k, int? ignore_index, bool labels"
    n_constants = 2
    kept = (0, 1, 2, 3)
    recomputes_unreduced = False

    def compute(self, call: Call) -> Result:
        (scores, alphas, target, class_weight), options, reduction, wanted, _ = call
        alpha, k, ignore_index, labels = options
        batch, dtype = scores.shape[:-1], accumulation_dtype(scores.dtype)
        rows, row_alpha, row_target = _as_rows(scores, alphas, target)
        if _leaves_statistics(scores, k):
            loss, *pieces = kernels.score_loss.forward(
                "auto", rows, row_target, class_weight, ignore_index, alpha, row_alpha, labels,
                reduction == "mean",
            )  # fmt: skip
            if reduction == "sum":
                loss = loss.sum()
            elif reduction == "none" and len(batch) != 1:
                loss = loss.view(batch)
            return Result(loss, pieces if any(wanted) else (None, None))
        row_target, weight = _row_weight(row_target, class_weight, ignore_index, labels, dtype)
        scale = RowScale.of(weight, reduction, rows.shape[0])
        factors = size = slopes = None
        if any(wanted):
            factors, size = normalized_factors(scale.factors(rows, rows.shape[0]), scores.dtype)
        if row_alpha is not None:
            slopes = rows.new_empty(rows.shape[0], dtype=dtype)
        order = alpha, row_alpha, slopes, k
        if k and not row_target.is_floating_point() and _uses_triton("topk_softmax_loss", scores):
            losses, gradient = kernels.topk_softmax.loss("auto", rows, row_target, factors, k)
        elif rows.dtype == dtype:
            losses, gradient = _rows(rows, row_target, factors, *order)
        else:
            losses, gradient = _widened_rows(rows, row_target, factors, *order)
        loss = scale.reduce(losses, reduction)
        if reduction == "none" and len(batch) != 1:
            loss = loss.reshape(batch)
        if factors is None:
            return Result(loss, (None, None))
        if slopes is not None:
            slopes = torch.where(factors == 0, 0.0, slopes * factors)
        found = gradient, slopes
        pieces = [each if wants else None for each, wants in zip(found, wanted, strict=True)]
        if len(batch) != 1:
            pieces = [
                None if each is None else each.view(*batch, *each.shape[1:]) for each in pieces
            ]
        return Result(loss, pieces, (), size)

    def fake(self, call: Call) -> Result:
        scores = call.operands[0]
        if not _leaves_statistics(scores, call.options[1]):
            return super().fake(call)
        n, dtype = scores.shape[:-1].numel(), torch.float32
        loss = scores.new_empty(scores.shape[:-1] if call.reduction == "none" else (), dtype=dtype)
        left = kernels.score_loss.left(scores.new_empty(n, scores.shape[-1]))
        return Result(loss, left if any(call.wanted) else (None, None))

    def finish(
        self, call: Call, pieces: Sequence[Any], factor: Tensor | None, reusable: bool
    ) -> Grads:
        (scores, alphas, target, _), (alpha, k, _, labels), _, wanted, _ = call
        if _leaves_statistics(scores, k):
            rows, row_alpha, row_target = _as_rows(scores, alphas, target)
            stats, chosen = pieces
            if factor is None:
                factor = stats.new_ones(())
            elif factor.dim() > 1:
                factor = factor.reshape(-1)
            gradient = slopes = None
            if wanted[0]:
                gradient = kernels.score_loss.backward(
                    "auto", rows, row_target, stats, chosen, factor, alpha, row_alpha, labels
                )
                gradient = gradient if scores.dim() == 2 else gradient.view(scores.shape)
            if wanted[1]:
                n = rows.shape[0]
                row = factor * stats[-1] * stats[:n]
                slopes = torch.where(row == 0, 0.0, row * stats[n : 2 * n]).view(alphas.shape)
            return [gradient, slopes]
        gradient, slopes = pieces
        if factor is None or not factor.dim():
            return super().finish(call, pieces, factor, reusable)
        if slopes is not None:
            slopes = torch.where(factor == 0, 0.0, slopes * factor)
        row = factor.unsqueeze(-1)
        if gradient is None:
            return [None, slopes]
        if reusable and gradient.dtype == row.dtype:
            return [gradient.mul_(row).masked_fill_(row == 0, 0.0), slopes]
        return [torch.where(row == 0, 0.0, gradient * row), slopes]

    def differentiable(self, call: Call, grad: Tensor) -> Grads:
        (scores, alphas, target, class_weight), options, reduction, wanted, _ = call
        alpha, k, ignore_index, labels = options
        batch, dtype = scores.shape[:-1], accumulation_dtype(scores.dtype)
        row_target, weight = _row_weight(target, class_weight, ignore_index, labels, dtype)
        scale = RowScale.of(weight, reduction, batch.numel())
        row = scale.factors(scores, batch.numel()).reshape(batch) * grad
        probs = _map(in_dtype(scores, dtype), alpha, alphas, k)
        slopes = None
        if wanted[1]:
            slopes = tsallis_entropy_alpha_slope(probs, alphas)
            if row_target.is_floating_point():
                slopes = slopes - tsallis_entropy_alpha_slope(row_target, alphas)
            slopes = torch.where(row == 0, 0.0, slopes * row)
        return [score_gradient(probs, row_target, row.unsqueeze(-1), probs.dtype), slopes]


_ENGINE = _ScoreLoss()


def _as_rows(
    scores: Tensor, alphas: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    n, dense = scores.shape[-1], target.dim() == scores.dim()
    rows = scores if scores.dim() == 2 else scores.reshape(-1, n)
    if dense:
        target = target if target.dim() == 2 else target.reshape(-1, n)
    else:
        target = target if target.dim() == 1 else target.reshape(-1)
    if alphas is not None and alphas.dim() != 1:
        alphas = alphas.reshape(-1)
    return rows.contiguous(), alphas, target.contiguous()


def _leaves_statistics(scores: Tensor, k: int) -> bool:
    """Whether backward computes the gradient from a few numbers per row."""
    return not k and _uses_triton("score_loss_forward", scores)


def _uses_triton(op: str, scores: Tensor) -> bool:
    return kernels.selected(op, scores.device.type, scores.dtype) == "triton"


def _row_weight(
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int | None,
    labels: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Targets with ignored ids replaced, or distributions; row weights, or None if all are 1."""
    counted = None
    if labels:
        target = target.to(dtype)
        total = target.sum(-1, keepdim=True)
        counted = (total > 0).squeeze(-1)
        target = target / torch.where(total > 0, total, 1.0)
    elif target.is_floating_point():
        target = in_dtype(target, dtype)
    elif ignore_index is not None:
        counted = target != ignore_index
        target = target * counted
    weight = None
    if class_weight is not None:
        weight = in_dtype(class_weight, dtype)
        weight = target @ weight if target.is_floating_point() else weight[target]
    if counted is not None:
        weight = counted.to(dtype) if weight is None else torch.where(counted, weight, 0.0)
    return target, weight


def _rows(
    rows: Tensor, target: Tensor, factors: Tensor | None, alpha: float, row_alpha: Tensor | None,
    slopes: Tensor | None, k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses, and the gradient of their sum weighted by ``factors`` if these are given.

    ``slopes`` is filled with the derivative of each loss with respect to its alpha.
    """
    if k:
        probs = kernels.topk_softmax.forward("auto", rows, k)
    else:
        probs = kernels.entmax.forward("auto", rows, alpha, row_alpha)
    # The Triton kernel takes class ids only. Distributions get here for topk_softmax_loss.
    dense = target.is_floating_point() and _uses_triton("entmax_rows_", rows)
    given = probs, rows, target, factors, alpha, row_alpha, slopes
    return kernels.entmax_rows.forward_("reference" if dense else "auto", *given), probs


def _widened_rows(
    rows: Tensor, target: Tensor, factors: Tensor | None, alpha: float, row_alpha: Tensor | None,
    slopes: Tensor | None, k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`_rows` for half precision, in chunks of rows that are converted to float32.

    Rounding a probability near 1 before 1 is subtracted would leave few digits of the gradient.
    """
    dtype = accumulation_dtype(rows.dtype)
    gradient, losses = torch.empty_like(rows), rows.new_empty(rows.shape[0], dtype=dtype)
    step = max(1, _WIDENED // rows.shape[1])
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        scale, own, slope = (
            None if each is None else each[part] for each in (factors, row_alpha, slopes)
        )
        losses[part], part_gradient = _rows(
            rows[part].to(dtype), target[part], scale, alpha, own, slope, k
        )
        if factors is not None:
            gradient[part] = part_gradient
    return losses, gradient


class _MapLoss(LossModule):
    """A loss with class weights, ``ignore_index`` and a reduction."""

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int | None = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(reduction)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = check_ignore_index(ignore_index)

    def options(self) -> dict[str, Any]:
        return {
            "class_weight": self.class_weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
        }

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, {super().extra_repr()}"


class SparsemaxLoss(_MapLoss):
    """:func:`lastlayer.sparsemax_loss` as a module.

    Args:
        class_weight: one weight per class, ``(n,)``.
        ignore_index: rows with this class id are ignored; None if every row counts.
        reduction: "mean", "sum" or "none".
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return sparsemax_loss(scores, target, **self.options())


class EntmaxLoss(_MapLoss):
    """:func:`lastlayer.entmax_loss` as a module.

    Args:
        alpha: a number of at least 1. A learned alpha is a parameter of the model, passed to
            :func:`lastlayer.entmax_loss` at each step.
        class_weight: one weight per class, ``(n,)``.
        ignore_index: rows with this class id are ignored; None if every row counts.
        reduction: "mean", "sum" or "none".
    """

    def __init__(self, alpha: float = 1.5, **options: Any) -> None:
        super().__init__(**options)
        check_alpha(alpha)
        self.alpha = alpha

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return entmax_loss(scores, target, self.alpha, **self.options())

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, {super().extra_repr()}"


class TopKSoftmaxLoss(_MapLoss):
    """:func:`lastlayer.topk_softmax_loss` as a module.

    Args:
        k: number of classes in the normaliser, at least 1.
        class_weight: one weight per class, ``(n,)``.
        ignore_index: rows with this class id are ignored; None if every row counts.
        reduction: "mean", "sum" or "none".
    """

    def __init__(self, k: int, **options: Any) -> None:
        super().__init__(**options)
        self.k = check_k(k)

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return topk_softmax_loss(scores, target, self.k, **self.options())

    def extra_repr(self) -> str:
        return f"k={self.k}, {super().extra_repr()}"
