"""Cutoffs from counts, against a brute force."""

import itertools
import re

import numpy as np
import pytest

from lastlayer.heads import AdaptiveSoftmax, MatrixCost, cutoffs_from_counts
from lastlayer.heads.layout import COSTS, tail_widths


def raises(kind, *parts):
    return pytest.raises(kind, match=".*".join(map(re.escape, parts)))


def brute_force(counts, in_features, rows, most, top_share, cost):
    counts = np.sort(np.asarray(counts, float))[::-1]
    n, share = len(counts), counts / counts.sum()
    best = (np.inf, None)
    for clusters in range(most + 1):
        widths = tail_widths(in_features, clusters, 2.0, 1)
        for cutoffs in itertools.combinations(range(1, n), clusters):
            top, ends = [*cutoffs, n][0], [*cutoffs, n]
            if share[:top].sum() < top_share - 1e-12:
                continue
            total = cost.work(top + clusters, rows, in_features)
            for width, a, b in zip(widths, ends[:-1], ends[1:], strict=True):
                expected = rows * share[a:b].sum()
                total += cost.work(b - a, expected, width) if b - a >= width else np.inf
                total += cost.product * expected * width * in_features
            calls = cost.call * (1 + clusters)
            total = max(calls, total) if cost.overlap else calls + total
            if total < best[0] - 1e-9:
                best = (total, list(cutoffs))
    return best


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("top_share", [0.0, 0.3])
@pytest.mark.parametrize("call", [0.1, 2.0, 50.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_cutoffs_are_those_of_a_brute_force(most, top_share, call, overlap, seed):
    counts = np.random.default_rng(seed).pareto(1.0, 14) + 1e-3
    cost = MatrixCost(call, 0.01, 0.01, 0.01, overlap)
    least, expected = brute_force(counts, 8, 30, most, top_share, cost)
    got = cutoffs_from_counts(
        counts, 8, div_value=2.0, min_width=1, rows=30, max_clusters=most, top_share=top_share,
        cost=cost,
    )  # fmt: skip
    assert got == expected, least


def test_cutoffs_of_words():
    zipf = 1 / np.arange(1, 50_001)
    cutoffs = cutoffs_from_counts(zipf, 256)
    head = AdaptiveSoftmax(256, counts=zipf)
    assert head.cutoffs.tolist() == cutoffs
    assert zipf[: cutoffs[0]].sum() >= 0.5 * zipf.sum()
    assert head.order is None
    cost = COSTS["cpu"]
    assert cost.work(50_000, 256, 256) > 10 * cost.work(cutoffs[0], 256, 256)
    assert cutoffs_from_counts(zipf, 256, top_share=1.0) == []
    assert cutoffs_from_counts([3], 4) == []


def test_on_a_gpu_clusters_are_fewer_and_the_top_is_larger():
    """A launch costs what many products do."""
    zipf = 1 / np.arange(1, 50_001)
    there = cutoffs_from_counts(zipf, 512, rows=8192, cost="cuda")
    here = cutoffs_from_counts(zipf, 512, rows=8192, cost="cpu")
    assert len(there) < len(here)
    assert there[0] > here[0]
    assert there == cutoffs_from_counts(zipf, 512, rows=8192, cost=COSTS["cuda"])


def test_shares_of_the_top():
    with raises(ValueError, "top_share: expected a number from 0 to 1", "got 2"):
        cutoffs_from_counts([1, 2], 4, top_share=2)


@pytest.mark.parametrize("cost", ["tpu", 3, (1.0, 1.0, 1.0, 1.0)])
def test_costs(cost):
    with raises(ValueError, "cost: expected one of ('cpu', 'cuda') or a MatrixCost", repr(cost)):
        cutoffs_from_counts([1, 2], 4, cost=cost)


def test_widths_and_cutoffs_that_are_none():
    head = AdaptiveSoftmax(4, cutoffs=[1, 2], n_classes=3, div_value=1e200)
    assert [len(each) for each in head.projections] == [4, 4]
    with pytest.raises(TypeError, match="cutoffs: position 0: expected an int, got bool"):
        AdaptiveSoftmax(4, cutoffs=[True], n_classes=3)
