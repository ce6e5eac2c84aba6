"""Binary trees by splitting groups of vectors again and again, all groups of a level at once."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lastlayer.trees._arrays import Integers, Offsets, Reals, offsets, ranges
from lastlayer.trees._two_means import split_groups

# An odd number near 2⁶⁴ divided by the golden ratio: levels and seeds start far apart.
_FAR = 0x9E3779B97F4A7C15

# Fewer rows are no work for a second thread.
_ROWS_A_PART = 4096


@dataclass(frozen=True)
class Growth:
    """How groups are split.

    Args:
        by_odds: to the likelier of the two clusters, rather than in half.
        overlap: how far from 0.5 a probability may be for a vector to go to both sides.
        max_paths: the most leaves.
        max_depth: the most levels.
        seed: of the random directions in which clusters are looked for.
    """

    by_odds: bool
    overlap: float
    max_paths: int
    max_depth: int
    seed: int


def grow(
    vectors: NDArray[np.float32],
    weights: Reals,
    group_start: Offsets,
    how: Growth,
    tell: Callable[[float], None],
) -> tuple[Offsets, Integers]:
    """A tree for each group, level by level.

    Args:
        vectors: all groups one after the other.
        weights: one for each vector.
        group_start: where each group starts; all have two vectors or more.
        how: the rules.
        tell: is told now and then which share of the work is done.

    Returns:
        Children of all nodes, ``~row`` for a leaf; the roots are the first nodes.
    """
    rows = np.arange(len(vectors))
    n_nodes, n_paths, level = len(group_start) - 1, len(vectors), 0
    unsure = log((0.5 + how.overlap) / (0.5 - how.overlap)) if how.overlap else 0.0
    work = _work(group_start)
    children: list[Integers] = [rows[:0]]
    with _threads(len(vectors)) as in_parts:
        while len(group_start) > 1:
            order, odds = np.empty(len(rows), np.int64), np.empty(len(rows))
            cuts = np.empty((len(group_start) - 1, 3), np.int64)
            chance = ((how.seed + 1) * _FAR + level * _FAR**2) % 2**62
            in_parts(
                split_groups, len(rows), vectors[rows], weights[rows], group_start, chance,
                how.by_odds, how.max_depth - level - 1, unsure, order, odds, cuts,
            )  # fmt: skip
            _share_room(cuts, odds, how.max_paths - n_paths)
            second, _, first_end = cuts.T
            starts = np.stack([group_start[:-1], second], 1).ravel()
            sizes = np.stack([first_end, group_start[1:]], 1).ravel() - starts
            n_paths += int((first_end - second).sum())
            rows = rows[order]
            inner = sizes > 1
            children.append(np.where(inner, n_nodes + np.cumsum(inner) - 1, ~rows[starts]))
            n_nodes += int(inner.sum())
            rows = rows[ranges(starts[inner], sizes[inner])]
            group_start = offsets(sizes[inner])
            level += 1
            tell(1.0 - _work(group_start) / work)
    child = np.concatenate(children)
    return np.arange(0, len(child) + 1, 2), child


@contextmanager
def _threads(n_rows: int) -> Iterator[Callable[..., None]]:
    """Runs ``kernel(start, stop, *args)`` for all rows, on as many threads as torch uses.

    Plain threads: the kernels let go of the interpreter, and Numba's own would have to be compiled
    for a kernel in each new process.
    """
    threads = min(torch.get_num_threads(), n_rows // _ROWS_A_PART)
    if threads < 2:
        yield lambda kernel, n, *args: kernel(0, n, *args)
        return
    with ThreadPoolExecutor(threads) as pool:

        def in_parts(kernel: Callable[..., None], n: int, *args: Any) -> None:
            # Some groups take longer than others: more parts than threads even that out.
            edges = np.linspace(0, n, 4 * threads + 1).astype(np.int64)
            deque(pool.map(lambda a, b: kernel(a, b, *args), edges[:-1], edges[1:]), maxlen=0)

        yield in_parts


def _work(group_start: Offsets) -> float:
    """About how often the vectors are still to be split, in all."""
    sizes = np.diff(group_start)
    return float((sizes * np.log2(np.maximum(1, sizes))).sum())


def _share_room(cuts: Integers, odds: Reals, room: int) -> None:
    """Keeps both sides of what is the least sure, as far as there is room for more leaves."""
    wanted = ranges(cuts[:, 0], cuts[:, 2] - cuts[:, 0])
    if len(wanted) <= room:
        return
    # Equally unsure ones are all in or all out, so that those that are in stay next to the cut.
    doubt = np.abs(odds[wanted])
    least = np.partition(doubt, room)[room] if room > 0 else -inf
    group = np.repeat(np.arange(len(cuts)), cuts[:, 2] - cuts[:, 0])
    kept = doubt < least
    before = wanted < cuts[group, 1]
    cuts[:, 0] = cuts[:, 1] - np.bincount(group[kept & before], minlength=len(cuts))
    cuts[:, 2] = cuts[:, 1] + np.bincount(group[kept & ~before], minlength=len(cuts))
