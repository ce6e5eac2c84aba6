"""sparsemax, the Euclidean projection onto the simplex."""

import torch
from torch import Tensor

from lastlayer.kernels import Impl
from lastlayer.maps._function import as_rows, entmax_rows, from_rows


def sparsemax(
    scores: Tensor, dim: int = -1, *, mask: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    r"""Projects scores onto the probability simplex; most probabilities are exactly zero.

    .. math:: p_i = \max(\theta_i - \tau, 0), \qquad \textstyle\sum_i p_i = 1

    The support (classes with a probability above 0) is exact; only scores within 1 of the maximum
    can be in it. Adding a constant to a row changes nothing; multiplying a row by a large number
    gives the argmax, by a small one the uniform distribution.

    Choose it to spread the probability over a few classes only: interpretable attention,
    multi-label prediction, mixtures of experts. Choose :func:`lastlayer.entmax` at 1.5 if gradients
    should fade rather than stop at the edge of the support.

    Cost: O(n) per row; scores are read once and probabilities written once. Backward reads the
    probabilities, and the gradient on the support only.

    Args:
        scores: any floating dtype and shape; -inf masks a class out.
        dim: the dimension along which probabilities sum to 1.
        mask: bool, broadcasting to ``scores``, True where a class is allowed.
        impl: "auto", or a specific implementation: "reference", "triton" or "cpu".

    Returns:
        Probabilities of the shape and dtype of ``scores``. A fully masked row is all
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
        dim: the dimension along which probabilities sum to 1.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        return sparsemax(scores, self.dim, mask=mask)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
