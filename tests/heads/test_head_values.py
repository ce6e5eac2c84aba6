"""What the three heads compute, against the maps on a matrix of scores."""

import copy
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lastlayer
from lastlayer import entmax, heads, topk_softmax
from lastlayer.fused.prediction import _top_in_order, _top_unless_tied
from lastlayer.heads import EntmaxHead, FullSoftmax, TopKSoftmaxHead

HEADS = {
    "softmax": (FullSoftmax, {}, lambda s: torch.softmax(s, -1)),
    "bent": (
        FullSoftmax,
        {"softcap": 2.0, "temperature": 0.5},
        lambda s: torch.softmax(2 * torch.tanh(s / 2) / 0.5, -1),
    ),
    "entmax": (EntmaxHead, {"alpha": 1.5}, lambda s: entmax(s, 1.5)),
    "sparsemax": (EntmaxHead, {"alpha": 2.0}, lambda s: entmax(s, 2.0)),
    "top 4": (TopKSoftmaxHead, {"k": 4}, lambda s: topk_softmax(s, 4)),
}


@pytest.fixture(params=HEADS)
def made(request):
    cls, options, predict = HEADS[request.param]
    head = cls(9, 37, dtype=torch.float64, **options)
    hidden = 3 * torch.randn(2, 5, 9, dtype=torch.float64)
    return head, hidden, predict(head.to_linear()(hidden))


def test_heads_have_a_package_of_their_own():
    assert lastlayer.__getattr__("heads") is heads
    assert not {*heads.__all__} & {*lastlayer.__all__}


def test_log_prob_is_the_log_of_the_map(made):
    head, hidden, probs = made
    torch.testing.assert_close(head.log_prob(hidden), probs.log())


@pytest.mark.parametrize("chunk_rows", [1, 3, 100, "low"])
def test_chunks_change_nothing(made, chunk_rows):
    head, hidden, _ = made
    classes = torch.randint(37, (2, 5, 4))
    seeded = [torch.Generator().manual_seed(3) for _ in range(2)]
    with torch.no_grad():
        whole = (
            head.log_prob(hidden),
            head.log_prob(hidden, classes),
            *head.topk(hidden, 6),
            head.sample(hidden, 9, generator=seeded[0]),
        )
        head.chunk_rows = chunk_rows
        parts = (
            head.log_prob(hidden),
            head.log_prob(hidden, classes),
            *head.topk(hidden, 6),
            head.sample(hidden, 9, generator=seeded[1]),
        )
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_equal_log_probabilities_come_in_the_order_of_their_classes(dtype):
    head = FullSoftmax(3, 50, dtype=dtype)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.bias[[7, 30]] = 1.0
        head.bias[[2, 40]] = -0.0
    values, classes = head.topk(torch.randn(4, 3).to(dtype), 6)
    assert classes.tolist() == [[7, 30, 0, 1, 2, 3]] * 4
    assert (values.diff() <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("find", [_top_unless_tied, _top_in_order], ids=["unless tied", "in order"])
def test_the_largest_are_those_of_a_stable_sort(find, dtype):
    for n in (1, 2, 7, 40):
        scores = torch.randint(-3, 4, (9, n)).to(dtype)
        scores[torch.rand(9, n) < 0.2] *= -0.0
        scores[torch.rand(9, n) < 0.2] = -math.inf
        scores[0] = -math.inf
        expected = scores.sort(dim=-1, descending=True, stable=True).indices
        for k in {1, (n + 1) // 2, n}:
            assert torch.equal(find(scores, k), expected[:, :k])
        scores[2, n // 2] = math.copysign(math.nan, -1.0)
        assert find(scores, 1)[2] == n // 2
    assert find(scores[:0], 3).shape == (0, 3)


def test_beyond_the_support_topk_has_minus_infinity():
    head = EntmaxHead(2, 6, 2.0, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[4] = 9.0
    values, classes = head.topk(torch.ones(2), 3)
    assert values.tolist() == [0.0, -math.inf, -math.inf]
    assert classes.tolist() == [4, 0, 1]
    assert (head.sample(torch.ones(5, 2), 20) == 4).all()


def test_of_equal_scores_the_first_k_are_in_the_running():
    head = TopKSoftmaxHead(2, 6, 3, bias=False)
    torch.nn.init.zeros_(head.weight)
    log_prob = head.log_prob(torch.ones(2))
    expected = topk_softmax(torch.zeros(6), 3).log()
    torch.testing.assert_close(log_prob, expected)


def test_log_probabilities_that_underflow_are_still_finite():
    head = TopKSoftmaxHead(1, 4, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [300.0], [-300.0], [-301.0]]))
    assert head.log_prob(torch.ones(1)).tolist() == [-300.0, 0.0, -600.0, -math.inf]


def test_half_precision_loses_nothing_on_the_way():
    """Scores are float32, so that only the parameters are rounded, not what they give."""
    head = FullSoftmax(64, 500, dtype=torch.bfloat16)
    hidden = (10 * torch.randn(20, 64)).bfloat16()
    exact = copy.deepcopy(head).double()
    torch.testing.assert_close(
        head.log_prob(hidden).double(), exact.log_prob(hidden.double()), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chosen", [False, True])
def test_gradients_of_log_prob_in_lower_precision(dtype, chosen):
    head = FullSoftmax(16, 40, dtype=dtype, chunk_rows=3)
    hidden = torch.randn(10, 16).to(dtype).requires_grad_()
    classes = torch.randint(40, (10, 2))
    upstream = torch.randn(10, 2)
    leaves = [hidden, head.weight, head.bias]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    rows, weight, bias = exact
    expected = torch.log_softmax(rows @ weight.T + bias, -1).gather(-1, classes)
    log_prob = head.log_prob(hidden, classes if chosen else None)
    log_prob = log_prob if chosen else log_prob.gather(-1, classes)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for got, wanted in zip(
        torch.autograd.grad(log_prob, leaves, upstream),
        torch.autograd.grad(expected, exact, upstream.double()),
        strict=True,
    ):
        assert got.dtype == dtype
        assert (got.double() - wanted).norm() <= tolerance * wanted.norm()


class Largest(TorchDispatchMode):
    """The most numbers that any tensor has had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
        return result


def test_the_scores_of_all_rows_are_never_held(made):
    head, _, _ = made
    head.chunk_rows = 4
    hidden, classes = torch.randn(200, 9, dtype=torch.float64), torch.arange(5)
    target, classes = torch.randint(37, (200,)), classes.expand(200, 5)
    # The sampler's chance and the targets are larger than a chunk; all scores are larger still.
    with Largest() as largest:
        head(hidden.requires_grad_(), target).backward()
        head.topk(hidden, 5)
        head.sample(hidden, 3)
        head.log_prob(hidden, classes).clamp(min=-50).sum().backward()
    assert largest.numbers <= 200 * 9


def test_class_weights_reach_the_loss():
    weight = torch.rand(11) + 0.5
    head = FullSoftmax(5, 11, class_weight=weight)
    hidden, target = torch.randn(6, 5), torch.tensor([0, 3, 10, -100, 3, 7])
    expected = torch.nn.functional.cross_entropy(head.to_linear()(hidden), target, weight=weight)
    torch.testing.assert_close(head(hidden, target), expected)
    assert torch.equal(head.state_dict()["class_weight"], weight)


def test_many_small_classes_are_drawn_as_often_as_they_are_probable():
    """Together they have half the mass, and each less than float32 adds to a sum near 1."""
    n = 1_000_000
    head = FullSoftmax(1, n + 1, bias=False)
    with torch.no_grad():
        head.weight.zero_()
        head.weight[0] = math.log(n)
    drawn = head.sample(torch.ones(1), 40_000)
    small = drawn[drawn > 0]
    assert abs(len(small) / 40_000 - 0.5) < 0.02
    assert abs((small > n // 2).float().mean() - 0.5) < 0.03
    assert len(small.unique()) > 0.95 * len(small)


CHUNKED = {
    "full": lambda **how: heads.FullSoftmax(32, 200, **how),
    "adaptive": lambda **how: heads.AdaptiveSoftmax(32, cutoffs=[20, 80], n_classes=200, **how),
    "differentiated": lambda **how: heads.DifferentiatedSoftmax(32, [(50, 24), (150, 8)], **how),
}


@pytest.mark.parametrize("make", CHUNKED.values(), ids=CHUNKED)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("chunk_rows", [4, 64, 1024])
def test_gradients_of_chosen_log_probs_do_not_depend_on_the_number_of_chunks(
    make, chunk_rows, autocast
):
    dtype = torch.float32 if autocast else torch.bfloat16
    head = make(chunk_rows=chunk_rows, dtype=dtype)
    exact = make(dtype=torch.float64)
    exact.load_state_dict(head.state_dict())
    hidden, target = torch.randn(1024, 32).bfloat16(), torch.randint(200, (1024, 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = -head.log_prob(hidden.to(dtype), target).mean()
    right = -exact.log_prob(hidden.double(), target).mean()
    made = torch.autograd.grad(loss, list(head.parameters()))
    expected = torch.autograd.grad(right, list(exact.parameters()))
    for got, true in zip(made, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - true).norm() <= 8e-3 * true.norm()


SEARCHED = {
    "full": lambda **how: heads.FullSoftmax(16, 90, **how),
    "entmax": lambda **how: heads.EntmaxHead(16, 90, alpha=1.3, **how),
    "topk": lambda **how: heads.TopKSoftmaxHead(16, 90, 20, **how),
}


@pytest.mark.parametrize("make", SEARCHED.values(), ids=SEARCHED)
@pytest.mark.filterwarnings("ignore")
def test_searches_in_compiled_code(make):
    head = make()
    hidden = torch.randn(7, 16)
    with torch.no_grad():
        head.weight[40:60] = head.weight[40]  # ties
        head.bias[40:60] = 3.0
    torch.compiler.reset()
    search = torch.compile(lambda x: head.topk(x, 5), backend="aot_eager", fullgraph=True)
    for got, right in zip(search(hidden), head.topk(hidden, 5), strict=True):
        torch.testing.assert_close(got, right)
    logs = torch.compile(head.log_prob, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logs(hidden), head.log_prob(hidden))


@pytest.mark.parametrize("alpha", [None, 1.0, 1.25, 1.5, 2.0, 3.0])
def test_biases_from_counts_predict_the_frequencies(alpha):
    made = {"dtype": torch.float64}
    head = FullSoftmax(3, 5, **made) if alpha is None else EntmaxHead(3, 5, alpha, **made)
    counts = torch.tensor([40.0, 1.0, 300.0, 7.0, 2.0], dtype=torch.float64)
    head.init_bias_from_counts(counts)
    found = head.log_prob(torch.zeros(1, 3, **made)).exp()
    torch.testing.assert_close(found[0], counts / counts.sum(), rtol=1e-9, atol=1e-12)
    # Frequencies in place of counts.
    head.init_bias_from_counts(counts / counts.sum())
    again = head.log_prob(torch.zeros(1, 3, **made)).exp()
    torch.testing.assert_close(again, found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("scale", "zero"), [(1.0, 0.5), (100.0, 0.5), (0.01, 0.005)])
def test_a_class_without_occurrences_gets_half_a_count(scale, zero):
    head = FullSoftmax(3, 3, dtype=torch.float64)
    counts = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64) * scale
    head.init_bias_from_counts(counts)
    counts[0] = zero
    torch.testing.assert_close(head.bias.detach().exp(), counts / counts.sum())
