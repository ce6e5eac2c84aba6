"""A linear layer with a loss on it as one differentiable operation.

``lastlayer::linear_loss`` computes losses and gradients together; torch.compile sees it as one
node. :func:`linear_loss` puts the autograd function around it. Where the upstream gradient is one
number (reductions "mean" and "sum") the gradients are made in the forward pass, from scores that
are there anyway, and scaled in backward. Where it is one number a row, or where the weight's
gradient goes into memory that the user gave, backward makes the scores again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused import engine
from lastlayer.fused._chunks import rows_at_a_time
from lastlayer.fused._cross_entropy_rows import cross_entropy_rows
from lastlayer.fused._entmax_rows import entmax_rows
from lastlayer.fused._slabs import run_slabs, slabs_suit
from lastlayer.fused._sparse_rows import can_wait
from lastlayer.fused._tiles import run_tiles, tiles_suit
from lastlayer.fused._topk_rows import topk_rows
from lastlayer.fused.engine import Result, RowLoss, Wanted

STATISTICS = "+statistics"
ROW_LOSSES: dict[str, Callable[..., RowLoss]] = {
    "cross_entropy": cross_entropy_rows,
    "cross_entropy" + STATISTICS: partial(cross_entropy_rows, statistics=True),
    "entmax": entmax_rows,
    "topk_softmax": topk_rows,
}


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
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
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
        counted = scale * problem.class_weight[inside].to(dtype)
    total = counted.sum()
    return scale / torch.where(total == 0, 1.0, total)


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


def near_one(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Factors of rows as products in ``dtype`` can take them, and what they were divided by.

    float16 has nothing below 6e-8, which is less than what 1/n leaves of a probability. So factors
    are brought to 1, and gradients back with the upstream one, which may be a loss scale.
    """
    if dtype != torch.float16 or scale.shape[0] == 0:
        return scale, None
    size = scale.abs().amax()
    size = torch.where(size == 0, 1.0, size)
    return scale / size, size


def rounded_product(values: Tensor, factor: Tensor) -> Tensor:
    """Rounded once: a factor may be out of the range of half precision."""
    return (values.to(factor.dtype) * factor).to(values.dtype)


def scaled_gradients(ctx: Any, grad: Tensor) -> list[Tensor]:
    """The gradients of the forward pass times the upstream one."""
    made: list[Tensor]
    if torch.compiler.is_compiling():
        size, *made = ctx.saved_tensors
        grad = grad if size is None else grad * size
        made = [rounded_product(each, grad) for each in made]
    else:
        if ctx.spent:
            raise RuntimeError(
                "backward: the gradients of this loss were made in its forward pass and handed "
                "out by the first backward; call the loss again, or use reduction='none' and "
                "reduce it yourself, whose backward can be repeated with retain_graph=True"
            )
        ctx.spent = True
        size, *made = ctx.saved_tensors
        grad = grad if size is None else grad * size
        for each in made:
            # In place: a copy of the weight's gradient may be more than the device can hold.
            kernels.scale.forward_("auto", each, grad)
    return made


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
    rows: int | str = int(chunk_rows) if chunk_rows.isdecimal() else chunk_rows
    result = run_rows(
        hidden, weight, bias, target, row_scale, class_weight, loss, options, copies,
        ignore_index, rows, Wanted(wanted[0], wanted[1], wanted[2]),
    )  # fmt: skip
    empty = hidden.new_empty(0)
    bias_gradient = result.bias
    if bias_gradient is not None and bias is not None:
        bias_gradient = bias_gradient.to(summed_in(bias.dtype))
    made = [result.hidden, result.weight, bias_gradient]
    return [result.loss, *result.statistics, *(empty.clone() if g is None else g for g in made)]


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
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    floats, integers = statistics
    numbers = [hidden.new_empty(target.shape, dtype=dtype) for _ in range(1 + floats)]
    ids = [torch.empty_like(target) for _ in range(integers)]
    sources = [
        (hidden, hidden.dtype),
        (weight, summed_in(weight.dtype)),
        (bias, None if bias is None else summed_in(bias.dtype)),
    ]
    return (
        numbers
        + ids
        + [
            torch.empty_like(source, dtype=dtype)
            if source is not None and needed
            else hidden.new_empty(0)
            for (source, dtype), needed in zip(sources, wanted, strict=True)
        ]
    )


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a sum over rows: with row factors near 1 it may be too large for float16."""
    return torch.float32 if dtype == torch.float16 else dtype


def run_rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    loss: str,
    options: Sequence[float],
    copies: float,
    ignore_index: int | None,
    chunk_rows: int | str,
    wanted: Wanted,
) -> Result:
    """All rows by the way that suits them, ignored ones left out."""
    kept, ignored = kept_rows(target, ignore_index), None
    if ignore_index is not None and not can_wait(target):
        ignored = target == ignore_index
        target = torch.where(ignored, 0, target)
    n = hidden.shape[0]
    weight_dtype = summed_in(weight.dtype)
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    if kept is not None:
        hidden, target = hidden[kept], target[kept]
        row_scale = None if row_scale is None else row_scale[kept]
    if class_weight is not None:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        class_weight = class_weight.to(dtype)
    copies *= engine.PRECISE_COPIES if wanted.precise(hidden) else 1.0
    rows = rows_at_a_time(chunk_rows, hidden, weight.shape[0], copies)
    problem = hidden, weight, bias, target, row_scale
    plain = loss == "cross_entropy"
    # Dtypes are settled by now; autocast would still round the float32 sums on the way.
    with torch.autocast(hidden.device.type, enabled=False):
        if plain and tiles_suit(hidden, options, chunk_rows, wanted):
            result = run_tiles(*problem, class_weight, wanted, options, weight_dtype)
        elif (
            plain
            and row_scale is not None
            and slabs_suit(hidden, options, chunk_rows, rows, wanted)
        ):
            result = run_slabs(
                hidden, weight, bias, target, row_scale, class_weight, wanted, options,
                weight_dtype, str(chunk_rows),
            )  # fmt: skip
        else:
            row_loss = ROW_LOSSES[loss](class_weight, *options)
            result = engine.run(row_loss, *problem, wanted, rows, weight_dtype)
    if ignored is not None:
        cleared = tuple(each.masked_fill(ignored, 0) for each in result.statistics)
        result = result._replace(statistics=cleared)
    return result if kept is None else _spread(result, kept, n)


def kept_rows(target: Tensor, ignore_index: int | None) -> Tensor | None:
    """The rows that count, or None for all of them.

    The host has to know how many there are, and waits for it once. While a CUDA graph is captured
    it cannot: ignored rows are then computed with a factor of 0.
    """
    if ignore_index is None or not can_wait(target):
        return None
    kept = (target != ignore_index).nonzero().squeeze(-1)
    return None if kept.shape[0] == target.shape[0] else kept


def _spread(result: Result, kept: Tensor, n: int) -> Result:
    """A result for the rows that were kept as one for all rows, 0 elsewhere."""

    def all_rows(some: Tensor) -> Tensor:
        everything = some.new_zeros(n, *some.shape[1:])
        return everything.index_copy_(0, kept, some)

    return result._replace(
        loss=all_rows(result.loss),
        statistics=tuple(all_rows(each) for each in result.statistics),
        hidden=None if result.hidden is None else all_rows(result.hidden),
    )
