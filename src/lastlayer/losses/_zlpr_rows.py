"""The autograd side of ZLPR: kernels for values and gradients, plain torch beyond."""

from typing import Any

import torch
from torch import Tensor

from lastlayer.kernels import zlpr
from lastlayer.kernels.zlpr import reference
from lastlayer.losses._positives import Positives
from lastlayer.maps._function import eager_form, needs_no_graph

Rows = tuple[Tensor, Tensor]


def zlpr_rows(scores: Tensor, target: Tensor, mask: Tensor | None) -> Rows:
    """Losses of the rows of ``(rows, n)``, and which rows have a class that counts."""
    if target.requires_grad or _transforms_are_active():
        losses, _, counts = reference.forward(scores, target, mask)
        return losses, counts
    if needs_no_graph(scores):
        losses, _, counts = zlpr.forward("auto", scores, target, mask)
        return losses, counts
    losses, counts, _ = _function().apply(scores, mask, 0.0, target)
    return losses, counts


def zlpr_listed_rows(
    scores: Tensor, positives: Positives, mask: Tensor | None, smoothing: float
) -> Rows:
    """As :func:`zlpr_rows`, from lists of positives."""
    classes, rows, _, starts, _, values = positives
    if _transforms_are_active() or (values is not None and values.requires_grad):
        target = reference.dense_target(scores, classes, rows, values, smoothing)
        losses, _, counts = reference.forward(scores, target, mask)
        return losses, counts
    if needs_no_graph(scores):
        losses, _, counts = zlpr.forward_listed(
            "auto", scores, classes, rows, starts, values, mask, smoothing
        )
        return losses, counts
    losses, counts, _ = _function().apply(scores, mask, smoothing, classes, rows, starts, values)
    return losses, counts


def _transforms_are_active() -> bool:
    """Whether a function transform has to see each operation; a compiler takes the kernels."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _function() -> type[torch.autograd.Function]:
    return _ZLPR if torch.compiler.is_compiling() else _EagerZLPR


class _ZLPR(torch.autograd.Function):
    """``labels`` is a dense target, or classes, rows, starts and values of lists."""

    @staticmethod
    def forward(
        scores: Tensor, mask: Tensor | None, smoothing: float, *labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(labels) == 1:
            losses, stats, counts = zlpr.forward("auto", scores, labels[0], mask)
        else:
            losses, stats, counts = zlpr.forward_listed("auto", scores, *labels, mask, smoothing)
        return losses, counts, stats

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, mask, ctx.smoothing, *labels = inputs
        _, counts, stats = output
        ctx.mark_non_differentiable(counts, stats)
        ctx.save_for_backward(scores, mask, stats, *labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        scores, mask, stats, *labels = ctx.saved_tensors
        others = (None,) * (2 + len(labels))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _differentiable_gradient(scores, mask, ctx.smoothing, labels, grad), *others
        if len(labels) == 1:
            product = zlpr.backward("auto", scores, labels[0], mask, stats, grad)
        else:
            product = zlpr.backward_listed(
                "auto", scores, *labels, mask, ctx.smoothing, stats, grad
            )
        return product, *others


_EagerZLPR = eager_form(_ZLPR)


def _differentiable_gradient(
    scores: Tensor, mask: Tensor | None, smoothing: float, labels: list[Any], grad: Tensor
) -> Tensor:
    if len(labels) == 1:
        (target,) = labels
    else:
        classes, rows, _, values = labels
        target = reference.dense_target(scores, classes, rows, values, smoothing)
    row = grad.unsqueeze(-1)
    slope = reference.gradient(scores, target, mask)
    return torch.where(row == 0, 0.0, slope * row).to(scores.dtype)
