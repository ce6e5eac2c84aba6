"""A linear layer with a loss on it as one differentiable operation.

``lastlayer::linear_loss`` computes losses and gradients together; torch.compile sees it as one
node. :func:`linear_loss` puts the autograd function around it. Where the upstream gradient is one
number (reductions "mean" and "sum") the gradients are made in the forward pass, from scores that
are there anyway, and scaled in backward. Where it is one number a row, or where the weight's
gradient goes into memory that the user gave, backward makes the scores again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer._checks import check_id_range
from lastlayer._torch import accumulation_dtype, gradient_sum_dtype
from lastlayer.fused._gradient_scale import (
    near_one,
    returned_gradients,
    rounded_product,
    scaled_gradients,
    unmade_gradients,
)
from lastlayer.fused._run_rows import STATISTICS, run_rows
from lastlayer.fused.engine import Wanted


class Loss(NamedTuple):
    """Which loss, with the options of its row loss."""

    name: str
    options: tuple[float, ...]
    # How many numbers a row it leaves beside the loss: float ones, then int64 ones.
    statistics: tuple[int, int] = (0, 0)
    # How many times the scores of a chunk are held.
    copies: float = 1.0


class Problem(NamedTuple):
    """The rows of a loss: hidden and weight in the dtype of the products."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    # None: every target counts.
    ignore_index: int | None
    chunk_rows: int | str


def linear_loss(
    loss: Loss,
    problem: Problem,
    row_weight: Tensor | None,
    reduction: str,
    weight_grad: Tensor | None,
) -> tuple[Tensor, ...]:
    """The reduced loss, and the statistics of each row."""
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    recording = torch.is_grad_enabled()
    wanted = (
        recording and hidden.requires_grad,
        recording and (weight.requires_grad or weight_grad is not None),
        recording and bias is not None and bias.requires_grad,
    )
    scale = _row_scale(problem, row_weight, reduction)
    results: tuple[Tensor, ...] = _LinearLoss.apply(
        hidden, weight, bias, problem.target, scale, problem.class_weight, loss,
        problem.ignore_index, problem.chunk_rows, reduction != "none", wanted, weight_grad,
    )  # fmt: skip
    return results


def _row_scale(problem: Problem, row_weight: Tensor | None, reduction: str) -> Tensor:
    """What the loss of each row counts in the result."""
    hidden, target = problem.hidden, problem.target
    dtype = accumulation_dtype(hidden.dtype)
    scale = hidden.new_ones(target.shape, dtype=dtype)
    if row_weight is not None:
        scale = row_weight.detach().reshape(-1).to(dtype)
    if problem.ignore_index is not None:
        scale = torch.where(target == problem.ignore_index, 0.0, scale)
    if reduction != "mean":
        return scale
    counted = scale
    if problem.class_weight is not None:
        inside = torch.where(scale == 0, 0, target)
        if torch.compiler.is_compiling() and target.device.type == "cpu":
            # Left for the operation to refuse, which says what is wrong.
            inside = inside.clamp(0, problem.class_weight.shape[0] - 1)
        counted = scale * problem.class_weight[inside].to(dtype)
    total = counted.sum()
    return torch.where(total == 0, 0.0, scale / total)


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        scale: Tensor,
        class_weight: Tensor | None,
        loss: Loss,
        ignore_index: int | None,
        chunk_rows: int | str,
        reduced: bool,
        wanted: tuple[bool, bool, bool],
        weight_grad: Tensor | None,
    ) -> tuple[Tensor, ...]:
        at_once = any(wanted) and reduced and weight_grad is None
        name = loss.name + STATISTICS if any(loss.statistics) else loss.name
        factors, size = near_one(scale, hidden.dtype)
        losses, *rest = _linear_loss(
            hidden, weight, bias, target, factors if at_once else None, class_weight, name,
            loss.options, loss.statistics, loss.copies, ignore_index, str(chunk_rows),
            wanted if at_once else (False, False, False),
        )  # fmt: skip
        n_statistics = sum(loss.statistics)
        statistics = tuple(rest[:n_statistics])
        ctx.at_once, ctx.wanted, ctx.spent = at_once, wanted, False
        ctx.rest = loss, ignore_index, chunk_rows, weight_grad
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden, weight, bias)]
        if at_once:
            ctx.save_for_backward(size, *rest[n_statistics:])
        else:
            ctx.save_for_backward(hidden, weight, bias, target, scale, class_weight)
        ctx.mark_non_differentiable(*statistics)
        counted = torch.where(scale == 0, 0.0, losses * scale)
        return (counted.sum() if reduced else counted), *statistics

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        # Where an upstream gradient is a constant, `once_differentiable` would let this pass.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "backward: a fused loss has no second derivatives, and create_graph=True asks for "
                "them; use the loss on scores, such as lastlayer.entmax_loss or "
                "torch.nn.functional.cross_entropy"
            )
        made = scaled_gradients(ctx, grad) if ctx.at_once else _recomputed(ctx, grad)
        gradients = (
            None if each is None or not needed else each.to(dtype)
            for each, needed, dtype in zip(made, ctx.wanted, ctx.dtypes, strict=True)
        )
        return *gradients, *(None,) * 9


def _recomputed(ctx: Any, grad: Tensor) -> list[Tensor | None]:
    """The gradients from scores that are made again."""
    hidden, weight, bias, target, scale, class_weight = ctx.saved_tensors
    loss, ignore_index, chunk_rows, weight_grad = ctx.rest
    scale, size = near_one(scale * grad.to(scale.dtype), hidden.dtype)
    common = hidden, weight, bias, target, scale, class_weight, loss.name, loss.options
    made: list[Tensor | None]
    if weight_grad is None:
        _, *made = _linear_loss(
            *common, (0, 0), loss.copies, ignore_index, str(chunk_rows), ctx.wanted
        )
    else:
        into = weight_grad if size is None else torch.zeros_like(weight_grad, dtype=scale.dtype)
        wanted = Wanted(*ctx.wanted)._replace(weight_into=into)
        result = run_rows(*common, loss.copies, ignore_index, chunk_rows, wanted)
        made = [result.hidden, None, result.bias]
        if size is not None:
            weight_grad.add_(into.mul_(size))
    if size is None:
        return made
    return [None if each is None else rounded_product(each, size) for each in made]


@torch.library.custom_op("lastlayer::linear_loss", mutates_args=())
def _linear_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    loss: str,
    options: Sequence[float],
    statistics: Sequence[int],
    copies: float,
    ignore_index: int | None,
    chunk_rows: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Losses, statistics, and the gradients of hidden, weight and bias (empty if not wanted)."""
    # Once more: nothing could be read while a compiler traced the caller.
    check_id_range("target", target, weight.shape[0], ignore_index)
    rows: int | str = int(chunk_rows) if chunk_rows.isdecimal() else chunk_rows
    result = run_rows(
        hidden, weight, bias, target, row_scale, class_weight, loss, options, copies,
        ignore_index, rows, Wanted(wanted[0], wanted[1], wanted[2]),
    )  # fmt: skip
    bias_gradient = result.bias
    if bias_gradient is not None and bias is not None:
        bias_gradient = bias_gradient.to(gradient_sum_dtype(bias.dtype))
    made = [result.hidden, result.weight, bias_gradient]
    return [result.loss, *result.statistics, *returned_gradients(hidden, made)]


@_linear_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    loss: str,
    options: Sequence[float],
    statistics: Sequence[int],
    copies: float,
    ignore_index: int | None,
    chunk_rows: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    dtype = accumulation_dtype(hidden.dtype)
    floats, integers = statistics
    numbers = [hidden.new_empty(target.shape, dtype=dtype) for _ in range(1 + floats)]
    ids = [target.new_empty(target.shape) for _ in range(integers)]
    return [*numbers, *ids, *unmade_gradients(hidden, weight, bias, wanted)]
