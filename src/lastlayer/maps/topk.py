"""Softmax over the k largest scores."""

import torch
from torch import Tensor

from lastlayer._checks import check_k
from lastlayer.kernels import Impl
from lastlayer.maps._function import as_rows, from_rows, topk_softmax_rows


def topk_softmax(
    scores: Tensor, k: int, dim: int = -1, *, mask: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    r"""Softmax over the k largest scores of each row; all other probabilities are zero.

    .. math:: p_i = \frac{e^{\theta_i}}{\sum_{j \in \Omega_k} e^{\theta_j}}
              \quad (i \in \Omega_k), \qquad p_i = 0 \text{ otherwise}

    where :math:`\Omega_k` holds the k largest scores. Among scores tied at rank k the first
    classes are kept, so that a row never has more than k non-zeros; with k = n or more it is the
    full softmax.

    Choose it if the number of non-zeros must be known in advance, as in routing and in decoding.
    Unlike sparsemax it is not continuous: it jumps when the k-th and the next score swap places.

    Cost: scores are read once and probabilities written once, plus the search for the k-th largest
    score; backward reads the gradient on the support only.

    Args:
        scores: any floating dtype and shape; -inf masks a class out.
        k: the maximum number of non-zero probabilities, at least 1.
        dim: the dimension along which probabilities sum to 1.
        mask: bool, broadcasting to ``scores``, True where a class is allowed.
        impl: "auto", or a specific implementation: "reference", "triton" or "cpu".

    Returns:
        Probabilities of the shape and dtype of ``scores``. A fully masked row is all
        zeros; a row with a NaN or +inf is all NaN.

    Example:
        >>> topk_softmax(torch.tensor([1.0, 3.0, 2.0]), k=2)
        tensor([0.0000, 0.7311, 0.2689])

    Reference:
        Su, spaces.ac.cn/archives/8046 (sparse softmax); Shazeer et al., Outrageously Large
        Neural Networks, ICLR 2017, arXiv:1701.06538 (as a router).
    """
    k = check_k(k)
    return from_rows(topk_softmax_rows(as_rows(scores, dim, mask), k, impl), dim)


class TopKSoftmax(torch.nn.Module):
    """:func:`lastlayer.topk_softmax` as a module.

    Args:
        k: the maximum number of non-zero probabilities, at least 1.
        dim: the dimension along which probabilities sum to 1.
    """

    def __init__(self, k: int, dim: int = -1) -> None:
        super().__init__()
        self.k, self.dim = check_k(k), dim

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        return topk_softmax(scores, self.k, self.dim, mask=mask)

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}"
