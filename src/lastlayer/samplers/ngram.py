"""A proposal that follows the model: an n-gram that learns from the scores of what was drawn."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lastlayer._checks import check_device, check_int, check_not_negative, check_scores, check_share
from lastlayer.kernels import rng
from lastlayer.samplers.base import MOST_CLASSES, Sampler
from lastlayer.samplers.counters import fork
from lastlayer.samplers.unigram import Unigram

# The mixture in units: its parts sum to this.
_PARTS = 1 << 32
# No part of the mixture falls below this: an n-gram that is of no use now may be of use later.
_LEAST_PART = 0.01
# Places for contexts whose hashes agree.
WAYS = 8
# The shares of a list sum to this.
SHARES = 1 << 40
# What an unused place of a list holds, above every class.
UNUSED = 2**31 - 1
_NO_KEY = -1
_GOLDEN = -7046029254386353131


class AdaptiveNGram(Sampler):
    """A mixture of unigram, bigram and trigram that is moved towards the model while it trains.

    q(w | h) = Σ_k α_k q_k(w | the last k − 1 words). The unigram is that of the counts. The others
    start as the unigram, and learn in :meth:`update` from the scores of the classes that were drawn
    for a row anyway: with W the set of them and p the softmax of their scores,

        q_k(w) ← (1 − λ) q_k(w) + λ q_k(W) p(w)   for w in W.

    The probability of W as a whole stays, so that q_k stays normalised and no other class has to
    be looked at. The mixture α follows the gradient of KL(p ‖ q) within W.

    Contexts live in a hash table on the device, each with a list of classes; a class that is on no
    list has the probability of the unigram. A full list keeps what differs most from the unigram. A
    context that finds no place, since the table is full around it, keeps the unigram; more
    ``contexts`` help. All is kept in integers: what is drawn has exactly the probability that
    :meth:`Sampler.log_prob` says.

    Args:
        counts: how frequent each class is, one number per class, at least 0, not all 0.
        order: 2 for a mixture of unigram and bigram, 3 for one with the trigram.
        contexts: how many contexts of each length have a list; a few more than are met.
        width: how many classes a list has. A context takes 12 bytes per class.
        rate: λ, how far an update moves.
        mixture_rate: how far an update moves the mixture.

    Reference:
        Yoshua Bengio and Jean-Sébastien Senécal, Adaptive importance sampling to accelerate
        training of a neural probabilistic language model, 2008.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.AdaptiveNGram([1, 1, 1, 1], rate=0.5)
        >>> context = torch.tensor([[3]])
        >>> ids, scores = torch.tensor([[0, 1]]), torch.tensor([[2.0, 0.0]])
        >>> sampler.update(context, ids, scores)
        >>> sampler.log_prob(torch.arange(4)[None], context).exp()
        tensor([[0.2976, 0.2024, 0.2500, 0.2500]])
    """

    needs_context = True
    mixture: Tensor

    def __init__(
        self,
        counts: Any,
        order: int = 2,
        *,
        contexts: int = 16_384,
        width: int = 256,
        rate: float = 0.1,
        mixture_rate: float = 0.1,
    ) -> None:
        unigram = Unigram(counts)
        super().__init__(check_int("n_classes", unigram.n_classes, most=UNUSED))
        self.order = check_int("order", order, least=2, most=3)
        self.contexts = check_int("contexts", contexts, most=MOST_CLASSES)
        self.width = check_int("width", width, most=MOST_CLASSES)
        self.rate = check_share("rate", rate)
        self.mixture_rate = check_not_negative("mixture_rate", mixture_rate)
        self.unigram = unigram
        self.lists = torch.nn.ModuleList(ContextLists(contexts, width) for _ in range(order - 1))
        parts = torch.full((order,), _PARTS // order)
        parts[0] += _PARTS - int(parts.sum())
        self.register_buffer("mixture", parts)

    def _draw(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Tensor:
        places = self._find(context)
        rows = len(places[0])
        start = self.unigram._draw(rows * n, fork(rng_counter, 0), None).view(rows, n)
        chance = rng.words("auto", fork(rng_counter, 1), 2 * rows * n).view(rows, n, 4)
        part = torch.searchsorted(self.mixture.cumsum(0), chance[..., 0].contiguous(), right=True)
        within = chance[..., 1] << 8 | chance[..., 2] >> 24
        drawn = start
        for k, (lists, place) in enumerate(zip(self._lists(), places, strict=True), 1):
            drawn = torch.where(part == k, lists.draw(place, start, within), drawn)
        return drawn

    def _log_prob(self, ids: Tensor, context: Tensor | None) -> Tensor:
        places = self._find(context)
        rows = len(places[0])
        if ids.dim() not in (1, 2) or len(ids) != rows:
            raise ValueError(
                f"ids: expected shape ({rows}, n) or ({rows},), one row per context, "
                f"got {tuple(ids.shape)}"
            )
        wide = ids if ids.dim() == 2 else ids.unsqueeze(1)
        parts = self._parts(places, wide, self.unigram.weight[wide])
        return (self._mixed(parts).log() - self.unigram.log_total).view(ids.shape)

    def _parts(self, places: list[Tensor], ids: Tensor, weight: Tensor) -> list[Tensor]:
        """Each n-gram's probabilities, in units of the unigram's weights."""
        pairs = zip(self._lists(), places, strict=True)
        return [weight.double(), *(lists.probs(place, ids, weight) for lists, place in pairs)]

    def _mixed(self, parts: list[Tensor]) -> Tensor:
        shares = self.mixture.double() / _PARTS
        return sum((shares[k] * part for k, part in enumerate(parts)), torch.zeros_like(parts[0]))

    @torch.no_grad()
    def update(self, context: Tensor, ids: Tensor, scores: Tensor) -> None:
        """Moves the proposal towards the model, from the scores of a few classes of each row.

        Of rows with the same context the last one teaches.

        Args:
            context: what came before, int64 ``(rows, order - 1)``; -1 for nothing.
            ids: the classes that were scored, ``(rows, m)``, or ``(m,)`` for every row. A class
                counts once, however often it is there.
            scores: the model's, ``(rows, m)``.
        """
        keys = self._keys(self._check_context(context))
        ids = self._check_ids("ids", ids)
        check_scores(scores)
        check_device("scores", scores, self.mixture, "the sampler")
        rows = len(keys[0])
        if ids.dim() == 1:
            ids = ids.expand(rows, -1)
        if ids.shape != scores.shape or len(ids) != rows or ids.dim() != 2 or not ids.shape[1]:
            raise ValueError(
                f"scores: expected shape ({rows}, m), one score for each of ids "
                f"{tuple(ids.shape)}, got {tuple(scores.shape)}"
            )
        if not rows:
            return
        classes, order = ids.sort(dim=1, stable=True)
        again = torch.zeros_like(classes, dtype=torch.bool)
        again[:, 1:] = classes[:, 1:] == classes[:, :-1]
        weight = self.unigram.weight[classes].masked_fill(again, 0)
        scores = scores.gather(1, order).double().masked_fill(again, -torch.inf)
        target = scores.softmax(1)
        known = target.isfinite().all(1)
        places = [lists.find(key) for lists, key in zip(self._lists(), keys, strict=True)]
        parts = [part.masked_fill(again, 0.0) for part in self._parts(places, classes, weight)]
        in_context = known & (keys[0] >= 0)
        target_there = target.masked_fill(~in_context[:, None], 0.0)
        self._move_mixture(parts, target_there, again, in_context)
        # A class that is there again goes behind the others, which stay sorted.
        classes, order = classes.masked_fill(again, UNUSED).sort(dim=1, stable=True)
        for lists, key, part in zip(self._lists(), keys, parts[1:], strict=True):
            moved = part + self.rate * (part.sum(1, keepdim=True) * target - part)
            place = lists.place(torch.where(known, key, -1))
            taught = classes.int(), moved.gather(1, order), weight.gather(1, order)
            lists.learn(place, *taught, self.unigram.weight)

    def _move_mixture(
        self, parts: list[Tensor], target: Tensor, again: Tensor, taught: Tensor
    ) -> None:
        """One step of exponentiated gradient on the KL divergence within the classes scored.

        Of the rows that were ``taught``, which have a context; without one nothing moves.
        """
        mixed = self._mixed(parts)
        per_class = target / mixed.masked_fill(again, 1.0)
        within = target.sum(1) / mixed.sum(1)
        n_taught = taught.sum().clamp(min=1)
        slopes = [((per_class * part).sum(1) - within * part.sum(1)).sum() for part in parts]
        moves = self.mixture_rate * torch.stack(slopes) / n_taught
        shares = self.mixture.double() * (moves - moves.max()).exp()
        shares = (shares / shares.sum()).clamp(min=_LEAST_PART)
        shares = shares / shares.sum()
        moved = (shares * _PARTS).long()
        moved[0] += _PARTS - moved.sum()
        self.mixture.copy_(moved)

    def _lists(self) -> list["ContextLists"]:
        return [each for each in self.lists if isinstance(each, ContextLists)]

    def _find(self, context: Tensor | None) -> list[Tensor]:
        pairs = zip(self._lists(), self._keys(context), strict=True)
        return [lists.find(key) for lists, key in pairs]

    def _keys(self, context: Any) -> list[Tensor]:
        """For each length of context one number per row that stands for it; -1 for none."""
        keys = [context[:, -1]]
        if self.order == 3:
            both = context[:, -1] * self.n_classes + context[:, -2]
            keys.append(torch.where((context[:, -2:] < 0).any(1), -1, both))
        return keys

    def _check_context(self, context: Any) -> Tensor:
        words = self._check_ids("context", context, True)
        if words.dim() != 2 or words.shape[1] != self.order - 1:
            raise ValueError(
                f"context: expected shape (rows, {self.order - 1}), the words before for order "
                f"{self.order}, the nearest one last, got {tuple(words.shape)}"
            )
        return words

    def config(self) -> dict[str, Any]:
        config = {**self._saved_config(), "counts": self.unigram.config()["counts"]}
        del config["n_classes"]
        return config

    def _saved_config(self) -> dict[str, Any]:
        names = ("n_classes", "order", "contexts", "width", "rate", "mixture_rate")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        others = {name: value for name, value in config.items() if name != "n_classes"}
        return cls(np.ones(config["n_classes"]), **others)


class ContextLists(torch.nn.Module):
    """A hash table from contexts to short lists of classes, in integers on the device.

    A list says how the classes on it share out the probability that the unigram gives them
    together; classes that are not on it have that of the unigram. So it is normalised whatever is
    on it. A context without a list has the unigram.

    Args:
        contexts: number of places; rounded up to a power of two.
        width: length of a list.
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
        """Probabilities of classes ``(rows, n)`` in units of the unigram's weights, in float64.

        ``place`` is that of the context of each row, ``weight`` are the classes' own weights.
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
        ``chance`` are integers from 0 to ``SHARES`` - 1, of the shape of ``ids``, ``(rows, n)``.
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

    def learn(
        self, place: Tensor, new: Tensor, probs: Tensor, new_weight: Tensor, unigram: Tensor
    ) -> None:
        """Puts classes on the lists, with probabilities in units of the unigram's weights.

        Where a list is too short, those stay that differ most from the unigram. Places are
        different ones but for ``nowhere``. New classes are int32 ``(rows, m)``, ascending, with
        ``UNUSED`` and a weight of 0 where one says nothing; ``unigram`` has the weights of all.
        """
        classes = self.classes[place]
        width = classes.shape[1]
        _, replaced = self._look_up(new, classes.long())
        kept = (classes != UNUSED) & ~replaced
        weight = torch.where(kept, unigram[torch.where(kept, classes, 0).long()], 0)
        value = torch.where(kept, self.probs(place, classes.long(), weight), 0.0)
        classes = torch.where(kept, classes, UNUSED)
        classes = torch.cat([classes, new], 1)
        value, weight = torch.cat([value, probs], 1), torch.cat([weight, new_weight], 1)
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
