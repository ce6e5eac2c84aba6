"""The losses of sparsemax and entmax."""

from torch import Tensor

from lastlayer._checks import check_alpha, check_alpha_shape, check_scores
from lastlayer._torch import accumulation_dtype
from lastlayer.losses._module import MapLoss
from lastlayer.losses.fenchel_young import fenchel_young_loss, parametric_loss
from lastlayer.maps._tsallis import tsallis_entropy, tsallis_entropy_alpha_slope
from lastlayer.maps.entmax import entmax


def sparsemax_loss(
    scores: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`lastlayer.sparsemax`: ``entmax_loss`` at alpha = 2.

    .. math:: L(\theta, y) = \tfrac12 \|\theta - y\|^2
              - \tfrac12 \|\theta - \mathrm{sparsemax}(\theta)\|^2

    It is zero once the right class leads all others by a margin of 1. For two classes it is the
    Huber classification loss. For a multi-label target give the uniform distribution over the
    positives.

    Cost: one forward of sparsemax, O(n) a row; the gradient is ``sparsemax(scores) - target``.

    Args:
        scores: ``(*batch, n)``; -inf is a legal mask.
        target: class ids ``(*batch)``, int64, or distributions ``(*batch, n)``.
        weight: one weight a class, ``(n,)``, as in torch's cross entropy.
        ignore_index: rows with this class id are left out.
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
        scores, target, 2.0, weight=weight, ignore_index=ignore_index, reduction=reduction
    )


def entmax_loss(
    scores: Tensor,
    target: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`lastlayer.entmax`.

    .. math:: L(\theta, y) = \langle p - y, \theta \rangle + H_\alpha(p) - H_\alpha(y),
              \quad p = \mathrm{entmax}_\alpha(\theta),
              \quad H_\alpha(p) = \tfrac{1}{\alpha(\alpha-1)} \textstyle\sum_i (p_i - p_i^\alpha)

    alpha = 1 is the cross entropy (minus the entropy of a soft target). Above 1 it is zero once
    the right class leads by 1/(alpha - 1), so easy examples stop pulling.

    Choose it with the map at the same alpha. With a learnable alpha the loss has the right
    gradient for it, at first and second order.

    Cost: one forward of the map, O(n) a row; the gradient is ``entmax(scores, alpha) - target``.

    Args:
        scores: ``(*batch, n)``; -inf is a legal mask.
        target: class ids ``(*batch)``, int64, or distributions ``(*batch, n)``.
        alpha: a number of at least 1, or a floating tensor that broadcasts to ``(*batch, 1)``.
        weight: one weight a class, ``(n,)``, as in torch's cross entropy.
        ignore_index: rows with this class id are left out.
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
    check_scores(scores)
    check_alpha(alpha)
    if not isinstance(alpha, Tensor):
        return fenchel_young_loss(
            scores,
            target,
            lambda rows: entmax(rows, alpha),
            lambda probs: tsallis_entropy(probs, alpha),
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
        )
    check_alpha_shape(alpha, scores, scores.dim() - 1)
    dtype = accumulation_dtype(scores.dtype)
    row_alpha = alpha.to(dtype).expand(*scores.shape[:-1], 1).squeeze(-1)
    return parametric_loss(
        scores,
        target,
        lambda rows: entmax(rows, row_alpha.unsqueeze(-1)),
        lambda probs: tsallis_entropy(probs, row_alpha),
        parameter=row_alpha,
        entropy_slope=lambda probs: tsallis_entropy_alpha_slope(probs, row_alpha),
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
    )


class SparsemaxLoss(MapLoss):
    """:func:`lastlayer.sparsemax_loss` as a module.

    Args:
        weight: one weight a class, ``(n,)``.
        ignore_index: rows with this class id are left out.
        reduction: "mean", "sum" or "none".
    """

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return sparsemax_loss(scores, target, **self.options())


class EntmaxLoss(MapLoss):
    """:func:`lastlayer.entmax_loss` as a module.

    Args:
        alpha: a number of at least 1. A learned alpha is a parameter of the model, passed to
            :func:`lastlayer.entmax_loss` at each step.
        weight: one weight a class, ``(n,)``.
        ignore_index: rows with this class id are left out.
        reduction: "mean", "sum" or "none".
    """

    def __init__(
        self,
        alpha: float = 1.5,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight=weight, ignore_index=ignore_index, reduction=reduction)
        check_alpha(alpha)
        self.alpha = alpha

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return entmax_loss(scores, target, self.alpha, **self.options())

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, {super().extra_repr()}"
