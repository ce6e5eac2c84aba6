"""Cross entropy from hidden states and class vectors, without the matrix of scores.

It usually runs in chunks (:mod:`lastlayer.fused.rows`), with three alternatives. *Few launches*, on
CUDA for small problems: one kernel does all that is between the products. *Tiles*, on CUDA for
small hidden sizes: scores are computed in on-chip tiles and never stored. *Slabs*, for
``chunk_rows="low"`` in half precision: blocks of an eighth of the rows and some of the classes.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from lastlayer import kernels
from lastlayer._checks import check_int, check_not_negative, check_positive, check_share
from lastlayer._torch import in_dtype, without_autocast
from lastlayer.fused.function import Call, Result
from lastlayer.fused.rows import (
    MOST_ROUNDED_ADDITIONS,
    ROW_LOSSES,
    Chunk,
    LossAndGradients,
    Problem,
    RowLoss,
    RowLossKind,
    RowOptions,
    RowResult,
    Wanted,
    gradients_by_products,
    linear_loss,
    target_scores,
)
from lastlayer.fused.scores import LayerProducts, budget_bytes

# Up to this hidden size recomputing a score in a tile is cheaper than storing it.
WIDEST_TILED = 256
# Options of the plain cross entropy: smoothing, z loss, soft cap (0 for none), temperature.
PLAIN = 0.0, 0.0, 0.0, 1.0
# Rows and classes of a slab are multiples of this, to match the tiles of matrix units.
_SLAB_STEP = 128


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_rows: int | str = "auto",
    weight_grad: Tensor | None = None,
    process_group: Any = None,
    hidden_grad: str = "sum",
) -> Tensor:
    r"""``cross_entropy(hidden @ weight.T + bias, target)`` without the matrix of scores.

    .. math:: L = \log \sum_j e^{\theta_j} - \theta_y + \lambda (\log \sum_j e^{\theta_j})^2,
              \qquad \theta = \mathrm{cap}(W h + b) / T

    Choose it for any exact softmax over more than a few thousand classes. It holds one chunk of
    scores at a time: about 1 GB on a GPU, but at least 128 rows, which is more from about 4 million
    classes on; on a CPU 48 MB, or a quarter of the weight if that is more; about a quarter of that
    with ``chunk_rows="low"``. On a GPU in half precision, with a hidden size of at most 256, it
    stores no scores at all, unless there are at most 2^25: host time is most of the time of such
    small problems, and with stored scores they take few launches.

    Cost: three products of n × d × v, as for the layer itself with its backward. Gradients are
    computed in the forward pass, and only scaled in backward. With ``reduction="none"``, if all
    scores fit in one chunk, their gradient is kept until backward. If they do not fit, and with
    ``weight_grad``, backward recomputes the scores, a fourth product.

    On a GPU any number of classes and any hidden size are about as fast as the next multiple of 8.
    For a misaligned hidden size (rows that are not a multiple of 16 bytes) large problems are
    computed on padded copies of hidden and weight, and gradients are copied back: this takes the
    memory of one more weight, or two with ``weight_grad``. A misaligned number of classes needs no
    such copy.

    On a GPU there is one host sync, to remove ignored rows before any product, if n × d × v is at
    least 2^36, for more than 65,536 rows, and in float64, but never during CUDA graph capture. Pass
    ``ignore_index=None`` if no target is ignored: this avoids the host sync.

    Args:
        hidden: ``(*batch, d)``, float16, bfloat16, float32 or float64.
        weight: ``(v, d)``, one row per class, as in ``nn.Linear``; keeps its dtype under autocast.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        ignore_index: rows with this target are left out; None if there are none.
        reduction: "mean", weighted, over the rows that are not ignored; "sum" or "none".
        label_smoothing: probability mass of the target that is spread evenly over all classes.
        class_weight: one weight per class, ``(v,)``, as in torch; it does not apply to ``z_loss``.
        row_weight: one weight per row, ``(*batch)``; no gradient flows to it.
        z_loss: :math:`\lambda`, pulls the normaliser towards 1.
        softcap: c, replaces scores by :math:`c \tanh(\theta / c)`.
        temperature: T, divides the scores.
        chunk_rows: rows of scores held at a time, "auto" or "low".
        weight_grad: a tensor of the weight's shape to which backward adds the weight's gradient,
            instead of returning it to autograd: ``weight.grad``, or a float32 buffer for a
            half-precision weight. With float32 no intermediate result is rounded to half precision.
        process_group: processes over which the classes are sharded, in the order of ranks. Each
            passes the ``weight``, ``bias`` and ``class_weight`` of its own classes. Hidden states
            and targets must be the same in all processes, and so is the loss. A DTensor with
            ``Shard(0)`` as weight does the same without a group.
        hidden_grad: for sharded classes: "sum" for the full gradient of hidden, or "part" for the
            contribution of this process's classes; the contributions add up to the full gradient.

    Returns:
        The loss in float32, or in float64 from float64.

    Example:
        >>> import torch
        >>> hidden, weight = torch.zeros(2, 8), torch.zeros(100, 8)
        >>> linear_cross_entropy(hidden, weight, torch.tensor([3, 99]))
        tensor(4.6052)

    Reference:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, ICLR 2025,
        arXiv:2411.09009; Hsu et al., Liger Kernel, 2024, arXiv:2410.10989.
    """
    numbers = cross_entropy_numbers(label_smoothing, z_loss, softcap, temperature)
    return linear_loss(
        "cross_entropy", numbers, hidden, weight, target, bias, ignore_index=ignore_index,
        reduction=reduction, class_weight=class_weight, row_weight=row_weight,
        weight_grad=weight_grad, chunk_rows=chunk_rows, process_group=process_group,
        hidden_grad=hidden_grad,
    )[0]  # fmt: skip


class Statistics(NamedTuple):
    """What :func:`linear_statistics` returns; all but the loss have the shape of the target.

    Only the loss is differentiable. In rows with an ignored target all entries are 0.
    """

    loss: Tensor
    log_prob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor
    in_top_k: Tensor


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    k: int = 5,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    **options: Unpack[RowOptions],
) -> Statistics:
    """:func:`linear_cross_entropy` with statistics of each row from the same pass over the scores.

    For each row: the log-probability of the target, the entropy, the logsumexp, the class with the
    highest score, and whether the target is among the top k.

    Choose it to monitor accuracy, calibration and the logsumexp in training or validation, and for
    the log-probabilities that policy gradients need. It always works in chunks of rows.

    Cost: that of :func:`linear_cross_entropy`; the scores are read no more often.

    Args:
        hidden: ``(*batch, d)``.
        weight: ``(v, d)``, one row per class.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        k: ``in_top_k`` is True if fewer than k classes have a higher score than the target.
        label_smoothing: probability mass of the target that is spread evenly over all classes.
        z_loss: weight of the squared logsumexp.
        softcap: c, replaces scores by ``c * tanh(score / c)``.
        temperature: divides the scores. All statistics are after softcap and temperature.
        options: ``ignore_index``, ``reduction``, ``class_weight``, ``row_weight``, ``chunk_rows``
            and ``weight_grad``, as in :func:`linear_cross_entropy`.

    Returns:
        :class:`Statistics`.

    Example:
        >>> import torch
        >>> known = linear_statistics(torch.ones(1, 1), torch.eye(3)[:, :1], torch.tensor([0]))
        >>> known.argmax, known.in_top_k, known.log_prob
        (tensor([0]), tensor([True]), tensor([-0.5514]))
    """
    k = check_int("k", k)
    numbers = cross_entropy_numbers(label_smoothing, z_loss, softcap, temperature)
    loss, lse, log_prob, entropy, argmax, rank = linear_loss(
        "cross_entropy_statistics", numbers, hidden, weight, target, bias, **options
    )
    in_top_k, ignore_index = rank < k, options.get("ignore_index", -100)
    if ignore_index is not None:
        # As int64: compared with 8-bit ids, -100 would be 156.
        in_top_k = in_top_k & (target.long() != ignore_index)
    return Statistics(loss, log_prob, entropy, lse, argmax, in_top_k)


def cross_entropy_numbers(
    label_smoothing: Any, z_loss: Any, softcap: Any, temperature: Any
) -> tuple[float, float, float, float]:
    """The checked options of :func:`cross_entropy_rows`; a softcap of None becomes 0."""
    return (
        check_share("label_smoothing", label_smoothing),
        check_not_negative("z_loss", z_loss),
        0.0 if softcap is None else check_positive("softcap", softcap),
        check_positive("temperature", temperature),
    )


def shaped(scores: Tensor, softcap: float, temperature: float) -> tuple[Tensor, Tensor]:
    """Scores after soft cap (0 for none) and temperature, and the derivative of that map."""
    if not softcap:
        return scores / temperature, torch.full_like(scores, 1.0 / temperature)
    bent = torch.tanh(scores / softcap)
    # Masked classes stay at -inf: the cap alone would make them finite.
    capped = (bent * (softcap / temperature)).masked_fill(scores == -math.inf, -math.inf)
    return capped, (1.0 - bent.square()) / temperature


def cross_entropy_rows(
    class_weight: Tensor | None,
    smoothing: float,
    z_loss: float,
    softcap: float,
    temperature: float,
    statistics: bool = False,
) -> RowLoss:
    """The cross entropy as a row loss; its dense gradient overwrites the scores."""

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        exact = target_scores(scores, chunk.target, chunk.exact_scores)
        if statistics and exact is None:
            exact = scores.gather(-1, chunk.target.unsqueeze(-1)).squeeze(-1)
        loss, *known = kernels.softmax_rows.forward_(
            "auto", scores, chunk.target, exact, chunk.row_scale, class_weight, smoothing, z_loss,
            softcap, temperature, statistics,
        )  # fmt: skip
        gradient = None if chunk.row_scale is None else scores
        if exact is None or not statistics:
            return RowResult(loss, gradient)
        lse, entropy, argmax, rank = known
        at_target = shaped(exact, softcap, temperature)[0]
        # A row that is all -inf has no finite difference.
        log_prob = torch.where(lse == -math.inf, lse, at_target - lse)
        return RowResult(loss, gradient, (lse, log_prob, entropy, argmax, rank))

    return rows


def in_few_launches(call: Call) -> Result:
    """A small, unweighted problem: one product, one kernel and two products."""
    hidden, weight, bias, target, *_ = call.operands
    _, numbers, ignore_index, *_ = call.options
    with without_autocast(hidden):
        vectors = in_dtype(weight, hidden.dtype)
        offset = None if bias is None else in_dtype(bias, hidden.dtype)
        scores = linear(hidden, vectors, offset)
        losses, states = kernels.softmax_rows.reduced_(
            "auto", scores, hidden, vectors, offset, target, ignore_index,
            call.reduction == "mean", True in call.wanted, *numbers,
        )  # fmt: skip
        pieces = gradients_by_products(scores, states, vectors, weight, bias, call.wanted)
        return Result(losses.sum(), pieces)


def tiles_or_slabs(
    problem: Problem, numbers: Sequence[float], chunk_rows: int | str, rows: int
) -> LossAndGradients | None:
    """Computes the loss by tiles or slabs if one of them is faster than chunks, else None."""
    if tiles_suit(problem.hidden, numbers, chunk_rows, problem.wanted):
        return run_tiles(problem, numbers)
    if slabs_suit(problem, numbers, chunk_rows, rows):
        return _run_slabs(problem, numbers, str(chunk_rows))
    return None


def _stores(hidden: Tensor, numbers: Sequence[float], chunk_rows: int | str) -> bool:
    return not tiles_suit(hidden, numbers, chunk_rows, Wanted())


def _native(
    scores: Tensor, target: Tensor, numbers: Sequence[float], reduction: str
) -> Tensor | None:
    smoothing, *others = numbers
    if others != [0.0, 0.0, 1.0]:
        return None
    return cross_entropy(scores, target, reduction=reduction, label_smoothing=smoothing)


ROW_LOSSES["cross_entropy"] = RowLossKind(
    cross_entropy_rows,
    shortcut=tiles_or_slabs,
    stores=_stores,
    native=_native,
    few=in_few_launches,
)
ROW_LOSSES["cross_entropy_statistics"] = RowLossKind(
    partial(cross_entropy_rows, statistics=True), statistics=(3, 2)
)


def tiles_suit(
    hidden: Tensor, numbers: Sequence[float], chunk_rows: int | str, wanted: Wanted
) -> bool:
    """Whether the tiled kernels support a problem and are faster."""
    smoothing, _, softcap, _ = numbers
    return (
        # An explicit row count asks for chunks.
        hidden.device.type == "cuda"
        and isinstance(chunk_rows, str)
        and hidden.dtype in (torch.float16, torch.bfloat16)
        and 0 < hidden.shape[1] <= WIDEST_TILED
        and hidden.shape[0] > 0
        and kernels.available()["triton"] is None
        and not wanted.precise(hidden)
        # Smoothing needs the sum of all scores: one matrix-vector product, but not with a cap.
        and not (smoothing and softcap)
    )


def run_tiles(
    problem: Problem, numbers: Sequence[float], in_order: bool = False
) -> LossAndGradients:
    """Losses and gradients of all rows, as :func:`lastlayer.fused.rows.run_chunks` returns them.

    ``in_order`` says that rows are sorted by their targets, which saves a sort.
    """
    # Imported here: Triton may not be installed.
    from lastlayer.kernels.linear_softmax.triton import (
        finish_rows,
        gradient_of_classes,
        mix_of_rows,
    )

    hidden, weight, bias, target, row_scale, class_weight, wanted, weight_dtype, *_ = problem
    smoothing, z_loss, softcap, temperature = numbers
    hidden, weight = hidden.contiguous(), weight.contiguous()
    n_classes = weight.shape[0]
    place = target.unsqueeze(-1)
    exact = kernels.products.scores("auto", hidden, weight, bias, place).squeeze(-1)
    gradient_wanted = wanted.any and row_scale is not None
    mix = mix_of_rows(hidden, weight, bias, softcap, temperature, wanted.hidden and gradient_wanted)
    spread, weights, more = smoothing / n_classes, None, None
    if smoothing:
        weights = exact.new_ones(n_classes) if class_weight is None else class_weight.float()
        more = spread * weights.sum()
    rows = finish_rows(
        mix, weight, target, exact, row_scale,
        None if class_weight is None else class_weight[target].float(), 1.0 - smoothing, more,
        z_loss, softcap, temperature, torch.float32 if smoothing else hidden.dtype,
    )  # fmt: skip
    loss, hidden_gradient = rows.loss, rows.gradient if wanted.hidden else None
    if weights is not None and more is not None:
        # The sum of all scores is the score of the sum of all class vectors.
        vector = _weighted_sum(weights, weight)
        summed = torch.mv(hidden.float(), vector)
        if bias is not None:
            summed = summed + torch.dot(bias.float(), weights)
        lse = rows.factors[0]
        smoothed = loss + more * lse - summed * (spread / temperature)
        # Fully masked rows have infinite loss and zero gradient.
        empty = lse == -torch.inf
        loss = torch.where(empty, loss, smoothed)
        row_scale = None if row_scale is None else row_scale.masked_fill(empty, 0.0)
    if not gradient_wanted or row_scale is None:
        return LossAndGradients(loss, (), None, None, None)

    if hidden_gradient is not None and smoothing:
        hidden_gradient -= torch.outer(row_scale * (spread / temperature), vector)
        hidden_gradient = hidden_gradient.to(hidden.dtype)
    weight_gradient = bias_gradient = None
    if wanted.weight or wanted.bias:
        into = wanted.weight_into
        weight_gradient = torch.empty_like(weight, dtype=weight_dtype) if into is None else into
        if wanted.bias:
            # Zeros: the kernel adds to it when it adds to the weight's gradient.
            bias_gradient = loss.new_zeros(n_classes)
        gradient_of_classes(
            hidden, weight, bias, target, rows.factors, softcap, temperature, weight_gradient,
            bias_gradient, into is not None, in_order,
        )  # fmt: skip
        if weights is not None:
            scaled = torch.mv(hidden.float().t(), row_scale) * (-spread / temperature)
            weight_gradient.addr_(weights.to(weight_dtype), scaled.to(weight_dtype))
            if bias_gradient is not None:
                bias_gradient -= weights * (row_scale.sum() * spread / temperature)
    if not wanted.weight:
        weight_gradient = None
    return LossAndGradients(loss, (), hidden_gradient, weight_gradient, bias_gradient)


def _weighted_sum(weights: Tensor, vectors: Tensor) -> Tensor:
    """``weights @ vectors`` in float32, converting a block of vectors at a time."""
    total = weights.new_zeros(vectors.shape[1])
    for some, of_them in zip(weights.split(1 << 16), vectors.split(1 << 16), strict=True):
        total += some @ of_them.float()
    return total


def slabs_suit(
    problem: Problem, numbers: Sequence[float], chunk_rows: int | str, rows: int
) -> bool:
    """Whether chunks of ``rows`` rows would add to a half-precision gradient too often.

    Only for ``chunk_rows="low"``: otherwise a float32 sum is faster than recomputing scores.
    """
    hidden, wanted = problem.hidden, problem.wanted
    return (
        chunk_rows == "low"
        and hidden.itemsize < 4
        and hidden.shape[0] > rows * MOST_ROUNDED_ADDITIONS
        and problem.row_scale is not None
        and wanted.weight
        and wanted.weight_into is None
        and not numbers[0]
    )


def _run_slabs(problem: Problem, numbers: Sequence[float], chunk_rows: str) -> LossAndGradients:
    """Losses and gradients of all rows, as :func:`lastlayer.fused.rows.run_chunks` returns them.

    Many small chunks would add to the weight's gradient so often that half precision becomes
    inaccurate, or would need a float32 sum of the weight's size. For each block of rows, a first
    pass over the slabs computes the logsumexp of each row. A second pass recomputes the scores,
    except for the last slab's, and turns them into the gradient.
    """
    hidden, weight, bias, target, row_scale, class_weight, wanted, weight_dtype, *_ = problem
    if row_scale is None:
        raise RuntimeError("row_scale: expected a tensor, got None; slabs compute gradients")
    n, n_classes = hidden.shape[0], weight.shape[0]
    rows = -(-n // (MOST_ROUNDED_ADDITIONS * _SLAB_STEP)) * _SLAB_STEP
    fitting = budget_bytes("rows", chunk_rows, hidden) // (rows * hidden.itemsize)
    step = min(n_classes, max(_SLAB_STEP, fitting // _SLAB_STEP * _SLAB_STEP))
    # The short slab comes first: the last one is not recomputed, so it should be a full one.
    short = n_classes % step
    starts = [*([0] if short else []), *range(short, n_classes, step)]
    slabs = [
        _Slab(slice(a, b), LayerProducts([weight[a:b]], None if bias is None else bias[a:b], n))
        for a, b in zip(starts, [*starts[1:], n_classes], strict=True)
    ]
    memory = hidden.new_empty(rows * max(slab.layer.stride for slab in slabs))
    weight_gradient = torch.zeros_like(weight, dtype=weight_dtype)
    hidden_gradient = torch.zeros_like(hidden) if wanted.hidden else None
    bias_gradient = hidden.new_zeros(n_classes, dtype=torch.float32) if wanted.bias else None
    losses = []
    for first in range(0, n, rows):
        part = slice(first, min(n, first + rows))
        block = _Block(memory, hidden[part], weight, bias, target[part], numbers)
        weights = None if class_weight is None else class_weight[target[part]]
        losses.append(block.loss(slabs, weights))
        for slab in reversed(slabs):
            classes, layer = slab
            gradient = block.gradient(slab, row_scale[part], weights)
            if bias_gradient is not None:
                bias_gradient[classes] += gradient.sum(0, dtype=torch.float32)
            gradient = layer.padded(block.memory_of(slab))
            layer.weight_gradient([weight_gradient[classes]], gradient, block.hidden, adds=True)
            if hidden_gradient is not None:
                layer.hidden_gradient(hidden_gradient[part], gradient, adds=True)
    return LossAndGradients(torch.cat(losses), (), hidden_gradient, weight_gradient, bias_gradient)


class _Slab(NamedTuple):
    """A range of classes, and the matrix products with their vectors."""

    classes: slice
    layer: LayerProducts


class _Block:
    """A block of rows, whose scores are computed slab by slab in the same buffer."""

    def __init__(
        self,
        memory: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        numbers: Sequence[float],
    ) -> None:
        self.hidden = hidden
        self._memory, self._target = memory, target
        _, self._z_loss, self._softcap, self._temperature = numbers
        place = target.unsqueeze(-1)
        exact = kernels.products.scores("auto", hidden, weight, bias, place)
        self._target_scores = exact.squeeze(-1)
        self._at_target, self._slope = shaped(self._target_scores, self._softcap, self._temperature)
        self._lse = torch.full_like(self._target_scores, -torch.inf)
        self._empty = torch.zeros_like(target, dtype=torch.bool)
        self._held: _Slab | None = None

    def loss(self, slabs: list[_Slab], weights: Tensor | None) -> Tensor:
        """The loss of each row, from all slabs; the scores of the last slab stay in the buffer."""
        for slab in slabs:
            scores = self._scores(slab)
            inside, local = self._targets_in(slab.classes)
            local = torch.where(inside, local, 0)
            # The kernel replaces the score of the target by `exact`. If the target is in another
            # slab, class 0 stands in for it, with its own score.
            exact = torch.where(inside, self._target_scores, scores[:, 0].float())
            _, lse, *_ = kernels.softmax_rows.forward_(
                "auto", scores, local, exact, None, None, 0.0, 0.0,
                self._softcap, self._temperature, False,
            )  # fmt: skip
            self._lse = torch.logaddexp(self._lse, lse)
        gap = self._lse - self._at_target
        gap = gap if weights is None else gap * weights
        losses = gap + self._z_loss * self._lse.square()
        # Fully masked rows have infinite loss and zero gradient.
        self._empty = self._lse == -torch.inf
        self._lse.masked_fill_(self._empty, 0.0)
        return losses.masked_fill(self._empty, torch.inf)

    def gradient(self, slab: _Slab, row_scale: Tensor, weights: Tensor | None) -> Tensor:
        """The gradient of a slab's scores, in place in the buffer."""
        scores = self._scores(slab)
        self._held = None
        row_scale = row_scale.masked_fill(self._empty, 0.0)
        pull = row_scale if weights is None else row_scale * weights
        push = pull + row_scale * (2.0 * self._z_loss) * self._lse
        below_one = torch.expm1(self._at_target - self._lse)
        true = (push * below_one + (push - pull)) * self._slope
        inside, local = self._targets_in(slab.classes)
        local = torch.where(inside, local, -1)
        kernels.softmax_rows.gradient_(
            "auto", scores, local, true, self._lse, push, self._softcap, self._temperature
        )
        return scores

    def _targets_in(self, classes: slice) -> tuple[Tensor, Tensor]:
        """Which targets are among these classes, and all targets relative to the first of them."""
        inside = (self._target >= classes.start) & (self._target < classes.stop)
        return inside, self._target - classes.start

    def _scores(self, slab: _Slab) -> Tensor:
        memory = self.memory_of(slab)
        if self._held is slab:
            return slab.layer.scores_in(memory)
        self._held = slab
        return slab.layer.scores_into(memory, self.hidden)

    def memory_of(self, slab: _Slab) -> Tensor:
        """The part of the buffer that holds a slab's scores or their gradient."""
        rows, columns = self.hidden.shape[0], slab.layer.stride
        return self._memory[: rows * columns].view(rows, columns)
