"""Trees learned from vectors of the classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lastlayer.trees._arrays import offsets
from lastlayer.trees._checks import as_counts, check_choice, check_number
from lastlayer.trees._grow import Growth, grow
from lastlayer.trees._progress import telling
from lastlayer.trees._vectors import as_vectors
from lastlayer.trees.tree import Tree


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
        counts: one number a class, at least 0, not all 0. A class then counts as if its vector came
            that often: in the clusters, and in what is half. Without them classes count alike.
        kind: "balanced" or "adaptive".
        overlap: ε, at least 0 and below 0.5; Mnih and Hinton had most from 0.25 to 0.4.
        max_paths: the most leaves, at least ``n_classes``; twice as many by default.
        max_depth: the most choices that lead to a class, at least log₂ of ``n_classes``; three
            times that by default.
        normalize: divide each vector by its length first, so that directions are compared.
        seed: the same one gives the same tree, on any number of threads.
        labels: one name a class.
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
        overlap=_checked_overlap(overlap, kind),
        max_paths=2 * n if max_paths is None else check_number("max_paths", max_paths, least=n),
        max_depth=(
            3 * depth if max_depth is None else check_number("max_depth", max_depth, least=depth)
        ),
        seed=check_number("seed", seed, least=0),
    )
    if n == 1:
        return Tree([0], [], labels)
    with telling(f"clustering {n:,} classes", progress) as tell:
        start, child = grow(x, weights / weights.max(), offsets(np.array([n])), how, tell)
    return Tree(start, child, labels, overlap=how.overlap > 0)


def _checked_overlap(overlap: Any, kind: str) -> float:
    if isinstance(overlap, bool) or not isinstance(overlap, (int, float)):
        raise TypeError(f"overlap: expected a number, got {type(overlap).__name__}")
    if not 0 <= overlap < 0.5:
        raise ValueError(f"overlap: expected at least 0 and less than 0.5, got {overlap}")
    if overlap and kind != "adaptive":
        raise ValueError(
            f"overlap: expected 0 with kind={kind!r}, got {overlap}; give kind='adaptive'"
        )
    return float(overlap)
