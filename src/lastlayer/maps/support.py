"""entmax in compact form: only the non-zero probabilities."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_alpha, check_alpha_shape, check_int
from lastlayer._torch import values_are_checked
from lastlayer.kernels import Impl
from lastlayer.maps._function import as_rows, batch_first, entmax_jacobian_product


class Support(NamedTuple):
    """The non-zero probabilities of each row, padded with probability 0 at class 0."""

    values: Tensor
    """Probabilities, ``(*batch, max_support)``."""
    indices: Tensor
    """Their classes in ascending order, int64, ``(*batch, max_support)``."""
    size: Tensor
    """Number of non-zeros of each row, int64, ``(*batch)``; may exceed ``max_support``."""


def entmax_support(
    scores: Tensor,
    alpha: float | Tensor = 1.5,
    max_support: int = 64,
    *,
    mask: Tensor | None = None,
    impl: Impl = "auto",
) -> Support:
    """The non-zero probabilities of ``entmax(scores, alpha)`` over the last dimension, as lists.

    The full row of probabilities is never written, which halves the memory traffic for a wide row,
    and a weighted sum over the support reads only a few class vectors:
    ``(values.unsqueeze(-1) * table[indices]).sum(-2)``. The values are differentiable.

    Choose it for wide rows with small supports: a vocabulary, a memory, an index. Choose
    :func:`lastlayer.entmax` if the support may be as wide as the row.

    Cost: one read of the scores and O(max_support) writes per row.

    Args:
        scores: ``(*batch, n)``, any floating dtype; -inf masks a class out.
        alpha: as for :func:`lastlayer.entmax`, but a tensor gets no gradient.
        max_support: the maximum number of non-zeros per row. On a CPU a larger support raises an
            error. On a GPU the check would wait for the device: it runs inside
            ``lastlayer.debug()`` only. Otherwise the first ``max_support`` non-zeros are returned,
            and ``size`` is larger than ``max_support``.
        mask: bool, broadcasting to ``scores``, True where a class is allowed.
        impl: "auto", or a specific implementation: "reference", "triton" or "cpu".

    Returns:
        A :class:`Support`: values, indices and size.

    Example:
        >>> values, indices, size = entmax_support(torch.tensor([0.0, 2.0, 1.9, -3.0]), 2.0, 2)
        >>> values, indices, size
        (tensor([0.5500, 0.4500]), tensor([1, 2]), tensor(2))
    """
    check_alpha(alpha)
    max_support = check_int("max_support", max_support)
    rows = as_rows(scores, -1, mask)
    row_alpha = None
    if isinstance(alpha, Tensor):
        check_alpha_shape(alpha, scores, scores.dim() - 1)
        row_alpha = alpha.detach().expand(*scores.shape[:-1], 1).squeeze(-1)
        alpha = math.nan
    support = Support(*_EntmaxSupport.apply(rows, row_alpha, float(alpha), max_support, impl))
    if values_are_checked(support.size) and support.size.numel():
        largest = int(support.size.max())
        if largest > max_support:
            raise ValueError(
                f"max_support: expected at least {largest}, the widest support of these scores, "
                f"got {max_support}; raise it, or use entmax for rows with wide supports"
            )
    return support


class _EntmaxSupport(torch.autograd.Function):
    @staticmethod
    def forward(
        scores: Tensor, row_alpha: Tensor | None, alpha: float, max_support: int, impl: Impl
    ) -> tuple[Tensor, Tensor, Tensor]:
        compact: tuple[Tensor, Tensor, Tensor] = kernels.entmax.support(
            impl, scores, alpha, row_alpha, max_support
        )
        return compact

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, row_alpha, ctx.alpha, _, ctx.impl = inputs
        values, indices, size = output
        ctx.mark_non_differentiable(indices, size)
        ctx.save_for_backward(values, indices, row_alpha)
        ctx.n_classes = scores.shape[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        values, indices, row_alpha = ctx.saved_tensors
        compact = entmax_jacobian_product(values, grad, row_alpha, ctx.alpha, ctx.impl)
        dense = compact.new_zeros(*compact.shape[:-1], ctx.n_classes)
        # Padding has gradient 0, so adding it at class 0 changes nothing.
        return dense.scatter_add(-1, indices, compact), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, ...]:
        rows = batch_first(info.batch_size, in_dims, *inputs[:2])
        return _EntmaxSupport.apply(*rows, *inputs[2:]), (0, 0, 0)
