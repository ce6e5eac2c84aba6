"""The loss of top-k softmax."""

from torch import Tensor

from lastlayer._checks import check_k
from lastlayer.losses._module import MapLoss
from lastlayer.losses.fenchel_young import fenchel_young_loss
from lastlayer.maps._tsallis import tsallis_entropy
from lastlayer.maps.topk import topk_softmax


def topk_softmax_loss(
    scores: Tensor,
    target: Tensor,
    k: int,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    r"""The Fenchel-Young loss of :func:`lastlayer.topk_softmax`.

    .. math:: L(\theta, y) = \log \sum_{j \in \Omega_k} e^{\theta_j} - \theta_y

    where :math:`\Omega_k` holds the k largest scores: the cross entropy with a normaliser that
    counts only what is in the running. A target outside the k largest is still pulled up, with
    gradient -1. It is never negative for class ids. For a target distribution it adds minus its
    Shannon entropy, a constant; a distribution over more than k classes cannot be met by any k
    of them, and the loss may then be negative, with the right gradient.

    Choose it to train the model that :func:`lastlayer.topk_softmax` will serve, or as a loss that
    stops pushing down classes that are already out of reach.

    Cost: one forward of the map, O(n) a row; the gradient is ``topk_softmax(scores, k) - target``.

    Args:
        scores: ``(*batch, n)``; -inf is a legal mask.
        target: class ids ``(*batch)``, int64, or distributions ``(*batch, n)``.
        k: how many classes are in the running, at least 1; n or more is the cross entropy.
        weight: one weight a class, ``(n,)``, as in torch's cross entropy.
        ignore_index: rows with this class id are left out.
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
    check_k(k)
    return fenchel_young_loss(
        scores,
        target,
        lambda rows: topk_softmax(rows, k),
        lambda probs: tsallis_entropy(probs, 1.0),
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
    )


class TopKSoftmaxLoss(MapLoss):
    """:func:`lastlayer.topk_softmax_loss` as a module.

    Args:
        k: how many classes are in the running, at least 1.
        weight: one weight a class, ``(n,)``.
        ignore_index: rows with this class id are left out.
        reduction: "mean", "sum" or "none".
    """

    def __init__(
        self,
        k: int,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(weight=weight, ignore_index=ignore_index, reduction=reduction)
        check_k(k)
        self.k = k

    def forward(self, scores: Tensor, target: Tensor) -> Tensor:
        return topk_softmax_loss(scores, target, self.k, **self.options())

    def extra_repr(self) -> str:
        return f"k={self.k}, {super().extra_repr()}"
