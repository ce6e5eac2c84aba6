"""What a sampler has learned of contexts: for each a short list of classes with their shares."""

from typing import NamedTuple

import torch
from torch import Tensor

# Places for contexts whose hashes agree.
WAYS = 8
# The shares of a list sum to this.
SHARES = 1 << 40
# What an unused place of a list holds, above every class.
UNUSED = 2**31 - 1
_NO_KEY = -1
_GOLDEN = -7046029254386353131


class Update(NamedTuple):
    """What a row teaches: different classes with a probability each."""

    classes: Tensor
    """int64 ``(rows, m)``, ascending; ``UNUSED`` for a place that says nothing."""
    probs: Tensor
    """float64 ``(rows, m)``."""
    weight: Tensor
    """Of the unigram, int64 ``(rows, m)``, 0 for a place that says nothing."""


class ContextLists(torch.nn.Module):
    """A hash table from contexts to lists, all of it in integers on the device.

    A list says how the classes on it share out the probability that the unigram gives them
    together; classes that are not on it have that of the unigram. So it is normalised whatever is
    on it. A context without a list has the unigram.

    Args:
        contexts: how many have a place; rounded up to a power of two.
        width: how many classes a list has.
    """

    keys: Tensor
    classes: Tensor
    end: Tensor
    mass: Tensor

    def __init__(self, contexts: int, width: int) -> None:
        super().__init__()
        self.bucket_bits = ((contexts + WAYS - 1) // WAYS - 1).bit_length()
        places = WAYS << self.bucket_bits
        # One place more, which is written to where there is nothing to write.
        self.register_buffer("keys", torch.full((places + 1,), _NO_KEY))
        empty = torch.full((places + 1, width), UNUSED, dtype=torch.int32)
        self.register_buffer("classes", empty)
        self.register_buffer("end", torch.full((places + 1, width), SHARES))
        self.register_buffer("mass", torch.zeros(places + 1, dtype=torch.int64))

    @property
    def nowhere(self) -> int:
        """The place of no context, whose list is empty."""
        return len(self.keys) - 1

    def find(self, key: Tensor) -> Tensor:
        """The place of each key ``(rows,)``; ``nowhere`` for one that has none, or is negative."""
        slots = self._slots(key)
        same = self.keys[slots] == key[:, None]
        found = same.any(1) & (key >= 0)
        return torch.where(found, slots[:, 0] + same.int().argmax(1), self.nowhere)

    def place(self, key: Tensor) -> Tensor:
        """As :meth:`find`, and makes places for new keys. Of equal keys the last one has it."""
        n = len(key)
        row = torch.arange(n, device=key.device)
        ranked, order = key.sort(dim=0, stable=True)
        is_last = torch.ones_like(ranked, dtype=torch.bool)
        is_last[:-1] = ranked[1:] != ranked[:-1]
        teaches = torch.empty_like(is_last).scatter_(0, order, is_last) & (key >= 0)
        found = self.find(key)
        new = teaches & (found == self.nowhere)
        slots = self._slots(key)
        # New keys of a bucket take its free ways in turn.
        bucket, order = torch.where(new, slots[:, 0], self.nowhere).sort(dim=0, stable=True)
        begins = torch.ones_like(new)
        begins[1:] = bucket[1:] != bucket[:-1]
        since = row - torch.where(begins, row, 0).cummax(0).values
        turn = torch.empty_like(row).scatter_(0, order, since)
        way = (self.keys[slots] != _NO_KEY).sum(1) + turn
        made = torch.where(new & (way < WAYS), slots[:, 0] + way, self.nowhere)
        self.keys[made] = key
        # A slice of one: a number that is put at a single place of a CUDA tensor is waited for.
        self.keys[self.nowhere :] = _NO_KEY
        return torch.where(teaches, torch.where(new, made, found), self.nowhere)

    def _slots(self, key: Tensor) -> Tensor:
        bucket = ((key * _GOLDEN) >> 33) & ((1 << self.bucket_bits) - 1)
        return bucket[:, None] * WAYS + torch.arange(WAYS, device=key.device)

    def probs(self, place: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
        """Probabilities in units of the unigram's weights, float64 ``(rows, n)``.

        Args:
            place: of the context of each row.
            ids: classes ``(rows, n)``.
            weight: theirs in the unigram.
        """
        at, listed = self._look_up(self.classes[place], ids)
        end = self.end[place]
        before = torch.where(at > 0, end.gather(1, (at - 1).clamp_min(0)), 0)
        share = (end.gather(1, at) - before).double() / SHARES
        return torch.where(listed, self.mass[place, None].double() * share, weight.double())

    def draw(self, place: Tensor, ids: Tensor, chance: Tensor) -> Tensor:
        """Turns draws from the unigram into draws for a context.

        A draw that is on the list is drawn again among the list, which together is as probable as
        in the unigram; any other draw stays.

        Args:
            place: of the context of each row.
            ids: draws from the unigram, ``(rows, n)``.
            chance: integers from 0 to ``SHARES`` - 1, of that shape.
        """
        classes = self.classes[place]
        _, listed = self._look_up(classes, ids)
        again = torch.searchsorted(self.end[place], chance, right=True)
        drawn = classes.gather(1, again.clamp_max(classes.shape[1] - 1)).long()
        return torch.where(listed, drawn, ids)

    @staticmethod
    def _look_up(classes: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        wanted = ids.to(classes.dtype)
        at = torch.searchsorted(classes, wanted).clamp_max(classes.shape[1] - 1)
        return at, (classes.gather(1, at) == wanted) & (wanted != UNUSED)

    def learn(self, place: Tensor, taught: Update, unigram: Tensor) -> None:
        """Puts classes on the lists, with probabilities in units of the unigram's weights.

        Where a list is too short, those stay that differ most from the unigram.

        Args:
            place: of the context of each row, different ones but for ``nowhere``.
            taught: the classes and their probabilities.
            unigram: weights of all classes.
        """
        classes = self.classes[place]
        width = classes.shape[1]
        _, replaced = self._look_up(taught.classes.int(), classes.long())
        kept = (classes != UNUSED) & ~replaced
        weight = torch.where(kept, unigram[torch.where(kept, classes, 0).long()], 0)
        value = torch.where(kept, self.probs(place, classes.long(), weight), 0.0)
        classes = torch.where(kept, classes, UNUSED)
        classes = torch.cat([classes, taught.classes.int()], 1)
        value, weight = torch.cat([value, taught.probs], 1), torch.cat([weight, taught.weight], 1)
        matters = torch.where(classes == UNUSED, -1.0, (value - weight).abs())
        best = matters.sort(dim=1, descending=True, stable=True).indices[:, :width]
        classes, by_class = classes.gather(1, best).sort(dim=1, stable=True)
        best = best.gather(1, by_class)
        value, weight = value.gather(1, best), weight.gather(1, best)
        self.classes[place] = classes
        self.end[place] = _shares(value, classes != UNUSED).cumsum(1)
        self.mass[place] = weight.sum(1)
        self.classes[self.nowhere :] = UNUSED
        self.end[self.nowhere :] = SHARES
        self.mass[self.nowhere :] = 0


def _shares(value: Tensor, used: Tensor) -> Tensor:
    """Integers of at least 1 that sum to ``SHARES``; what rounding leaves goes to the largest."""
    total = value.sum(1, keepdim=True).clamp_min(torch.finfo(value.dtype).tiny)
    share = torch.where(used, (value / total * SHARES).long().clamp_min(1), 0)
    largest = share.argmax(1, keepdim=True)
    left = SHARES - share.sum(1, keepdim=True)
    return share.scatter(1, largest, share.gather(1, largest) + left)
