"""Trees learned from vectors of the classes, by splitting groups of vectors level by level."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lastlayer._checks import as_array, as_counts, check_choice, check_real
from lastlayer._torch import accumulation_dtype, as_numpy
from lastlayer.trees._arrays import Integers, Offsets, Reals, check_count, offsets, ranges
from lastlayer.trees.tree import Tree

# An odd number near 2⁶⁴ divided by the golden ratio: levels and seeds start far apart.
_FAR = 0x9E3779B97F4A7C15
# Fewer rows are not worth a second thread.
_ROWS_PER_PART = 4096
# Shorter work shows no progress bar.
_SECONDS_WITHOUT_BAR = 2.0


def cluster(
    vectors: Any,
    counts: Any = None,
    *,
    kind: str = "balanced",
    overlap: float = 0.0,
    max_paths: int | None = None,
    max_depth: int | None = None,
    normalize: bool = False,
    seed: int = 0,
    labels: Sequence[str] | None = None,
    progress: bool = True,
) -> Tree:
    """A binary tree with similar classes near each other, by splitting in two again and again.

    At each node two clusters are found among the classes below it: a mixture of two Gaussians with
    one common variance, from 2-means. The classes are sorted by their responsibility, which is the
    probability of the second cluster, and cut in two:

    - ``kind="balanced"``: in half.
    - ``kind="adaptive"``: at 0.5, each class to its likelier cluster, however many there are.
    - ``overlap=ε`` with "adaptive": classes whose responsibility is closer to 0.5 than ε go to both
      sides. They have several paths then, and the sum of their probabilities.

    Mnih and Hinton take the mean of the vectors that a model predicts where a class is the target.
    The rows of a trained output layer, ``linear.weight``, do as well.

    Two rules hold for all kinds. A node whose classes have the same vector is cut in half, as they
    are listed. And where classes could otherwise get deeper than ``max_depth``, a node is cut in
    half by the number of its classes, and none of them goes to both sides.

    Overlap ends by two rules: each side lacks at least one class of its node, and there are at most
    ``max_paths`` leaves. On the level where there would be more, the classes closest to 0.5 go to
    both sides, as many as there is room for, and below that level none.

    Args:
        vectors: ``(n_classes, d)``, floating.
        counts: one number per class, at least 0, not all 0. A class then counts as if its vector
            occurred that often: in the clusters, and in what is half. None for equal ones.
        kind: "balanced" or "adaptive".
        overlap: ε, at least 0 and below 0.5; Mnih and Hinton found 0.25 to 0.4 best.
        max_paths: the most leaves, at least ``n_classes``; twice as many by default.
        max_depth: the most choices that lead to a class, at least log₂ of ``n_classes``; three
            times that by default.
        normalize: divide each vector by its length first, so that directions are compared.
        seed: the same one gives the same tree, on any number of threads.
        labels: one name per class.
        progress: show a bar in a terminal where it takes longer than two seconds.

    Reference:
        Andriy Mnih and Geoffrey Hinton, A scalable hierarchical distributed language model, 2008.

    Example:
        >>> import torch
        >>> animals = torch.tensor([[0.0, 0.1], [9.0, 9.1], [0.2, 0.0], [9.2, 9.0]])
        >>> tree = cluster(animals, labels=["cat", "trout", "dog", "salmon"])
        >>> sorted(tree.code("cat")[:1] + tree.code("trout")[:1])  # apart at the root
        [0, 1]
        >>> tree.code("cat")[0] == tree.code("dog")[0]
        True
    """
    x = as_vectors("vectors", vectors, normalize)
    n = len(x)
    weights = np.ones(n) if counts is None else as_counts(counts, n)
    check_choice("kind", kind, ("balanced", "adaptive"))
    depth = max(1, (n - 1).bit_length())
    how = Growth(
        by_odds=kind == "adaptive",
        overlap=_check_overlap(overlap, kind),
        max_paths=2 * n if max_paths is None else check_count("max_paths", max_paths, least=n),
        max_depth=(
            3 * depth if max_depth is None else check_count("max_depth", max_depth, least=depth)
        ),
        seed=check_count("seed", seed, least=0),
    )
    if n == 1:
        return Tree([0], [], labels)
    with _progress(f"clustering {n:,} classes", progress) as tell:
        start, child = grow(x, weights / weights.max(), offsets(np.array([n])), how, tell)
    return Tree(start, child, labels, overlap=how.overlap > 0)


def _check_overlap(overlap: Any, kind: str) -> float:
    number = check_real(
        "overlap", overlap, "at least 0 and less than 0.5", lambda x: 0.0 <= x < 0.5
    )
    if number and kind != "adaptive":
        raise ValueError(
            f"overlap: expected 0 with kind={kind!r}, got {overlap}; give kind='adaptive'"
        )
    return number


@contextmanager
def _progress(what: str, wanted: bool) -> Iterator[Callable[[float], None]]:
    """A function that is told which share is done, and shows it in a terminal once it is slow."""
    since, bars = time.perf_counter(), list[Any]()

    def tell(share: float) -> None:
        if wanted and time.perf_counter() - since > _SECONDS_WITHOUT_BAR:
            if not bars:
                # Imported here: most trees are built in less time than rich takes to load.
                from rich.console import Console
                from rich.progress import Progress

                console = Console(stderr=True)
                hidden = not console.is_terminal
                bars.append(Progress(console=console, transient=True, disable=hidden))
                bars[0].add_task(what, total=1.0)
                bars[0].start()
            bars[0].update(bars[0].task_ids[0], completed=share)

    try:
        yield tell
    finally:
        if bars:
            bars[0].stop()


def as_vectors(name: str, vectors: Any, normalize: bool) -> NDArray[np.float32]:
    """Rows in float32, scaled and centred so that their squares neither overflow nor vanish."""
    expected = "floating vectors, one per class"
    if isinstance(vectors, torch.Tensor) and vectors.is_floating_point():
        dtype = accumulation_dtype(vectors.dtype)
        array: NDArray[Any] = as_numpy(vectors.detach().to("cpu", dtype))
    else:
        array = as_array(name, vectors, expected)
    if array.dtype.kind != "f":
        raise TypeError(f"{name}: expected {expected}, got {array.dtype}")
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name}: expected shape (n_classes, d), neither 0, got {array.shape}")
    array = array.astype(np.float64 if array.itemsize > 4 else np.float32, copy=False)
    largest = np.abs(array).max(1)
    if not np.isfinite(largest).all():
        c = int((~np.isfinite(largest)).argmax())
        odd = array[c][~np.isfinite(array[c])][0]
        raise ValueError(f"{name}: expected finite numbers, got {odd} for class {c}")
    if normalize:
        # Large and small ones first, so that their squares are in range.
        array = array / np.where(largest > 0, largest, 1)[:, None]
        lengths = np.linalg.norm(array, axis=1, keepdims=True)
        array = array / np.where(lengths > 0, lengths, 1)
    else:
        array = array / (largest.max() or 1.0)
    mean = array.mean(0, dtype=np.float64).astype(array.dtype)
    centred: NDArray[np.float32] = (array - mean).astype(np.float32, copy=False)
    return centred


@dataclass(frozen=True)
class Growth:
    """How groups are split."""

    by_odds: bool
    """To the likelier of the two clusters, rather than in half."""
    overlap: float
    """How far from 0.5 a probability may be for a vector to go to both sides."""
    max_paths: int
    max_depth: int
    seed: int
    """Of the random directions in which clusters are looked for."""


def grow(
    vectors: NDArray[np.float32],
    weights: Reals,
    group_start: Offsets,
    how: Growth,
    tell: Callable[[float], None],
) -> tuple[Offsets, Integers]:
    """A tree for each group of two vectors or more, which start at ``group_start``.

    Returns ``child_start`` and ``child`` of all nodes, level by level, the roots first, with
    ``~row`` for a leaf. ``tell`` is told after each level which share of the work is done.
    """
    from lastlayer.trees import _loops

    rows = np.arange(len(vectors))
    n_nodes, n_paths, level = len(group_start) - 1, len(vectors), 0
    unsure = log((0.5 + how.overlap) / (0.5 - how.overlap)) if how.overlap else 0.0
    work = _work(group_start)
    children: list[Integers] = [rows[:0]]
    with _threads(len(vectors)) as in_parts:
        while len(group_start) > 1:
            order, odds = np.empty(len(rows), np.int64), np.empty(len(rows))
            cuts = np.empty((len(group_start) - 1, 3), np.int64)
            seed = ((how.seed + 1) * _FAR + level * _FAR**2) % 2**62
            in_parts(
                _loops.split_groups, len(rows), vectors[rows], weights[rows], group_start, seed,
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

    Python's threads: the kernels release the GIL, and Numba's own would be compiled in each new
    process.
    """
    threads = min(torch.get_num_threads(), n_rows // _ROWS_PER_PART)
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
    """Keep the least sure on both sides, as far as there is room for more leaves."""
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
