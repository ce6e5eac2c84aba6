"""Trees from class vectors, by splitting groups of vectors in two, level by level."""

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

# An odd number near 2⁶⁴ divided by the golden ratio, so that levels and seeds get distant values.
_FAR = 0x9E3779B97F4A7C15
# Minimum number of rows per thread.
_ROWS_PER_PART = 4096
# The progress bar is shown after this time.
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
    """A binary tree with similar classes near each other, from hierarchical clustering of vectors.

    Each node splits its classes in two: it fits a mixture of two Gaussians with a common variance,
    initialized by 2-means, sorts the classes by responsibility (the probability of the second
    cluster), and cuts the sorted list:

    - ``kind="balanced"``: in half.
    - ``kind="adaptive"``: at 0.5, so each class goes to its more probable cluster.
    - ``overlap=ε`` with "adaptive": a class whose responsibility is within ε of 0.5 goes to both
      sides. It then has several paths, and its probability is the sum over them.

    As the vector of a class, Mnih and Hinton take the mean of the vectors that a model predicts
    for positions where the class is the target. The rows of a trained output layer,
    ``linear.weight``, work as well.

    Two rules hold for all kinds. If all classes of a node have the same vector, their list is cut
    in half. If a class could otherwise get deeper than ``max_depth``, the node is cut in half by
    number of classes, without overlap.

    Overlap is limited in two ways: each side lacks at least one class of its node, and the tree has
    at most ``max_paths`` leaves. On the level where this limit would be exceeded, only the classes
    closest to 0.5 go to both sides; below that level none do.

    Args:
        vectors: ``(n_classes, d)``, floating.
        counts: one number per class, at least 0, not all 0; None for equal counts. They weight the
            classes, both in the clusters and in finding the half.
        kind: "balanced" or "adaptive".
        overlap: ε, at least 0 and below 0.5; Mnih and Hinton found 0.25 to 0.4 best.
        max_paths: maximum number of leaves, at least ``n_classes``; ``2 * n_classes`` by default.
        max_depth: maximum depth of a class, at least log₂(``n_classes``) rounded up; three times
            that by default.
        normalize: divide each vector by its length first, so that only directions matter.
        seed: random seed; the tree does not depend on the number of threads.
        labels: one name per class.
        progress: show a progress bar in a terminal if building takes more than two seconds.

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
    """Yields a function of the completed share of the work, which updates a progress bar."""
    since, bars = time.perf_counter(), list[Any]()

    def tell(share: float) -> None:
        if wanted and time.perf_counter() - since > _SECONDS_WITHOUT_BAR:
            if not bars:
                # Imported here: most trees are built in less time than the import takes.
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
    """Rows in float32, scaled and centred so that their squares neither overflow nor underflow."""
    expected = "floating vectors, one per class"
    if isinstance(vectors, torch.Tensor) and vectors.is_floating_point():
        dtype = accumulation_dtype(vectors.dtype)
        array: NDArray[Any] = as_numpy(vectors.detach().to("cpu", dtype))
    else:
        array = as_array(name, vectors, expected)
    if array.dtype.kind != "f":
        raise TypeError(f"{name}: expected {expected}, got {array.dtype}")
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name}: expected shape (n_classes, d) without zeros, got {array.shape}")
    array = array.astype(np.float64 if array.itemsize > 4 else np.float32, copy=False)
    largest = np.abs(array).max(1)
    if not np.isfinite(largest).all():
        c = int((~np.isfinite(largest)).argmax())
        odd = array[c][~np.isfinite(array[c])][0]
        raise ValueError(f"{name}: expected finite numbers, got {odd} for class {c}")
    if normalize:
        # Divide by the largest magnitude first, so that squares are in range.
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
    """How groups of vectors are split."""

    by_odds: bool
    """Whether a vector goes to its more probable cluster; otherwise groups are cut in half."""
    overlap: float
    """Vectors whose responsibility is within this distance of 0.5 go to both sides."""
    max_paths: int
    max_depth: int
    seed: int
    """Seed of the random initial directions."""


def grow(
    vectors: NDArray[np.float32],
    weights: Reals,
    group_start: Offsets,
    how: Growth,
    tell: Callable[[float], None],
) -> tuple[Offsets, Integers]:
    """One tree for each group of at least two vectors; groups start at ``group_start``.

    Returns ``child_start`` and ``child`` of all nodes, level by level, roots first, with ``~row``
    for a leaf. ``tell`` is called after each level with the completed share of the work.
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
    """Yields a function that runs ``kernel(start, stop, *args)`` on ``torch.get_num_threads()``.

    These are Python threads, since the kernels release the GIL; Numba's parallel code would be
    compiled again in each process.
    """
    threads = min(torch.get_num_threads(), n_rows // _ROWS_PER_PART)
    if threads < 2:
        yield lambda kernel, n, *args: kernel(0, n, *args)
        return
    with ThreadPoolExecutor(threads) as pool:

        def in_parts(kernel: Callable[..., None], n: int, *args: Any) -> None:
            # More parts than threads balance the load, since some groups take longer than others.
            edges = np.linspace(0, n, 4 * threads + 1).astype(np.int64)
            deque(pool.map(lambda a, b: kernel(a, b, *args), edges[:-1], edges[1:]), maxlen=0)

        yield in_parts


def _work(group_start: Offsets) -> float:
    """Estimated remaining work: the sum of n log₂ n over groups of size n."""
    sizes = np.diff(group_start)
    return float((sizes * np.log2(np.maximum(1, sizes))).sum())


def _share_room(cuts: Integers, odds: Reals, room: int) -> None:
    """Limit overlap to ``room`` more leaves: the vectors with log-odds closest to 0 keep it."""
    wanted = ranges(cuts[:, 0], cuts[:, 2] - cuts[:, 0])
    if len(wanted) <= room:
        return
    # Ties are all kept or all dropped, so that those that are kept are contiguous at the cut.
    doubt = np.abs(odds[wanted])
    least = np.partition(doubt, room)[room] if room > 0 else -inf
    group = np.repeat(np.arange(len(cuts)), cuts[:, 2] - cuts[:, 0])
    kept = doubt < least
    before = wanted < cuts[group, 1]
    cuts[:, 0] = cuts[:, 1] - np.bincount(group[kept & before], minlength=len(cuts))
    cuts[:, 2] = cuts[:, 1] + np.bincount(group[kept & ~before], minlength=len(cuts))
