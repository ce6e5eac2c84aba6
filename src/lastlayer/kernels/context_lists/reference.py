"""The adaptive n-gram proposal in plain torch: the reference for tests."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels import products, rng
from lastlayer.kernels.context_lists import (
    GOLDEN,
    LEAST_PART,
    NO_KEY,
    PARTS,
    SHARES,
    UNUSED,
    WAYS,
)


class Lists(NamedTuple):
    """The lists of one length of context."""

    keys: Tensor
    classes: Tensor
    end: Tensor
    mass: Tensor

    @property
    def nowhere(self) -> int:
        """The last place, whose list is empty, for contexts without a list."""
        return len(self.keys) - 1


def draw(
    context: Tensor, counter: Tensor, proposal: Sequence[Tensor], n: int
) -> tuple[Tensor, Tensor]:
    """``n`` draws for each row, int64 ``(rows, n)``, and their log-probabilities in float32.

    The mixture selects the list of an n-gram, or none. If a unigram draw is on that list, it is
    redrawn from the list, which has the same total probability as in the unigram.
    """
    mixture, table, weight = proposal[:3]
    rows = context.shape[0]
    start, _ = rng.draw("reference", table, weight, rng.fork(counter, 0), rows * n)
    start = start.view(rows, n)
    chance = rng.words("reference", rng.fork(counter, 1), 2 * rows * n).view(rows, n, 4)
    part = torch.searchsorted(mixture.cumsum(0), chance[..., 0].contiguous(), right=True)
    within = chance[..., 1] << 8 | chance[..., 2] >> 24
    drawn = start
    for k, (lists, place) in enumerate(_places(context, proposal), 1):
        classes = lists.classes[place]
        _, listed = _look_up(classes, start)
        again = torch.searchsorted(lists.end[place], within, right=True)
        other = classes.gather(1, again.clamp_max(classes.shape[1] - 1)).long()
        drawn = torch.where((part == k) & listed, other, drawn)
    return drawn, log_prob(context, drawn, proposal).float()


def log_prob(context: Tensor, ids: Tensor, proposal: Sequence[Tensor]) -> Tensor:
    """The log-probabilities of classes ``(rows, n)``, in float64."""
    mixture, table, weight = proposal[:3]
    found = _places(context, proposal)
    parts = [weight[ids].double(), *(_probs(*each, ids, weight[ids]) for each in found)]
    return _mixed(mixture, parts).log() - (len(table).bit_length() + 31) * math.log(2.0)


def draw_until_(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, context: Tensor, counter: Tensor,
    proposal: Sequence[Tensor], used: Tensor, ess: Tensor, sums: Tensor, first: int, blocks: int,
    n: int, enough: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Draws and scores up to ``blocks`` blocks of ``n``, until a row's sample size is ``enough``.

    Block b of a row has its draws by fork b of ``counter``.

    Args:
        hidden: ``(rows, d)``.
        weight: ``(v, d)``.
        bias: ``(v,)``.
        context: int64 ``(rows, order - 1)``.
        counter: seed and step.
        proposal: the tensors of the proposal.
        used: number of blocks that each row has drawn, int64 ``(rows,)``, updated. A row continues
            if it has drawn ``first`` blocks and its sample size is too small.
        ess: the effective sample size of each row, updated.
        sums: ``(rows, 3)``, updated: the largest log r so far, and Σ r and Σ r² relative to it,
            with r = e^score / q; initially -inf, 0 and 0.
        first: the index of the first block.
        blocks: the maximum number of blocks.
        n: draws per block.
        enough: the effective sample size to reach.

    Returns:
        Ids, log-probabilities and scores, ``(rows, blocks * n)``: -1, inf and 0 after the last
        block of a row. The latter two are float32, or float64 from float64.
    """
    dtype, rows = accumulation_dtype(hidden.dtype), hidden.shape[0]
    ids = context.new_full((rows, blocks * n), -1)
    log_q = hidden.new_full(ids.shape, torch.inf, dtype=dtype)
    scores = hidden.new_zeros(ids.shape, dtype=dtype)
    for block in range(first, first + blocks):
        going = ((used == block) & (ess < enough)).unsqueeze(1)
        there = slice((block - first) * n, (block - first + 1) * n)
        drawn, _ = draw(context, rng.fork(counter, block), proposal, n)
        found = products.scores("reference", hidden, weight, bias, drawn)
        log_prob_of_drawn = log_prob(context, drawn, proposal).to(dtype)
        ids[:, there] = torch.where(going, drawn, -1)
        log_q[:, there] = torch.where(going, log_prob_of_drawn, torch.inf)
        scores[:, there] = torch.where(going, found, 0.0)
        log_r = found - log_prob_of_drawn
        peak = torch.maximum(sums[:, 0], log_r.amax(1))
        origin = torch.where(peak == -torch.inf, 0.0, peak)
        old, new = (sums[:, 0] - origin).exp(), (log_r - origin.unsqueeze(1)).exp()
        total = sums[:, 1] * old + new.sum(1)
        squares = sums[:, 2] * old.square() + new.square().sum(1)
        size = torch.where(total == 0, 0.0, total.square() / squares)
        sums.copy_(torch.where(going, torch.stack([peak, total, squares], 1), sums))
        ess.copy_(torch.where(going.squeeze(1), size, ess))
        used += going.squeeze(1)
    return ids, log_q, scores


def learn_(
    context: Tensor, ids: Tensor, scores: Tensor, proposal: Sequence[Tensor], rate: float,
    mixture_rate: float,
) -> None:  # fmt: skip
    """Updates lists and mixture from the scores of some classes of each row.

    Of repeated classes in a row only the first counts. Of rows with the same context only the last
    one updates the list. Rows whose scores have no softmax, for example with a NaN, are ignored.

    Args:
        context: int64 ``(rows, order - 1)``.
        ids: the classes that were scored, int64 ``(rows, m)``; negative for padding.
        scores: ``(rows, m)``.
        proposal: the tensors of the proposal, updated.
        rate: step size for the lists, from 0 to 1.
        mixture_rate: step size for the mixture.
    """
    mixture, _, unigram = proposal[:3]
    # Padding becomes UNUSED, which is larger than every class.
    classes, order = torch.where(ids < 0, UNUSED, ids).sort(dim=1, stable=True)
    again = classes == UNUSED
    again[:, 1:] |= classes[:, 1:] == classes[:, :-1]
    classes = classes.masked_fill(again, 0)
    weight = unigram[classes].masked_fill(again, 0)
    target = scores.gather(1, order).double().masked_fill(again, -torch.inf).softmax(1)
    known = target.isfinite().all(1)
    found = _places(context, proposal)
    parts = [weight.double(), *(_probs(*each, classes, weight) for each in found)]
    parts = [part.masked_fill(again, 0.0) for part in parts]
    in_context = known & (context[:, -1] >= 0)
    target_there = target.masked_fill(~in_context[:, None], 0.0)
    moved_mixture = _moved_mixture(mixture, parts, target_there, again, in_context, mixture_rate)
    # Duplicates are moved behind the other classes, which stay sorted.
    classes, order = classes.masked_fill(again, UNUSED).sort(dim=1, stable=True)
    for (lists, _), key, part in zip(found, _keys(context, len(unigram)), parts[1:], strict=True):
        moved = part + rate * (part.sum(1, keepdim=True) * target - part)
        place = place_(lists.keys, torch.where(known, key, -1))
        taught = classes.int(), moved.gather(1, order), weight.gather(1, order)
        _merge_(lists, place, *taught, unigram)
    mixture.copy_(moved_mixture)


def _lists(proposal: Sequence[Tensor]) -> list[Lists]:
    return [Lists(*proposal[i : i + 4]) for i in range(3, len(proposal), 4)]


def _places(context: Tensor, proposal: Sequence[Tensor]) -> list[tuple[Lists, Tensor]]:
    pairs = zip(_lists(proposal), _keys(context, len(proposal[2])), strict=True)
    return [(lists, find(lists.keys, key)) for lists, key in pairs]


def _keys(context: Tensor, n_classes: int) -> list[Tensor]:
    """For each length of context one key per row; -1 for no context."""
    keys = [context[:, -1]]
    if context.shape[1] == 2:
        both = context[:, -1] * n_classes + context[:, -2]
        keys.append(torch.where((context < 0).any(1), -1, both))
    return keys


def find(keys: Tensor, key: Tensor) -> Tensor:
    """The place of each key ``(rows,)``; the last place for an unknown or negative key."""
    slots = _slots(keys, key)
    same = keys[slots] == key[:, None]
    found = same.any(1) & (key >= 0)
    return torch.where(found, slots[:, 0] + same.int().argmax(1), len(keys) - 1)


def place_(keys: Tensor, key: Tensor) -> Tensor:
    """As :func:`find`, but adds new keys, and only the last of equal keys gets the place."""
    nowhere = len(keys) - 1
    row = torch.arange(len(key), device=key.device)
    ranked, order = key.sort(dim=0, stable=True)
    is_last = torch.ones_like(ranked, dtype=torch.bool)
    is_last[:-1] = ranked[1:] != ranked[:-1]
    teaches = torch.empty_like(is_last).scatter_(0, order, is_last) & (key >= 0)
    found = find(keys, key)
    new = teaches & (found == nowhere)
    slots = _slots(keys, key)
    # New keys of a bucket take its free places in order.
    bucket, order = torch.where(new, slots[:, 0], nowhere).sort(dim=0, stable=True)
    begins = torch.ones_like(new)
    begins[1:] = bucket[1:] != bucket[:-1]
    since = row - torch.where(begins, row, 0).cummax(0).values
    turn = torch.empty_like(row).scatter_(0, order, since)
    way = (keys[slots] != NO_KEY).sum(1) + turn
    made = torch.where(new & (way < WAYS), slots[:, 0] + way, nowhere)
    keys[made] = key
    # A slice, since assigning to a single element of a CUDA tensor causes a host sync.
    keys[nowhere:] = NO_KEY
    return torch.where(teaches, torch.where(new, made, found), nowhere)


def _slots(keys: Tensor, key: Tensor) -> Tensor:
    bucket = ((key * GOLDEN) >> 33) & ((len(keys) - 1) // WAYS - 1)
    return bucket[:, None] * WAYS + torch.arange(WAYS, device=key.device)


def _probs(lists: Lists, place: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Probabilities of classes ``(rows, n)`` in units of the unigram's weights, in float64.

    ``place`` is the place of each row's context, ``weight`` has the unigram weights of the classes.
    """
    at, listed = _look_up(lists.classes[place], ids)
    end = lists.end[place]
    before = torch.where(at > 0, end.gather(1, (at - 1).clamp_min(0)), 0)
    share = (end.gather(1, at) - before).double() / SHARES
    return torch.where(listed, lists.mass[place, None].double() * share, weight.double())


def _look_up(classes: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    wanted = ids.to(classes.dtype)
    at = torch.searchsorted(classes, wanted).clamp_max(classes.shape[1] - 1)
    return at, (classes.gather(1, at) == wanted) & (wanted != UNUSED)


def _mixed(mixture: Tensor, parts: list[Tensor]) -> Tensor:
    shares = mixture.double() / PARTS
    return sum((shares[k] * part for k, part in enumerate(parts)), torch.zeros_like(parts[0]))


def _moved_mixture(
    mixture: Tensor, parts: list[Tensor], target: Tensor, again: Tensor, taught: Tensor,
    mixture_rate: float,
) -> Tensor:  # fmt: skip
    """One step of exponentiated gradient on the KL divergence within the scored classes.

    The gradient is averaged over the ``taught`` rows, which have a context.
    """
    mixed = _mixed(mixture, parts)
    per_class = target / mixed.masked_fill(again, 1.0)
    within = target.sum(1) / mixed.sum(1)
    slopes = [((per_class * part).sum(1) - within * part.sum(1)) for part in parts]
    total = torch.stack([torch.where(taught, each, 0.0).sum() for each in slopes])
    moves = mixture_rate * total / taught.sum().clamp(min=1)
    shares = mixture.double() * (moves - moves.max()).exp()
    shares = (shares / shares.sum()).clamp(min=LEAST_PART)
    moved = (shares / shares.sum() * PARTS).long()
    moved[0] += PARTS - moved.sum()
    return torch.where(taught.any(), moved, mixture)


def _merge_(
    lists: Lists, place: Tensor, new: Tensor, probs: Tensor, new_weight: Tensor, unigram: Tensor
) -> None:
    """Merges classes into the lists, with probabilities in units of the unigram's weights.

    If a list is too short, the classes that differ most from the unigram are kept. Places are
    distinct except for ``nowhere``. New classes are int32 ``(rows, m)``, ascending, with ``UNUSED``
    and a weight of 0 as padding; ``unigram`` has the weights of all classes.
    """
    classes = lists.classes[place]
    width = classes.shape[1]
    _, replaced = _look_up(new, classes.long())
    kept = (classes != UNUSED) & ~replaced
    weight = torch.where(kept, unigram[torch.where(kept, classes, 0).long()], 0)
    value = torch.where(kept, _probs(lists, place, classes.long(), weight), 0.0)
    classes = torch.cat([torch.where(kept, classes, UNUSED), new], 1)
    value, weight = torch.cat([value, probs], 1), torch.cat([weight, new_weight], 1)
    matters = torch.where(classes == UNUSED, -1.0, (value - weight).abs())
    best = matters.sort(dim=1, descending=True, stable=True).indices[:, :width]
    classes, by_class = classes.gather(1, best).sort(dim=1, stable=True)
    best = best.gather(1, by_class)
    value, weight = value.gather(1, best), weight.gather(1, best)
    lists.classes[place] = classes
    lists.end[place] = _shares(value, classes != UNUSED).cumsum(1)
    lists.mass[place] = weight.sum(1)
    lists.classes[lists.nowhere :] = UNUSED
    lists.end[lists.nowhere :] = SHARES
    lists.mass[lists.nowhere :] = 0


def _shares(value: Tensor, used: Tensor) -> Tensor:
    """Integers of at least 1 that sum to ``SHARES``; the largest absorbs the rounding."""
    total = value.sum(1, keepdim=True).clamp_min(torch.finfo(value.dtype).tiny)
    share = torch.where(used, (value / total * SHARES).long().clamp_min(1), 0)
    largest = share.argmax(1, keepdim=True)
    left = SHARES - share.sum(1, keepdim=True)
    return share.scatter(1, largest, share.gather(1, largest) + left)
