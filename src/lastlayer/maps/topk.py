"""Softmax over the k largest scores."""

import torch
from torch import Tensor

from lastlayer._checks import check_k
from lastlayer.kernels import Impl
from lastlayer.maps._function import as_rows, from_rows, topk_softmax_rows


def topk_softmax(
    scores: Tensor, k: int, dim: int = -1, *, mask: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    r"""Softmax over the k largest scores of each row; zero elsewhere.

    .. math:: p_i = \frac{e^{\theta_i}}{\sum_{j \in \Omega_k} e^{\theta_j}}
              \quad (i \in \Omega_k), \qquad p_i = 0 \text{ otherwise}

    where :math:`\Omega_k` holds the k largest scores. Of equal scores at the edge the first is
    kept, so a row never has more than k non-zeros; k = n or more is the full softmax.

    Choose it where the number of survivors must be known in advance, as in routing and in
    decoding. Unlike sparsemax it jumps when two scores change places at the edge.

    Cost: one read and one write of the scores plus the search for the k-th largest; backward
    reads the gradient on the support only.

    Args:
        scores: any floating dtype and shape; -inf is a legal mask.
        k: how many classes keep a probability, at least 1.
        dim: the dimension that sums to 1.
        mask: bool, broadcasting to ``scores``, True where a class is allowed.
        impl: "auto", or the implementation to force: "reference", "triton" or "cpu".

    Returns:
        Probabilities of the shape and dtype of ``scores``. A row with nothing allowed is all
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
        k: how many classes keep a probability, at least 1.
        dim: the dimension that sums to 1.
    """

    def __init__(self, k: int, dim: int = -1) -> None:
        super().__init__()
        self.k, self.dim = check_k(k), dim

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        return topk_softmax(scores, self.k, self.dim, mask=mask)

    def extra_repr(self) -> str:
        return f"k={self.k}, dim={self.dim}"
