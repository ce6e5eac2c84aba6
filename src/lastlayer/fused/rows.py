"""The engine of losses on rows of scores: chunk by chunk, losses and gradients together.

For each chunk of rows one product makes the scores, a row loss turns them into losses and, in the
same memory, into the gradient of the scores, and two products carry that on to hidden and weight.
The scores of one chunk are all that is ever stored; where they are all scores and the loss is not
reduced, their gradient is kept for backward. A new loss is one small function, see
:data:`RowLoss`, and a line in :data:`ROW_LOSSES`; everything else is here, once.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lastlayer import kernels
from lastlayer._checks import (
    check_choice,
    check_chunk,
    check_class_weight,
    check_device,
    check_floating,
    check_ignore_index,
    check_linear,
    check_reduction,
    check_target_ids,
)
from lastlayer._processes import HIDDEN_GRADS, IGNORED, Shards, local_part, shards_of
from lastlayer._torch import (
    accumulation_dtype,
    active_ddp,
    autocast_dtype,
    eager,
    gradient_sum_dtype,
    graph_is_kept,
    host_sync_allowed,
    in_autocast_dtype,
    in_dtype,
    is_eager,
    keeps_float32,
    without_autocast,
)
from lastlayer.fused.function import (
    Call,
    Engine,
    Operands,
    Result,
    RowScale,
    fused_loss,
    near_one,
)
from lastlayer.fused.scores import (
    LayerProducts,
    are_few,
    as_chunk,
    missing_columns,
    part_of,
    rows_at_a_time,
)
from lastlayer.kernels import empty

# Beyond this many additions in half precision a gradient of the weight is no longer within
# 4e-3 of the exact one.
MOST_ROUNDED_ADDITIONS = 8
# Multiplications of one product from which on a step may wait once for the device, and the rows
# of shorter ones whose factors one launch makes.
_LONG, _MOST_ROWS = 1 << 36, 1 << 16
# What a chunk takes where scores are float32 and their gradient is held in two halves as well.
_PRECISE_COPIES = 4.0
# How many times the scores of a chunk are held at most where classes are spread over processes.
_SPREAD_COPIES = 1.0


class Chunk(NamedTuple):
    """What a row loss is given with the scores of a few rows.

    ``exact_scores`` gives those of chosen classes, (rows, k), in full precision, where the scores
    of the chunk are rounded. ``row_scale`` is what the loss of each row is multiplied by in the
    end; it is None where no gradient is wanted. ``width`` is the size of the hidden state.
    ``target_weight`` are the class weights of the targets, where classes are spread over processes.
    """

    target: Tensor
    exact_scores: Callable[[Tensor], Tensor]
    row_scale: Tensor | None
    width: int
    target_weight: Tensor | None = None


class Sparse(NamedTuple):
    """A score gradient with few non-zeros: values (rows, k) and their classes; 0 is padding."""

    values: Tensor
    classes: Tensor


class RowResult(NamedTuple):
    """What a row loss makes of a chunk: ``gradient`` is the scores' own memory, new, or sparse."""

    loss: Tensor
    gradient: Tensor | Sparse | None
    statistics: tuple[Tensor, ...] = ()


# A loss on rows of scores, which it may overwrite.
RowLoss = Callable[[Tensor, Chunk], RowResult]


class Made(NamedTuple):
    """Losses of all rows, what else was asked for, and the gradients that were wanted."""

    loss: Tensor
    statistics: tuple[Tensor, ...]
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Wanted(NamedTuple):
    """Which gradients are wanted, and what the weight's is added to: None makes one."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    weight_into: Tensor | None = None

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias

    def precise(self, hidden: Tensor) -> bool:
        """Whether half-precision rows meet a float32 sum: nothing is rounded on the way then."""
        return self.weight_into is not None and self.weight_into.itemsize > hidden.itemsize


class Problem(NamedTuple):
    """Rows that all count: tensors in the dtype of the products, targets that are class ids."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    row_scale: Tensor | None
    """What the gradient of each row's loss is multiplied by; None where none is wanted."""
    class_weight: Tensor | None
    wanted: Wanted
    weight_dtype: torch.dtype
    """Of the weight's gradient."""
    shards: Shards | None = None
    """How classes are spread over processes: targets are then places in this one."""
    target_weight: Tensor | None = None
    """The class weights of the targets, where classes are spread."""


class RowLossKind(NamedTuple):
    """How a row loss is made, and what it needs."""

    make: Callable[..., RowLoss]
    """From the class weights and the numbers of the options."""
    copies: float = 1.0
    """How many times the scores of a chunk are held."""
    statistics: tuple[int, int] = (0, 0)
    """How many numbers per row it leaves beside the loss: float ones, then int64 ones."""
    shortcut: Callable[[Problem, Sequence[float], int | str, int], Made | None] | None = None
    """Another way than chunks where that is faster: from problem, numbers, ``chunk_rows``, rows."""
    wide: Callable[[Tensor, int], bool] = lambda *_: False
    """Whether scores of half precision are held in float32: from hidden and number of classes."""
    stores: Callable[[Tensor, Sequence[float], int | str], bool] = lambda *_: False
    """Whether scores that fit one chunk become a dense gradient, which "none" keeps: from hidden,
    numbers and ``chunk_rows``."""
    complete: bool = False
    """Where classes are spread: whether a process knows losses, not its part of them alone."""
    native: Callable[[Tensor, Tensor, Sequence[float], str], Tensor | None] | None = None
    """The reduced loss by torch's own operations and autograd, which take the host less time for
    few scores: from scores, target, numbers and reduction. None where torch has no such loss."""


ROW_LOSSES: dict[str, RowLossKind] = {}
# Shards as options of an engine, and those of classes that are not spread over processes.
SPREAD_SCHEMA = ", str group_name, int n_classes, int most, int first, int here"
NOT_SPREAD = Shards("", 0, 0, 0, 0)
# Of the engine below; one more is what its forward pass has left.
_OPERANDS = 7


class _RowsEngine(Engine):
    """Operands: hidden, weight, bias; target, class_weight, row_weight, weight_grad."""

    name = "linear_loss"
    schema = (
        "str loss, float[] numbers, int? ignore_index, str chunk_rows, bool into_weight_grad"
        + SPREAD_SCHEMA
    )
    n_constants = 4
    written = 6
    instead = "a loss on scores, such as lastlayer.entmax_loss or torch's cross_entropy"

    def statistics(self, options: tuple[Any, ...]) -> int:
        return sum(ROW_LOSSES[options[0]].statistics)

    def recomputes(self, options: tuple[Any, ...], reduction: str) -> bool:
        return bool(reduction == "none" or options[4])

    def invoke(self, call: Call) -> Result:
        if call.reduction == "none" and any(call.wanted) and is_eager(call.operands[0]):
            if len(call.operands) > _OPERANDS:
                return self._from_stored(call)
            if call.upstream is None and (made := self._stored(call)) is not None:
                return made
        return super().invoke(call)

    def _stored(self, call: Call) -> Result | None:
        """Losses, and what backward makes the gradients from: that of the scores for factors of 1.

        None where scores take several chunks, or rows are left out: backward makes them again.
        """
        hidden, weight, bias, target, class_weight, row_weight, weight_grad = call.operands
        name, numbers, ignore_index, chunk, _, spread, *_ = call.options
        kind, n, dtype = ROW_LOSSES[name], hidden.shape[0], accumulation_dtype(hidden.dtype)
        step = rows_at_a_time(as_chunk(chunk), hidden, weight.shape[0], kind.copies)
        if (
            not 0 < n <= step
            or hidden.is_meta
            or weight_grad is not None
            or spread
            or missing_columns(weight, n)
            or not kind.stores(hidden, numbers, as_chunk(chunk))
        ):
            return None
        with without_autocast(hidden):
            hidden, target, row_weight, complete = _with_ignored(call)
            if not complete and any(x is not None for x in counted_rows(target, ignore_index)):
                return None
            weight, ones = in_dtype(weight, hidden.dtype), kernels.full(n, 1.0, dtype, hidden)
            bias = None if bias is None else in_dtype(bias, hidden.dtype)
            class_weight = None if class_weight is None else in_dtype(class_weight, dtype)
            layer = LayerProducts([weight], bias, n)
            memory = layer.scores(hidden, hidden.dtype)
            exact = partial(kernels.products.scores, "auto", hidden, weight, bias)
            loss, *_ = kind.make(class_weight, *numbers)(
                layer.scores_in(memory), Chunk(target, exact, ones, hidden.shape[1])
            )
            return Result(RowScale.of(row_weight, "none", n).reduce(loss, "none"), (memory,))

    def _from_stored(self, call: Call) -> Result:
        """The gradients, once the factor of each row is known."""
        _, weight, bias, *_, memory = call.operands
        with without_autocast(call.operands[0]):
            hidden, _, row_weight, _ = _with_ignored(call)
            n = hidden.shape[0]
            scale = RowScale.of(row_weight, "none", n)
            factors: Any = scale.factors(hidden, n, call.upstream)
            factors, size = near_one(factors, hidden.dtype)
            layer = LayerProducts([in_dtype(weight, hidden.dtype)], None, n)
            memory = memory.clone() if graph_is_kept() else memory
            scores = layer.scores_in(memory).mul_(factors.unsqueeze(-1))
            to_hidden, to_weight, to_bias = call.wanted
            gradients = _Gradients(
                hidden, layer, Wanted(to_hidden, to_weight, to_bias), n,
                gradient_sum_dtype(weight.dtype),
            )  # fmt: skip
            gradients.add(slice(0, n), scores, memory)
            of_hidden, of_weight, of_bias = gradients.finished()
            if of_bias is not None:
                of_bias = in_dtype(of_bias, gradient_sum_dtype(bias.dtype))
        return Result(factors, (of_hidden, of_weight, of_bias), (), size)

    def compute(self, call: Call) -> Result:
        operands, options, reduction, wanted, upstream = call
        hidden, weight, bias, target, class_weight, row_weight, weight_grad = operands
        name, numbers, ignore_index, chunk, _, *spread = options
        plain = upstream is None and self.is_plain(operands, options, reduction)
        if plain and are_few(hidden, weight.shape[0], as_chunk(chunk)):
            return _few(name, numbers, hidden, weight, bias, target, reduction, wanted)
        shards = Shards(*spread) if spread[0] else None
        with_gradients = upstream is not None or not self.recomputes(options, reduction)
        with without_autocast(hidden):
            n, dtype = hidden.shape[0], accumulation_dtype(hidden.dtype)
            row_weight = None if row_weight is None else in_dtype(row_weight, dtype)
            kept = ignored = known = None
            short = is_short(hidden, hidden.numel() * weight.shape[0], ignore_index)
            if short and class_weight is None and shards is None:
                if sum(ROW_LOSSES[name].statistics):
                    ignored = target == ignore_index
                target, hidden, row_weight, known = kernels.products.row_factors(
                    "auto", target, hidden, row_weight, ignore_index, reduction == "mean"
                )
            else:
                kept, ignored = counted_rows(target, ignore_index)
            if kept is not None:
                hidden, target = hidden[kept], target[kept]
                row_weight = None if row_weight is None else row_weight[kept]
                if upstream is not None and upstream.dim():
                    upstream = upstream[kept]
            if ignored is not None and known is None:
                # A NaN there would come back through the weight's gradient, as 0 · NaN.
                hidden = hidden.masked_fill(ignored.unsqueeze(-1), 0.0)
                target = torch.where(ignored, 0, target)
                row_weight = torch.where(ignored, 0.0, 1.0 if row_weight is None else row_weight)
                row_weight = in_dtype(row_weight, dtype)
            counted = target_weight = None
            if class_weight is not None:
                class_weight = in_dtype(class_weight, dtype)
                if shards is not None:
                    target_weight = _weights_of(target, class_weight, shards)
                if reduction == "mean":
                    counted = class_weight[target] if target_weight is None else target_weight
                    counted = counted if row_weight is None else counted * row_weight
            scale = RowScale.of(row_weight, reduction, hidden.shape[0], counted)
            factors = size = into = None
            if with_gradients and (any(wanted) or weight_grad is not None):
                factors = known
                if known is None or upstream is not None:
                    factors = scale.factors(hidden, hidden.shape[0], upstream)
                factors, size = near_one(factors, hidden.dtype)
                into = weight_grad
                if weight_grad is not None and size is not None:
                    into = torch.zeros_like(weight_grad, dtype=dtype)
            made = _run(
                name, numbers, as_chunk(chunk),
                Problem(
                    hidden, in_dtype(weight, hidden.dtype),
                    None if bias is None else in_dtype(bias, hidden.dtype), target, factors,
                    class_weight,
                    Wanted(wanted[0], wanted[1] or weight_grad is not None, wanted[2], into)
                    if factors is not None else Wanted(),
                    gradient_sum_dtype(weight.dtype), shards, target_weight,
                ),
            )  # fmt: skip
            if into is not None and size is not None and weight_grad is not None:
                weight_grad.add_(into.mul_(size))
            loss = scale.reduce(made.loss, reduction)
            if shards is not None and not ROW_LOSSES[name].complete:
                loss = shards.sum(loss)
            statistics = made.statistics
            if ignored is not None:
                statistics = tuple(each.masked_fill(ignored, 0) for each in statistics)
            of_hidden, of_bias = made.hidden, made.bias
            if kept is not None:
                loss = spread_rows(loss, kept, n) if reduction == "none" else loss
                statistics = tuple(spread_rows(each, kept, n) for each in statistics)
                of_hidden = None if of_hidden is None else spread_rows(of_hidden, kept, n)
            if of_bias is not None and bias is not None:
                of_bias = in_dtype(of_bias, gradient_sum_dtype(bias.dtype))
        of_weight = made.weight if weight_grad is None else None
        return Result(loss, (of_hidden, of_weight, of_bias), statistics, size)

    def is_plain(self, operands: Operands, options: tuple[Any, ...], reduction: str) -> bool:
        """Whether every row counts the same, and all tensors have one dtype."""
        hidden, weight, bias, _, class_weight, row_weight, weight_grad = operands
        ignore_index, spread = options[2], options[5]
        return (
            ignore_index is None
            and not spread
            and class_weight is None
            and row_weight is None
            and weight_grad is None
            and reduction != "none"
            and hidden.shape[0] > 0
            and hidden.dtype == weight.dtype
            and (bias is None or bias.dtype == hidden.dtype)
            and autocast_dtype(hidden) is None
        )

    def fake(self, call: Call) -> Result:
        hidden, target = call.operands[0], call.operands[3]
        dtype = accumulation_dtype(hidden.dtype)
        floats, integers = ROW_LOSSES[call.options[0]].statistics
        statistics = [hidden.new_empty(target.shape, dtype=dtype) for _ in range(floats)]
        statistics += [target.new_empty(target.shape) for _ in range(integers)]
        return super().fake(call)._replace(statistics=statistics)


class RowOptions(TypedDict, total=False):
    """What every loss on rows takes, as :func:`lastlayer.fused.linear_cross_entropy` says."""

    ignore_index: int | None
    reduction: str
    class_weight: Tensor | None
    row_weight: Tensor | None
    chunk_rows: int | str
    weight_grad: Tensor | None
    process_group: Any
    hidden_grad: str


def linear_loss(
    loss: str,
    numbers: Sequence[float],
    hidden: Any,
    weight: Any,
    target: Any,
    bias: Any,
    *,
    ignore_index: Any = -100,
    reduction: Any = "mean",
    class_weight: Any = None,
    row_weight: Any = None,
    chunk_rows: Any = "auto",
    weight_grad: Any = None,
    process_group: Any = None,
    hidden_grad: Any = "sum",
) -> tuple[Tensor, ...]:
    """The loss of a linear layer by one of :data:`ROW_LOSSES`, and its statistics.

    It checks every argument but ``numbers``. Results have the shape of the target.
    """
    shards, spread = None, NOT_SPREAD
    if hidden_grad != "sum" or is_spread(weight, process_group):
        if torch.compiler.is_compiling():
            return _eager_loss(
                loss, numbers, hidden, weight, target, bias, ignore_index=ignore_index,
                reduction=reduction, class_weight=class_weight, row_weight=row_weight,
                chunk_rows=chunk_rows, weight_grad=weight_grad, process_group=process_group,
                hidden_grad=hidden_grad,
            )  # fmt: skip
        shards = spread_classes(weight, process_group, hidden_grad)
        _check_spread(loss, weight_grad)
        weight, bias, class_weight = map(local_part, (weight, bias, class_weight))
        hidden = shards.seen(hidden, hidden_grad)
        shards = None if shards.processes == 1 else shards
        spread = shards or NOT_SPREAD
    check_linear(hidden, weight, bias, empty=shards is not None)
    check_reduction(reduction)
    check_chunk(chunk_rows)
    ignore_index = check_ignore_index(ignore_index)
    batch, n_classes = hidden.shape[:-1], weight.shape[0] if shards is None else shards.n_classes
    target, ignore_index = check_target_ids(target, hidden, n_classes, ignore_index)
    if shards is not None:
        target = shards.local(target, ignore_index)
        ignore_index = None if ignore_index is None else IGNORED
    if class_weight is not None:
        check_class_weight(class_weight, weight.shape[0], hidden)
    if row_weight is not None:
        _check_row_weight(row_weight, target)
        row_weight = row_weight.detach()
    if weight_grad is not None:
        _check_weight_grad(weight_grad, weight)
    rows = in_autocast_dtype(hidden)
    if len(batch) != 1:
        rows, target = rows.reshape(target.numel(), hidden.shape[-1]), target.reshape(-1)
        row_weight = None if row_weight is None else row_weight.reshape(-1)
    operands = rows, weight, bias, target, class_weight, row_weight, weight_grad
    options = loss, tuple(numbers), ignore_index, str(chunk_rows), weight_grad is not None, *spread
    native = ROW_LOSSES[loss].native
    plain = native is not None and ROWS.is_plain(operands, options, reduction)
    if native is not None and plain and are_few(rows, n_classes, chunk_rows):
        of_torch = native(linear(rows, weight, bias), target, numbers, reduction)
        # For a row that is all -inf torch's loss is NaN.
        if of_torch is not None and math.isfinite(of_torch.item()):
            return (of_torch,)
    made = fused_loss(ROWS, operands, options, reduction)
    if len(batch) == 1:
        return made
    return tuple(each.reshape(batch) if each.dim() else each for each in made)


ROWS, _eager_loss = _RowsEngine(), eager(linear_loss)


def _few(
    name: str, numbers: Sequence[float], hidden: Tensor, weight: Tensor, bias: Tensor | None,
    target: Tensor, reduction: str, wanted: Sequence[bool],
) -> Result:  # fmt: skip
    """Few scores of rows that all count: the row loss and three products, nothing else."""
    (n, width), dtype, factors = hidden.shape, hidden.dtype, None
    if True in wanted:
        factors = kernels.full(n, 1.0 / n if reduction == "mean" else 1.0, dtype, hidden)
    exact = partial(kernels.products.scores, "auto", hidden, weight, bias)
    loss, gradient, statistics = ROW_LOSSES[name].make(None, *numbers)(
        linear(hidden, weight, bias), Chunk(target, exact, factors, width)
    )
    loss = loss.mean() if reduction == "mean" else loss.sum()
    to_hidden, to_weight, to_bias = wanted
    if isinstance(gradient, Sparse):
        layer = LayerProducts([weight], bias, n)
        made = _Gradients(hidden, layer, Wanted(to_hidden, to_weight, to_bias), n, dtype)
        made.add(slice(0, n), gradient, gradient.values)
        return Result(loss, made.finished(), statistics)
    pieces = (
        torch.mm(gradient, weight) if to_hidden else None,
        torch.mm(gradient.t(), hidden) if to_weight else None,
        gradient.sum(0) if to_bias else None,
    ) if gradient is not None else (None, None, None)  # fmt: skip
    return Result(loss, pieces, statistics)


def _with_ignored(call: Call) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """Hidden, targets and row weights; where a step is short, with ignored rows as 0.

    And whether nothing is left to be done about ignored rows.
    """
    hidden, weight, _, target, _, row_weight, *_ = call.operands
    ignore_index, dtype = call.options[2], accumulation_dtype(hidden.dtype)
    row_weight = None if row_weight is None else in_dtype(row_weight, dtype)
    if is_short(hidden, hidden.numel() * weight.shape[0], ignore_index):
        target, hidden, row_weight, _ = kernels.products.row_factors(
            "auto", target, hidden, row_weight, ignore_index, False
        )
        return hidden, target, row_weight, True
    return hidden, target, row_weight, ignore_index is None


def is_short(hidden: Tensor, work: int, ignore_index: int | None) -> bool:
    """Whether waiting for the device would cost a step more than products with ignored rows do.

    ``work`` is the number of multiplications of one product.
    """
    rows = hidden.shape[0]
    on_gpu = hidden.device.type == "cuda" and hidden.itemsize <= 4
    return ignore_index is not None and on_gpu and rows <= _MOST_ROWS and work < _LONG


def counted_rows(target: Tensor, ignore_index: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Which rows to keep, or which ones are ignored but stay; None and None where all count.

    Ignored rows are left out before any product, for which the host has to know how many there
    are, and waits once. While a CUDA graph is captured it cannot: they stay, with a factor of 0.
    """
    if ignore_index is None:
        return None, None
    if not host_sync_allowed(target):
        return None, target == ignore_index
    kept = (target != ignore_index).nonzero().squeeze(-1)
    return (None if kept.shape[0] == target.shape[0] else kept), None


def spread_rows(some: Tensor, kept: Tensor, n: int) -> Tensor:
    """Results of the rows that were kept as results of all rows, 0 elsewhere."""
    everything = some.new_zeros if kept.shape[0] < n else some.new_empty
    return everything(n, *some.shape[1:]).index_copy_(0, kept, some)


def _run(name: str, numbers: Sequence[float], chunk_rows: int | str, problem: Problem) -> Made:
    """All rows by the way that suits them; with longer vectors where their size is odd."""
    more = missing_columns(problem.weight, problem.hidden.shape[0])
    if not more:
        return _run_aligned(name, numbers, chunk_rows, problem)
    wanted, into = problem.wanted, problem.wanted.weight_into
    width, wide = problem.weight.shape[1], (0, more)
    if into is not None:
        wanted = wanted._replace(weight_into=into.new_zeros(into.shape[0], width + more))
    made = _run_aligned(
        name, numbers, chunk_rows,
        problem._replace(
            hidden=pad(problem.hidden, wide), weight=pad(problem.weight, wide), wanted=wanted
        ),
    )  # fmt: skip
    of_hidden, of_weight = (
        None if each is None else each[:, :width] for each in (made.hidden, made.weight)
    )
    if into is not None and of_weight is not None:
        of_weight = into.add_(of_weight)
    elif of_weight is not None:
        of_weight = of_weight.contiguous()
    return made._replace(
        hidden=None if of_hidden is None else of_hidden.contiguous(), weight=of_weight
    )


def _run_aligned(
    name: str, numbers: Sequence[float], chunk_rows: int | str, problem: Problem
) -> Made:
    if problem.shards is not None:
        return _run_spread(name, numbers, chunk_rows, problem)
    kind, wanted = ROW_LOSSES[name], problem.wanted
    copies = kind.copies * (_PRECISE_COPIES if wanted.precise(problem.hidden) else 1.0)
    rows = rows_at_a_time(chunk_rows, problem.hidden, problem.weight.shape[0], copies)
    if chunk_rows == "auto" and wanted.weight and wanted.weight_into is None:
        rows = _without_wide_sum(rows, problem, copies)
    if kind.shortcut is not None:
        made = kind.shortcut(problem, numbers, chunk_rows, rows)
        if made is not None:
            return made
    wide = kind.wide(problem.hidden, problem.weight.shape[0])
    return run_chunks(kind.make(problem.class_weight, *numbers), problem, rows, wide)


def _run_spread(
    name: str, numbers: Sequence[float], chunk_rows: int | str, problem: Problem
) -> Made:
    """All rows, in the same chunks in all processes that share the classes."""
    # Imported here, as it stands on this module.
    from lastlayer.fused.spread import SPREAD_LOSSES

    shards = problem.shards
    if shards is None:
        raise RuntimeError("shards: expected those of the classes, got None")
    rows = rows_at_a_time(chunk_rows, problem.hidden, shards.most, _SPREAD_COPIES)
    row_loss = SPREAD_LOSSES[name](shards, problem.class_weight, *numbers)
    return run_chunks(row_loss, problem, rows)


def _without_wide_sum(rows: int, problem: Problem, copies: float) -> int:
    """Rows of a chunk such that the weight's gradient can be summed in half precision.

    More rows, where their scores take no more memory than a sum in float32 would.
    """
    hidden, dtype = problem.hidden, problem.weight_dtype
    if weight_sum_dtype(hidden, rows, dtype) == dtype:
        return rows
    few = -(-hidden.shape[0] // MOST_ROUNDED_ADDITIONS)
    few = -(-few // 128) * 128
    wide = accumulation_dtype(dtype)
    if weight_sum_dtype(hidden, few, dtype) == wide:
        return rows
    spared = wide.itemsize * hidden.shape[1]
    return few if (few - rows) * hidden.element_size() * copies <= spared else rows


def run_chunks(row_loss: RowLoss, problem: Problem, chunk_rows: int, wide: bool = False) -> Made:
    """Losses and gradients of all rows, so many at a time; ``wide`` for scores in float32."""
    hidden, weight, bias, target, row_scale, _, wanted, weight_dtype, _, weights = problem
    n, layer = hidden.shape[0], LayerProducts([weight], bias, hidden.shape[0])
    gradients = _Gradients(hidden, layer, wanted, chunk_rows, weight_dtype)
    dtype = torch.float32 if wide or wanted.precise(hidden) else hidden.dtype
    if n <= chunk_rows:
        exact = partial(kernels.products.scores, "auto", hidden, weight, bias)
        memory = layer.scores(hidden, dtype)
        chunk = Chunk(target, exact, row_scale, hidden.shape[1], weights)
        result = row_loss(layer.scores_in(memory), chunk)
        gradients.add(slice(0, n), result.gradient, memory)
        return Made(result.loss, result.statistics, *gradients.finished())
    memory = layer.memory(chunk_rows, dtype)
    losses: list[Tensor] = []
    statistics: list[tuple[Tensor, ...]] = []
    for first in range(0, n, chunk_rows):
        part = slice(first, min(n, first + chunk_rows))
        rows, ids = hidden[part], target[part]
        scores = layer.scores_into(memory, rows)
        exact = partial(kernels.products.scores, "auto", rows, weight, bias)
        scale, some = (None if each is None else each[part] for each in (row_scale, weights))
        result = row_loss(scores, Chunk(ids, exact, scale, hidden.shape[1], some))
        losses.append(result.loss)
        statistics.append(result.statistics)
        gradients.add(part, result.gradient, memory)
    together = tuple(torch.cat(each) for each in zip(*statistics, strict=True))
    return Made(torch.cat(losses), together, *gradients.finished())


def weight_sum_dtype(hidden: Tensor, chunk_rows: int, weight_dtype: torch.dtype) -> torch.dtype:
    """In which the gradient of the weight is summed, chunk by chunk."""
    wide = accumulation_dtype(hidden.dtype)
    many = hidden.shape[0] > MOST_ROUNDED_ADDITIONS * chunk_rows
    # No product of two half-precision matrices gives the other half precision, or float64.
    foreign = weight_dtype not in (hidden.dtype, wide)
    return wide if many or foreign else weight_dtype


def target_scores(
    scores: Tensor, target: Tensor, exact: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The score of each row's target in full precision; None where ``scores`` have it so."""
    return None if keeps_float32(scores) else exact(target.unsqueeze(-1)).squeeze(-1)


class _Gradients:
    """The gradients of hidden, weight and bias as chunks come in."""

    def __init__(
        self,
        hidden: Tensor,
        layer: LayerProducts,
        wanted: Wanted,
        chunk_rows: int,
        weight_dtype: torch.dtype,
    ) -> None:
        (weight,) = layer.weights
        self._hidden, self._layer, self._weight, self._wanted = hidden, layer, weight, wanted
        self._weight_dtype = weight_dtype
        self._whole = hidden.shape[0] <= chunk_rows
        wide = accumulation_dtype(weight.dtype)
        self._sum_dtype = weight_sum_dtype(hidden, chunk_rows, weight_dtype)
        into = wanted.weight_into
        straight = into is not None and into.dtype in (wide, self._sum_dtype)
        self._weight_sum: Tensor | None = into if straight else None
        self._hidden_sum: Tensor | None = None
        self._bias_sum: Tensor | None = None
        self._sparse: list[tuple[slice, Sparse]] = []

    def add(self, part: slice, gradient: Tensor | Sparse | None, memory: Tensor) -> None:
        """Takes the gradient of the scores of some rows; a dense one is in the memory of these."""
        if isinstance(gradient, Sparse):
            self._add_sparse(part, gradient)
        elif gradient is not None:
            self._add_dense(part, gradient, memory)

    def _add_dense(self, part: slice, gradient: Tensor, memory: Tensor) -> None:
        rows = self._hidden if self._whole else self._hidden[part]
        if self._wanted.bias:
            some = gradient.sum(0, dtype=accumulation_dtype(gradient.dtype))
            self._bias_sum = some if self._bias_sum is None else self._bias_sum.add_(some)
        if self._layer.stride > self._layer.n_classes:
            gradient = self._layer.padded(part_of(memory, slice(gradient.shape[0])))
        rounded = in_dtype(gradient, self._weight.dtype)
        if self._wanted.hidden:
            if self._whole:
                self._hidden_sum = self._layer.hidden_gradient(None, rounded)
            else:
                self._layer.hidden_gradient(self._hidden_memory()[part], rounded)
        if self._wanted.weight:
            self._add_to_weight(rounded, rows)
            if rounded is not gradient and self._wanted.precise(rows):
                self._add_to_weight((gradient - rounded).to(rounded.dtype), rows)

    def _hidden_memory(self) -> Tensor:
        if self._hidden_sum is None:
            self._hidden_sum = self._hidden.new_empty(self._hidden.shape)
        return self._hidden_sum

    def _add_to_weight(self, gradient: Tensor, rows: Tensor) -> None:
        if self._weight_sum is None:
            self._weight_sum = self._layer.new_weight_gradient(gradient, rows, self._sum_dtype)
        else:
            self._layer.weight_gradient([self._weight_sum], gradient, rows, True)

    def _room_for_weight(self) -> Tensor:
        return empty(self._weight.shape, self._sum_dtype, self._weight.device)

    def _add_sparse(self, part: slice, gradient: Sparse) -> None:
        if self._wanted.hidden:
            self._hidden_memory()[part] = kernels.products.to_hidden(
                "auto", gradient.values, gradient.classes, self._weight
            )
        if self._wanted.weight:
            # One sort for all chunks: classes are then visited once.
            self._sparse.append((part, gradient))
        if self._wanted.bias:
            if self._bias_sum is None:
                dtype = accumulation_dtype(self._weight.dtype)
                self._bias_sum = self._weight.new_zeros(self._weight.shape[0], dtype=dtype)
            values = gradient.values.to(self._bias_sum.dtype).flatten()
            self._bias_sum.index_add_(0, gradient.classes.flatten(), values)

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of hidden, weight and bias."""
        total, into = self._weight_sum, self._wanted.weight_into
        if self._wanted.weight and total is None:
            total = self._room_for_weight().zero_()
        if self._sparse and total is not None:
            self._add_lists(total)
        if total is not None and into is not None:
            if total is not into:
                into.add_(total)
            total = into
        elif total is not None:
            total = in_dtype(total, self._weight_dtype)
        return self._hidden_sum, total, self._bias_sum

    def _add_lists(self, total: Tensor) -> None:
        rows = torch.cat([self._hidden[part] for part, _ in self._sparse])
        width = max(each.values.shape[1] for _, each in self._sparse)
        values = torch.cat([_padded(each.values, width) for _, each in self._sparse])
        classes = torch.cat([_padded(each.classes, width) for _, each in self._sparse])
        kernels.products.add_to_weight_("auto", values, classes, rows, total)


def _padded(entries: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(entries, (0, width - entries.shape[1]))


def _weights_of(target: Tensor, class_weight: Tensor, shards: Shards) -> Tensor:
    """The class weights of targets, each of which one process has; one number per row."""
    if not class_weight.shape[0]:
        return shards.sum(class_weight.new_zeros(target.shape))
    return shards.sum(torch.where(target >= 0, class_weight[target.clamp(min=0)], 0.0))


def is_spread(weight: Any, process_group: Any = None) -> bool:
    """Whether classes are spread over processes: the weight is a DTensor, or there is a group."""
    return process_group is not None or getattr(weight, "placements", None) is not None


def spread_classes(weight: Any, process_group: Any, hidden_grad: Any) -> Shards:
    """How the classes of a weight are spread over processes.

    A DTensor says it itself; with a ``process_group`` each process has given its own part.
    """
    check_choice("hidden_grad", hidden_grad, HIDDEN_GRADS)
    if process_group is None:
        if not is_spread(weight):
            raise ValueError(
                f"hidden_grad: expected 'sum' where one process has all classes, got "
                f"{hidden_grad!r}; give a DTensor as weight, or a process_group"
            )
        return shards_of(weight)
    if is_spread(weight):
        raise ValueError(
            "process_group: expected None with a DTensor as weight, which has a mesh, got a group"
        )
    if isinstance(process_group, torch.distributed.ProcessGroup):
        return Shards.of_parts(process_group, weight)
    raise TypeError(
        "process_group: expected a torch.distributed.ProcessGroup, such as mesh.get_group(), got "
        f"{type(process_group).__name__}"
    )


def _check_spread(loss: str, weight_grad: Any) -> None:
    """What is not there for classes that are spread over processes."""
    if weight_grad is not None:
        raise ValueError(
            "weight_grad: expected None where classes are spread over processes, got a tensor; "
            "the gradient of the weight is that of this process's classes"
        )
    if sum(ROW_LOSSES[loss].statistics):
        raise ValueError(
            "weight: expected a plain tensor for statistics of each row, got one that is spread "
            "over processes; lastlayer.parallel.ClassParallel has log_prob and topk"
        )


def _check_row_weight(row_weight: Any, target: Tensor) -> None:
    check_floating("row_weight", row_weight, "a floating tensor with one weight per row")
    if row_weight.shape != target.shape:
        raise ValueError(
            f"row_weight: expected the shape of target, {tuple(target.shape)}, got "
            f"{tuple(row_weight.shape)}"
        )
    check_device("row_weight", row_weight, target)


def _check_weight_grad(weight_grad: Any, weight: Tensor) -> None:
    if active_ddp() is not None:
        raise RuntimeError(
            "weight_grad: expected None inside DistributedDataParallel, whose hooks see only what "
            "autograd computes: processes would keep different gradients; leave it out, or call "
            "the loss outside of the wrapped module and reduce weight_grad yourself"
        )
    if not isinstance(weight_grad, Tensor):
        raise TypeError(
            f"weight_grad: expected a tensor to add to, got {type(weight_grad).__name__}; "
            "weight.grad is None before the first backward: set it to zeros"
        )
    wide = accumulation_dtype(weight.dtype)
    if weight_grad.dtype not in (weight.dtype, wide):
        expected = " or ".join(str(dtype) for dtype in dict.fromkeys((weight.dtype, wide)))
        raise TypeError(f"weight_grad: expected {expected}, got {weight_grad.dtype}")
    (n_classes, width), strides = weight.shape, weight_grad.stride()
    if (
        weight_grad.shape != weight.shape
        or (width > 1 and strides[1] != 1)
        or (n_classes > 1 and strides[0] < width)
    ):
        raise ValueError(
            f"weight_grad: expected shape {tuple(weight.shape)} with rows that are contiguous and "
            f"do not overlap, got {tuple(weight_grad.shape)} with strides {strides}"
        )
    check_device("weight_grad", weight_grad, weight)
    if weight_grad is weight or (
        is_eager(weight) and weight_grad.numel() and weight_grad.data_ptr() == weight.data_ptr()
    ):
        raise ValueError("weight_grad: expected memory of its own, got that of weight")
    if torch.compiler.is_compiling():
        raise ValueError(
            "weight_grad: cannot be used inside torch.compile, which does not see that backward "
            "writes to it; call the loss outside, or leave weight_grad out"
        )
