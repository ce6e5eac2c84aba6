"""Best classes, samples and log-probabilities on CUDA, from peaks and levels of blocks of classes.

One streaming pass computes for each block of a row its largest score, the *peak*, and the logsumexp
of its scores, the *level*. The k blocks with the largest peaks contain the k best classes, the
levels give the normaliser, and a class is drawn by drawing a block and then a class in it. After
the first pass only a few blocks of each row are read again. :class:`Blocks` has the single steps,
for callers that hold only a slab of the classes in memory. README.md has the proof.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer._torch import in_dtype
from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import (
    LOG2E,
    cdiv,
    in_rows,
    next_power_of_2,
    row_max,
    tanh,
    tile_width,
)
from lastlayer.kernels.prediction import MOST_BEST

# Least classes per block, and most blocks per row: all are handled by one program.
NARROWEST, MOST_BLOCKS = 64, 8192
SCORES_A_PROGRAM = 2048
# Rows with up to this many classes are searched by one program each, without blocks.
WIDEST_WHOLE = 4096
# Draws of one row per program.
DRAWS = 16
WIDEST_TILE = 4096
_LOWEST = tl.constexpr(-(2**31))


def best(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, k: int,
    normalised: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Same as the reference, for k up to ``MOST_BEST``."""
    if k > MOST_BEST:
        raise ValueError(f"k: expected at most {MOST_BEST} with impl='triton', got {k}")
    scores, shape = in_rows(in_dtype(scores, torch.float32)), (softcap, temperature)
    n, n_classes = scores.shape
    if k and n_classes <= WIDEST_WHOLE:
        whole = Blocks(None, None, n, n_classes, max(16, next_power_of_2(n_classes)))
        total = torch.empty(n, device=scores.device, dtype=torch.float32)
        found = whole.best(scores, bias, *shape, total, None, k, normalised=normalised)
        return *found, total
    blocks = Blocks.empty(scores, *scores.shape, peaks=k > 0, levels=normalised)
    blocks.read_(scores, bias, *shape)
    total, chosen = blocks.choose(k)
    values, classes = blocks.best(scores, bias, *shape, total, chosen, k, normalised=normalised)
    return values, classes, total


def draw(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float, uniform: Tensor
) -> Tensor:
    scores = in_rows(in_dtype(scores, torch.float32))
    blocks = Blocks.empty(scores, *scores.shape, peaks=False, levels=True)
    blocks.read_(scores, bias, softcap, temperature)
    chosen, rest = blocks.draw(uniform)
    return blocks.draw_inside(scores, bias, softcap, temperature, chosen, rest)


class Blocks(NamedTuple):
    """Peaks and levels of all blocks of classes of some rows."""

    peaks: Tensor | None
    """float32 ``(n, blocks)``; +inf for a block with a NaN."""
    levels: Tensor | None
    """float32 ``(n, blocks)``; NaN for a block with a NaN or +inf."""
    n_rows: int
    n_classes: int
    width: int
    """Classes per block."""

    @classmethod
    def empty(
        cls, like: Tensor, n_rows: int, n_classes: int, *, peaks: bool, levels: bool
    ) -> "Blocks":
        """Uninitialised, on the device of ``like``; :meth:`read_` fills them."""
        width = block_width(n_classes)
        shape = n_rows, cdiv(n_classes, width)
        made = torch.empty(peaks + levels, *shape, device=like.device, dtype=torch.float32)
        of_levels = made[-1] if levels else None
        return cls(made[0] if peaks else None, of_levels, n_rows, n_classes, width)

    def read_(
        self, scores: Tensor, bias: Tensor | None, softcap: float, temperature: float,
        first: int = 0,
    ) -> None:  # fmt: skip
        """Computes peaks and levels from the scores of the classes from ``first`` on.

        ``first`` is a multiple of the width. Scores are float32 with contiguous rows; ``bias`` is
        the bias of these classes.
        """
        n, some = scores.shape
        if not scores.numel():
            return
        line, place = cdiv(self.n_classes, self.width), first // self.width
        here = cdiv(some, self.width)
        blocks = max(1, SCORES_A_PROGRAM // self.width)
        tiles = cdiv(here, blocks)
        _read_blocks[(n * tiles,)](
            scores, bias, self.peaks, self.levels, some, scores.stride(0), line, place, here,
            tiles, softcap, 1.0 / temperature, BLOCKS=blocks, WIDTH=self.width,
            BIASED=bias is not None, CAPPED=softcap != 0.0, PEAKS=self.peaks is not None,
            LEVELS=self.levels is not None, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip

    def choose(self, k: int) -> tuple[Tensor, Tensor]:
        """The logsumexp ``(n,)``, 0 without levels; and the k blocks with the largest peaks."""
        some = self.peaks if self.levels is None else self.levels
        made = torch.empty if some is not None and some.numel() else torch.zeros
        device = None if some is None else some.device
        n_blocks = cdiv(self.n_classes, self.width)
        total = made(self.n_rows, device=device, dtype=torch.float32)
        chosen = made(self.n_rows, min(k, n_blocks), device=device, dtype=torch.int32)
        if some is not None and some.numel():
            width = max(16, next_power_of_2(n_blocks))
            _choose_blocks[(self.n_rows,)](
                self.peaks, self.levels, total, chosen, n_blocks, chosen.shape[1], WIDTH=width,
                PEAKS=k > 0, LEVELS=self.levels is not None,
                num_warps=max(1, min(8, width // 512)), enable_fp_fusion=True,
            )  # fmt: skip
        return total, chosen

    def best(
        self, scores: Tensor, bias: Tensor | None, softcap: float, temperature: float,
        total: Tensor, chosen: Tensor | None, k: int, *, normalised: bool, compact: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Values and classes ``(n, k)`` in the chosen blocks, the best first.

        Scores are of all classes or, with ``compact``, of the chosen blocks only, concatenated.
        If ``chosen`` is None the whole row is one block, and the logsumexp is written to ``total``.
        """
        n, most = scores.shape[0], 1 if chosen is None else chosen.shape[1]
        values = torch.empty(n, k, device=scores.device, dtype=torch.float32)
        classes = torch.empty(n, k, device=scores.device, dtype=torch.int64)
        if values.numel():
            blocks = next_power_of_2(most)
            # The best classes before they are sorted.
            found = torch.empty(n, k, device=scores.device, dtype=torch.int32)
            _best_of_blocks[(n,)](
                scores, bias, total, chosen, values, classes, found, self.n_classes,
                scores.stride(0), most, k, softcap, 1.0 / temperature, BLOCKS=blocks,
                WIDTH=self.width, BEST=max(16, next_power_of_2(k)), BIASED=bias is not None,
                CAPPED=softcap != 0.0, NORMALISED=normalised, COMPACT=compact,
                WHOLE=chosen is None, num_warps=max(1, min(16, blocks * self.width // 512)),
                enable_fp_fusion=True,
            )  # fmt: skip
        return values, classes

    def draw(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """One block per number, ``(n, m)``, or -1; and the position in the block, in [0, 1]."""
        n, m = uniform.shape
        chosen = torch.empty(n, m, device=uniform.device, dtype=torch.int32)
        rest = torch.empty(n, m, device=uniform.device, dtype=torch.float64)
        if chosen.numel():
            n_blocks = cdiv(self.n_classes, self.width)
            width = max(16, next_power_of_2(n_blocks))
            _draw_blocks[(n, cdiv(m, DRAWS))](
                self.levels, uniform.contiguous(), chosen, rest, n_blocks, m, WIDTH=width,
                DRAWS=DRAWS,
                num_warps=max(1, min(16, width // 256)), enable_fp_fusion=True,
            )  # fmt: skip
        return chosen, rest

    def draw_inside(
        self, scores: Tensor, bias: Tensor | None, softcap: float, temperature: float,
        chosen: Tensor, rest: Tensor, *, compact: bool = False,
    ) -> Tensor:  # fmt: skip
        """Classes ``(n, m)`` in the blocks from :meth:`draw`; scores as in :meth:`best`."""
        classes = torch.empty(chosen.shape, device=scores.device, dtype=torch.int64)
        n, m = chosen.shape
        if classes.numel():
            _draw_in_block[(n * m,)](
                scores, bias, chosen, rest, classes, self.n_classes, scores.stride(0), m, softcap,
                1.0 / temperature, WIDTH=self.width, BIASED=bias is not None,
                CAPPED=softcap != 0.0, COMPACT=compact, num_warps=1, enable_fp_fusion=True,
            )  # fmt: skip
        return classes


def block_width(n_classes: int) -> int:
    """Classes per block: a power of two that gives at most ``MOST_BLOCKS`` blocks."""
    return max(NARROWEST, next_power_of_2(cdiv(n_classes, MOST_BLOCKS)))


@triton.jit
def _shaped(
    scores, bias, column, live, softcap, inverse_temperature, BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Scores after bias, soft cap and temperature; -inf where ``live`` is false."""
    if BIASED:
        scores += tl.load(bias + column, mask=live, other=0.0).to(tl.float32)
    if CAPPED:
        bent = tanh(scores / softcap) * softcap
        # A cap must not bring back a class that a bias of -inf masks.
        scores = tl.where(scores == -float("inf"), scores, bent)
    return tl.where(live, scores * inverse_temperature, -float("inf"))


@kernel
def _read_blocks(
    scores, bias, peaks, levels, n, stride, line, place, n_blocks, tiles, softcap,
    inverse_temperature, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr,
    CAPPED: tl.constexpr, PEAKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block = (tl.program_id(0) % tiles) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    live = column < n
    values = tl.load(scores + row * stride + column, mask=live, other=0.0)
    values = _shaped(values, bias, column, live, softcap, inverse_temperature, BIASED, CAPPED)
    peak = row_max(values, 1)
    at = row * line + place + block
    if PEAKS:
        tl.store(peaks + at, peak, mask=block < n_blocks)
    if LEVELS:
        origin = tl.where(peak == -float("inf"), 0.0, peak)
        # A NaN or +inf makes the sum NaN.
        total = tl.sum(tl.exp2((values - origin[:, None]) * LOG2E), 1)
        tl.store(levels + at, origin + tl.log(total), mask=block < n_blocks)


@triton.jit
def _order_of(values):
    """Integers that sort like the values. NaN of either sign is +inf, and -0.0 is 0.0."""
    known = tl.where(values == values, values, float("inf")) + 0.0
    bits = known.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _largest(order, ids, live, k):
    """Mask of the k largest live entries; among ties those with the lowest ids."""
    order = tl.where(live, order, _LOWEST)
    # The k-th largest number, bit by bit from the sign bit down.
    edge = tl.full((), _LOWEST, tl.int32)
    step = tl.full((), 1 << 31, tl.int64)
    for _ in range(32):
        higher = (edge.to(tl.int64) + step).to(tl.int32)
        edge = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= k, higher, edge)
        step = step >> 1
    above = order > edge
    equal = (order == edge) & live
    left = k - tl.sum(above.to(tl.int32), 0)
    last = tl.full((), 0x7FFFFFFF, tl.int32)
    if tl.sum(equal.to(tl.int32), 0) > left:
        # The largest id such that fewer than ``left`` tied ids are below it.
        last = last * 0
        step = tl.full((), 1 << 30, tl.int64)
        for _ in range(31):
            higher = (last.to(tl.int64) + step).to(tl.int32)
            fewer = tl.sum((equal & (ids < higher)).to(tl.int32), 0) < left
            last = tl.where(fewer, higher, last)
            step = step >> 1
    return above | (equal & (ids <= last))


@kernel
def _choose_blocks(
    peaks, levels, total, chosen, n_blocks, k, WIDTH: tl.constexpr, PEAKS: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    live = block < n_blocks
    log_sum = 0.0
    if LEVELS:
        level = tl.load(levels + row * n_blocks + block, mask=live, other=-float("inf"))
        top = tl.max(level, 0)
        origin = tl.where(top == -float("inf"), 0.0, top)
        log_sum = origin + tl.log(tl.sum(tl.exp2((level - origin) * LOG2E), 0))
    tl.store(total + row, log_sum)
    if PEAKS:
        peak = tl.load(peaks + row * n_blocks + block, mask=live, other=-float("inf"))
        if LEVELS:
            # Unequal scores may have equal rounded log-probabilities, so compare those.
            peak -= tl.where(log_sum == -float("inf"), 0.0, log_sum)
        taken = _largest(_order_of(peak), block, live, k).to(tl.int32)
        slot = tl.cumsum(taken, 0) - 1
        tl.store(chosen + row * k + slot, block, mask=taken > 0)


@kernel
def _best_of_blocks(
    scores, bias, total, chosen, values, classes, found, n, stride, most, k, softcap,
    inverse_temperature, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, BEST: tl.constexpr,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, NORMALISED: tl.constexpr, COMPACT: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCKS * WIDTH)
    if WHOLE:
        column = place
        live = column < n
    else:
        slot = place // WIDTH
        block = tl.load(chosen + row * most + slot, mask=slot < most, other=0)
        column = block * WIDTH + place % WIDTH
        live = (slot < most) & (column < n)
    if COMPACT:
        value = tl.load(scores + row * stride + place, mask=live, other=0.0)
    else:
        value = tl.load(scores + row * stride + column, mask=live, other=0.0)
    value = _shaped(value, bias, column, live, softcap, inverse_temperature, BIASED, CAPPED)
    log_sum = 0.0
    if WHOLE:
        if NORMALISED:
            top = tl.max(value, 0)
            origin = tl.where(top == -float("inf"), 0.0, top)
            log_sum = origin + tl.log(tl.sum(tl.exp2((value - origin) * LOG2E), 0))
        tl.store(total + row, log_sum)
    elif NORMALISED:
        log_sum = tl.load(total + row)
    if NORMALISED:
        value -= tl.where(log_sum == -float("inf"), 0.0, log_sum)
    taken = _largest(_order_of(value), column, live, k).to(tl.int32)
    into = row * k + tl.cumsum(taken, 0) - 1
    tl.store(values + into, value, mask=taken > 0)
    tl.store(found + into, column, mask=taken > 0)
    # Other threads of this program read the values next.
    tl.debug_barrier()
    mine = tl.arange(0, BEST)
    kept = mine < k
    value = tl.load(values + row * k + mine, mask=kept, other=0.0)
    column = tl.load(found + row * k + mine, mask=kept, other=0)
    order = tl.where(kept, _order_of(value), _LOWEST)
    ahead = (order[None, :] > order[:, None]) | (
        (order[None, :] == order[:, None]) & (column[None, :] < column[:, None])
    )
    rank = tl.sum((ahead & kept[None, :]).to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(values + row * k + rank, value, mask=kept)
    tl.store(classes + row * k + rank, column.to(tl.int64), mask=kept)


@triton.jit
def _place_of(share, reached, limit, WIDTH: tl.constexpr):
    """The first place where the cumulative share exceeds the limit.

    A place whose share is 0 is never returned, however sums are rounded.
    """
    place = tl.arange(0, WIDTH)
    there = share > 0.0
    at = tl.min(tl.where(there & (reached > limit), place, WIDTH), 0)
    return tl.where(at == WIDTH, tl.max(tl.where(there, place, 0), 0), at)


@kernel
def _draw_blocks(
    levels, uniform, chosen, rest, n_blocks, m, WIDTH: tl.constexpr, DRAWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    level = tl.load(levels + row * n_blocks + block, mask=block < n_blocks, other=-float("inf"))
    top = tl.max(level, 0)
    origin = tl.where(top == -float("inf"), 0.0, top)
    # In float64, so that many small blocks keep their shares.
    share = tl.exp(level.to(tl.float64) - origin.to(tl.float64))
    total = tl.sum(share, 0)
    reached = tl.cumsum(share, 0)
    first = tl.program_id(1) * DRAWS
    for i in range(first, tl.minimum(first + DRAWS, m)):
        limit = tl.load(uniform + row * m + i) * total
        at = _place_of(share, reached, limit, WIDTH)
        own = tl.sum(tl.where(block == at, share, 0.0), 0)
        before = tl.sum(tl.where(block == at, reached, 0.0), 0) - own
        inside = tl.minimum(tl.maximum((limit - before) / own, 0.0), 1.0)
        # -1 if the sum is 0 or NaN.
        tl.store(chosen + row * m + i, tl.where(total > 0.0, at, -1))
        tl.store(rest + row * m + i, inside)


@kernel
def _draw_in_block(
    scores, bias, chosen, rest, classes, n, stride, m, softcap, inverse_temperature,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, COMPACT: tl.constexpr,
):  # fmt: skip
    draw = tl.program_id(0).to(tl.int64)
    row = draw // m
    block = tl.load(chosen + draw)
    lane = tl.arange(0, WIDTH)
    column = block * WIDTH + lane
    live = (column >= 0) & (column < n)
    if COMPACT:
        value = tl.load(scores + row * stride + (draw % m) * WIDTH + lane, mask=live, other=0.0)
    else:
        value = tl.load(scores + row * stride + column, mask=live, other=0.0)
    value = _shaped(value, bias, column, live, softcap, inverse_temperature, BIASED, CAPPED)
    top = tl.max(value, 0)
    origin = tl.where(top == -float("inf"), 0.0, top)
    share = tl.exp(value.to(tl.float64) - origin.to(tl.float64))
    limit = tl.load(rest + draw) * tl.sum(share, 0)
    at = _place_of(share, tl.cumsum(share, 0), limit, WIDTH)
    tl.store(classes + draw, tl.where(block >= 0, block.to(tl.int64) * WIDTH + at, -1))


def log_softmax_(
    scores: Tensor, bias: Tensor | None, softcap: float, temperature: float,
    offset: Tensor | None = None,
) -> None:  # fmt: skip
    """Same as the reference; rows of scores must be contiguous."""
    n_rows, n = scores.shape
    if scores.numel():
        width = tile_width(n, WIDEST_TILE, 32)
        _log_softmax_row[(n_rows,)](
            scores, bias, offset, n, scores.stride(0), 0 if offset is None else offset.stride(0),
            softcap, 1.0 / temperature, WIDTH=width, BIASED=bias is not None,
            CAPPED=softcap != 0.0, MOVED=offset is not None,
            num_warps=max(1, min(8, width // 512)), enable_fp_fusion=True,
        )  # fmt: skip


@kernel
def _log_softmax_row(
    scores, bias, offset, n, stride, offset_stride, softcap, inverse_temperature,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr, MOVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores += row * stride
    peak = tl.full((WIDTH,), -float("inf"), tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, n, WIDTH):
        column = first + tl.arange(0, WIDTH)
        live = column < n
        value = tl.load(scores + column, mask=live, other=0.0)
        value = _shaped(value, bias, column, live, softcap, inverse_temperature, BIASED, CAPPED)
        # One maximum and sum per lane. NaN and +inf make the sum NaN.
        grown = tl.maximum(peak, value)
        origin = tl.where(grown == -float("inf"), 0.0, grown)
        total = total * tl.exp2((peak - origin) * LOG2E) + tl.exp2((value - origin) * LOG2E)
        peak = grown
    top = tl.max(peak, 0)
    origin = tl.where(top == -float("inf"), 0.0, top)
    # Kept apart from the maximum: if that is large, their sum would lose it to rounding.
    rest = tl.log(tl.sum(total * tl.exp2((peak - origin) * LOG2E), 0))
    rest = tl.where(rest == -float("inf"), 0.0, rest)
    if MOVED:
        rest -= tl.load(offset + row * offset_stride)
    # Backwards: the tiles that were read last are still in the cache.
    last = (n - 1) // WIDTH * WIDTH
    for back in range(0, n, WIDTH):
        column = last - back + tl.arange(0, WIDTH)
        live = column < n
        value = tl.load(scores + column, mask=live, other=0.0)
        value = _shaped(value, bias, column, live, softcap, inverse_temperature, BIASED, CAPPED)
        tl.store(scores + column, (value - origin) - rest, mask=live)


def log_sigmoid_(scores: Tensor, bias: Tensor | None, softcap: float, temperature: float) -> None:
    """Same as the reference; rows of scores must be contiguous."""
    n_rows, n = scores.shape
    if scores.numel():
        width = tile_width(n, WIDEST_TILE, 32)
        tiles = cdiv(n, width)
        _log_sigmoid_tile[(n_rows * tiles,)](
            scores, bias, n, scores.stride(0), tiles, softcap, 1.0 / temperature, WIDTH=width,
            BIASED=bias is not None, CAPPED=softcap != 0.0,
            num_warps=max(1, min(8, width // 512)), enable_fp_fusion=True,
        )  # fmt: skip


@kernel
def _log_sigmoid_tile(
    scores, bias, n, stride, tiles, softcap, inverse_temperature,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    scores += (tl.program_id(0) // tiles).to(tl.int64) * stride
    column = (tl.program_id(0) % tiles) * WIDTH + tl.arange(0, WIDTH)
    live = column < n
    value = tl.load(scores + column, mask=live, other=0.0)
    value = _shaped(value, bias, column, live, softcap, inverse_temperature, BIASED, CAPPED)
    rest = tl.exp2(-tl.abs(value) * LOG2E)
    # log(1 + rest), by a series if rest is small.
    near = rest * (1.0 - rest * (0.5 - rest * (0.33333334 - rest * 0.25)))
    log1p = tl.where(rest < 1e-2, near, tl.log(1.0 + rest))
    tl.store(scores + column, tl.minimum(value, 0.0) - log1p, mask=live)
