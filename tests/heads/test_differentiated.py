"""The differentiated softmax: against a dense block-diagonal layer."""

import itertools
import re
import warnings

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lastlayer import kernels
from lastlayer.fused import clusters
from lastlayer.fused.rows import NOT_SPREAD
from lastlayer.heads import DifferentiatedSoftmax, Head, bands_from_counts
from lastlayer.testing import check_head

BANDS = [(5, 6), (10, 4), (25, 2)]
N_CLASSES = 40


def raises(kind, *parts):
    return pytest.raises(kind, match=".*".join(map(re.escape, parts)))


def make(**options):
    options = {"order": torch.randperm(N_CLASSES), "dtype": torch.float64, **options}
    return DifferentiatedSoftmax(12, BANDS, **options)


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({}, {}),
        ({"variant": "projections", "bias": False}, {"compile": False}),
        (
            {"label_smoothing": 0.2, "order": None, "chunk_rows": 2},
            {"loss_is_nll": False, "compile": False},
        ),
        ({"variant": "projections", "ignore_index": None}, {"compile": False}),
    ],
    ids=["slices", "projections", "smoothed", "nothing ignored"],
)
def test_it_is_a_head(options, rules, seed):
    check_head(make(**options, dtype=None), seed=seed, draws=5000, **rules)


def test_one_band_is_a_head(seed):
    head = DifferentiatedSoftmax(7, [(20, 7)])
    check_head(head, seed=seed, compile=False, draws=5000, dtypes=(torch.float32, torch.float64))


def block_diagonal(head):
    """The weight of all classes on all numbers that the bands see."""
    return torch.block_diag(*head.weights)


def dense_scores(head, hidden):
    seen = hidden if head.projection is None else hidden @ head.projection.T
    scores = seen @ block_diagonal(head).T
    scores = scores if head.bias is None else scores + head.bias
    return scores if head.places is None else scores[..., head.places]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("variant", ["slices", "projections"])
def test_loss_and_gradients_of_the_dense_layer(variant, smoothing, reduction):
    head = make(variant=variant, label_smoothing=smoothing, reduction=reduction, chunk_rows=4)
    hidden = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randint(N_CLASSES, (3, 7))
    target[1, ::2] = -100
    loss = head(hidden, target)
    expected = torch.nn.functional.cross_entropy(
        dense_scores(head, hidden).flatten(0, 1), target.flatten(), reduction=reduction,
        label_smoothing=smoothing,
    ).reshape(loss.shape)  # fmt: skip
    torch.testing.assert_close(loss, expected)
    upstream = torch.randn_like(loss)
    leaves = [hidden, *head.parameters()]
    for got, wanted in zip(
        torch.autograd.grad(loss, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_in_half_precision(dtype, reduction):
    head = make(dtype=dtype, reduction=reduction, chunk_rows=5)
    hidden = torch.randn(30, 12).to(dtype).requires_grad_()
    target = torch.randint(N_CLASSES, (30,))
    upstream = torch.rand(30) if reduction == "none" else torch.tensor(1.0)
    leaves = [hidden, *head.parameters()]
    made = torch.autograd.grad(head(hidden, target), leaves, upstream)
    exact = DifferentiatedSoftmax(12, BANDS, order=head.order, dtype=torch.float64)
    exact.reduction = reduction
    exact.load_state_dict(head.state_dict())
    rows = hidden.detach().double().requires_grad_()
    expected = torch.autograd.grad(
        exact(rows, target), [rows, *exact.parameters()], upstream.double()
    )
    for got, wanted in zip(made, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("variant", ["slices", "projections"])
def test_log_prob_topk_and_chosen_classes(variant):
    head = make(variant=variant, chunk_rows=3)
    hidden = torch.randn(11, 12, dtype=torch.float64)
    expected = torch.log_softmax(dense_scores(head, hidden), -1)
    torch.testing.assert_close(head.log_prob(hidden), expected)
    classes = torch.randint(N_CLASSES, (11, 3))
    torch.testing.assert_close(head.log_prob(hidden, classes), expected.gather(-1, classes))
    order = expected.sort(dim=-1, descending=True, stable=True)
    values, found = head.topk(hidden, 9)
    torch.testing.assert_close(values, order.values[:, :9])
    assert torch.equal(found, order.indices[:, :9])


def test_compiled_without_reduction():
    head = make(reduction="none", variant="projections")
    hidden = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 39, -100, 17, 8, 2])
    losses = head(hidden, target)
    upstream = torch.randn_like(losses)
    leaves = [hidden, *head.parameters()]
    expected = torch.autograd.grad(losses, leaves, upstream)
    with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
        compiled = torch.compile(head, fullgraph=True, backend="aot_eager")(hidden, target)
    torch.testing.assert_close(compiled, losses)
    for got, wanted in zip(torch.autograd.grad(compiled, leaves, upstream), expected, strict=True):
        torch.testing.assert_close(got, wanted)


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


def test_neither_a_dense_weight_nor_all_scores_are_ever_made():
    head = make(chunk_rows=4)
    hidden, target = torch.randn(30, 12, dtype=torch.float64), torch.randint(N_CLASSES, (30,))
    with Shapes() as shapes:
        head(hidden.requires_grad_(), target).backward()
        head.log_prob(hidden, target.unsqueeze(-1)).sum().backward()
        head.topk(hidden, 3)
    largest = max(int(np.prod(shape)) for shape in shapes.seen)
    assert largest <= 30 * 12 < N_CLASSES * 12 < 30 * N_CLASSES
    assert not any(set(shape) == {N_CLASSES, 12} for shape in shapes.seen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [True, False])
def test_what_the_compiler_is_told_of_the_operation_is_true(dtype, wanted):
    head = make(dtype=dtype)
    operands = [torch.randn(4, 12, dtype=dtype), head.bias.detach()]
    operands += [each.detach() for each in head.weights]
    target, wants = torch.tensor([0, 39, -100, 17]), [wanted] * len(operands)
    operation = torch.ops.lastlayer.band_loss.default
    for upstream, reduction in ((None, "mean"), (None, "none"), (torch.ones(4), "none")):
        torch.library.opcheck(
            operation,
            (
                [*operands, target, head.places],
                upstream,
                0.1,
                -100,
                "auto",
                *NOT_SPREAD,
                reduction,
                wants,
            ),
            test_utils=["test_schema", "test_faketensor"],
        )


def test_a_second_backward_gives_the_same_and_second_derivatives_are_refused():
    head, target = make(), torch.tensor([1, 2, 3])
    hidden = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    loss = head(hidden, target)
    leaves = [hidden, *head.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(2.0 * loss, leaves)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(2.0 * one, other)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(head(hidden, target), hidden, create_graph=True)


@pytest.mark.parametrize("variant", ["slices", "projections"])
def test_saving(variant, tmp_path):
    head = make(variant=variant, bias=False, reduction="sum")
    head.save(tmp_path)
    loaded = Head.load(tmp_path)
    assert repr(loaded) == repr(head)
    assert torch.equal(loaded.order, head.order)
    hidden, target = torch.randn(4, 12, dtype=torch.float64), torch.randint(N_CLASSES, (4,))
    assert torch.equal(loaded(hidden, target), head(hidden, target))


def test_inside_a_band_classes_stand_by_id():
    head = make()
    for first, last in itertools.pairwise([0, 5, 15, N_CLASSES]):
        members = head.order[first:last].tolist()
        assert members == sorted(members)
    assert torch.equal(head.order[head.places], torch.arange(N_CLASSES))


def test_its_configuration_makes_the_same_head():
    head = make(variant="projections", reduction="sum", chunk_rows=7)
    other = DifferentiatedSoftmax(**head.config(), dtype=torch.float64)
    other.load_state_dict(head.state_dict())
    assert repr(other) == repr(head)
    assert f"n_classes={N_CLASSES}" in repr(head)
    hidden = torch.randn(3, 12, dtype=torch.float64)
    torch.testing.assert_close(other.log_prob(hidden), head.log_prob(hidden))


def test_an_altered_order_is_refused():
    head = make()
    state = {**head.state_dict(), "order": torch.full((N_CLASSES,), 987744430)}
    with raises(ValueError, "order:", "got 987744430 at position 0"):
        head.load_state_dict(state)


@pytest.mark.parametrize("chunk_rows", ["auto", 2])
def test_parameters_changed_before_backward_are_noticed(chunk_rows):
    head, hidden = make(chunk_rows=chunk_rows), torch.randn(5, 12, dtype=torch.float64)
    log_prob = head.log_prob(hidden, torch.tensor([0, 5, 9, 20, 39])).sum()
    with torch.no_grad():
        head.weights[1].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.backward()


def test_biases_start_at_the_frequencies():
    head, counts = make(), torch.randint(0, 50, (N_CLASSES,)).double()
    head.init_bias_from_counts(counts)
    expected = counts.clamp(min=0.5) / counts.clamp(min=0.5).sum()
    found = head.log_prob(torch.zeros(12, dtype=torch.float64))
    torch.testing.assert_close(found, expected.log())
    with raises(ValueError, "init_bias_from_counts:", "make it with bias=True"):
        make(bias=False).init_bias_from_counts(counts)


def test_a_row_that_is_masked_whole_has_no_probabilities():
    head = make()
    torch.nn.init.constant_(head.bias, -torch.inf)
    assert (head.log_prob(torch.randn(2, 12, dtype=torch.float64)) == -torch.inf).all()


# Bands from counts.


def worth(bands, counts):
    share = np.sort(np.asarray(counts, float))[::-1] / np.sum(counts)
    ends = np.cumsum([0] + [classes for classes, _ in bands])
    return sum(
        share[a:b].sum() * np.log(width)
        for (_, width), a, b in zip(bands, ends[:-1], ends[1:], strict=True)
    )


def all_layouts(n, in_features):
    for bands in range(1, 5):
        for cuts in itertools.combinations(range(1, n), bands - 1):
            ends = [0, *cuts, n]
            for widths in itertools.product(range(in_features, 0, -1), repeat=bands):
                falling = all(a >= b for a, b in itertools.pairwise(widths))
                if falling and sum(widths) == in_features:
                    yield list(zip(np.diff(ends).tolist(), widths, strict=True))


@pytest.mark.parametrize("budget", [14, 20, 35, 60])
def test_bands_are_the_best_that_fit(budget, seed):
    counts = np.random.default_rng(seed).pareto(1.0, 9) + 1e-3
    bands = bands_from_counts(counts, 6, budget)
    fitting = [
        layout
        for layout in all_layouts(9, 6)
        if sum(classes * width for classes, width in layout) <= budget
    ]
    assert bands in fitting
    best = max(worth(layout, counts) for layout in fitting)
    np.testing.assert_allclose(worth(bands, counts), best)


@pytest.mark.parametrize("variant", ["slices", "projections"])
def test_bands_make_a_head_within_the_budget(variant):
    counts = torch.rand(3000) ** 8
    bands = bands_from_counts(counts, 64, 3000 * 20, variant=variant)
    head = DifferentiatedSoftmax(
        64, bands, order=counts.argsort(descending=True), variant=variant, bias=False
    )
    assert head.n_classes == 3000
    assert sum(each.numel() for each in head.parameters()) <= 3000 * 20
    assert counts[head.order[: bands[0][0]]].min() >= counts[head.order[bands[0][0] :]].max()


def test_with_parameters_for_all_there_is_one_band():
    assert bands_from_counts([3, 1, 2], 8, 24) == [(3, 8)]


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        (
            {"bands": [(5, 6), (35, 4)]},
            ValueError,
            ("bands: expected widths that sum to in_features=12", "6 + 4 = 10", "projections"),
        ),
        ({"bands": [(0, 6), (40, 6)]}, ValueError, ("bands: classes at position 0:", "got 0")),
        ({"bands": [(5, 12), (35, 0)]}, ValueError, ("bands: width at position 1:", "got 0")),
        ({"bands": [(5, 6), 3]}, TypeError, ("bands:", "(classes, width)", "got 3 at position 1")),
        ({"bands": [(5, 6, 1)]}, TypeError, ("bands:", "got (5, 6, 1) at position 0")),
        ({"bands": 7}, TypeError, ("bands:", "got int")),
        ({"bands": []}, ValueError, ("bands:", "got none")),
        ({"variant": "both"}, ValueError, ("variant: expected one of", "got 'both'")),
        ({"order": [1] * 40}, ValueError, ("order:", "class 1 at positions 0 and 1")),
        ({"order": [*range(39), -1]}, ValueError, ("order:", "got -1 at position 39")),
        ({"in_features": 0}, ValueError, ("in_features: expected at least 1", "got 0")),
        ({"chunk_rows": 0}, ValueError, ("chunk_rows:", "got 0")),
    ],
)
def test_constructors(arguments, kind, parts):
    with raises(kind, *parts):
        DifferentiatedSoftmax(**{"in_features": 12, "bands": BANDS, **arguments})


def test_budgets():
    with raises(ValueError, "n_parameters: expected at least 24 for 4 classes", "got 3"):
        bands_from_counts([4, 3, 2, 1], 24, 3)
    with raises(ValueError, "counts:", "got -1 for class 1"):
        bands_from_counts([1, -1], 4, 100)
    with raises(ValueError, "counts:", "2 zeros"):
        bands_from_counts([0, 0], 4, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["slices", "projections"])
def test_on_a_gpu_it_is_what_it_is_on_a_cpu(variant):
    head = make(variant=variant, dtype=torch.float32)
    hidden, target = torch.randn(30, 12), torch.randint(N_CLASSES, (30,))
    target[3] = -100
    expected = head(hidden, target)
    head.cuda()
    torch.testing.assert_close(head(hidden.cuda(), target.cuda()).cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 4096], ids=["bias columns", "tiles"])
def test_large_steps_on_a_gpu(n):
    bands = [(2000, 96), (38_001, 23), (100_000, 9)]
    head = DifferentiatedSoftmax(128, bands, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(140_001, (n,), device="cuda")
    torch.nn.init.normal_(head.bias)
    loss = head(hidden, target)
    leaves = hidden, head.bias, *head.weights
    made = torch.autograd.grad(loss, leaves)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    slices = wide[0].split([width for _, width in bands], 1)
    scores = torch.cat([a @ b.t() for a, b in zip(slices, wide[2:], strict=True)], 1) + wide[1]
    exact = torch.nn.functional.cross_entropy(scores, target)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=1e-4)
    for one, other in zip(made, torch.autograd.grad(exact, wide), strict=True):
        assert (one.double() - other).norm() <= 8e-3 * other.norm()


# The interpreter warns of the logarithm of 0 in a part without classes.
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("chunk_rows", ["auto", 4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("frozen", [None, "weights", "bias", "hidden"])
def test_bands_without_stored_scores(monkeypatch, frozen, reduction, chunk_rows):
    pytest.importorskip("triton")
    if kernels.available()["triton"] is not None:
        pytest.skip(kernels.available()["triton"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = make(dtype=torch.float32, reduction=reduction, chunk_rows=chunk_rows).to(device)
    with torch.no_grad():
        head.bias[3] = -torch.inf
    hidden = torch.randn(9, 12, device=device)
    target = torch.randint(N_CLASSES, (9,), device=device)
    target[target == (3 if head.order is None else head.order[3])] = -100
    target[2] = -100
    hidden[2] = torch.nan
    if frozen != "hidden":
        hidden.requires_grad_()
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(frozen is None or (name == "bias") != (frozen == "bias"))
    learned = [each for each in (hidden, *head.parameters()) if each.requires_grad]
    upstream = torch.randn(9) if reduction == "none" else torch.tensor(0.7)
    upstream = upstream.to(device)

    def made():
        loss = head(hidden, target)
        return loss.detach(), *torch.autograd.grad(loss, learned, upstream)

    expected = made()
    monkeypatch.setattr(
        clusters, "_narrow_bands", lambda given: [each.shape[1] < 6 for each in given.weights]
    )
    # A GPU's kernels, which are for half precision, multiply float32 in TF32.
    near = dict(atol=2e-6, rtol=2e-5) if device == "cpu" else dict(atol=2e-3, rtol=2e-3)
    for one, other in zip(made(), expected, strict=True):
        torch.testing.assert_close(one, other, **near)
    with torch.no_grad():
        torch.testing.assert_close(head(hidden, target), expected[0], **near)


@pytest.mark.parametrize("chunk_rows", ["auto", 4])
@pytest.mark.parametrize("frozen", [None, "weights", "bias", "hidden"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"variant": "projections"}])
def test_biases_as_columns_of_the_weights(monkeypatch, options, frozen, chunk_rows):
    """As large steps on a GPU take them, in slices of all remainders of 8."""
    head = make(chunk_rows=chunk_rows, **options)
    with torch.no_grad():
        head.bias[3] = -torch.inf
    hidden, target = torch.randn(9, 12, dtype=torch.float64), torch.randint(N_CLASSES, (9,))
    target[target == (3 if head.order is None else head.order[3])] = -100
    target[2] = -100
    hidden[2] = torch.nan
    hidden.requires_grad_(frozen != "hidden")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(frozen is None or (name == "bias") != (frozen == "bias"))
    learned = [each for each in (hidden, *head.parameters()) if each.requires_grad]

    def made():
        loss = head(hidden, target)
        return loss.detach(), *torch.autograd.grad(loss, learned, torch.tensor(0.7).double())

    expected, seen = made(), []

    def large(given):
        seen.append(given.bias is not None)
        return seen[-1]

    monkeypatch.setattr(clusters, "_has_bias_columns", large)
    for one, other in zip(made(), expected, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other)
    assert True in seen
    with torch.no_grad():
        torch.testing.assert_close(head(hidden, target), expected[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ignored_rows_without_a_wait(reduction, dtype, monkeypatch):
    """As short steps on a GPU take them: with a factor of 0 instead of being left out."""
    head = DifferentiatedSoftmax(12, [(5, 6), (20, 4), (31, 2)], reduction=reduction, dtype=dtype)
    hidden, target = torch.randn(9, 12, dtype=dtype), torch.randint(56, (9,))
    target[[0, 4]] = -100
    hidden[0, 3] = torch.nan
    found = []
    for short in (False, True):
        monkeypatch.setattr(clusters, "masks_ignored_rows", lambda *_, short=short: short)
        rows = hidden.clone().requires_grad_()
        loss = head(rows, target)
        loss.backward(torch.arange(1.0, 10.0) if reduction == "none" else None)
        found.append([loss.detach(), rows.grad, *(each.grad for each in head.parameters())])
        head.zero_grad()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(
            one, other, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3
        )
    head.zero_grad()
    target[:] = -100
    assert not head(hidden, target).any()
