"""The engine of losses on rows of scores: losses and gradients together, chunk by chunk.

For each chunk of rows one product computes the scores. A row loss computes the losses and, in
place, the gradient of the scores. Two more products give the gradients of hidden and weight. Only
the scores of one chunk are ever stored. If all scores fit in one chunk and the loss is not reduced,
their gradient is kept for backward. A new loss is one small function, see :data:`RowLoss`, and an
entry in :data:`ROW_LOSSES`.
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
    normalized_factors,
)
from lastlayer.fused.scores import (
    ALIGN_FROM,
    LayerProducts,
    as_chunk,
    fits_one_cpu_product,
    missing_columns,
    multiply,
    part_of,
    rows_at_a_time,
    scores_into,
)
from lastlayer.kernels import empty

# With more additions than this in half precision, the relative error of the weight's gradient
# exceeds 4e-3.
MOST_ROUNDED_ADDITIONS = 8
# On a GPU ignored rows are removed, with one host sync, if a product has at least this many
# multiplications, or more rows than one launch can mask. Otherwise they are masked.
_SYNC_FROM_MULTIPLICATIONS, _MASK_UP_TO_ROWS = 1 << 36, 1 << 16
# Buffers per chunk if scores are float32 and their gradient is also split into two half-precision
# terms, in units of half-precision scores.
_PRECISE_COPIES = 4.0
# On a GPU the host needs most of the time of problems with at most this many scores and rows.
_FEW_SCORES, _FEW_ROWS = 1 << 25, 1 << 12
# Buffers per chunk for classes that are sharded over processes.
_SPREAD_COPIES = 1.0


class Chunk(NamedTuple):
    """Inputs of a row loss besides the scores of a chunk.

    ``exact_scores`` computes the scores of given classes, (rows, k), in full precision, since the
    scores of the chunk may be rounded. ``row_scale`` is the factor of each row in the gradient;
    None if no gradient is wanted. ``width`` is the hidden size. ``target_weight`` has the class
    weights of the targets if classes are sharded over processes.
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
    """The output of a row loss; ``gradient`` overwrites the scores, or is new, or sparse."""

    loss: Tensor
    gradient: Tensor | Sparse | None
    statistics: tuple[Tensor, ...] = ()


# Computes the losses of a chunk from its scores, which it may overwrite.
RowLoss = Callable[[Tensor, Chunk], RowResult]


class LossAndGradients(NamedTuple):
    """Losses and statistics of all rows, and the wanted gradients."""

    loss: Tensor
    statistics: tuple[Tensor, ...]
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Wanted(NamedTuple):
    """Which gradients are wanted. The weight's is added to ``weight_into`` if that is given."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    weight_into: Tensor | None = None

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias

    def precise(self, hidden: Tensor) -> bool:
        """Whether a float32 gradient is accumulated from half-precision rows without rounding."""
        return self.weight_into is not None and self.weight_into.itemsize > hidden.itemsize


class Problem(NamedTuple):
    """Inputs in the dtype of the products, without ignored rows: all targets are class ids."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    row_scale: Tensor | None
    """Factor of the gradient of each row's loss; None if no gradient is wanted."""
    class_weight: Tensor | None
    wanted: Wanted
    weight_dtype: torch.dtype
    """dtype of the weight's gradient."""
    shards: Shards | None = None
    """How classes are sharded over processes; targets are then local to this process."""
    target_weight: Tensor | None = None
    """Class weights of the targets, if classes are sharded."""


class RowLossKind(NamedTuple):
    """How to construct a row loss, and its properties."""

    make: Callable[..., RowLoss]
    """Constructs the row loss from the class weights and the numeric options."""
    copies: float = 1.0
    """Number of buffers of scores that a chunk needs."""
    statistics: tuple[int, int] = (0, 0)
    """Number of statistics per row: floating ones, and int64 ones."""
    shortcut: (
        Callable[[Problem, Sequence[float], int | str, int], LossAndGradients | None] | None
    ) = None
    """Computes the loss faster than in chunks, or returns None if it cannot. Its arguments are the
    problem, the numeric options, ``chunk_rows``, and the rows per chunk."""
    wide: Callable[[Tensor, int], bool] = lambda *_: False
    """Whether scores of half-precision operands are float32, from hidden and number of classes."""
    stores: Callable[[Tensor, Sequence[float], int | str], bool] = lambda *_: False
    """Whether scores in a single chunk become a dense gradient, which "none" keeps for backward;
    from hidden, the numeric options and ``chunk_rows``."""
    complete: bool = False
    """For sharded classes: whether each process has the full loss, not only its own part."""
    native: Callable[[Tensor, Tensor, Sequence[float], str], Tensor | None] | None = None
    """The reduced loss by torch's own operations and autograd, which take less host time for few
    scores. Its arguments are scores, target, the numeric options and reduction; it returns None if
    torch has no such loss."""
    few: Callable[[Call], Result] | None = None
    """Computes a small problem on a GPU with fewer launches than :func:`loss_by_one_product`."""


ROW_LOSSES: dict[str, RowLossKind] = {}
# The fields of Shards as options of an engine, and their values for classes that are not sharded.
SPREAD_SCHEMA = ", str group_name, int n_classes, int most, int first, int here"
NOT_SPREAD = Shards("", 0, 0, 0, 0)
# Number of operands of the engine below; backward may get one more, saved by the forward pass.
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
                return self._gradients_from_kept(call)
            if call.upstream is None and (made := self._keep_score_gradient(call)) is not None:
                return made
        return super().invoke(call)

    def _keep_score_gradient(self, call: Call) -> Result | None:
        """Losses, and the gradient of the scores for row factors of 1, to be kept for backward.

        None if the scores need several chunks or rows are removed: backward then recomputes them.
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

    def _gradients_from_kept(self, call: Call) -> Result:
        """The gradients from the kept score gradient and the upstream gradient."""
        _, weight, bias, *_, memory = call.operands
        with without_autocast(call.operands[0]):
            hidden, _, row_weight, _ = _with_ignored(call)
            n = hidden.shape[0]
            scale = RowScale.of(row_weight, "none", n)
            factors: Any = scale.factors(hidden, n, call.upstream)
            factors, size = normalized_factors(factors, hidden.dtype)
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
        if is_small_on_gpu(call):
            return (ROW_LOSSES[name].few or loss_by_one_product)(call)
        unweighted = upstream is None and self.is_unweighted(operands, options, reduction)
        if unweighted and fits_one_cpu_product(hidden, weight.shape[0], as_chunk(chunk)):
            return loss_by_one_product(call)
        shards = Shards(*spread) if spread[0] else None
        with_gradients = upstream is not None or not self.recomputes(options, reduction)
        with without_autocast(hidden):
            n, dtype = hidden.shape[0], accumulation_dtype(hidden.dtype)
            row_weight = None if row_weight is None else in_dtype(row_weight, dtype)
            kept = ignored = known = None
            short = masks_ignored_rows(hidden, hidden.numel() * weight.shape[0], ignore_index)
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
                # A NaN in an ignored row would reach the weight's gradient as 0 · NaN.
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
                factors, size = normalized_factors(factors, hidden.dtype)
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
                loss = scatter_rows(loss, kept, n) if reduction == "none" else loss
                statistics = tuple(scatter_rows(each, kept, n) for each in statistics)
                of_hidden = None if of_hidden is None else scatter_rows(of_hidden, kept, n)
            if of_bias is not None and bias is not None:
                of_bias = in_dtype(of_bias, gradient_sum_dtype(bias.dtype))
        of_weight = made.weight if weight_grad is None else None
        return Result(loss, (of_hidden, of_weight, of_bias), statistics, size)

    def is_unweighted(self, operands: Operands, options: tuple[Any, ...], reduction: str) -> bool:
        """Whether all rows have the same weight and all tensors the same dtype."""
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
    """Options of all row losses, documented in :func:`lastlayer.fused.linear_cross_entropy`."""

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
    """One of :data:`ROW_LOSSES` on the scores of a linear layer, and its statistics.

    Checks all arguments except ``numbers``. Results per row have the shape of the target.
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
    unweighted = native is not None and ROWS.is_unweighted(operands, options, reduction)
    if native is not None and unweighted and fits_one_cpu_product(rows, n_classes, chunk_rows):
        of_torch = native(linear(rows, weight, bias), target, numbers, reduction)
        # For a row that is all -inf torch's loss is NaN.
        if of_torch is not None and math.isfinite(of_torch.item()):
            return (of_torch,)
    made = fused_loss(ROWS, operands, options, reduction)
    if len(batch) == 1:
        return made
    return tuple(each.reshape(batch) if each.dim() else each for each in made)


ROWS, _eager_loss = _RowsEngine(), eager(linear_loss)


def is_small_on_gpu(call: Call) -> bool:
    """Whether the host needs more time for chunks than a GPU for the products."""
    hidden, weight, _, _, class_weight, row_weight, weight_grad = call.operands
    name, chunk_rows, spread = call.options[0], call.options[3], call.options[5]
    return (
        hidden.is_cuda
        and class_weight is None
        and row_weight is None
        and weight_grad is None
        and not spread
        and call.reduction != "none"
        and chunk_rows == "auto"
        and not any(ROW_LOSSES[name].statistics)
        and has_few_scores_on_gpu(hidden, weight.shape[0])
    )


def has_few_scores_on_gpu(hidden: Tensor, n_classes: int) -> bool:
    """Whether a GPU needs so little time for all scores that host time decides."""
    n, width = hidden.shape
    return (
        hidden.is_cuda
        # The factors of float16 gradients have to be normalised.
        and hidden.dtype in (torch.bfloat16, torch.float32)
        and 0 < n <= _FEW_ROWS
        and 0 < n * n_classes <= _FEW_SCORES
        # Larger products need aligned operands.
        and n * n_classes * width < ALIGN_FROM["cuda"]
        and kernels.available()["triton"] is None
    )


def loss_by_one_product(call: Call) -> Result:
    """The loss of a small, unweighted problem: one product, the row loss and two products."""
    hidden, weight, bias, target, *_ = call.operands
    name, numbers, ignore_index, *_ = call.options
    kind, mean, n = ROW_LOSSES[name], call.reduction == "mean", hidden.shape[0]
    to_hidden, to_weight, to_bias = call.wanted
    counts = factors = None
    with without_autocast(hidden):
        vectors = in_dtype(weight, hidden.dtype)
        offset = None if bias is None else in_dtype(bias, hidden.dtype)
        if ignore_index is not None:
            target, hidden, counts, factors = kernels.products.row_factors(
                "auto", target, hidden, None, ignore_index, mean
            )
        elif True in call.wanted:
            dtype = accumulation_dtype(hidden.dtype)
            factors = kernels.full(n, 1.0 / n if mean else 1.0, dtype, hidden)
        if kind.wide(hidden, weight.shape[0]):
            scores = hidden.new_empty(n, weight.shape[0], dtype=torch.float32)
            scores_into(scores, hidden, vectors, offset)
        else:
            scores = linear(hidden, vectors, offset)
        exact = partial(kernels.products.scores, "auto", hidden, vectors, offset)
        chunk = Chunk(target, exact, factors if True in call.wanted else None, hidden.shape[1])
        loss, gradient, statistics = kind.make(None, *numbers)(scores, chunk)
        if counts is not None:
            loss = RowScale.of(counts, call.reduction, n).reduce(loss, call.reduction)
        else:
            loss = loss.mean() if mean else loss.sum()
        if isinstance(gradient, Sparse):
            layer = LayerProducts([vectors], offset, n)
            made = _Gradients(
                hidden, layer, Wanted(to_hidden, to_weight, to_bias), n,
                gradient_sum_dtype(weight.dtype),
            )  # fmt: skip
            made.add(slice(0, n), gradient, gradient.values)
            return Result(loss, made.finished(), statistics)
        if gradient is None:
            return Result(loss, (None, None, None), statistics)
        pieces = gradients_by_products(gradient, hidden, vectors, weight, bias, call.wanted)
        return Result(loss, pieces, statistics)


def gradients_by_products(
    gradient: Tensor,
    rows: Tensor,
    vectors: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The wanted gradients of hidden, weight and bias, from that of all scores."""
    to_hidden, to_weight, to_bias = wanted
    rounded, of_weight, of_bias = in_dtype(gradient, rows.dtype), None, None
    if to_weight:
        dtype = gradient_sum_dtype(weight.dtype)
        if dtype == rows.dtype:
            of_weight = torch.mm(rounded.t(), rows)
        else:
            of_weight = multiply(rows.new_empty(weight.shape, dtype=dtype), rounded.t(), rows)
    if bias is not None and to_bias:
        of_bias = gradient.sum(0, dtype=gradient_sum_dtype(bias.dtype))
    return torch.mm(rounded, vectors) if to_hidden else None, of_weight, of_bias


def _with_ignored(call: Call) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """Hidden, targets and row weights, with ignored rows set to 0 if they are masked.

    The last result is True if ignored rows need no further handling.
    """
    hidden, weight, _, target, _, row_weight, *_ = call.operands
    ignore_index, dtype = call.options[2], accumulation_dtype(hidden.dtype)
    row_weight = None if row_weight is None else in_dtype(row_weight, dtype)
    if masks_ignored_rows(hidden, hidden.numel() * weight.shape[0], ignore_index):
        target, hidden, row_weight, _ = kernels.products.row_factors(
            "auto", target, hidden, row_weight, ignore_index, False
        )
        return hidden, target, row_weight, True
    return hidden, target, row_weight, ignore_index is None


def masks_ignored_rows(hidden: Tensor, work: int, ignore_index: int | None) -> bool:
    """Whether ignored rows are masked: for small problems that is cheaper than a host sync.

    ``work`` is the number of multiplications of one product.
    """
    rows = hidden.shape[0]
    on_gpu = hidden.device.type == "cuda" and hidden.itemsize <= 4
    return (
        ignore_index is not None
        and on_gpu
        and rows <= _MASK_UP_TO_ROWS
        and work < _SYNC_FROM_MULTIPLICATIONS
    )


def counted_rows(target: Tensor, ignore_index: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Indices of the rows to keep, or a mask of ignored rows to give a factor of 0; else None.

    Removing ignored rows before any product needs their number, and so a host sync. While a CUDA
    graph is captured none is allowed, and the mask is returned instead. Both are None if no row is
    ignored.
    """
    if ignore_index is None:
        return None, None
    if not host_sync_allowed(target):
        return None, target == ignore_index
    kept = (target != ignore_index).nonzero().squeeze(-1)
    return (None if kept.shape[0] == target.shape[0] else kept), None


def scatter_rows(some: Tensor, kept: Tensor, n: int) -> Tensor:
    """Scatters the results of the kept rows to all ``n`` rows, with 0 for the others."""
    everything = some.new_zeros if kept.shape[0] < n else some.new_empty
    return everything(n, *some.shape[1:]).index_copy_(0, kept, some)


def _run(
    name: str, numbers: Sequence[float], chunk_rows: int | str, problem: Problem
) -> LossAndGradients:
    """Computes all rows, with hidden and weight padded if their size is misaligned."""
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
) -> LossAndGradients:
    if problem.shards is not None:
        return _run_spread(name, numbers, chunk_rows, problem)
    kind, wanted = ROW_LOSSES[name], problem.wanted
    copies = kind.copies * (_PRECISE_COPIES if wanted.precise(problem.hidden) else 1.0)
    rows = rows_at_a_time(chunk_rows, problem.hidden, problem.weight.shape[0], copies)
    if chunk_rows == "auto" and wanted.weight and wanted.weight_into is None:
        rows = _rows_for_narrow_sum(rows, problem, copies)
    if kind.shortcut is not None:
        made = kind.shortcut(problem, numbers, chunk_rows, rows)
        if made is not None:
            return made
    wide = kind.wide(problem.hidden, problem.weight.shape[0])
    return run_chunks(kind.make(problem.class_weight, *numbers), problem, rows, wide)


def _run_spread(
    name: str, numbers: Sequence[float], chunk_rows: int | str, problem: Problem
) -> LossAndGradients:
    """Computes all rows for sharded classes, in the same chunks in all processes."""
    # Imported here: that module imports this one.
    from lastlayer.fused.spread import SPREAD_LOSSES

    shards = problem.shards
    if shards is None:
        raise RuntimeError("shards: expected the shards of the classes, got None")
    rows = rows_at_a_time(chunk_rows, problem.hidden, shards.most, _SPREAD_COPIES)
    row_loss = SPREAD_LOSSES[name](shards, problem.class_weight, *numbers)
    return run_chunks(row_loss, problem, rows)


def _rows_for_narrow_sum(rows: int, problem: Problem, copies: float) -> int:
    """Rows per chunk, increased if the weight's gradient can then be summed in half precision.

    Only if the additional scores take no more memory than a float32 sum would.
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


def run_chunks(
    row_loss: RowLoss, problem: Problem, chunk_rows: int, wide: bool = False
) -> LossAndGradients:
    """Losses and gradients of all rows, ``chunk_rows`` at a time; ``wide`` for float32 scores."""
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
        return LossAndGradients(result.loss, result.statistics, *gradients.finished())
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
    return LossAndGradients(torch.cat(losses), together, *gradients.finished())


def weight_sum_dtype(hidden: Tensor, chunk_rows: int, weight_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the weight's gradient is summed over chunks."""
    wide = accumulation_dtype(hidden.dtype)
    many = hidden.shape[0] > MOST_ROUNDED_ADDITIONS * chunk_rows
    # No matrix product converts, for example, from bfloat16 to float16 or float64.
    foreign = weight_dtype not in (hidden.dtype, wide)
    return wide if many or foreign else weight_dtype


def target_scores(
    scores: Tensor, target: Tensor, exact: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """The score of each row's target in full precision; None if ``scores`` are not rounded."""
    return None if keeps_float32(scores) else exact(target.unsqueeze(-1)).squeeze(-1)


class _Gradients:
    """Accumulates the gradients of hidden, weight and bias over chunks."""

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
        """Adds a chunk's score gradient; ``memory`` is the buffer of a dense one, with padding."""
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
            # Collected: one sort over all chunks then updates each class once.
            self._sparse.append((part, gradient))
        if self._wanted.bias:
            if self._bias_sum is None:
                dtype = accumulation_dtype(self._weight.dtype)
                self._bias_sum = self._weight.new_zeros(self._weight.shape[0], dtype=dtype)
            values = gradient.values.to(self._bias_sum.dtype).flatten()
            self._bias_sum.index_add_(0, gradient.classes.flatten(), values)

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden, weight and bias."""
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
    """The class weight of each row's target, summed over processes: one process has it."""
    if not class_weight.shape[0]:
        return shards.sum(class_weight.new_zeros(target.shape))
    return shards.sum(torch.where(target >= 0, class_weight[target.clamp(min=0)], 0.0))


def is_spread(weight: Any, process_group: Any = None) -> bool:
    """Whether classes are sharded over processes: by a DTensor as weight, or a process group."""
    return process_group is not None or getattr(weight, "placements", None) is not None


def spread_classes(weight: Any, process_group: Any, hidden_grad: Any) -> Shards:
    """How the classes of a weight are sharded over processes.

    Read from a DTensor; with a ``process_group`` each process passes its own part of the weight.
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
    """Rejects options that sharded classes do not support."""
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
