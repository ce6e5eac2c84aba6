"""Trees learned from vectors."""

import importlib
import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import all_codes, breadth_of_codes, left_to_right, zipf
from rich.console import Console

from lastlayer import trees
from lastlayer.trees._loops import centre, log_odds

# `lastlayer.trees.cluster` is the function of that name.
module = importlib.import_module("lastlayer.trees.cluster")

SIZES = st.integers(1, 70)
SEEDS = st.integers(0, 2**31 - 2)


def blobs(sizes, seed, d=5, apart=20.0):
    """Clusters far from each other, and which one each vector is of."""
    chance = np.random.default_rng(seed)
    centres = apart * np.eye(len(sizes), d)
    which = chance.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return centres[which] + chance.normal(size=(len(which), d)), which


def first_choices(tree):
    return np.array([tree.code(c)[0] for c in range(tree.n_classes)])


@given(SIZES, SEEDS)
def test_balanced_trees_are_as_shallow_as_can_be(n, seed):
    tree = trees.cluster(np.random.default_rng(seed).normal(size=(n, 3)), seed=seed)
    assert sorted(left_to_right(tree)) == list(range(n))
    assert tree.is_binary
    assert tree.max_depth == (n - 1).bit_length()
    assert tree.class_depth.max() - tree.class_depth.min() <= 1


@given(SIZES, SEEDS, st.sampled_from([0.0, 0.1, 0.4, 0.49]), st.booleans())
def test_adaptive_trees_have_all_classes(n, seed, overlap, counted):
    vectors = np.random.default_rng(seed).normal(size=(n, 3))
    counts = zipf(n) if counted else None
    tree = trees.cluster(vectors, counts, kind="adaptive", overlap=overlap, seed=seed)
    assert set(left_to_right(tree)) == set(range(n))
    assert tree.n_paths <= (2 * n if overlap else n)
    assert tree.max_depth <= 3 * max(1, (n - 1).bit_length())
    codes = all_codes(tree)
    assert sum(breadth_of_codes(codes)) == 1
    assert len({tuple(code) for code in codes}) == tree.n_paths


@pytest.mark.parametrize("sizes", [(30, 30), (50, 7), (3, 60)])
def test_clusters_part_at_the_root(sizes, seed):
    vectors, which = blobs(sizes, seed)
    choices = first_choices(trees.cluster(vectors, kind="adaptive", seed=seed))
    assert len({*zip(choices, which, strict=True)}) == 2


def test_the_halves_of_a_balanced_tree_follow_the_clusters(seed):
    vectors, which = blobs((32, 32), seed)
    choices = first_choices(trees.cluster(vectors, seed=seed))
    assert len({*zip(choices, which, strict=True)}) == 2


def test_four_clusters_are_the_four_grandchildren(seed):
    vectors, which = blobs((16, 16, 16, 16), seed, apart=60.0)
    tree = trees.cluster(vectors, kind="adaptive", seed=seed)
    found = {}
    for c, blob in enumerate(which):
        found.setdefault(blob, []).append(tree.code(c))
    begins = []
    for codes in found.values():
        common = 0
        while len({tuple(code[: common + 1]) for code in codes}) == 1:
            common += 1
        begins.append(tuple(codes[0][:common]))
    assert len({*begins}) == 4
    assert sum(0.5 ** len(begin) for begin in begins) == 1


def test_odds_are_a_fixed_point_of_the_mixture(seed):
    chance = np.random.default_rng(seed)
    x = np.concatenate([chance.normal(size=(300, 4)), chance.normal(size=(200, 4)) + 2.5])
    weight = chance.uniform(0.5, 1.5, 500)
    rows, odds = x.astype(np.float32), np.empty(500)
    squares, _ = centre(rows, weight)
    assert log_odds(rows, weight, squares, 1, odds)

    share = 1 / (1 + np.exp(-odds))
    parts = np.stack([weight * (1 - share), weight * share])
    means = parts @ x / parts.sum(1, keepdims=True)
    distances = ((x[None] - means[:, None]) ** 2).sum(-1)
    variance = (parts * distances).sum() / (weight.sum() * x.shape[1])
    logs = np.log(parts.sum(1))[:, None] - distances / (2 * variance)
    again = 1 / (1 + np.exp(logs[0] - logs[1]))
    assert np.abs(again - share).max() < 0.05


@pytest.mark.parametrize("kind", ["balanced", "adaptive"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
def test_vectors_that_are_all_the_same_are_halved(kind, value):
    tree = trees.cluster(np.full((100, 4), value), kind=kind)
    assert left_to_right(tree) == list(range(100))
    assert tree.max_depth == 7


def test_one_vector_that_is_not_like_the_others(seed):
    vectors = np.full((65, 3), 0.3)
    vectors[20] = 5
    tree = trees.cluster(vectors, kind="adaptive", overlap=0.3, seed=seed)
    assert tree.depth(20) == 1
    assert tree.n_paths == 65


def test_counts_decide_what_half_is():
    n = 2000
    chance = np.random.default_rng(1)
    vectors, counts = chance.normal(size=(n, 4)), zipf(n, chance)
    plain, counted = trees.cluster(vectors), trees.cluster(vectors, counts)
    assert counted.expected_depth(counts) < counted.entropy_bound(counts).bits + 2
    assert counted.expected_depth(counts) < plain.expected_depth(counts) - 1


def test_classes_that_never_occur_have_a_place_too():
    counts = np.zeros(40)
    counts[[3, 30]] = 5, 6
    vectors = np.random.default_rng(0).normal(size=(40, 3))
    for kind in ("balanced", "adaptive"):
        tree = trees.cluster(vectors, counts, kind=kind)
        assert sorted(left_to_right(tree)) == list(range(40))


def test_counts_weigh_the_clusters():
    # Two heavy classes are apart; without counts, the many light ones between them decide.
    line = np.concatenate([[-1.0, 1.0], np.linspace(1.1, 3, 60)])[:, None]
    heavy = np.concatenate([[1e6, 1e6], np.ones(60)])
    with_counts = trees.cluster(line, heavy, kind="adaptive")
    without = trees.cluster(line, kind="adaptive")
    assert with_counts.code(0)[0] != with_counts.code(1)[0]
    assert without.code(0)[0] == without.code(1)[0]


def test_a_class_in_the_middle_goes_to_both_sides(seed):
    chance = np.random.default_rng(seed)
    vectors = np.concatenate([chance.normal(-6, 1, (40, 1)), chance.normal(6, 1, (40, 1)), [[0.0]]])
    tree = trees.cluster(vectors, kind="adaptive", overlap=0.4999, max_paths=82, seed=seed)
    assert {code[0] for code in tree.codes(80)} == {0, 1}
    assert tree.n_paths == 82
    with pytest.raises(ValueError, match=r"expected a class with one path, got 80 .*codes"):
        tree.code(80)


@given(st.integers(3, 60), SEEDS, st.integers(0, 40))
def test_no_more_paths_than_allowed(n, seed, more):
    vectors = np.random.default_rng(seed).normal(size=(n, 2))
    tree = trees.cluster(vectors, kind="adaptive", overlap=0.49, max_paths=n + more, seed=seed)
    assert n <= tree.n_paths <= n + more


@pytest.mark.parametrize("max_depth", [6, 8, 20])
def test_no_class_is_deeper_than_allowed(max_depth):
    # Each point is as far from the next as from all before: 2-means takes them one by one.
    line = 4.0 ** np.arange(64)[:, None]
    tree = trees.cluster(line, kind="adaptive", overlap=0.1, max_depth=max_depth)
    assert tree.max_depth <= max_depth
    assert trees.cluster(line, line[:, 0], max_depth=max_depth).max_depth <= max_depth


def test_the_same_seed_gives_the_same_tree_on_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(module, "_ROWS_PER_PART", 16)
    vectors = np.random.default_rng(0).normal(size=(3000, 6))
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(trees.cluster(vectors, kind="adaptive", overlap=0.2, seed=5))
    torch.set_num_threads(1)
    assert found[0] == found[1]
    assert found[0] != trees.cluster(vectors, kind="adaptive", overlap=0.2, seed=6)


def test_vectors_of_any_scale_place_and_type(seed):
    vectors = np.round(np.random.default_rng(seed).normal(size=(200, 4)), 1)
    tree = trees.cluster(vectors, kind="adaptive")
    for same in (2.0**300 * vectors, 2.0**-300 * vectors, torch.tensor(vectors)):
        assert trees.cluster(same, kind="adaptive") == tree
    half = torch.tensor(vectors).bfloat16().requires_grad_()
    assert trees.cluster(half) == trees.cluster(half.float())


def test_directions_alone_count_where_vectors_are_normalized(seed):
    chance = np.random.default_rng(seed)
    vectors = chance.normal(size=(60, 3))
    vectors[7] = 0
    lengths = 2.0 ** chance.integers(-300, 300, (60, 1))
    tree = trees.cluster(vectors, normalize=True)
    assert trees.cluster(lengths * vectors, normalize=True) == tree


def test_a_bar_is_shown_in_a_terminal_when_it_takes_long(monkeypatch):
    out = io.StringIO()
    terminal = {"file": out, "force_terminal": True, "width": 90}
    monkeypatch.setattr("rich.console.Console", lambda stderr: Console(**terminal))
    vectors = np.random.default_rng(0).normal(size=(300, 2))
    trees.cluster(vectors)
    assert out.getvalue() == ""
    monkeypatch.setattr(module, "_SECONDS_WITHOUT_BAR", -1.0)
    trees.cluster(vectors, progress=False)
    assert out.getvalue() == ""
    trees.cluster(vectors)
    assert "clustering 300 classes" in out.getvalue()
    terminal["force_terminal"] = False
    terminal["file"] = silent = io.StringIO()
    trees.cluster(vectors)
    assert silent.getvalue() == ""
