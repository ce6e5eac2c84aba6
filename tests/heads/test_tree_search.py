"""The search for the best leaves of a tree, and walks down to random ones."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastlayer import trees
from lastlayer.fused.prediction import top_classes
from lastlayer.heads import Head, _tree_search
from lastlayer.heads.hierarchical import HierarchicalSoftmax

sys.path.append(str(Path(__file__).parents[1] / "trees"))
from random_trees import random_trees, zipf


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    """By the kernel of the device, and by operations of torch, as where there is none."""
    if request.param == "torch":
        monkeypatch.setattr(_tree_search, "selected", lambda *_: "reference")
    return request.param


def compare_with_a_sort(head, hidden, k):
    values, classes = head.topk(hidden, k)
    expected, sorted_classes = top_classes(head.log_prob(hidden), k)
    torch.testing.assert_close(values, expected)
    assert torch.equal(classes, sorted_classes)


def trained_shape(head, counts, scale):
    """Biases that give the classes their counts, and vectors that move the odds by ``scale``."""
    layer = torch.nn.Linear(head.in_features, head.n_classes)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.from_numpy(np.log(counts)))
    made = HierarchicalSoftmax.init_from_linear(layer, head.tree)
    with torch.no_grad():
        made.weight.normal_(0.0, scale / math.sqrt(head.in_features))
    return made


@settings(max_examples=40)
@given(random_trees(least=2), st.sampled_from([0.1, 1.0, 6.0]), st.integers(0, 10**6))
def test_the_best_are_those_of_a_sort(way, tree, scale, seed):
    torch.manual_seed(seed)
    head = HierarchicalSoftmax(3, tree, dtype=torch.float64)
    hidden = scale * torch.randn(6, 3, dtype=torch.float64)
    for k in sorted({1, (tree.n_classes + 1) // 2, tree.n_classes}):
        compare_with_a_sort(head, hidden, k)


@pytest.mark.parametrize("arity", [2, 5, 40])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_many_classes(arity, scale, way, monkeypatch):
    monkeypatch.setattr(_tree_search, "_TOP_ROWS", 50)
    counts = zipf(2000, np.random.default_rng(3))
    tree = trees.huffman(counts)
    tree = tree if arity == 2 else tree.collapse(arity)
    head = trained_shape(HierarchicalSoftmax(16, tree), counts, scale).double()
    hidden = torch.randn(20, 16, dtype=torch.float64)
    for k in (1, 7, 300, 2000):
        compare_with_a_sort(head, hidden, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_equal_classes_the_lower_id_comes_first(dtype, way):
    counts = np.random.default_rng(5).integers(1, 50, 40)
    for tree in (trees.balanced(64), trees.huffman(counts), trees.balanced(40).collapse(7)):
        head = HierarchicalSoftmax(3, tree, dtype=dtype)
        with torch.no_grad():
            head.weight.zero_()
            # Few values, so that many leaves are equal; halves keep their sums exact.
            head.bias.copy_(torch.randint(0, 2, head.bias.shape) * 100.0)
        hidden = torch.randn(4, 3, dtype=dtype)
        for k in (1, 3, 11, tree.n_classes):
            compare_with_a_sort(head, hidden, k)


def test_where_all_are_alike_rows_are_sorted(monkeypatch):
    monkeypatch.setattr(_tree_search, "_MOST_READ", 64)
    head = HierarchicalSoftmax(3, trees.balanced(600))
    hidden = torch.randn(5, 3)
    torch.nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.bias.zero_()
    found = head._search(hidden, 5)
    assert (found.opened == 599).all()
    compare_with_a_sort(head, hidden, 5)
    with torch.no_grad():
        head.weight[0, 0] = 5.0  # rows go different ways: some are searched, some are sorted
        head.bias[1:].uniform_(2.0, 4.0)
    compare_with_a_sort(head, hidden, 5)


def test_few_nodes_are_opened_in_a_huffman_tree():
    counts = zipf(5000)
    head = trained_shape(HierarchicalSoftmax(32, trees.huffman(counts)), counts, 1.0)
    hidden = torch.randn(50, 32)
    for k, share in ((1, 0.05), (10, 0.15)):
        found = head._search(hidden, k)
        assert found.opened.float().mean() < share * head.n_classes
        assert (found.opened > 0).all()


def test_a_beam_is_a_lower_bound_that_can_miss(way):
    """The best class is below the worse child of the root."""
    tree = trees.from_codes([[[0, n]] for n in range(3)] + [[[1, n]] for n in range(2)])
    head = HierarchicalSoftmax(1, tree)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.bias[0] = -0.1  # the first child of the root has 0.525, in three equal parts
        head.bias[-1] = 9.0
    hidden = torch.ones(2, 1)
    assert head.topk(hidden, 1).classes.tolist() == [[4], [4]]
    narrow = head.topk(hidden, 1, beam=1)
    assert (narrow.classes < 3).all()
    wide = head.topk(hidden, 2, beam=5)
    torch.testing.assert_close(wide.values, head.topk(hidden, 2).values)
    assert (wide.classes[:, 0] == 4).all()


def test_a_beam_never_beats_the_best(way):
    counts = zipf(300)
    head = trained_shape(HierarchicalSoftmax(8, trees.huffman(counts)), counts, 3.0)
    hidden = torch.randn(40, 8)
    best, narrow = head.topk(hidden, 4), head.topk(hidden, 4, beam=4)
    assert (narrow.values <= best.values + 1e-5).all()
    at_found = head.log_prob(hidden).gather(-1, narrow.classes)
    torch.testing.assert_close(narrow.values, at_found)


@settings(max_examples=25)
@given(random_trees(least=2), st.sampled_from([0.3, 3.0]), st.integers(0, 10**6))
def test_a_beam_is_the_same_whoever_follows_it(tree, scale, seed):
    torch.manual_seed(seed)
    head = HierarchicalSoftmax(3, tree, dtype=torch.float64)
    hidden = scale * torch.randn(5, 3, dtype=torch.float64)
    for k, width in ((1, 1), (1, 3), (2, 2), (tree.n_classes, tree.n_classes + 5)):
        found = head._search(hidden, k, width)
        expected = _tree_search.beam_by_levels(head._nodes, hidden, k, width)
        torch.testing.assert_close(found.values, expected.values)
        assert torch.equal(found.classes, expected.classes)
        assert torch.equal(found.opened, expected.opened)


def test_a_beam_that_meets_a_nan_says_so(way):
    head = HierarchicalSoftmax(4, trees.balanced(100))
    hidden = torch.randn(3, 4)
    clean = head.topk(hidden, 5, beam=6)
    hidden[1] = math.nan
    values, classes = head.topk(hidden, 5, beam=6)
    assert values[1].isnan().all()
    assert (classes[1] == -1).all()
    assert torch.equal(classes[::2], clean.classes[::2])
    torch.testing.assert_close(values[::2], clean.values[::2])


def test_a_row_of_nan_disturbs_no_other(way):
    head = HierarchicalSoftmax(4, trees.balanced(100))
    hidden = torch.randn(3, 4)
    clean = head.topk(hidden, 5)
    hidden[1] = math.nan
    values, classes = head.topk(hidden, 5)
    assert values[1].isnan().all()
    assert torch.equal(classes[[0, 2]], clean.classes[[0, 2]])
    torch.testing.assert_close(values[[0, 2]], clean.values[[0, 2]])
    with pytest.raises(ValueError, match=r"hidden: expected .* position \(1,\)"):
        head.sample(hidden)


def test_classes_of_probability_zero_come_last(way):
    head = HierarchicalSoftmax(1, trees.balanced(16), bias=False)
    with torch.no_grad():
        head.weight.fill_(math.inf)
    values, classes = head.topk(torch.ones(1, 1), 3)
    assert values.tolist() == [[0.0, -math.inf, -math.inf]]
    assert classes[0, 0] == head.sample(torch.ones(1), 1).item()
    assert len(set(classes[0].tolist())) == 3


@pytest.mark.parametrize("arity", [2, 6])
def test_walks_are_as_frequent_as_they_are_probable(arity, way):
    counts = zipf(50)
    tree = trees.huffman(counts)
    tree = tree if arity == 2 else tree.collapse(arity)
    head = trained_shape(HierarchicalSoftmax(4, tree), counts, 1.0)
    hidden = torch.randn(2, 4)
    drawn = head.sample(hidden, 40_000)
    probs = head.log_prob(hidden).exp()
    for row in range(2):
        shares = torch.bincount(drawn[row], minlength=50) / 40_000
        deviation = (probs[row] * (1 - probs[row]) / 40_000).sqrt()
        assert ((shares - probs[row]).abs() <= 6 * deviation + 1e-4).all()


def test_very_rare_classes_are_drawn_too(way):
    """Deep below a likely path, each with less than float32 adds to 1, but half of it together."""
    n = 1 << 16
    head = HierarchicalSoftmax(1, trees.balanced(n))
    torch.nn.init.zeros_(head.weight)
    with torch.no_grad():
        head.bias.zero_()
    drawn = head.sample(torch.ones(1), 20_000)
    assert abs((drawn >= n // 2).float().mean() - 0.5) < 0.03
    assert len(drawn.unique()) > 0.8 * 20_000


@settings(max_examples=25)
@given(random_trees(least=2), st.integers(0, 10**6))
def test_a_seed_decides_whoever_takes_the_steps(tree, seed):
    torch.manual_seed(seed)
    head = HierarchicalSoftmax(3, tree, dtype=torch.float64)
    hidden = torch.randn(4, 3, dtype=torch.float64)
    drawn = []
    for chosen in ("cpu", "reference"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_tree_search, "selected", lambda *_, chosen=chosen: chosen)
            generator = torch.Generator().manual_seed(seed)
            drawn.append(head.sample(hidden, 30, generator=generator))
            drawn.append(torch.rand(1, generator=generator))
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_searched_as_what_it_stands_for(dtype, way):
    counts = zipf(1500)
    head = trained_shape(HierarchicalSoftmax(24, trees.huffman(counts)), counts, 2.0).to(dtype)
    hidden = torch.randn(12, 24).to(dtype)
    values, classes = head.topk(hidden, 8)
    assert values.dtype == torch.float32
    truth = head.double().log_prob(hidden.double())
    best = truth.sort(dim=-1, descending=True).values[:, :8]
    torch.testing.assert_close(values.double(), best, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(truth.gather(-1, classes), best, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (1,), ()])
def test_few_rows_or_none(shape, way):
    head = HierarchicalSoftmax(3, trees.huffman(zipf(40)))
    hidden = torch.randn(*shape, 3)
    assert head.topk(hidden, 4).classes.shape == (*shape, 4)
    assert head.sample(hidden, 2).shape == (*shape, 2)
    compare_with_a_sort(head, hidden.reshape(-1, 3), 4)


def test_a_flat_row_reads_little_more_than_a_sort_does(monkeypatch):
    """All leaves are as good as the root's: the search ends after its part of the weight."""
    head = HierarchicalSoftmax(2, trees.balanced(1 << 15))
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    asked = []
    sort = Head.topk
    monkeypatch.setattr(Head, "topk", lambda *args: asked.append(len(args[1])) or sort(*args))
    values, classes = head.topk(torch.randn(2, 2), 3)
    assert asked == [2]
    assert classes.tolist() == [[0, 1, 2]] * 2
    assert (values + 15 * math.log(2)).abs().max() < 1e-4


def test_a_search_inside_a_compiled_function():
    head = HierarchicalSoftmax(3, trees.huffman(zipf(40)))
    hidden = torch.randn(4, 3)
    compiled = torch.compile(lambda rows: head.topk(rows * 2.0, 5), backend="eager")
    assert torch.equal(compiled(hidden).classes, head.topk(hidden * 2.0, 5).classes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("arity", [2, 30])
def test_on_a_gpu(dtype, arity):
    counts = zipf(20_000)
    tree = trees.huffman(counts)
    tree = tree if arity == 2 else tree.collapse(arity)
    head = trained_shape(HierarchicalSoftmax(96, tree), counts, 1.5).to("cuda", dtype)
    hidden = torch.randn(70, 96, device="cuda").to(dtype)
    hidden[3] = 0.0
    hidden[5] = math.nan
    for k in (1, 10, 64, 100):
        values, classes = head.topk(hidden, k)
        assert values[5].isnan().all()
        exact = HierarchicalSoftmax(96, tree, device="cuda", dtype=torch.float64)
        exact.load_state_dict(head.state_dict())
        truth = exact.log_prob(hidden.double())
        best = truth.sort(dim=-1, descending=True).values[:, :k]
        close = {"atol": 1e-4, "rtol": 1e-5}
        torch.testing.assert_close(values.double(), best, equal_nan=True, **close)
        torch.testing.assert_close(truth.gather(-1, classes), best, equal_nan=True, **close)
    opened = head._search(hidden, 10).opened
    assert (opened > 0).all()
    if arity == 2 and dtype != torch.float64:
        assert opened[:3].float().mean() < 0.1 * tree.n_inner


def test_under_autocast_the_best_are_those_of_a_sort():
    tree = trees.huffman([1 / rank for rank in range(1, 2001)])
    head = HierarchicalSoftmax(64, tree)
    hidden = torch.randn(64, 64).bfloat16()
    target = torch.randint(2000, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        every = head.log_prob(hidden)
        torch.testing.assert_close(head.topk(hidden, 10).values, every.topk(10).values)
        assert (head.topk(hidden, 10).classes == every.topk(10).indices).all()
        loss = head(hidden, target)
    torch.testing.assert_close(loss, -every.gather(1, target.unsqueeze(-1)).mean())


@pytest.mark.parametrize("scale", [0.05, 0.1])
def test_the_best_of_flat_rows_under_autocast(scale):
    head = HierarchicalSoftmax(8, trees.balanced(5000), dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.mul_(scale)
        head.bias.zero_()
    hidden = torch.randn(20, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logs = head.log_prob(hidden)
        values, classes = head.topk(hidden, 5)
    expected = logs.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(classes, expected.indices[:, :5])
    assert torch.equal(values, expected.values[:, :5])
