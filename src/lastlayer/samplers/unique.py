"""Draws without replacement, from a table of integer inclusion probabilities."""

import torch
from torch import Tensor

from lastlayer.kernels import rng
from lastlayer.samplers.counters import fractions

METHODS = ("fixed", "poisson")
# Probability 1 in integer units.
UNIT = 1 << 32


class Inclusion:
    """Inclusion probabilities of classes, as consecutive pieces of a line of length ``n``.

    The length of a piece is the probability that the class is drawn, at most 1.

    Args:
        probs: probabilities of the classes, float64 ``(n_classes,)``.
        n: number of unique classes to draw.
    """

    def __init__(self, probs: Tensor, n: int) -> None:
        self.n = n
        self.width = _widths(probs, n)
        self.end = self.width.cumsum(0)

    def fits(self, n: int, device: torch.device) -> bool:
        """Whether this table is for ``n`` draws on ``device``."""
        return self.n == n and self.width.device == device

    def log_prob(self, ids: Tensor) -> Tensor:
        """The log-probability that a class is drawn."""
        return (self.width[ids].double() / UNIT).log().float()

    def draw(self, method: str, rng_counter: Tensor) -> Tensor:
        """Unique ids, in ascending order."""
        if method == "poisson":
            pairs: Tensor = rng.words("auto", rng_counter, (len(self.width) + 1) // 2)
            chance = pairs.flatten()
            return (chance[: len(self.width)] < self.width).nonzero().squeeze(1)
        return self._one_per_stretch(rng.words("auto", rng_counter, 2 * self.n).view(self.n, 4))

    def _one_per_stretch(self, chance: Tensor) -> Tensor:
        """One class from each interval of length 1, by the method of Deville.

        A class may lie in two intervals: ``before`` of its length in one, and ``here`` in the next.
        It must not be drawn twice, and its total probability must be before + here. If it was drawn
        in the first interval, the second draws from the other classes. If not, the second draws it
        with probability here / (1 − before), and otherwise one of the other classes.
        """
        number = torch.arange(self.n, device=chance.device)
        start = number * UNIT
        shared = self._class_at(start)
        before = start - (self.end[shared] - self.width[shared])
        here = torch.where(before > 0, self.end[shared] - start, 0)
        first, second = fractions(chance[:, :2]), fractions(chance[:, 2:])
        rest = self._class_at(start + here + (first * (UNIT - here)).long())
        claimed = second * (UNIT - before) < here
        reaches = self.end[rest] > start + UNIT
        # Whether the shared class was drawn before depends on the previous interval, and so on,
        # back to the last interval whose result does not depend on the one before.
        certain = torch.where(claimed & reaches, -1, number).cummax(0).values
        drawn = (certain >= 0) & reaches[certain.clamp_min(0)]
        drawn_before = torch.cat([drawn.new_zeros(1), drawn[:-1]])
        return torch.where(claimed & ~drawn_before, shared, rest)

    def _class_at(self, place: Tensor) -> Tensor:
        return torch.searchsorted(self.end, place, right=True)


def _widths(probs: Tensor, n: int) -> Tensor:
    """Integers close to c · probs that sum to n units, each at most one unit."""
    possible = int((probs > 0).sum())
    if possible < n:
        raise ValueError(
            f"n: expected at most {possible}, the classes with a probability above 0, got {n}"
        )
    certain = torch.zeros_like(probs, dtype=torch.bool)
    while True:
        left = n - int(certain.sum())
        shares = torch.where(certain, 0.0, probs)
        shares = shares * (left / shares.sum().clamp_min(torch.finfo(probs.dtype).tiny))
        more = shares >= 1.0
        if not bool(more.any()):
            break
        certain |= more
    width = torch.where(certain, UNIT, (shares * UNIT).long().clamp(1, UNIT))
    width.masked_fill_(probs <= 0, 0)
    missing = n * UNIT - int(width.sum())
    while missing:
        able = (width > 0) & (width < UNIT) if missing > 0 else width > 1
        able = able.nonzero().squeeze(1)
        each = max(1, abs(missing) // len(able))
        chosen = able[: abs(missing) // each]
        change = each if missing > 0 else -each
        width[chosen] = (width[chosen] + change).clamp(1, UNIT)
        missing = n * UNIT - int(width.sum())
    return width
