"""Losses of rows of drawn classes on the CPU: a row stays in the cache between its passes.

:class:`OneTarget` has everything around the matrix products of a step where all rows share their
samples and have one target each. For small problems the time of a step is the time of its calls, so
it makes few calls and few tensors.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import accumulation_dtype, as_numpy, in_dtype
from lastlayer.kernels import _cpu
from lastlayer.kernels._cpu import as_array, by_rows, empty_array
from lastlayer.kernels._cpu_math import BLOCK, FAST, add_scaled, dot, exp, largest, log1p, multiply
from lastlayer.kernels.rng import GIVEN, LOG_UNIFORM, UNIFORM
from lastlayer.kernels.rng.draws import draw_range, log_prob_of
from lastlayer.kernels.sampled_rows import Draws

# The logit of a sampled class with a bias of -inf, where the samples that count are counted: it has
# no probability, but -inf would say that it was not sampled.
_MASKED = -1e38
# Arrays in the place of tensors that are None.
_DTYPES = torch.float32, torch.float64, torch.int64
_NONE = {dtype: as_numpy(torch.empty(0, dtype=dtype)) for dtype in _DTYPES}


def forward_(
    scores: Tensor, gradient: Tensor, first: Tensor, second: Tensor, columns: Tensor,
    offset: Tensor, ids: Tensor, target: Tensor, shift: Tensor | None, exact: Tensor | None,
    row_scale: Tensor | None, factor: float, n_exact: int, logistic: bool, drop_hits: bool,
    average: bool, adds: bool,
) -> None:  # fmt: skip
    dtype = accumulation_dtype(scores.dtype)
    n, m = scores.shape
    wide = in_dtype(scores.detach(), dtype).contiguous()
    rows = as_numpy(wide)
    if n:
        _sampled_rows(
            n, 2 * m, rows, _lists(as_array(offset, dtype)), _lists(as_array(ids)),
            as_array(target), _array(shift, dtype), _array(exact, dtype),
            _array(row_scale, dtype), as_numpy(first), as_numpy(second), factor, n_exact, logistic,
            drop_hits, average,
        )  # fmt: skip
    if row_scale is not None and gradient.data_ptr() != wide.data_ptr():
        gradient.copy_(wide)
    if row_scale is not None and columns.numel():
        columns = columns if adds else columns.zero_()
        columns[0] += wide.sum(0)


def _array(tensor: Tensor | None, dtype: torch.dtype) -> NDArray[Any]:
    """The memory of a tensor, or an empty array for None."""
    return _NONE[dtype] if tensor is None else as_array(tensor, dtype)


def _lists(values: NDArray[Any]) -> NDArray[Any]:
    """One list for all rows, or one for each, as a matrix."""
    return values if values.ndim == 2 else values.reshape(1, -1)


@by_rows
@njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")
def _sampled_rows(
    start, stop, scores, offset, ids, target, shift, exact, row_scale, first, second, factor,
    n_exact, logistic, drop_hits, average,
):  # fmt: skip
    m = scores.shape[1]
    real, lanes = scores.dtype.type, np.empty(BLOCK, scores.dtype)
    for row in range(start, stop):
        x = scores[row]
        added, named = offset[row if len(offset) > 1 else 0], ids[row if len(ids) > 1 else 0]
        for i in range(m):
            x[i] = x[i] * real(factor) + added[i]
        if drop_hits:
            for one in target[row]:
                for i in range(m):
                    x[i] = -np.inf if one >= 0 and named[i] == one else x[i]
        move = real(shift[row]) if len(shift) else real(0.0)
        if average:
            move -= real(math.log(max(1, _count(added, named, target[row], drop_hits, n_exact))))
        for i in range(n_exact, m):
            x[i] += move
        scale = real(row_scale[row] * factor) if len(row_scale) else real(0.0)
        if logistic:
            first[row], second[row] = _to_slopes(x, scale, len(row_scale) > 0)
            if scale == real(0.0) and len(row_scale):
                x[:] = real(0.0)
            continue
        peak = largest(x, lanes, -math.inf)
        origin = real(0.0) if peak == -math.inf else peak
        head, drawn, squares = _to_shares(x, n_exact, origin)
        total = head + drawn
        first[row] = origin + math.log(total) if total > 0.0 else -math.inf
        if math.isnan(total):
            first[row] = math.nan
        second[row] = drawn * drawn / squares if squares > 0.0 else 0.0
        if squares == 0.0 and drawn > 0.0:
            second[row] = 1.0
        if len(row_scale):
            everything = total + (math.exp(exact[row] - origin) if len(exact) else 0.0)
            if scale == real(0.0):
                x[:] = real(0.0)
            else:
                multiply(x, scale / real(everything) if everything != 0.0 else real(0.0))


@njit(nogil=True)
def _count(added, ids, target, drop_hits, n_exact):
    """How many of the drawn columns count."""
    count = 0
    if len(target) == 1:
        # Without an inner loop this becomes vector instructions.
        for i in range(n_exact, len(added)):
            count += (added[i] != -np.inf) & ((ids[i] != target[0]) | (not drop_hits))
        return count
    for i in range(n_exact, len(added)):
        hit = False
        if drop_hits:
            for one in target:
                hit |= ids[i] == one
        count += added[i] != -np.inf and not hit
    return count


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _to_slopes(x, scale, wanted):
    """Σ log(1 + e^x) and the sum of its slopes; these times ``scale`` in place where wanted."""
    zero, one = x.dtype.type(0.0), x.dtype.type(1.0)
    loss, total = 0.0, 0.0
    for i in range(len(x)):
        # e^-|x| does not overflow.
        small = exp(-abs(x[i]))
        loss += log1p(small) + (x[i] if x[i] > zero else zero)
        slope = (one if x[i] > zero else small) / (one + small)
        total += slope
        if wanted:
            x[i] = slope * scale
    return loss, total


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _to_shares(x, n_exact, origin):
    """In place; sums of the first columns and of the drawn ones, and of the latter's squares."""
    zero = x.dtype.type(0.0)
    for i in range(len(x)):
        x[i] = exp(x[i] - origin)
    head, drawn, squares = zero, zero, zero
    for i in range(n_exact):
        head += x[i]
    for i in range(n_exact, len(x)):
        drawn += x[i]
        squares += x[i] * x[i]
    return head, drawn, squares


class OneTarget:
    """A step of rows against samples that all share, with one target each, around its products.

    It has the interface of ``triton.OneTarget``. ``clean`` is hidden with 0 in rows without a
    target, ``vectors`` are those of the sampled classes. ``entries`` are the classes of samples and
    targets, -1 for none. ``numbers`` are the gradients of the scores of targets, ``(n, 1)``, and
    ``column_biases`` those of samples, summed over rows.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
        row_shift: Tensor | None, draws: Draws, factor: float, mean: bool, to_bias: bool,
        _chunk: int, upstream: Tensor | None, rule: tuple[bool, ...],
    ) -> None:  # fmt: skip
        (n, d), m, dtype = hidden.shape, draws.m, hidden.dtype
        self.columns, self.width, self._factor, self._rule = m, d, factor, rule
        self._weight, self._target = as_array(weight), as_array(target)
        # Not contiguous() of the counter, which is written to.
        self._first, self._counts = as_numpy(draws.first), draws.counts
        kind, number = draws.kind, 0.0
        log_expected, table = (draws.second, None) if kind == GIVEN else (None, draws.second)
        if kind == UNIFORM:
            number = math.log(draws.n_classes)
        elif kind == LOG_UNIFORM:
            number = math.log2(draws.n_classes + 1)
        elif table is not None:
            number = float(table.shape[0].bit_length() - 1)
        vectors, self.vectors = empty_array((m, d), dtype)
        self._entries, self.entries = empty_array((m + n,), torch.int64)
        self._ess, self.ess = empty_array((n,), dtype)
        self._slopes, self.numbers = empty_array((n, 1), dtype)
        self.column_biases = torch.empty(m, dtype=dtype) if to_bias else None
        # What is added to the logits of each sample. Of each row: the logit of its target, what is
        # added to the logits of its samples, its factor, its loss.
        self._offset = _cpu.new_array(m, vectors.dtype)
        self._of_rows = _cpu.new_array((4, n), vectors.dtype)
        counted = _number_of_targets(self._target)
        self.clean = hidden if counted == n else torch.where(target >= 0, hidden, 0.0)
        _start(
            m + n, d, as_array(self.clean), self._weight, _array(bias, dtype), self._target,
            _array(row_shift, dtype), self._first, _array(table, torch.int64),
            _array(draws.third, torch.int64), _array(log_expected, dtype),
            _array(draws.of_targets, dtype).reshape(-1), _array(draws.shift, dtype),
            _array(upstream, dtype), kind, number, draws.n_classes, draws.less, draws.corrects,
            draws.targets, factor, 1.0 / max(1, counted) if mean else 1.0,
            _MASKED if rule[3] else -math.inf, vectors, self._entries, self._offset, self._of_rows,
        )  # fmt: skip

    def rows(
        self, scores: Tensor, gradient: Tensor, row0: int, push: Tensor | None, n_exact: int,
        _mean: bool, wanted: bool,
    ) -> None:  # fmt: skip
        """Scores of some rows to their gradient, which takes their place, and losses."""
        logistic, with_target, drop_hits, average = self._rule
        n, m = scores.shape
        part = slice(row0, row0 + n)
        logits, shift, scale, losses = self._of_rows[:, part]
        ess = self._ess[part]
        _sampled_rows(
            n, 2 * m, as_numpy(scores), self._offset.reshape(1, m), self._entries[:m].reshape(1, m),
            self._target[part], shift, logits if with_target and not logistic else logits[:0],
            scale if wanted else logits[:0], losses, ess, self._factor, n_exact, logistic,
            drop_hits, average,
        )  # fmt: skip
        _end_rows(
            n, 8, logits, scale, losses, ess, self._slopes[part],
            logits[:0] if push is None else as_numpy(push)[part], self._factor, logistic,
            with_target,
        )  # fmt: skip
        if self.column_biases is not None and wanted:
            if row0:
                self.column_biases += gradient.sum(0)
            else:
                torch.sum(gradient, 0, out=self.column_biases)

    def losses(self) -> Tensor:
        """Of each row."""
        return torch.from_numpy(self._of_rows[3])

    def total(self, loss: Tensor | None, of_hidden: Tensor | None, _bias: bool) -> None:
        """Adds up the losses of all rows, and adds the part of the targets to ``of_hidden``.

        The RNG counter advances, since all samples are drawn.
        """
        if loss is not None:
            _add_up(self._of_rows[3], as_numpy(loss))
        if self._counts:
            self._first[1] += 1
        if of_hidden is not None:
            _add_targets(
                len(self._target), self.width, self._slopes, self._target, self._weight,
                as_numpy(of_hidden),
            )  # fmt: skip


@njit(nogil=True, cache=True)
def _number_of_targets(target):
    count = 0
    for row in range(len(target)):
        count += target[row, 0] >= 0
    return count


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _start(
    start, stop, hidden, weight, bias, target, row_shift, first, second, third, log_expected,
    of_targets, shift, upstream, kind, number, n_classes, less, corrects, targets, factor, share,
    lowest, vectors, entries, offset, of_rows,
):  # fmt: skip
    """Draws samples, with the vector and offset of each; prepares the rows from their targets."""
    m = len(offset)
    last = min(stop, m)
    if kind == GIVEN:
        entries[start:last] = first[start:last]
    else:
        draw_range(start, last, kind, number, n_classes, first, second, entries)
    for i in range(start, last):
        one = entries[i]
        vectors[i] = weight[one]
        offset[i] = -less
        if kind == GIVEN:
            offset[i] -= log_expected[i]
        elif corrects:
            offset[i] -= log_prob_of(one, kind, number, n_classes, third, False)
        if len(bias):
            offset[i] += max(bias[one] * factor, lowest)
    for i in range(max(start, m), stop):
        row = i - m
        one, logit, move = target[row, 0], 0.0, 0.0
        entries[i] = one
        if one >= 0:
            logit = np.float64(dot(hidden[row], weight[one]))
            if len(bias):
                logit += bias[one]
        logit *= factor
        if len(of_targets):
            logit -= of_targets[row]
        elif targets == 1 and one >= 0:
            logit -= log_prob_of(one, kind, number, n_classes, third, False) + less
        elif targets == 2 and one >= 0:
            move += log_prob_of(one, kind, number, n_classes, third, True)
        if len(shift):
            move += shift[row]
        if len(row_shift):
            logit += row_shift[row]
            move += row_shift[row]
        of_rows[0, row], of_rows[1, row] = logit, move
        of_rows[2, row] = 0.0 if one < 0 else share * (upstream[row] if len(upstream) else 1.0)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _end_rows(
    start, stop, logits, scales, losses, ess, slopes, push, factor, logistic, with_target
):  # fmt: skip
    """The loss of each row, and the gradient of its target's score."""
    for row in range(start, stop):
        logit, scale, rest = np.float64(logits[row]), scales[row], np.float64(losses[row])
        # Log-odds of the samples against the target: computing 1 - p would cancel.
        odds = np.inf if logit == -np.inf else rest - logit
        x = -logit if logistic else odds
        small = math.exp(-abs(x))
        loss, slope = odds, 1.0
        if logistic or with_target:
            loss = (x if x > 0.0 else 0.0) + math.log1p(small) + (rest if logistic else 0.0)
            slope = (small if x < 0.0 else 1.0) / (1.0 + small)
        losses[row] = loss * scale if scale != 0.0 else 0.0
        slopes[row, 0] = -slope * scale * factor if scale != 0.0 else 0.0
        if len(push):
            push[row] = (ess[row] - slope) * scale if scale != 0.0 else 0.0
        if logistic:
            ess[row] = 0.0


@by_rows
@njit(nogil=True, cache=True)
def _add_targets(start, stop, slopes, target, weight, of_hidden):
    for row in range(start, stop):
        if target[row, 0] >= 0:
            add_scaled(of_hidden[row], slopes[row, 0], weight[target[row, 0]])


@njit(nogil=True, cache=True)
def _add_up(losses, loss):
    total = 0.0
    for each in losses:
        total += each
    loss[()] = total
