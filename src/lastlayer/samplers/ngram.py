"""A proposal that follows the model: an n-gram that learns from the scores of what was drawn."""

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from lastlayer._checks import check_scores
from lastlayer.kernels.rng import words
from lastlayer.samplers._checks import check_device, check_ids, check_number, check_real
from lastlayer.samplers._counters import fork
from lastlayer.samplers._lists import UNUSED, ContextLists, Update
from lastlayer.samplers.base import Sampler
from lastlayer.samplers.unigram import Unigram

# The mixture in units: its parts sum to this.
_PARTS = 1 << 32
# No part of the mixture falls below this: an n-gram that is of no use now may be of use later.
_LEAST_PART = 0.01


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
        counts: how frequent each class is, one number a class, at least 0, not all 0.
        order: 2 for a mixture of unigram and bigram, 3 for one with the trigram.
        contexts: how many contexts of each length have a list; a few more than are met.
        width: how many classes a list has. A context takes 12 bytes a class.
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
        super().__init__(check_number("n_classes", unigram.n_classes, most=UNUSED))
        self.order = check_number("order", order, least=2, most=3)
        self.contexts = check_number("contexts", contexts)
        self.width = check_number("width", width)
        self.rate = check_real("rate", rate, least=0.0, most=1.0)
        self.mixture_rate = check_real("mixture_rate", mixture_rate, least=0.0, most=1e6)
        self.unigram = unigram
        self.lists = torch.nn.ModuleList(ContextLists(contexts, width) for _ in range(order - 1))
        parts = torch.full((order,), _PARTS // order)
        parts[0] += _PARTS - int(parts.sum())
        self.register_buffer("mixture", parts)

    def _draw(self, n: int, counter: Tensor, context: Tensor | None) -> Tensor:
        places = self._find(context)
        rows = len(places[0])
        start = self.unigram._draw(rows * n, fork(counter, 0), None).view(rows, n)
        chance = words("auto", fork(counter, 1), 2 * rows * n).view(rows, n, 4)
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
                f"ids: expected shape ({rows}, n) or ({rows},), one row a context, "
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
        self._check_context(context)
        keys = self._keys(context)
        check_ids(self, "ids", ids)
        check_scores(scores)
        check_device(self, "scores", scores)
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
        taught = known & (keys[0] >= 0)
        self._move_mixture(parts, target.masked_fill(~taught[:, None], 0.0), again, taught)
        # A class that is there again goes behind the others, which stay sorted.
        classes, order = classes.masked_fill(again, UNUSED).sort(dim=1, stable=True)
        for lists, key, part in zip(self._lists(), keys, parts[1:], strict=True):
            moved = part + self.rate * (part.sum(1, keepdim=True) * target - part)
            found = Update(classes, moved.gather(1, order), weight.gather(1, order))
            lists.learn(lists.place(torch.where(known, key, -1)), found, self.unigram.weight)

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

    def _lists(self) -> list[ContextLists]:
        return [each for each in self.lists if isinstance(each, ContextLists)]

    def _find(self, context: Tensor | None) -> list[Tensor]:
        pairs = zip(self._lists(), self._keys(context), strict=True)
        return [lists.find(key) for lists, key in pairs]

    def _keys(self, context: Any) -> list[Tensor]:
        """For each length of context one number a row that stands for it; -1 for none."""
        keys = [context[:, -1]]
        if self.order == 3:
            both = context[:, -1] * self.n_classes + context[:, -2]
            keys.append(torch.where((context[:, -2:] < 0).any(1), -1, both))
        return keys

    def _check_context(self, context: Any) -> None:
        check_ids(self, "context", context, least=-1)
        if context.dim() != 2 or context.shape[1] != self.order - 1:
            raise ValueError(
                f"context: expected shape (rows, {self.order - 1}), the words before for order "
                f"{self.order}, the nearest one last, got {tuple(context.shape)}"
            )

    def config(self) -> dict[str, Any]:
        names = ("n_classes", "order", "contexts", "width", "rate", "mixture_rate")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        others = {name: value for name, value in config.items() if name != "n_classes"}
        return cls(np.ones(config["n_classes"]), **others)
