"""The adaptive n-gram proposal on CUDA, one program per row, without copies of the lists.

There is no sort and no host sync: duplicates, the entries to keep and their positions are found by
comparing the few entries of a row pairwise.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._launch import kernel
from lastlayer.kernels._triton import cdiv, load_rows, philox, tile_width
from lastlayer.kernels.context_lists import GOLDEN, LEAST_PART, PARTS, SHARES, UNUSED, WAYS
from lastlayer.kernels.rng import FORKS

_GOLDEN, _FORKS = tl.constexpr(GOLDEN), tl.constexpr(FORKS)
_SHARES, _PARTS = tl.constexpr(SHARES), tl.constexpr(PARTS)
_UNUSED, _WAYS = tl.constexpr(UNUSED), tl.constexpr(WAYS)
_LEAST_PART = tl.constexpr(LEAST_PART)
_LOG_2 = tl.constexpr(0.6931471805599453)
# Draws per program, and the tile of entries that are compared pairwise.
_DRAWS, _NEAR, _OTHERS = 64, 128, 64


def draw(
    context: Tensor, counter: Tensor, proposal: Sequence[Tensor], n: int
) -> tuple[Tensor, Tensor]:
    rows = context.shape[0]
    ids = torch.empty(rows, n, dtype=torch.int64, device=context.device)
    log_prob = torch.empty(rows, n, dtype=torch.float32, device=context.device)
    if ids.numel():
        tensors, sizes, constants = _given(proposal)
        _draw[(rows, cdiv(n, _DRAWS))](
            context.contiguous(), counter, *tensors, ids, log_prob, n, *sizes, DRAWS=_DRAWS,
            **constants, num_warps=2, enable_fp_fusion=True,
        )  # fmt: skip
    return ids, log_prob


def log_prob(context: Tensor, ids: Tensor, proposal: Sequence[Tensor]) -> Tensor:
    made = torch.empty(ids.shape, dtype=torch.float64, device=context.device)
    if ids.numel():
        tensors, sizes, constants = _given(proposal)
        n = ids.shape[1]
        _log_prob[(ids.shape[0], cdiv(n, _DRAWS))](
            context.contiguous(), ids.contiguous(), *tensors, made, n, *sizes, DRAWS=_DRAWS,
            **constants, num_warps=2, enable_fp_fusion=True,
        )  # fmt: skip
    return made


def draw_until_(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, context: Tensor, counter: Tensor,
    proposal: Sequence[Tensor], used: Tensor, ess: Tensor, sums: Tensor, first: int, blocks: int,
    n: int, enough: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (rows, depth), device = hidden.shape, hidden.device
    ids = torch.empty(rows, blocks * n, dtype=torch.int64, device=device)
    log_q = torch.empty(rows, blocks * n, dtype=torch.float32, device=device)
    scores = torch.empty_like(log_q)
    if ids.numel():
        tensors, sizes, constants = _given(proposal)
        _until[(rows,)](
            hidden, weight, None if bias is None else bias.contiguous(), context.contiguous(),
            counter, *tensors, used, ess, sums, ids, log_q, scores, first, blocks, n,
            float(enough), depth, hidden.stride(0), hidden.stride(1), weight.stride(0),
            weight.stride(1), *sizes, DRAWS=tile_width(n, _DRAWS), DEPTH=tile_width(depth, 128),
            BIASED=bias is not None, **constants, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return ids, log_q, scores


def learn_(
    context: Tensor, ids: Tensor, scores: Tensor, proposal: Sequence[Tensor], rate: float,
    mixture_rate: float,
) -> None:  # fmt: skip
    if not ids.numel():
        return
    (rows, m), device, order = ids.shape, ids.device, proposal[0].shape[0]
    tensors, (n_classes, places, width), constants = _given(proposal)
    context, size = context.contiguous(), width + m
    # For each length of context, the entries of a list followed by the classes that a row scored.
    # The first row of values is scratch memory.
    classes = torch.empty(order - 1, rows, size, dtype=torch.int32, device=device)
    values = torch.empty(order, rows, size, dtype=torch.float64, device=device)
    slopes = torch.empty(rows, 4, dtype=torch.float64, device=device)
    place = torch.empty(2, rows, dtype=torch.int64, device=device)
    near = dict(NEAR=_NEAR, OTHERS=_OTHERS, num_warps=4, enable_fp_fusion=True)
    _weigh[(rows,)](
        context, ids.contiguous(), scores.contiguous(), *tensors, classes, values, slopes, m, rows,
        *_halves(rate), n_classes, places, width, **constants, **near,
    )  # fmt: skip
    for k in range(order - 1):
        keys, listed, end, mass = proposal[3 + 4 * k : 7 + 4 * k]
        for step in range(2):
            _place[(rows,)](
                context, slopes, keys, place, rows, n_classes, places, K=k, ORDER=order,
                FIRST=step == 0, OTHERS=1024, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
        _merge[(rows,)](
            classes[k], values[k + 1], values[0], place, proposal[2], listed, end, mass, m, width,
            **near,
        )  # fmt: skip
    _move_mixture[(1,)](
        slopes, proposal[0], rows, *_halves(mixture_rate), ORDER=order, BLOCK=256, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip


def _halves(number: float) -> tuple[float, float]:
    """Splits a number into two float32 numbers, since kernel arguments are float32."""
    near = float(np.float32(number))
    return near, number - near


def _given(proposal: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, ...], dict[str, Any]]:
    """Tensors with two sets of lists, equal if there is only one; sizes; and constants."""
    mixture, table, unigram, keys, classes = proposal[:5]
    constants = dict(
        ORDER=mixture.shape[0], BITS=table.shape[0].bit_length() - 1,
        SEARCH=classes.shape[1].bit_length(),
    )  # fmt: skip
    sizes = unigram.shape[0], keys.shape[0] - 1, classes.shape[1]
    return [*proposal[:7], *proposal[-4:]], sizes, constants


@triton.jit
def _fork(seed, number):
    """The seed of a fork, as computed by rng.fork."""
    step = number.to(tl.int64) + _FORKS
    a, b, _, _ = philox(step * 0, seed, step)
    return ((a << 32) | b).to(tl.int64)


@triton.jit
def _key(context, row, n_classes, K: tl.constexpr, ORDER: tl.constexpr):
    """The key of the last ``K + 1`` words of a row; -1 if one of them is missing."""
    key = tl.load(context + row * (ORDER - 1) + (ORDER - 2))
    if K == 1:
        other = tl.load(context + row * (ORDER - 1) + (ORDER - 3))
        key = tl.where((key < 0) | (other < 0), -1, key * n_classes + other)
    return key


@triton.jit
def _bucket(key, places):
    return ((key * _GOLDEN) >> 33) & (places // _WAYS - 1)


@triton.jit
def _find(keys, key, places):
    """The place of a key; the last place for an unknown key."""
    slot = _bucket(key, places) * _WAYS + tl.arange(0, _WAYS)
    same = (tl.load(keys + slot) == key) & (key >= 0)
    found = tl.max(tl.where(same, slot, -1), 0)
    return tl.where(found < 0, places, found)


@triton.jit
def _listed(classes, one, live, width, SEARCH: tl.constexpr):
    """The position of classes on a list, and whether they are on it."""
    low = tl.zeros_like(one).to(tl.int32)
    high = low + width
    for _ in range(SEARCH):
        middle = (low + high) // 2
        going = live & (low < high)
        below = tl.load(classes + middle, mask=going, other=_UNUSED).to(tl.int64) < one
        low = tl.where(going & below, middle + 1, low)
        high = tl.where(going & (below == 0), middle, high)
    at = tl.minimum(low, width - 1)
    return at, live & (tl.load(classes + at, mask=live, other=_UNUSED).to(tl.int64) == one)


@triton.jit
def _part(classes, end, mass, place, places, one, own, live, width, SEARCH: tl.constexpr):
    """Probabilities of classes with unigram weights ``own``, in units of these weights."""
    part = own
    if place < places:
        at, listed = _listed(classes + place * width, one, live, width, SEARCH)
        there = end + place * width + at
        before = tl.load(there - 1, mask=listed & (at > 0), other=0)
        share = (tl.load(there, mask=listed, other=0) - before).to(tl.float64) / _SHARES
        part = tl.where(listed, tl.load(mass + place).to(tl.float64) * share, own)
    return part


@triton.jit
def _log_probs(
    one, live, place, place_2, mixture, unigram, classes, end, mass, classes_2, end_2, mass_2,
    places, width, ORDER: tl.constexpr, BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    own = tl.load(unigram + one, mask=live, other=1).to(tl.float64)
    mixed = tl.load(mixture).to(tl.float64) / _PARTS * own
    part = _part(classes, end, mass, place, places, one, own, live, width, SEARCH)
    mixed += tl.load(mixture + 1).to(tl.float64) / _PARTS * part
    if ORDER == 3:
        part = _part(classes_2, end_2, mass_2, place_2, places, one, own, live, width, SEARCH)
        mixed += tl.load(mixture + 2).to(tl.float64) / _PARTS * part
    return tl.log(mixed) - (BITS + 32) * _LOG_2


@triton.jit
def _again(classes, end, place, one, wanted, chance, width, SEARCH: tl.constexpr):
    """Redraws the classes that are wanted and on the list from it."""
    _, listed = _listed(classes + place * width, one, wanted, width, SEARCH)
    low = tl.zeros_like(one).to(tl.int32)
    high = low + width
    for _ in range(SEARCH):
        middle = (low + high) // 2
        going = listed & (low < high)
        below = tl.load(end + place * width + middle, mask=going, other=0) <= chance
        low = tl.where(going & below, middle + 1, low)
        high = tl.where(going & (below == 0), middle, high)
    at = classes + place * width + tl.minimum(low, width - 1)
    return tl.where(listed, tl.load(at, mask=listed, other=0).to(tl.int64), one)


@triton.jit
def _drawn(
    number, live, seed, step, place, place_2, mixture, table, classes, end, classes_2, end_2,
    places, width, ORDER: tl.constexpr, BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """The draws with indices ``number``."""
    a, b, c, d = philox(number >> 1, _fork(seed, step * 0), step)
    odd = (number & 1) == 1
    upper, lower = tl.where(odd, c, a).to(tl.int64), tl.where(odd, d, b).to(tl.int64)
    column = upper >> (32 - BITS)
    entry = tl.load(table + column, mask=live, other=0)
    one = tl.where(lower < (entry & 0xFFFFFFFF), column, entry >> 32)
    if (place < places) | (place_2 < places):
        a, b, c, d = philox(number, _fork(seed, step * 0 + 1), step)
        chance = ((b << 8) | (c >> 24)).to(tl.int64)
        word = a.to(tl.int64)
        first = tl.load(mixture)
        second = first + tl.load(mixture + 1)
        start = one
        if place < places:
            wanted = live & (word >= first) & (word < second)
            one = _again(classes, end, place, start, wanted, chance, width, SEARCH)
        if ORDER == 3:
            if place_2 < places:
                wanted = live & (word >= second)
                other = _again(classes_2, end_2, place_2, start, wanted, chance, width, SEARCH)
                one = tl.where(wanted, other, one)
    return one


@triton.jit
def _places(context, row, keys, keys_2, n_classes, places, ORDER: tl.constexpr):
    place = _find(keys, _key(context, row, n_classes, 0, ORDER), places)
    place_2 = place * 0 + places
    if ORDER == 3:
        place_2 = _find(keys_2, _key(context, row, n_classes, 1, ORDER), places)
    return place, place_2


@kernel
def _draw(
    context, counter, mixture, table, unigram, keys, classes, end, mass, keys_2, classes_2, end_2,
    mass_2, ids, log_prob, n, n_classes, places, width, DRAWS: tl.constexpr, ORDER: tl.constexpr,
    BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * DRAWS + tl.arange(0, DRAWS)
    live = slot < n
    place, place_2 = _places(context, row, keys, keys_2, n_classes, places, ORDER)
    one = _drawn(
        row * n + slot, live, tl.load(counter), tl.load(counter + 1), place, place_2, mixture,
        table, classes, end, classes_2, end_2, places, width, ORDER, BITS, SEARCH,
    )  # fmt: skip
    found = _log_probs(
        one, live, place, place_2, mixture, unigram, classes, end, mass, classes_2, end_2, mass_2,
        places, width, ORDER, BITS, SEARCH,
    )  # fmt: skip
    tl.store(ids + row * n + slot, one, mask=live)
    tl.store(log_prob + row * n + slot, found.to(tl.float32), mask=live)


@kernel
def _log_prob(
    context, ids, mixture, table, unigram, keys, classes, end, mass, keys_2, classes_2, end_2,
    mass_2, made, n, n_classes, places, width, DRAWS: tl.constexpr, ORDER: tl.constexpr,
    BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * DRAWS + tl.arange(0, DRAWS)
    live = slot < n
    place, place_2 = _places(context, row, keys, keys_2, n_classes, places, ORDER)
    one = tl.load(ids + row * n + slot, mask=live, other=0)
    found = _log_probs(
        one, live, place, place_2, mixture, unigram, classes, end, mass, classes_2, end_2, mass_2,
        places, width, ORDER, BITS, SEARCH,
    )  # fmt: skip
    tl.store(made + row * n + slot, found, mask=live)


@kernel(do_not_specialize=["first", "blocks"])
def _until(
    hidden, weight, bias, context, counter, mixture, table, unigram, keys, classes, end, mass,
    keys_2, classes_2, end_2, mass_2, used, ess, sums, ids, log_q, scores, first, blocks, n,
    enough, depth, hidden_row, hidden_step, weight_row, weight_step, n_classes, places, width,
    DRAWS: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr, ORDER: tl.constexpr,
    BITS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin, before = row * blocks * n, tl.load(used + row)
    size = tl.load(ess + row)
    done = (before * 0).to(tl.int32)
    if (before == first) & (size < enough):
        place, place_2 = _places(context, row, keys, keys_2, n_classes, places, ORDER)
        seed, step = tl.load(counter), tl.load(counter + 1)
        peak = tl.load(sums + 3 * row)
        total = tl.load(sums + 3 * row + 1)
        squares = tl.load(sums + 3 * row + 2)
        while (done < blocks) & (size < enough):
            own_seed = _fork(seed, first + done)
            for start in range(0, n, DRAWS):
                slot = start + tl.arange(0, DRAWS)
                live = slot < n
                one = _drawn(
                    row * n + slot, live, own_seed, step, place, place_2, mixture, table, classes,
                    end, classes_2, end_2, places, width, ORDER, BITS, SEARCH,
                )  # fmt: skip
                log_prob = _log_probs(
                    one, live, place, place_2, mixture, unigram, classes, end, mass, classes_2,
                    end_2, mass_2, places, width, ORDER, BITS, SEARCH,
                ).to(tl.float32)  # fmt: skip
                products = tl.zeros((DRAWS, DEPTH), dtype=tl.float32)
                for low in range(0, depth, DEPTH):
                    at = low + tl.arange(0, DEPTH)
                    inside = at < depth
                    there = hidden + row * hidden_row + at * hidden_step
                    state = tl.load(there, mask=inside, other=0.0).to(tl.float32)
                    vectors = load_rows(weight, one, weight_row, at, weight_step, live, inside)
                    products += vectors.to(tl.float32) * state[None, :]
                score = tl.sum(products, 1)
                if BIASED:
                    score += tl.load(bias + one, mask=live, other=0.0).to(tl.float32)
                place_of_draw = begin + done * n + slot
                tl.store(ids + place_of_draw, one, mask=live)
                tl.store(log_q + place_of_draw, log_prob, mask=live)
                tl.store(scores + place_of_draw, score, mask=live)
                log_r = tl.where(live, score - log_prob, -float("inf"))
                new_peak = tl.maximum(peak, tl.max(log_r, 0))
                origin = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                shrunk = tl.exp(peak - origin)
                r = tl.exp(log_r - origin)
                total = total * shrunk + tl.sum(r, 0)
                squares = squares * shrunk * shrunk + tl.sum(r * r, 0)
                peak = new_peak
            done += 1
            size = tl.where(total == 0.0, 0.0, total * total / squares)
        tl.store(sums + 3 * row, peak)
        tl.store(sums + 3 * row + 1, total)
        tl.store(sums + 3 * row + 2, squares)
        tl.store(ess + row, size)
        tl.store(used + row, before + done)
    for start in range(done * n, blocks * n, DRAWS):
        slot = start + tl.arange(0, DRAWS)
        live = slot < blocks * n
        tl.store(ids + begin + slot, tl.full((DRAWS,), -1, tl.int64), mask=live)
        tl.store(log_q + begin + slot, tl.full((DRAWS,), float("inf"), tl.float32), mask=live)
        tl.store(scores + begin + slot, tl.zeros((DRAWS,), tl.float32), mask=live)


@kernel(do_not_specialize=["m", "rows"])
def _weigh(
    context, ids, scores, mixture, table, unigram, keys, classes, end, mass, keys_2, classes_2,
    end_2, mass_2, found, values, slopes, m, rows, rate, rate_rest, n_classes, places, width,
    ORDER: tl.constexpr, BITS: tl.constexpr, SEARCH: tl.constexpr, NEAR: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Writes the distinct classes of a row, their new probabilities, and the mixture's slopes."""
    row = tl.program_id(0).to(tl.int64)
    rate = tl.full((), rate, tl.float64) + rate_rest
    there = row * (width + m) + width
    all_of = rows.to(tl.int64) * (width + m)
    peak = tl.full((), -float("inf"), tl.float64)
    bad = tl.full((), 0, tl.int32)
    for start in range(0, m, NEAR):
        slot = start + tl.arange(0, NEAR)
        one = tl.load(ids + row * m + slot, mask=slot < m, other=-1)
        again = tl.zeros((NEAR,), tl.int32)
        for first in range(0, tl.minimum(start + NEAR, m), OTHERS):
            other = first + tl.arange(0, OTHERS)
            named = tl.load(ids + row * m + other, mask=other < m, other=-2)
            same = (named[None, :] == one[:, None]) & (other[None, :] < slot[:, None])
            again = tl.maximum(again, tl.max(same.to(tl.int32), 1))
        counts = (again == 0) & (one >= 0)
        score = tl.load(scores + row * m + slot, mask=counts, other=-float("inf")).to(tl.float64)
        odd = (score != score) | (score == float("inf"))
        bad = tl.maximum(bad, tl.max(odd.to(tl.int32), 0))
        peak = tl.maximum(peak, tl.max(score, 0))
        kept = tl.where(counts, one, _UNUSED).to(tl.int32)
        tl.store(found + there + slot, kept, mask=slot < m)
        if ORDER == 3:
            tl.store(found + all_of + there + slot, kept, mask=slot < m)
    known = (bad == 0) & (peak > -float("inf"))
    own_sum = tl.full((), 0.0, tl.float64)
    sum_1, sum_2, pull_0, pull_1, pull_2 = own_sum, own_sum, own_sum, own_sum, own_sum
    in_context = known & (_key(context, row, n_classes, 0, ORDER) >= 0)
    if in_context:
        tl.debug_barrier()
        place, place_2 = _places(context, row, keys, keys_2, n_classes, places, ORDER)
        total = tl.full((), 0.0, tl.float64)
        for start in range(0, m, NEAR):
            slot = start + tl.arange(0, NEAR)
            one = tl.load(found + there + slot, mask=slot < m, other=_UNUSED)
            counts = one != _UNUSED
            score = tl.load(scores + row * m + slot, mask=counts, other=0.0).to(tl.float64)
            total += tl.sum(tl.where(counts, tl.exp(score - peak), 0.0), 0)
        for start in range(0, m, NEAR):
            slot = start + tl.arange(0, NEAR)
            one = tl.load(found + there + slot, mask=slot < m, other=_UNUSED).to(tl.int64)
            counts = one != _UNUSED
            score = tl.load(scores + row * m + slot, mask=counts, other=0.0).to(tl.float64)
            target = tl.where(counts, tl.exp(score - peak) / total, 0.0)
            own = tl.load(unigram + one, mask=counts, other=0).to(tl.float64)
            part = _part(classes, end, mass, place, places, one, own, counts, width, SEARCH)
            mixed = tl.load(mixture).to(tl.float64) / _PARTS * own
            mixed += tl.load(mixture + 1).to(tl.float64) / _PARTS * part
            tl.store(values + all_of + there + slot, part, mask=slot < m)
            if ORDER == 3:
                other = _part(
                    classes_2, end_2, mass_2, place_2, places, one, own, counts, width, SEARCH
                )
                mixed += tl.load(mixture + 2).to(tl.float64) / _PARTS * other
                tl.store(values + 2 * all_of + there + slot, other, mask=slot < m)
            pull = tl.where(counts, target / tl.where(counts, mixed, 1.0), 0.0)
            own_sum += tl.sum(own, 0)
            sum_1 += tl.sum(part, 0)
            pull_0 += tl.sum(pull * own, 0)
            pull_1 += tl.sum(pull * part, 0)
            if ORDER == 3:
                sum_2 += tl.sum(other, 0)
                pull_2 += tl.sum(pull * other, 0)
        tl.debug_barrier()
        for start in range(0, m, NEAR):
            slot = start + tl.arange(0, NEAR)
            one = tl.load(found + there + slot, mask=slot < m, other=_UNUSED)
            counts = one != _UNUSED
            score = tl.load(scores + row * m + slot, mask=counts, other=0.0).to(tl.float64)
            target = tl.where(counts, tl.exp(score - peak) / total, 0.0)
            at = values + all_of + there + slot
            part = tl.load(at, mask=counts, other=0.0)
            tl.store(at, part + rate * (sum_1 * target - part), mask=counts)
            if ORDER == 3:
                part = tl.load(at + all_of, mask=counts, other=0.0)
                tl.store(at + all_of, part + rate * (sum_2 * target - part), mask=counts)
        within = tl.load(mixture).to(tl.float64) / _PARTS * own_sum
        within += tl.load(mixture + 1).to(tl.float64) / _PARTS * sum_1
        if ORDER == 3:
            within += tl.load(mixture + 2).to(tl.float64) / _PARTS * sum_2
        pull_0 -= own_sum / within
        pull_1 -= sum_1 / within
        pull_2 -= sum_2 / within
    tl.store(slopes + 4 * row, pull_0)
    tl.store(slopes + 4 * row + 1, pull_1)
    tl.store(slopes + 4 * row + 2, pull_2)
    tl.store(slopes + 4 * row + 3, tl.where(in_context, 1.0, 0.0).to(tl.float64))


@triton.jit
def _taught_key(
    context, slopes, row, rows, n_classes, K: tl.constexpr, ORDER: tl.constexpr
):  # fmt: skip
    """The keys of rows that may update a list; -1 for others."""
    inside = row < rows
    known = tl.load(slopes + 4 * row + 3, mask=inside, other=0.0) != 0.0
    key = tl.load(context + row * (ORDER - 1) + (ORDER - 2), mask=known, other=-1)
    if K == 1:
        other = tl.load(context + row * (ORDER - 1) + (ORDER - 3), mask=known, other=-1)
        key = tl.where((key < 0) | (other < 0), -1, key * n_classes + other)
    return key


@kernel(do_not_specialize=["rows"])
def _place(
    context, slopes, keys, place, rows, n_classes, places, K: tl.constexpr, ORDER: tl.constexpr,
    FIRST: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Writes the place of a key for the last row with that key, and -1 for other rows.

    The first launch finds existing keys, and stores for a new key its bucket and how many places of
    the bucket are taken. In the second launch new keys take the free places in order.
    """
    row = tl.program_id(0).to(tl.int64)
    if FIRST:
        mine = row + tl.arange(0, 1)
        key = tl.max(_taught_key(context, slopes, mine, rows, n_classes, K, ORDER), 0)
        at = tl.full((), -1, tl.int64)
        fresh = tl.full((), -1, tl.int64)
        if key >= 0:
            again = tl.full((), 0, tl.int32)
            for start in range(row, rows, OTHERS):
                other = start + tl.arange(0, OTHERS)
                named = _taught_key(context, slopes, other, rows, n_classes, K, ORDER)
                same = (named == key) & (other > row)
                again = tl.maximum(again, tl.max(same.to(tl.int32), 0))
            if again == 0:
                found = _find(keys, key, places).to(tl.int64)
                bucket = _bucket(key, places)
                slot = bucket * _WAYS + tl.arange(0, _WAYS)
                taken = tl.sum((tl.load(keys + slot) >= 0).to(tl.int64), 0)
                at = tl.where(found < places, found, -1)
                fresh = tl.where(found < places, -1, bucket * 16 + taken)
        tl.store(place + row, at)
        tl.store(place + rows + row, fresh)
    else:
        fresh = tl.load(place + rows + row)
        if fresh >= 0:
            turn = tl.full((), 0, tl.int64)
            for start in range(0, row, OTHERS):
                other = start + tl.arange(0, OTHERS)
                named = tl.load(place + rows + other, mask=other < row, other=-1)
                turn += tl.sum((named == fresh).to(tl.int64), 0)
            way = (fresh & 15) + turn
            if way < _WAYS:
                at = (fresh >> 4) * _WAYS + way
                mine = row + tl.arange(0, 1)
                key = tl.max(_taught_key(context, slopes, mine, rows, n_classes, K, ORDER), 0)
                tl.store(keys + at, key)
                tl.store(place + row, at)


@kernel(do_not_specialize=["m"])
def _merge(
    found, values, matters, place, unigram, classes, end, mass, m, width, NEAR: tl.constexpr,
    OTHERS: tl.constexpr,
):  # fmt: skip
    """Merges a row's classes into its list."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(place + row)
    if at >= 0:
        size = width + m
        found += row * size
        values += row * size
        matters += row * size
        classes += at * width
        end += at * width
        whole = tl.load(mass + at).to(tl.float64)
        for start in range(0, size, NEAR):
            slot = start + tl.arange(0, NEAR)
            old = slot < width
            one = tl.load(classes + slot, mask=old, other=_UNUSED)
            one = tl.where(old, one, tl.load(found + slot, mask=(slot < size) & (old == 0),
                                             other=_UNUSED))  # fmt: skip
            replaced = tl.zeros((NEAR,), tl.int32)
            if start < width:
                for first in range(width, size, OTHERS):
                    other = first + tl.arange(0, OTHERS)
                    named = tl.load(found + other, mask=other < size, other=-1)
                    same = named[None, :] == one[:, None]
                    replaced = tl.maximum(replaced, tl.max(same.to(tl.int32), 1))
            one = tl.where(old & (replaced > 0), _UNUSED, one)
            counts = one != _UNUSED
            before = tl.load(end + slot - 1, mask=counts & old & (slot > 0), other=0)
            share = (tl.load(end + slot, mask=counts & old, other=0) - before).to(tl.float64)
            new = tl.load(values + slot, mask=counts & (old == 0), other=0.0)
            value = tl.where(old, whole * (share / _SHARES), new)
            weight = tl.load(unigram + one, mask=counts, other=0).to(tl.float64)
            matter = tl.where(counts, tl.abs(value - weight), -1.0)
            tl.store(values + slot, value, mask=slot < size)
            tl.store(matters + slot, matter, mask=slot < size)
            # Not the scored classes, which the next tiles of the list are compared with.
            tl.store(found + slot, one, mask=old)
        tl.debug_barrier()
        total = tl.full((), 0.0, tl.float64)
        weights = tl.full((), 0, tl.int64)
        count = tl.full((), 0, tl.int32)
        for start in range(0, size, NEAR):
            slot = start + tl.arange(0, NEAR)
            matter = tl.load(matters + slot, mask=slot < size, other=-1.0)
            rank = tl.zeros((NEAR,), tl.int32)
            for first in range(0, size, OTHERS):
                other = first + tl.arange(0, OTHERS)
                more = tl.load(matters + other, mask=other < size, other=-2.0)[None, :]
                ahead = (more > matter[:, None]) | (
                    (more == matter[:, None]) & (other[None, :] < slot[:, None])
                )
                rank += tl.sum(ahead.to(tl.int32), 1)
            kept = (matter >= 0.0) & (rank < width)
            one = tl.load(found + slot, mask=kept, other=_UNUSED)
            tl.store(found + slot, one, mask=slot < size)
            total += tl.sum(tl.load(values + slot, mask=kept, other=0.0), 0)
            weights += tl.sum(tl.load(unigram + one, mask=kept, other=0), 0)
            count += tl.sum(kept.to(tl.int32), 0)
        tl.debug_barrier()
        # Shares are integers of at least 1; the largest absorbs the rounding.
        left = tl.full((), _SHARES, tl.int64)
        most = tl.full((), 0, tl.int64)
        for start in range(0, size, NEAR):
            slot = start + tl.arange(0, NEAR)
            kept = tl.load(found + slot, mask=slot < size, other=_UNUSED) != _UNUSED
            value = tl.load(values + slot, mask=kept, other=0.0)
            share = tl.maximum((value / tl.maximum(total, 1e-300) * _SHARES).to(tl.int64), 1)
            share = tl.where(kept, share, 0)
            tl.store(values + slot, share.to(tl.float64), mask=slot < size)
            left -= tl.sum(share, 0)
            most = tl.maximum(most, tl.max(share, 0))
        tl.debug_barrier()
        best = tl.full((), _UNUSED, tl.int32)
        for start in range(0, size, NEAR):
            slot = start + tl.arange(0, NEAR)
            one = tl.load(found + slot, mask=slot < size, other=_UNUSED)
            share = tl.load(values + slot, mask=slot < size, other=0.0).to(tl.int64)
            best = tl.minimum(best, tl.min(tl.where(share == most, one, _UNUSED), 0))
        for start in range(0, size, NEAR):
            slot = start + tl.arange(0, NEAR)
            one = tl.load(found + slot, mask=slot < size, other=_UNUSED)
            rank = tl.zeros((NEAR,), tl.int32)
            ends = tl.zeros((NEAR,), tl.float64)
            for first in range(0, size, OTHERS):
                other = first + tl.arange(0, OTHERS)
                named = tl.load(found + other, mask=other < size, other=_UNUSED)[None, :]
                share = tl.load(values + other, mask=other < size, other=0.0)[None, :]
                rank += tl.sum((named < one[:, None]).to(tl.int32), 1)
                ends += tl.sum(tl.where(named <= one[:, None], share, 0.0), 1)
            kept = one != _UNUSED
            last = ends.to(tl.int64) + tl.where(best <= one, left, 0)
            tl.store(classes + rank, one, mask=kept)
            tl.store(end + rank, last, mask=kept)
        for start in range(0, width, NEAR):
            slot = start + tl.arange(0, NEAR)
            unused = (slot >= count) & (slot < width)
            tl.store(classes + slot, tl.full((NEAR,), _UNUSED, tl.int32), mask=unused)
            tl.store(end + slot, tl.full((NEAR,), _SHARES, tl.int64), mask=unused)
        tl.store(mass + at, weights)


@kernel(do_not_specialize=["rows"])
def _move_mixture(slopes, mixture, rows, rate, rate_rest, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """One step of exponentiated gradient, unless no row has a context."""
    rate = tl.full((), rate, tl.float64) + rate_rest
    part = tl.arange(0, 4)
    total = tl.zeros((BLOCK, 4), dtype=tl.float64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        at = slopes + row[:, None] * 4 + part[None, :]
        total += tl.load(at, mask=(row < rows)[:, None], other=0.0)
    sums = tl.sum(total, 0)
    taught = tl.sum(tl.where(part == 3, sums, 0.0), 0)
    if taught > 0.0:
        inside = part < ORDER
        moves = tl.where(inside, rate * sums / taught, -float("inf"))
        old = tl.load(mixture + part, mask=inside, other=0).to(tl.float64)
        shares = tl.where(inside, old * tl.exp(moves - tl.max(moves, 0)), 0.0)
        shares = tl.where(inside, tl.maximum(shares / tl.sum(shares, 0), _LEAST_PART), 0.0)
        moved = (shares / tl.sum(shares, 0) * _PARTS).to(tl.int64)
        moved += tl.where(part == 0, _PARTS - tl.sum(moved, 0), 0)
        tl.store(mixture + part, moved, mask=inside)
