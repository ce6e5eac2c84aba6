"""Shared by all maps: arguments as rows, and autograd functions differentiable to any order."""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_dim, check_mask, check_scores
from lastlayer._torch import (
    apply_of,
    forward_result,
    is_eager,
    is_grads_batched,
    transforms_are_active,
)
from lastlayer.kernels import Impl
from lastlayer.maps.tsallis import alpha_slope


def as_rows(scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """``scores`` with ``dim`` last and -inf where ``mask`` is False."""
    check_scores(scores)
    if dim != -1:
        dim = check_dim(dim, scores)
    if mask is not None:
        check_mask(mask, scores)
        scores = scores.masked_fill(~mask, -math.inf)
    return scores if dim in (-1, scores.dim() - 1) else scores.movedim(dim, -1)


def from_rows(rows: Tensor, dim: int) -> Tensor:
    """Moves the last dimension back to ``dim``."""
    # Even a view that changes nothing costs host time, in forward and in backward.
    return rows if dim in (-1, rows.dim() - 1) else rows.movedim(-1, dim)


def entmax_rows(scores: Tensor, alpha: float, row_alpha: Tensor | None, impl: Impl) -> Tensor:
    """entmax over the last dimension; ``row_alpha`` has the shape of the batch."""
    probs: Tensor
    if _needs_no_graph(scores, row_alpha):
        probs = _forward(impl, scores, alpha, row_alpha)
    else:
        apply = _Entmax.apply if transforms_are_active() else _apply_entmax
        probs = apply(scores, row_alpha, alpha, impl)
    return probs


def topk_softmax_rows(scores: Tensor, k: int, impl: Impl) -> Tensor:
    """Top-k softmax over the last dimension."""
    probs: Tensor
    if _needs_no_graph(scores):
        probs = kernels.topk_softmax.forward(impl, scores, k)
    else:
        apply = _TopKSoftmax.apply if transforms_are_active() else _apply_topk_softmax
        probs = apply(scores, k, impl)
    return probs


def entmax_jacobian_product(
    probs: Tensor, grad: Tensor, row_alpha: Tensor | None, alpha: float, impl: Impl
) -> Tensor:
    """The Jacobian of entmax at ``probs``, which is symmetric, times ``grad``; differentiable."""
    product: Tensor
    if is_grads_batched(grad):
        slope = _slope(probs, alpha, row_alpha)
        centred = _centred(grad, slope, slope.sum(-1, keepdim=True))
        product = torch.where(probs != 0, slope * centred, 0.0)
    elif _needs_no_graph(probs, grad, row_alpha):
        product = _backward(impl, probs, grad, alpha, row_alpha)
    else:
        product = _EntmaxJacobianProduct.apply(probs, grad, row_alpha, alpha, impl)
    return product


def _forward(impl: Impl, scores: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    probs: Tensor
    if not scores.is_contiguous() and _are_columns(impl, scores):
        from lastlayer.kernels.entmax import cpu as kernel

        probs = kernel.forward_columns(scores, alpha, row_alpha)
    else:
        probs = kernels.entmax.forward(impl, scores, alpha, row_alpha)
    return probs


def _backward(
    impl: Impl, probs: Tensor, grad: Tensor, alpha: float, row_alpha: Tensor | None
) -> Tensor:
    product: Tensor
    if (
        not probs.is_contiguous()
        and probs.dtype == grad.dtype
        and _are_columns(impl, probs)
        and is_eager(grad)
    ):
        from lastlayer.kernels.entmax import cpu as kernel

        product = kernel.backward_columns(probs, grad, alpha, row_alpha)
    else:
        product = kernels.entmax.backward(impl, probs, grad, alpha, row_alpha)
    return product


def _are_columns(impl: Impl, rows: Tensor) -> bool:
    """Whether rows are columns in memory, as for ``dim=0``, and the CPU kernel can read them so.

    Only in eager mode: the registered operation has to return contiguous rows.
    """
    return (
        impl in ("auto", "cpu")
        and rows.device.type == "cpu"
        and rows.dtype in (torch.float32, torch.float64)
        and is_eager(rows)
        and rows.movedim(-1, 0).is_contiguous()
        and kernels.selected("entmax", "cpu", rows.dtype) == "cpu"
    )


def _alpha_gradient(probs: Tensor, grad: Tensor, row_alpha: Tensor) -> Tensor:
    """The gradient of each row's alpha; differentiable."""
    slope = alpha_slope(probs, row_alpha)
    # Outside the support the gradient has no effect, even if it is infinite or NaN.
    inside = torch.where(probs != 0, grad.to(slope.dtype), 0.0)
    return (slope * inside).sum(-1).to(row_alpha.dtype)


def _needs_no_graph(*tensors: Tensor | None) -> bool:
    """Whether the kernel can be called without autograd, which costs much less host time."""
    if transforms_are_active():
        return False
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return False
    return True


def _eager_apply(function: type[torch.autograd.Function]) -> Any:
    """``apply`` of the same Function with ``forward`` and ``setup_context`` combined.

    Transforms of ``torch.func`` need two separate methods, but then torch inspects the signature of
    ``forward`` at every call, which costs more host time than a kernel launch.
    """

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = function.forward(*args)
            function.setup_context(ctx, args, output)
            return output

        backward = staticmethod(function.backward)

    Eager.__name__ = Eager.__qualname__ = function.__name__
    return apply_of(Eager)


def batch_first(size: int, in_dims: tuple[int | None, ...], *tensors: Any) -> tuple[Any, ...]:
    """For vmap: moves the mapped dimension of each tensor to the front; expands the others."""
    placed: list[Tensor | None] = []
    for tensor, in_dim in zip(tensors, in_dims, strict=False):
        if tensor is None:
            placed.append(None)
        elif in_dim is None:
            placed.append(tensor.expand(size, *tensor.shape))
        else:
            placed.append(tensor.movedim(in_dim, 0))
    return tuple(placed)


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(scores: Tensor, row_alpha: Tensor | None, alpha: float, impl: Impl) -> Tensor:
        return forward_result(_forward(impl, scores, alpha, row_alpha))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, row_alpha, ctx.alpha, ctx.impl = inputs
        ctx.save_for_backward(output, row_alpha)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        probs, row_alpha = ctx.saved_tensors
        if (
            ctx.needs_input_grad[1]
            and not is_grads_batched(grad)
            and _needs_no_graph(probs, grad, row_alpha)
        ):
            gradients = kernels.entmax.gradients(ctx.impl, probs, grad, row_alpha)
            return *gradients, None, None
        grad_scores = grad_row_alpha = None
        if ctx.needs_input_grad[0]:
            grad_scores = entmax_jacobian_product(probs, grad, row_alpha, ctx.alpha, ctx.impl)
        if ctx.needs_input_grad[1]:
            grad_row_alpha = _alpha_gradient(probs, grad, row_alpha)
        return grad_scores, grad_row_alpha, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        scores, row_alpha = batch_first(info.batch_size, in_dims, *inputs[:2])
        alpha, impl = inputs[2:]
        return entmax_rows(scores, alpha, row_alpha, impl), 0


class _EntmaxJacobianProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        probs: Tensor, grad: Tensor, row_alpha: Tensor | None, alpha: float, impl: Impl
    ) -> Tensor:
        return forward_result(kernels.entmax.backward(impl, probs, grad, alpha, row_alpha))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        probs, grad, row_alpha, ctx.alpha, ctx.impl = inputs
        ctx.save_for_backward(probs, grad, row_alpha)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        probs, grad, row_alpha = ctx.saved_tensors
        grad_probs = grad_grad = grad_row_alpha = None
        if ctx.needs_input_grad[1]:
            grad_grad = entmax_jacobian_product(probs, upstream, row_alpha, ctx.alpha, ctx.impl)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            # Let s = p**(2 - alpha), and let bar(x) be the s-weighted mean of x over the row. The
            # derivative of <upstream, J grad> with respect to each s is
            # (upstream - bar(upstream)) (grad - bar(grad)).
            alpha = ctx.alpha if row_alpha is None else row_alpha.unsqueeze(-1)
            support = probs != 0
            inside = torch.where(support, probs, 1.0)
            slope = _slope(probs, ctx.alpha, row_alpha)
            total = slope.sum(-1, keepdim=True)
            by_slope = _centred(upstream, slope, total) * _centred(grad, slope, total)
            by_slope = torch.where(support, by_slope, 0.0)
            if ctx.needs_input_grad[0]:
                grad_probs = by_slope * (2.0 - alpha) * inside ** (1.0 - alpha)
            if ctx.needs_input_grad[2]:
                grad_row_alpha = -(by_slope * slope * torch.log(inside)).sum(-1)
        return grad_probs, grad_grad, grad_row_alpha, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        probs, grad, row_alpha = batch_first(info.batch_size, in_dims, *inputs[:3])
        return entmax_jacobian_product(probs, grad, row_alpha, *inputs[3:]), 0


class _TopKSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(scores: Tensor, k: int, impl: Impl) -> Tensor:
        return forward_result(kernels.topk_softmax.forward(impl, scores, k))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.impl = inputs
        ctx.save_for_backward(output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        (probs,) = ctx.saved_tensors
        # On its support this is softmax, which is entmax at alpha = 1.
        return entmax_jacobian_product(probs, grad, None, 1.0, ctx.impl), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], scores: Tensor, k: int, impl: Impl
    ) -> tuple[Tensor, int]:
        (scores,) = batch_first(info.batch_size, in_dims, scores)
        return topk_softmax_rows(scores, k, impl), 0


_apply_entmax = _eager_apply(_Entmax)
_apply_topk_softmax = _eager_apply(_TopKSoftmax)


def _slope(probs: Tensor, alpha: float, row_alpha: Tensor | None) -> Tensor:
    """``p**(2 - alpha)`` on the support, 0 elsewhere."""
    exponent = 2.0 - (alpha if row_alpha is None else row_alpha.unsqueeze(-1))
    support = probs != 0
    return torch.where(support, torch.where(support, probs, 1.0) ** exponent, 0.0)


def _centred(values: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    return values - torch.where(weights != 0, weights * values, 0.0).sum(-1, keepdim=True) / total
