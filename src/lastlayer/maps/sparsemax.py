"""sparsemax, the Euclidean projection onto the simplex."""

import torch
from torch import Tensor

from lastlayer.kernels import Impl
from lastlayer.maps._function import as_rows, entmax_rows, from_rows


def sparsemax(
    scores: Tensor, dim: int = -1, *, mask: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    r"""The point of the simplex nearest to the scores; most probabilities are exactly zero.

    .. math:: p_i = \max(\theta_i - \tau, 0), \qquad \textstyle\sum_i p_i = 1

    The support is found exactly: only scores within 1 of the maximum can be in it. Adding a
    constant to a row changes nothing; multiplying a row by a large number gives the argmax, by a
    small one the uniform distribution.

    Choose it where a few classes should share the mass and the others should have none:
    attention that can be read, multi-label prediction, mixtures of experts. Choose
    :func:`lastlayer.entmax` at 1.5 where gradients should fade rather than stop at the edge of
    the support.

    Cost: one read and one write of the scores, O(n) per row; backward reads the probabilities,
    and the gradient on the support only.

    Args:
        scores: any floating dtype and shape; -inf is a legal mask.
        dim: the dimension that sums to 1.
        mask: bool, broadcasting to ``scores``, True where a class is allowed.
        impl: "auto", or the implementation to force: "reference", "triton" or "cpu".

    Returns:
        Probabilities of the shape and dtype of ``scores``. A row with nothing allowed is all
        zeros; a row with a NaN or +inf is all NaN.

    Example:
        >>> sparsemax(torch.tensor([1.0, 0.8, -1.0]))
        tensor([0.6000, 0.4000, 0.0000])

    Reference:
        Martins and Astudillo, From Softmax to Sparsemax, ICML 2016, arXiv:1602.02068.
    """
    return from_rows(entmax_rows(as_rows(scores, dim, mask), 2.0, None, impl), dim)


class Sparsemax(torch.nn.Module):
    """:func:`lastlayer.sparsemax` as a module.

    Args:
        dim: the dimension that sums to 1.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        return sparsemax(scores, self.dim, mask=mask)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
