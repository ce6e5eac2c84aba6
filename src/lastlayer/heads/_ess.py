"""Draws in blocks until their weights are worth enough equally weighted ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer.heads._checks import check_count
from lastlayer.heads._sampled_checks import check_positive


class Stopped(NamedTuple):
    """When each row stopped."""

    blocks: Tensor
    """Blocks that a row used, int64 ``(n,)``; 0 for a row that does not count."""
    ess: Tensor
    """Its effective sample size then, ``(n,)``."""
    reached: Tensor
    """Whether that is enough, bool ``(n,)``."""


class RunningWeights:
    """log Σ r and log Σ r² of rows, of which blocks arrive one after the other."""

    def __init__(self, n_rows: int, like: Tensor) -> None:
        self._sum = like.new_full((n_rows,), -torch.inf)
        self._squares = self._sum.clone()

    def add(self, rows: Tensor, log_sum: Tensor, log_squares: Tensor) -> None:
        """The sums of a block for some rows."""
        self._sum[rows] = torch.logaddexp(self._sum[rows], log_sum)
        self._squares[rows] = torch.logaddexp(self._squares[rows], log_squares)

    @property
    def ess(self) -> Tensor:
        """(Σ r)² / Σ r²."""
        return torch.where(self._sum == -torch.inf, 0.0, (2 * self._sum - self._squares).exp())


def draw_until(
    target_ess: float,
    most_blocks: int,
    counted: Tensor,
    weights: RunningWeights,
    add_block: Callable[[int, Tensor], None],
) -> Stopped:
    """Draws a block at a time for the rows that have not reached ``target_ess``.

    The host waits once a block, to know which rows go on.

    Args:
        target_ess: what is enough.
        most_blocks: after which a row gives up.
        counted: rows that take part, bool ``(n,)``.
        weights: of no draws yet.
        add_block: draws block b for the rows it is given, and adds to ``weights``.
    """
    blocks = torch.zeros_like(counted, dtype=torch.int64)
    open_rows = counted.nonzero().squeeze(1)
    for block in range(most_blocks):
        if not len(open_rows):
            break
        add_block(block, open_rows)
        blocks[open_rows] += 1
        # A NaN will not become a number with more draws.
        going_on = weights.ess[open_rows] < target_ess
        open_rows = open_rows[going_on]
    ess = weights.ess
    return Stopped(blocks, ess, ~(ess < target_ess) | ~counted)


def check_stopping(target_ess: Any, n_samples: int, max_samples: Any) -> None:
    """A number to reach, and draws after which a row gives up: a block at least."""
    if target_ess is not None:
        check_positive("target_ess", target_ess)
    if max_samples is not None:
        check_count("max_samples", max_samples)
        if target_ess is None:
            raise ValueError(
                f"max_samples: expected None without target_ess, got {max_samples}; every row "
                "draws n_samples then"
            )
        if max_samples < n_samples:
            raise ValueError(
                f"max_samples: expected at least n_samples={n_samples}, one block, got "
                f"{max_samples}"
            )
    most = n_samples * BLOCKS if max_samples is None else max_samples
    if target_ess is not None and target_ess > most:
        raise ValueError(
            f"target_ess: expected at most max_samples={most}, which is reached where all weights "
            f"are equal, got {target_ess}"
        )


# Blocks after which a row gives up where nothing else is said.
BLOCKS = 32
