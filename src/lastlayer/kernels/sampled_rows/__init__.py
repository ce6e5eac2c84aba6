"""Rows of scores of drawn classes to a softmax or logistic loss, and to its gradient; README.md.

``triton.OneTarget`` and ``cpu.OneTarget`` have all that surrounds them where each row has one
target and all rows share their draws.
"""

from typing import NamedTuple

from torch import Tensor

from lastlayer.kernels._registry import operation


def parts_of_columns(n: int, m: int) -> int:
    """How many parts the sums of columns come in on CUDA, one per program."""
    # Programs that a GPU runs at once, or a few more.
    return max(1, min(n, (1 << 21) // max(16, 1 << (m - 1).bit_length())))


class Draws(NamedTuple):
    """How the classes of a step are drawn, and what is taken off their scores.

    Draws and targets may be corrected by ``log q + less``: draws where ``corrects`` says so,
    targets where ``targets`` is 1. With 2, log(1 - q) of a row's target is added to its draws.
    """

    kind: int
    """Given as tensors, or one of lastlayer.kernels.rng."""
    m: int
    first: Tensor
    """The ids (m,), or the RNG counter."""
    second: Tensor | None = None
    """What is taken off their scores (m,), or the sampler's first table."""
    third: Tensor | None = None
    """The sampler's second table."""
    n_classes: int = 1
    """Of the sampler."""
    less: float = 0.0
    corrects: bool = True
    targets: int = 0
    of_targets: Tensor | None = None
    """Taken off the scores of given targets (n,), where draws are given."""
    shift: Tensor | None = None
    """Added to those of a row's draws (n,), where draws are given."""
    counts: bool = False
    """Whether the RNG counter moves on."""


forward_ = operation(
    "sampled_rows.forward_",
    "sampled_rows_",
    writes=("scores", "gradient", "first", "second", "columns"),
)
