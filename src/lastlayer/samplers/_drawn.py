"""What samplers give back."""

from typing import NamedTuple

from torch import Tensor


class Sampled(NamedTuple):
    """Draws with replacement."""

    ids: Tensor
    """Class ids, int64."""
    log_prob: Tensor
    """The log-probability of each, of the same shape."""


class Drawn(NamedTuple):
    """Draws without replacement."""

    ids: Tensor
    """Different class ids, int64 ``(n,)``."""
    log_expected: Tensor
    """The log-probability that a class is among them, which is how often it is on average."""
