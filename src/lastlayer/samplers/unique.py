"""Draws without replacement from a table of integers, which says how probable each class is."""

import torch
from torch import Tensor

from lastlayer.kernels import rng
from lastlayer.samplers.counters import fractions

METHODS = ("fixed", "poisson")
# Probability 1 in units of the table.
UNIT = 1 << 32


class Inclusion:
    """Each class has a piece of a line of length ``n``, as long as it is probable: at most 1.

    Args:
        probs: of the classes, float64 ``(n_classes,)``.
        n: how many different classes are drawn.
    """

    def __init__(self, probs: Tensor, n: int) -> None:
        self.n = n
        self.width = _widths(probs, n)
        self.end = self.width.cumsum(0)

    def fits(self, n: int, device: torch.device) -> bool:
        """Whether this table is for ``n`` draws there."""
        return self.n == n and self.width.device == device

    def log_prob(self, ids: Tensor) -> Tensor:
        """The log-probability that a class is drawn."""
        return (self.width[ids].double() / UNIT).log().float()

    def draw(self, method: str, rng_counter: Tensor) -> Tensor:
        """Different ids, in ascending order."""
        if method == "poisson":
            pairs: Tensor = rng.words("auto", rng_counter, (len(self.width) + 1) // 2)
            chance = pairs.flatten()
            return (chance[: len(self.width)] < self.width).nonzero().squeeze(1)
        return self._one_per_stretch(rng.words("auto", rng_counter, 2 * self.n).view(self.n, 4))

    def _one_per_stretch(self, chance: Tensor) -> Tensor:
        """One class from each stretch of length 1, after Deville.

        A class may lie in two stretches: with ``before`` of its length in one and ``here`` in the
        next. It must not be drawn twice, and its chances must add up. So where it was drawn in the
        first, the second draws among the rest; where it was not, it is drawn in the second with
        probability here / (1 − before), and else the rest is drawn from.
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
        # Whether the shared class was drawn before depends on the stretch before that, and so on
        # back to the last one that leaves no doubt.
        certain = torch.where(claimed & reaches, -1, number).cummax(0).values
        drawn = (certain >= 0) & reaches[certain.clamp_min(0)]
        drawn_before = torch.cat([drawn.new_zeros(1), drawn[:-1]])
        return torch.where(claimed & ~drawn_before, shared, rest)

    def _class_at(self, place: Tensor) -> Tensor:
        return torch.searchsorted(self.end, place, right=True)


def _widths(probs: Tensor, n: int) -> Tensor:
    """Integers that sum to n units, none above one unit, near to c · probs."""
    possible = int((probs > 0).sum())
    if possible < n:
        raise ValueError(
            f"n: expected at most {possible}, the classes that have a probability, got {n}"
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
