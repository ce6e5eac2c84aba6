"""alpha-entmax: a family of maps with softmax (alpha = 1) and sparsemax (alpha = 2)."""

import math

import torch
from torch import Tensor

from lastlayer._checks import check_alpha, check_alpha_shape
from lastlayer.kernels import Impl
from lastlayer.maps._function import as_rows, entmax_rows, from_rows


def entmax(
    scores: Tensor,
    alpha: float | Tensor = 1.5,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    r"""Probabilities that maximise ``<p, scores>`` plus the Tsallis entropy of order alpha.

    .. math:: p_i = \max\bigl((\alpha - 1)\theta_i - \tau, 0\bigr)^{1/(\alpha-1)},
              \qquad \textstyle\sum_i p_i = 1

    alpha = 1 is softmax, 2 is sparsemax; between them the probabilities are sparse, but approach
    zero smoothly. The threshold is solved to convergence for every alpha, by Newton's method whose
    last step is taken on the probabilities themselves.

    Choose 1.5 as a general sparse replacement of softmax, and a learnable alpha if each attention
    head should learn its own sparsity.

    Cost: for alpha 1.5 and 2 scores are read once and probabilities written once; other alphas
    also take an exp and a log per candidate and iteration. Backward reads the gradient on the
    support only.

    Args:
        scores: any floating dtype and shape; -inf masks a class out.
        alpha: a number of at least 1, or a floating tensor that broadcasts to ``scores`` with
            size 1 at ``dim`` (0-dimensional or ``(heads, 1, 1)``, for example); it gets a gradient.
        dim: the dimension along which probabilities sum to 1.
        mask: bool, broadcasting to ``scores``, True where a class is allowed.
        impl: "auto", or a specific implementation: "reference", "triton" or "cpu".

    Returns:
        Probabilities of the shape and dtype of ``scores``. A fully masked row is all
        zeros; a row with a NaN or +inf is all NaN.

    Example:
        >>> entmax(torch.tensor([1.0, 0.5, -2.0]))
        tensor([0.6740, 0.3260, 0.0000])

    Reference:
        Peters, Niculae and Martins, Sparse Sequence-to-Sequence Models, ACL 2019,
        arXiv:1905.05702; Correia, Niculae and Martins, Adaptively Sparse Transformers, EMNLP
        2019, arXiv:1909.00015 (the gradient for alpha).
    """
    check_alpha(alpha)
    rows = as_rows(scores, dim, mask)
    if not isinstance(alpha, Tensor):
        return from_rows(entmax_rows(rows, float(alpha), None, impl), dim)
    check_alpha_shape(alpha, scores, dim % scores.dim())
    # Views that change nothing cost host time, in backward too.
    if not alpha.dim():
        row_alpha = alpha.expand(rows.shape[:-1])
    else:
        shape = list(scores.shape)
        shape[dim] = 1
        row_alpha = alpha if list(alpha.shape) == shape else alpha.expand(shape)
        row_alpha = row_alpha.squeeze(dim)
    return from_rows(entmax_rows(rows, math.nan, row_alpha, impl), dim)


class Entmax(torch.nn.Module):
    """:func:`lastlayer.entmax` as a module, with an alpha that can be learned.

    A learned alpha is stored as ``log(alpha - 1)``, so no optimiser step can make it 1 or less.

    Args:
        alpha: at least 1; above 1 if it is learned (this is then its initial value). A tensor has
            one alpha per entry, for example ``torch.full((heads, 1, 1), 1.5)``.
        dim: the dimension along which probabilities sum to 1.
        learn_alpha: whether alpha is a parameter.

    Example:
        >>> head_wise = Entmax(torch.full((8, 1, 1), 1.5), learn_alpha=True)
        >>> head_wise(torch.randn(2, 8, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def __init__(
        self, alpha: float | Tensor = 1.5, dim: int = -1, *, learn_alpha: bool = False
    ) -> None:
        super().__init__()
        check_alpha(alpha)
        self.dim = dim
        self.learn_alpha = learn_alpha
        self._alpha: float | None = None
        start = torch.as_tensor(alpha, dtype=torch.get_default_dtype())
        if learn_alpha:
            if bool((start <= 1.0).any()):
                raise ValueError(
                    f"alpha: expected more than 1 with learn_alpha=True, got {alpha}; start at 1.5"
                )
            self.log_excess = torch.nn.Parameter(torch.log(start - 1.0))
        elif isinstance(alpha, Tensor):
            self.register_buffer("fixed_alpha", alpha.detach().clone())
        else:
            self._alpha = float(alpha)

    @property
    def alpha(self) -> float | Tensor:
        """The current alpha: a tensor if it is learned or was given as a tensor, else a number."""
        if self.learn_alpha:
            return 1.0 + self.log_excess.exp()
        return self.get_buffer("fixed_alpha") if self._alpha is None else self._alpha

    def forward(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        return entmax(scores, self.alpha, self.dim, mask=mask)

    def extra_repr(self) -> str:
        alpha = self.alpha
        if isinstance(alpha, Tensor):
            shown = f"{alpha.item():g}" if alpha.numel() == 1 else f"tensor{tuple(alpha.shape)}"
        else:
            shown = f"{alpha:g}"
        return f"alpha={shown}, dim={self.dim}, learn_alpha={self.learn_alpha}"
