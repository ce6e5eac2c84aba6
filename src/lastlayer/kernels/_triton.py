"""Shared by the Triton kernels: sizes, small functions, and the first stage of maps on wide rows.

The first stage reads all scores once and stores the largest score of each block of a row, its
*peak*. From the peaks the second stage finds the few blocks that it has to read again. The first
stage also writes the zeros of a sparse result. No program waits for another, so it runs at memory
bandwidth for any shape.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels import _launch
from lastlayer.kernels._launch import kernel
from lastlayer.kernels.rng import SERIES, SQRT_2

# Maximum number of peaks per row, which the second stage holds in registers.
MAX_PEAKS = 2048
# Tuned on an H200: blocks of short rows are narrower, so that fewer scores are read again.
NARROWEST_BLOCK, USUAL_BLOCK, USUAL_PEAKS = 16, 64, 128
SCORES_A_PROGRAM = 2048
INTERPRETED = tl.constexpr(_launch.INTERPRETED)
LOG2E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)
_WORD = tl.constexpr(0xFFFFFFFF)
_SERIES = tl.constexpr(SERIES)
_SQRT_2 = tl.constexpr(SQRT_2)
_STEP = tl.constexpr(2.0**-53)
# Kinds of labels: integers or bools; floats; bits; lists, with a bit for each listed class; all 0;
# all the same.
HARD, SOFT, BITS, LISTED, NONE, SMOOTHED = (tl.constexpr(kind) for kind in range(6))
# With fewer programs than this, rows are cut into parts.
ENOUGH_PROGRAMS = 1024
# Up to this many ids are sorted by comparing all pairs.
MOST_COMPARED = 1 << 14


def cdiv(n: int, size: int) -> int:
    """``ceil(n / size)``; Triton's own function takes microseconds per call."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


def tile_width(n: int, widest: int, narrowest: int = 16) -> int:
    """The width of a tile: a power of two, at least ``n`` unless that exceeds ``widest``."""
    return min(widest, max(narrowest, next_power_of_2(n)))


def in_rows(matrix: Tensor) -> Tensor:
    """``matrix``, or a contiguous copy of it if its rows are not contiguous."""
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix with contiguous rows; a view is avoided, since it costs host time."""
    return in_rows(tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1]))


def labels_of(target: Tensor) -> tuple[int, Tensor]:
    """The kind of dense labels, and the labels with contiguous rows."""
    target = in_rows(target)
    kind = SOFT if target.is_floating_point() else HARD
    return kind.value, target.view(torch.uint8) if target.dtype == torch.bool else target


def mask_of(mask: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A mask as uint8 and its strides: an expanded mask is read without a copy."""
    if mask is None:
        return None, 0, 0
    return mask.view(torch.uint8), mask.stride(0), mask.stride(1)


def row_parts(tiles: int, n: int, width: int) -> tuple[int, int]:
    """How rows are cut into parts: scores per part, and parts per row, for ``tiles`` programs."""
    blocks = cdiv(n, width)
    parts = max(1, min(cdiv(ENOUGH_PROGRAMS, tiles), blocks // 4, 1024))
    span = cdiv(blocks, parts) * width
    return span, max(1, cdiv(n, span)) if span else 1


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU, each of which runs at least one program."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def sort_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same as the reference; torch's radix sort takes a dozen launches."""
    n = ids.shape[0]
    if n > MOST_COMPARED or not n:
        return torch.sort(ids, stable=True)
    ids, ordered = ids.contiguous(), torch.empty(n, device=ids.device, dtype=ids.dtype)
    order = torch.empty(n, device=ids.device, dtype=torch.int64)
    _count_before[(cdiv(n, 32),)](
        ids, ordered, order, n, ROWS=32, OTHERS=256, LARGEST=torch.iinfo(ids.dtype).max,
        num_warps=8,
    )  # fmt: skip
    return ordered, order


@kernel(do_not_specialize=["n"])
def _count_before(
    ids, ordered, order, n, ROWS: tl.constexpr, OTHERS: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """The place of an id is the number of smaller ids, and of equal ones with a smaller index.

    Ids are smaller than ``LARGEST``.
    """
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(ids + at, mask=at < n, other=0)
    before = tl.zeros((ROWS, OTHERS), dtype=tl.int32)
    for first in range(0, n, OTHERS):
        other = first + tl.arange(0, OTHERS)
        theirs = tl.load(ids + other, mask=other < n, other=LARGEST)
        tied = (other[None, :] < at[:, None]).to(ids.dtype.element_ty)
        before += (theirs[None, :] < own[:, None] + tied).to(tl.int32)
    place = tl.sum(before, 1)
    tl.store(ordered + place, own, mask=at < n)
    tl.store(order + place, at.to(tl.int64), mask=at < n)


def mean_of_losses(
    losses: Tensor, losses_at: int, weights: Tensor | None, loss: Tensor, share: Tensor,
    share_at: int, n: int,
) -> None:  # fmt: skip
    """Computes the mean of ``n`` losses, and 1 over the sum of their weights, in one launch.

    The mean is written to ``loss[0]``, the factor to ``share[share_at]``. Losses are read from
    ``losses_at`` on. A weight of 0 ignores a loss, even if it is NaN.
    """
    block = tile_width(n, 4096, 128)
    _mean[(1,)](
        losses, losses_at, weights, loss, share, share_at, n, BLOCK=block,
        WEIGHTED=weights is not None, num_warps=block // 128,
    )  # fmt: skip


@kernel(do_not_specialize=["losses_at", "share_at", "n"])
def _mean(
    losses, losses_at, weights, loss, share, share_at, n,
    BLOCK: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    losses += losses_at
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    size = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        place = first + tl.arange(0, BLOCK)
        value = tl.load(losses + place, mask=place < n, other=0.0)
        if WEIGHTED:
            weight = tl.load(weights + place, mask=place < n, other=0).to(tl.float32)
            value = tl.where(weight == 0.0, 0.0, value * weight)
            size += weight
        total += value
    counted = tl.sum(size, 0) if WEIGHTED else n.to(tl.float32)
    one = tl.where(counted == 0.0, 0.0, 1.0 / counted)
    tl.store(loss, tl.sum(total, 0) * one)
    tl.store(share + share_at, one)


@triton.jit
def load_rows(base, row, row_stride, step, step_stride, rows_there, steps_there):
    """Columns ``step`` of rows ``row`` of a matrix, (rows, steps); 0 outside of the matrix."""
    place = base + row[:, None] * row_stride + step[None, :] * step_stride
    return tl.load(place, mask=rows_there[:, None] & steps_there[None, :], other=0.0)


@triton.jit
def dot_rows(
    state, state_step, base, row, row_stride, step_stride, rows_there, depth,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Dot products of one vector with rows of a matrix, (rows,); 0 for rows that do not exist."""
    sums = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        step = first + tl.arange(0, DEPTH)
        inside = step < depth
        numbers = tl.load(state + step * state_step, mask=inside, other=0.0).to(tl.float32)
        vectors = load_rows(base, row, row_stride, step, step_stride, rows_there, inside)
        sums += vectors.to(tl.float32) * numbers[None, :]
    return tl.sum(sums, 1)


@triton.jit
def load_labelled(
    scores, labels, mask, row, column, inside, stride, label_stride, mask_row, mask_column,
    smoothing, KIND: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores, labels (bool if all are 0 or 1), which classes to keep, and which are listed.

    Masked classes are not kept; listed classes are not either, since the list has their labels.
    """
    value = tl.load(scores + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    keep = inside
    if MASKED:
        place = row * mask_row + column * mask_column
        keep = keep & (tl.load(mask + place, mask=inside, other=0) != 0)
    listed = ~inside
    if KIND == NONE:
        label = inside & (column < 0)
    elif KIND == SMOOTHED:
        # A score of -inf is padding, not a class.
        label = tl.where(value == -float("inf"), 0.0, smoothing)
    elif KIND == HARD:
        label = tl.load(labels + row * label_stride + column, mask=inside, other=0) != 0
    elif KIND == SOFT:
        label = tl.load(labels + row * label_stride + column, mask=inside, other=0.0)
        label = label.to(tl.float32)
    else:
        word = tl.load(labels + row * label_stride + (column >> 5), mask=inside, other=0)
        label = ((word >> (column & 31)) & 1) != 0
        if KIND == LISTED:
            listed = label
            keep = keep & ~listed
            label = value * 0.0 + smoothing
    return value, label, keep, listed


@triton.jit
def tanh(x):
    """The tanh, from exp(-2|x|), which cannot overflow."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def approximate_log2(x):
    """log2 in one instruction instead of almost thirty.

    Its error is 2^-22: absolute from 0.5 to 2, relative elsewhere. A subnormal x counts as 0.
    """
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def reciprocal(x):
    """``1 / x`` within a unit in the last place, in one instruction; infinite for a subnormal x."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log1p(x):
    """log(1 + x) for x from 0 to 1; a factor corrects the rounding of 1 + x."""
    grown = 1.0 + x
    return tl.where(grown == 1.0, x, tl.log(grown) * (x / tl.where(grown == 1.0, 1.0, grown - 1.0)))


@triton.jit
def expm1(x):
    """exp(x) - 1 for x up to 0.1, by a series near 0, where exp(x) - 1 would cancel."""
    near = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.008333334))))
    return tl.where(x > -0.1, near, tl.exp(x) - 1.0)


@triton.jit
def philox(block, seed, step):
    """Four random 32-bit words per block, see rng/README.md; all three arguments are int64."""
    block, seed, step = block.to(tl.uint64), seed.to(tl.uint64), step.to(tl.uint64)
    a, b = block & _WORD, block >> 32
    c, d = (step & _WORD) + 0 * block, (step >> 32) + 0 * block
    k, m = seed & _WORD, seed >> 32
    for _ in tl.static_range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ k, right & _WORD, (left >> 32) ^ d ^ m, left & _WORD
        k, m = (k + 0x9E3779B9) & _WORD, (m + 0xBB67AE85) & _WORD
    return a, b, c, d


@triton.jit
def rank_of_bits(upper, lower, n_classes, OCTAVES: tl.constexpr):
    """The rank that two words draw log-uniformly, see rng/reference.py.

    Kernels that call it are launched with ``enable_fp_fusion=False``.
    """
    exponent = ((upper << 21) | (lower >> 11)).to(tl.float64) * _STEP * OCTAVES
    # The exponent is not negative, so truncation rounds down.
    octave = exponent.to(tl.int64)
    place = exponent - octave.to(tl.float64) - 0.5
    power = tl.full(place.shape, _SERIES[0], tl.float64)
    for k in tl.static_range(1, 14):
        power = power * place + _SERIES[k]
    scale = tl.full(place.shape, 1, tl.int64) << octave
    rank = (power * _SQRT_2 * scale.to(tl.float64)).to(tl.int64) - 1
    return tl.minimum(tl.maximum(rank, 0), n_classes - 1)


@triton.jit
def share_of_rank(rank, OCTAVES: tl.constexpr):
    """The log-uniform probability of a rank, in float64."""
    return _log1p(1.0 / (rank + 1).to(tl.float64)) / (OCTAVES * LOG_2)


@triton.jit
def log_of_others(share):
    """log(1 - p), for a probability p."""
    return tl.where(share >= 1.0, -float("inf"), _log1p(tl.where(share >= 1.0, 0.0, -share)))


@triton.jit
def _log1p(part):
    """log(1 + x); a factor corrects the rounding of 1 + x."""
    above = 1.0 + part
    rounded = tl.where(above == 1.0, 1.0, above - 1.0)
    return tl.where(above == 1.0, part, tl.log(above) * (part / rounded))


@triton.jit
def alias_draw(table, upper, lower, live, BITS: tl.constexpr):
    """The class that two words (int64) draw from an alias table of 2^BITS columns."""
    column = upper >> (32 - BITS)
    entry = tl.load(table + column, mask=live, other=0)
    return tl.where(lower < (entry & 0xFFFFFFFF), column, entry >> 32)


@triton.jit
def log_of_other_weights(own, BITS: tl.constexpr):
    """log(1 - w / 2^BITS), computed without 2^BITS itself, since 2^63 exceeds int64."""
    return tl.log((((1 << BITS) - 1) - own).to(tl.float64) + 1.0) - BITS * LOG_2


def block_width(n: int) -> int:
    """Scores per block: a power of two with at most ``MAX_PEAKS`` blocks per row."""
    usual = min(USUAL_BLOCK, next_power_of_2(cdiv(n, USUAL_PEAKS)))
    return max(NARROWEST_BLOCK, usual, next_power_of_2(cdiv(n, MAX_PEAKS)))


def find_peaks(rows: Tensor, zeros: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """The largest score of each block, +inf if a score is NaN. Fills ``zeros`` with 0.

    If there is a ``bias``, it is added to the scores first.
    """
    n_rows, n = rows.shape
    width = block_width(n)
    n_blocks = cdiv(n, width)
    peaks = torch.empty(n_rows, n_blocks, device=rows.device, dtype=torch.float32)
    blocks = max(1, SCORES_A_PROGRAM // width)
    tiles = cdiv(n_blocks, blocks)
    _find_peaks[(n_rows * tiles,)](
        rows, bias, peaks if zeros is None else zeros, peaks, n, rows.stride(0), tiles, n_blocks,
        BLOCKS=blocks, WIDTH=width, ZEROS=zeros is not None, BIASED=bias is not None, num_warps=4,
    )  # fmt: skip
    return peaks


@kernel
def _find_peaks(
    rows, bias, zeros, peaks, n, stride, tiles, n_blocks,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    live = column < n
    scores = tl.load(rows + row * stride + column, mask=live, other=-float("inf"))
    if ZEROS:
        nothing = tl.zeros((BLOCKS, WIDTH), dtype=zeros.dtype.element_ty)
        tl.store(zeros + row * n + column, nothing, mask=live)
    scores = scores.to(tl.float32)
    if BIASED:
        scores += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    peak = row_max(scores, 1)
    tl.store(peaks + row * n_blocks + block, peak, mask=block < n_blocks)


@triton.jit
def peaks_of_row(
    scores, zeros, n, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, ZEROS: tl.constexpr
):  # fmt: skip
    """The peaks of up to ``BLOCKS`` blocks of a row, by one program. Fills ``zeros`` with 0."""
    column = tl.arange(0, BLOCKS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(scores + column, mask=column < n, other=-float("inf"))
    if ZEROS:
        nothing = tl.zeros((BLOCKS, WIDTH), dtype=zeros.dtype.element_ty)
        tl.store(zeros + column, nothing, mask=column < n)
    return row_max(values.to(tl.float32), 1)


@triton.jit
def row_max(values, AXIS: tl.constexpr):
    """The maximum, +inf if there is a NaN: both mean that the row has no probabilities."""
    if INTERPRETED:
        # The interpreter runs a custom reduction entry by entry.
        return tl.max(tl.where(values != values, float("inf"), values), AXIS)
    else:
        peak = tl.reduce(values, AXIS, _max_or_nan)
        return tl.where(peak != peak, float("inf"), peak)


@triton.jit
def _max_or_nan(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def choose_blocks(chosen, keep, BLOCKS: tl.constexpr):
    """Writes the indices of the blocks to keep, in order, and returns their number."""
    slot = tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(chosen + slot, tl.arange(0, BLOCKS), mask=keep)
    # Other threads of this program read the list afterwards.
    tl.debug_barrier()
    return tl.sum(keep.to(tl.int32), 0)


@triton.jit
def chosen_columns(chosen, first, count, n, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """The columns of the next ``GROUP`` chosen blocks, and which of them exist."""
    slot = first + tl.arange(0, GROUP)
    block = tl.load(chosen + slot, mask=slot < count, other=0).to(tl.int32)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return column, (slot < count)[:, None] & (column < n)
