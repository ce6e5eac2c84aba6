"""Draws from rows of log-probabilities."""

import torch
from torch import Tensor

from lastlayer._torch import values_are_checked

# Numbers held for each log-probability, itself included: sums are in float64.
COPIES = 5.0


def draw_classes(log_probs: Tensor, chance: Tensor) -> Tensor:
    """Class ids ``(rows, m)`` from log-probabilities ``(rows, n)`` and as many numbers in [0, 1).

    The first class whose cumulated probability exceeds the number: a class of probability 0 is
    never drawn. Sums are in float64, so that the many small classes of a wide row keep their
    shares, which they would lose in ``torch.multinomial``. A row without probabilities gives -1.
    """
    reached = log_probs.double().exp().cumsum_(-1)
    total = reached[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    places = torch.searchsorted(reached, torch.minimum(chance * total, below), right=True)
    return torch.where(total > 0, places, -1)


def check_drawn(classes: Tensor) -> None:
    """Something was drawn in every row of ``(*batch, m)``."""
    if not values_are_checked(classes):
        return
    wrong = (classes < 0).any(-1)
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"hidden: expected states with probabilities to draw from, got none at position "
            f"{first}; look for NaN or inf in hidden and in the head's parameters"
        )
