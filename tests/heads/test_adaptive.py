"""The adaptive softmax: against torch's, against dense formulas, and its traps."""

import copy
import itertools
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

from lastlayer.fused import clusters
from lastlayer.fused.rows import NOT_SPREAD
from lastlayer.heads import AdaptiveSoftmax, DifferentiatedSoftmax, Head, adaptive
from lastlayer.heads.adaptive import ceiling, opened
from lastlayer.testing import check_head

N_CLASSES = 40


def raises(kind, *parts):
    return pytest.raises(kind, match=".*".join(map(re.escape, parts)))


def shuffled(n=N_CLASSES):
    return torch.randperm(n)


def make(**options):
    options = {"cutoffs": [6, 15], "n_classes": N_CLASSES, "dtype": torch.float64, **options}
    return AdaptiveSoftmax(12, **options)


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({"order": True, "head_bias": True}, {}),
        ({"label_smoothing": 0.2, "order": True}, {"loss_is_nll": False, "compile": False}),
        ({"cutoffs": [], "ignore_index": 3}, {"compile": False}),
        ({"cutoffs": [1, 11, 21, 31], "div_value": 1, "chunk_rows": 2}, {"compile": False}),
        ({"ignore_index": None}, {"compile": False}),
    ],
    ids=["shuffled", "smoothed", "no clusters", "four clusters", "nothing ignored"],
)
def test_it_is_a_head(options, rules, seed):
    if "order" in options:
        options = {**options, "order": shuffled()}
    check_head(make(**options, dtype=None), seed=seed, draws=5000, **rules)


def test_compiled_with_smoothing_and_ignored_rows():
    head = make(label_smoothing=0.1, order=shuffled())
    hidden = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randint(N_CLASSES, (2, 5))
    target[0, 1] = -100
    loss = head(hidden, target)
    expected = torch.autograd.grad(loss, [hidden, *head.parameters()])
    with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
        compiled = torch.compile(head, fullgraph=True, backend="aot_eager")(hidden, target)
    torch.testing.assert_close(compiled, loss)
    for got, wanted in zip(
        torch.autograd.grad(compiled, [hidden, *head.parameters()]), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted)


def dense_log_prob(head, hidden):
    """By the formula, all of it, in the order of places."""
    starts = head.cutoffs.tolist()
    n = starts[0] if starts else head.n_classes
    top = torch.log_softmax(linear(hidden, head.head_weight, head.head_bias), -1)
    parts = [top[..., :n]]
    for i, (projection, tail) in enumerate(zip(head.projections, head.tails, strict=True)):
        inside = torch.log_softmax(hidden @ projection.T @ tail.T, -1)
        parts.append(top[..., n + i : n + i + 1] + inside)
    return torch.cat(parts, -1)


def dense_loss(head, hidden, target):
    by_place = dense_log_prob(head, hidden)
    log_prob = by_place if head.places is None else by_place[..., head.places]
    counts = target != -100
    at = log_prob.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    eps = head.label_smoothing
    losses = torch.where(counts, -(1 - eps) * at - eps * log_prob.mean(-1), 0.0)
    if head.reduction == "none":
        return losses
    return losses.sum() / (counts.sum() if head.reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("way", [clusters.in_segments, clusters.all_rows])
@pytest.mark.parametrize("chunk_rows", ["auto", 2])
def test_both_ways_have_the_loss_and_gradients_of_the_dense_formula(
    way, smoothing, reduction, chunk_rows, monkeypatch
):
    monkeypatch.setattr("lastlayer.fused.clusters.share_out", way)
    head = make(
        label_smoothing=smoothing, reduction=reduction, order=shuffled(), head_bias=True,
        ignore_index=-100, chunk_rows=chunk_rows,
    )  # fmt: skip
    hidden = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randint(N_CLASSES, (3, 7))
    target[1, ::2] = -100
    loss, expected = head(hidden, target), dense_loss(head, hidden, target)
    torch.testing.assert_close(loss, expected)
    upstream = torch.randn_like(loss)
    leaves = [hidden, *head.parameters()]
    for got, wanted in zip(
        torch.autograd.grad(loss, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("ignore_index", [-100, None])
@pytest.mark.parametrize("ordered", [False, True])
def test_rows_are_shared_out_on_a_gpu_as_on_a_cpu(ordered, ignore_index):
    """One sorts by torch, the other by numpy."""
    target, places = torch.randint(N_CLASSES, (30,)), shuffled() if ordered else None
    if ignore_index is not None:
        target[::4] = ignore_index
    given = target, places, ignore_index, (6, 15)
    place, rows, ends = clusters._sorted(*given)
    expected_place, expected_rows, expected_ends = clusters._sorted_on_cpu(*given)
    assert place.tolist() == expected_place.tolist()
    assert rows.tolist() == expected_rows.tolist()
    assert ends == expected_ends


@pytest.mark.parametrize("way", [clusters.in_segments, clusters.all_rows])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_a_nan_in_a_row_that_does_not_count_reaches_nothing(way, smoothing, monkeypatch):
    monkeypatch.setattr("lastlayer.fused.clusters.share_out", way)
    head = make(label_smoothing=smoothing)
    hidden, target = torch.randn(6, 12, dtype=torch.float64), torch.randint(N_CLASSES, (6,))
    hidden[2], target[2] = torch.nan, -100
    hidden.requires_grad_()
    head(hidden, target).backward()
    assert not hidden.grad[2].any()
    assert all(each.grad.isfinite().all() for each in (hidden, *head.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_in_half_precision(dtype, reduction):
    head = make(dtype=dtype, reduction=reduction, order=shuffled(), head_bias=True)
    hidden = torch.randn(60, 12).to(dtype).requires_grad_()
    target = torch.randint(N_CLASSES, (60,))
    upstream = torch.rand(60) if reduction == "none" else torch.tensor(1.0)
    made = torch.autograd.grad(head(hidden, target), [hidden, *head.parameters()], upstream)
    exact = make(reduction=reduction, order=head.order, head_bias=True)
    exact.load_state_dict(head.state_dict())
    rows = hidden.detach().double().requires_grad_()
    expected = torch.autograd.grad(
        exact(rows, target), [rows, *exact.parameters()], upstream.double()
    )
    for got, wanted in zip(made, expected, strict=True):
        assert got.dtype == dtype
        assert (got.double() - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_gradients_under_autocast_are_in_the_dtype_of_their_parameters(half):
    head, target = make(dtype=torch.float32), torch.randint(N_CLASSES, (60,))
    hidden = torch.randn(60, 12, requires_grad=True)
    leaves = [hidden, *head.parameters()]
    expected = torch.autograd.grad(head(hidden, target), leaves)
    with torch.autocast("cpu", half):
        loss = head(hidden, target)
    for got, wanted in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert got.dtype == torch.float32
        assert (got - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("frozen", ["head_weight", "projections", "tails", "hidden"])
@pytest.mark.parametrize("chunk_rows", ["auto", 2])
def test_what_is_frozen_has_no_gradient_and_changes_none(frozen, chunk_rows):
    head = make(chunk_rows=chunk_rows)
    hidden = torch.randn(30, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randint(N_CLASSES, (30,))
    leaves = {"hidden": hidden, **dict(head.named_parameters())}
    expected = dict(
        zip(leaves, torch.autograd.grad(head(hidden, target), leaves.values()), strict=True)
    )
    for name, leaf in leaves.items():
        leaf.requires_grad_(not name.startswith(frozen))
    head(hidden, target).backward()
    for name, leaf in leaves.items():
        if name.startswith(frozen):
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [True, False])
def test_what_the_compiler_is_told_of_the_operation_is_true(dtype, wanted):
    head = make(head_bias=True, order=shuffled()).to(dtype)
    target = torch.tensor([0, 39, 17, 8, -100, 2])
    pairs = itertools.chain(*zip(head.projections, head.tails, strict=True))
    operands = torch.randn(6, 12, dtype=dtype), head.head_bias, head.head_weight, *pairs
    operands = [each.detach() for each in operands]
    wants = [wanted] * len(operands)
    operation = torch.ops.lastlayer.cluster_loss.default
    for upstream, reduction in ((None, "mean"), (None, "none"), (torch.ones(6), "none")):
        torch.library.opcheck(
            operation,
            (
                [*operands, target, head.places],
                upstream,
                [6, 15],
                -100,
                "auto",
                *NOT_SPREAD,
                reduction,
                wants,
            ),
            test_utils=["test_schema", "test_faketensor"],
        )


def test_a_second_backward_gives_the_same_and_second_derivatives_are_refused():
    head, target = make(), torch.tensor([1, 20, 39])
    hidden = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    loss = head(hidden, target)
    leaves = [hidden, *head.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(2.0 * loss, leaves)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(2.0 * one, other)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(head(hidden, target), hidden, create_graph=True)


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("div_value", [2.0, 4.0])
def test_with_the_weights_of_torch_it_is_torchs(head_bias, div_value):
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(
        32, 200, [20, 60], div_value=div_value, head_bias=head_bias
    )
    ours = AdaptiveSoftmax.from_torch(theirs)
    hidden, target = torch.randn(50, 32, requires_grad=True), torch.randint(200, (50,))
    output, loss = theirs(hidden, target)
    torch.testing.assert_close(ours(hidden, target), loss)
    torch.testing.assert_close(ours.log_prob(hidden), theirs.log_prob(hidden))
    at_target = ours.log_prob(hidden, target.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(at_target, output)
    assert torch.equal(ours.topk(hidden, 1).classes.squeeze(-1), theirs.predict(hidden))
    (mine,) = torch.autograd.grad(ours(hidden, target), hidden)
    (wanted,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(mine, wanted)


def test_from_torch_shares_the_parameters(tmp_path):
    # Clusters of width 5 and 1, narrower than the default min_width.
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(16, 60, [20, 40], div_value=3.0, head_bias=True)
    head = AdaptiveSoftmax.from_torch(theirs, reduction="sum")
    shared = [head.head_weight, head.head_bias, *head.projections, *head.tails]
    assert {id(each) for each in shared} == {id(each) for each in theirs.parameters()}
    hidden, target = torch.randn(7, 16), torch.randint(60, (7,))
    before = head(hidden, target)
    before.backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert head(hidden, target) < before
    torch.testing.assert_close(head(hidden, target), 7 * theirs(hidden, target).loss)
    head.save(tmp_path)
    again = AdaptiveSoftmax.load(tmp_path)
    torch.testing.assert_close(again.log_prob(hidden), theirs.log_prob(hidden))
    assert again.reduction == "sum"
    # Nothing is left on the meta device.
    assert not any(each.is_meta for each in head.state_dict().values())
    copied = copy.deepcopy(head).to("cpu", torch.float64)
    torch.testing.assert_close(copied.log_prob(hidden.double()).float(), theirs.log_prob(hidden))


def test_from_torch_names_what_is_wrong():
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(16, 60, [20, 40])
    with pytest.raises(TypeError, match=r"softmax: expected an nn.AdaptiveLogSoftmax.* got Linear"):
        AdaptiveSoftmax.from_torch(torch.nn.Linear(3, 4))
    with pytest.raises(TypeError, match="div_value: expected no such argument"):
        AdaptiveSoftmax.from_torch(theirs, div_value=2.0)
    # torch initialises clusters of width 0 with a warning.
    with pytest.warns(UserWarning, match="zero-element"):
        narrow = torch.nn.AdaptiveLogSoftmaxWithLoss(4, 60, [20, 40])
    with pytest.raises(ValueError, match="got one of width 0: in_features=4 is too small"):
        AdaptiveSoftmax.from_torch(narrow)


def test_classes_in_any_order_are_a_relabelling():
    """Counts in shuffled order, against sorted classes with the same vectors."""
    counts = torch.rand(N_CLASSES)
    by_frequency = counts.argsort(descending=True)
    head = make(counts=counts)
    for first, last in itertools.pairwise([0, 6, 15, N_CLASSES]):
        members = head.order[first:last].tolist()
        assert members == sorted(by_frequency[first:last].tolist())
    hidden, target = torch.randn(30, 12, dtype=torch.float64), torch.randint(N_CLASSES, (30,))
    relabelled = make()
    parameters = {name: value.detach() for name, value in head.named_parameters()}
    relabelled.load_state_dict({**parameters, "cutoffs": head.cutoffs})
    expected = relabelled(hidden, head.places[target])
    torch.testing.assert_close(head(hidden, target), expected)
    torch.testing.assert_close(head.log_prob(hidden), relabelled.log_prob(hidden)[:, head.places])


@pytest.mark.parametrize("k", [1, 3, 6, 7, 20, N_CLASSES])
def test_topk_is_a_dense_sort(k):
    head = make(order=shuffled(), chunk_rows=4)
    with torch.no_grad():
        for weight in head.parameters():
            weight.mul_(4)
    hidden = torch.randn(25, 12, dtype=torch.float64)
    expected = head.log_prob(hidden).sort(dim=-1, descending=True, stable=True)
    values, classes = head.topk(hidden, k)
    torch.testing.assert_close(values, expected.values[:, :k])
    assert torch.equal(classes, expected.indices[:, :k])


def test_equal_log_probabilities_come_in_the_order_of_their_classes():
    """Four classes at the top, and four that are sure to follow from their cluster."""
    head = AdaptiveSoftmax(2, cutoffs=[3, 4, 5], n_classes=6, order=[5, 2, 0, 4, 1, 3])
    torch.nn.init.zeros_(head.head_weight)
    assert head.topk(torch.ones(2), 6).classes.tolist() == [0, 1, 2, 3, 4, 5]
    assert head.topk(torch.ones(2), 3).classes.tolist() == [0, 1, 2]


def test_topk_opens_only_the_clusters_that_can_matter(monkeypatch):
    head = AdaptiveSoftmax(2, cutoffs=[4, 20], n_classes=50, head_bias=True, dtype=torch.float64)
    with torch.no_grad():
        head.head_weight.zero_()
        head.head_bias.zero_()
        head.head_weight[4, 0] = 9.0  # the first cluster, for rows that point there
        head.head_bias[5] = -9.0  # the second one hardly ever
    hidden = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    opened = []
    inside = AdaptiveSoftmax._inside_log_prob

    def spied(self, cluster, rows):
        opened.append((cluster, len(rows)))
        return inside(self, cluster, rows)

    # Of few scores all are made.
    monkeypatch.setattr("lastlayer.fused.scores._ONE_PRODUCT_SCORES", -1)
    expected = head.log_prob(hidden).sort(dim=-1, descending=True, stable=True)
    monkeypatch.setattr(AdaptiveSoftmax, "_inside_log_prob", spied)
    values, classes = head.topk(hidden, 3)
    assert (0, 2) in opened
    assert sum(rows for cluster, rows in opened if cluster == 1) == 0
    torch.testing.assert_close(values, expected.values[:, :3])
    assert torch.equal(classes, expected.indices[:, :3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_no_class_of_a_cluster_is_above_its_ceiling(dtype, scale):
    head = AdaptiveSoftmax(16, cutoffs=[4, 20], n_classes=300, dtype=dtype)
    with torch.no_grad():
        head.tails[0].add_(3.0)  # far from 0, near each other
        for tail in head.tails:
            tail.mul_(scale)
    hidden = torch.randn(40, 16).to(dtype)
    for cluster in range(2):
        best = head._inside_log_prob(cluster, hidden).amax(-1)
        most = ceiling(head.projections[cluster], head.tails[cluster], hidden)
        assert (best <= most).all()
        assert (most <= 0).all()
    if scale < 1:
        assert (most < -3.0).any()


def test_topk_leaves_clusters_closed_whose_classes_are_alike():
    head = AdaptiveSoftmax(8, cutoffs=[10], n_classes=2000, head_bias=True)
    with torch.no_grad():
        head.tails[0].mul_(0.01)
        head.head_bias[10] = 3.0  # the cluster as a whole is likely, none of its classes is
    hidden = 0.3 * torch.randn(30, 8)
    top = head._top_log_prob(hidden)
    kth = top[:, :10].sort(-1, descending=True).values[:, 2]
    assert (top[:, 10] > kth).all()
    assert len(opened(head, 0, hidden, top[:, 10], kth)) == 0
    expected = head.log_prob(hidden).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(head.topk(hidden, 3).classes, expected.indices[:, :3])


def test_a_row_of_nan_does_not_disturb_the_best_of_others():
    head = make()
    hidden = torch.randn(4, 12, dtype=torch.float64)
    expected = head.topk(hidden, 20)
    hidden[2] = torch.nan
    values, classes = head.topk(hidden, 20)
    assert values[2].isnan().all()
    rest = [0, 1, 3]
    assert torch.equal(values[rest], expected.values[rest])
    assert torch.equal(classes[rest], expected.classes[rest])


def test_samples_do_not_depend_on_chunks():
    head, hidden = make(order=shuffled()), torch.randn(20, 12, dtype=torch.float64)
    whole = head.sample(hidden, 30, generator=torch.Generator().manual_seed(1))
    head.chunk_rows = 3
    parts = head.sample(hidden, 30, generator=torch.Generator().manual_seed(1))
    assert torch.equal(whole, parts)


def test_a_row_without_probabilities_cannot_be_drawn_from():
    hidden = torch.zeros(2, 2, 12, dtype=torch.float64)
    hidden[1, 0, 1] = torch.nan
    with raises(ValueError, "hidden: expected rows with valid probabilities", "position (1, 0)"):
        make(order=shuffled()).sample(hidden)


def test_an_order_that_counts_is_none():
    assert make(order=range(N_CLASSES)).order is None
    order = shuffled()
    with torch.device("meta"):
        head = make(order=order)
    assert {each.device.type for each in head.state_dict().values()} == {"meta"}


def altered(head, folder, **buffers):
    """The head as it was saved, with other buffers."""
    head.save(folder)
    state = load_file(folder / "model.safetensors")
    assert buffers.keys() <= state.keys()
    save_file({**state, **buffers}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "values", "parts"),
    [
        ("order", [987744430, *range(1, 40)], ("order:", "from 0 to 39", "got 987744430")),
        ("order", [1, 1, *range(2, 40)], ("order:", "class 1 at positions 0 and 1")),
        ("places", [987744430, *range(1, 40)], ("places: expected the inverse permutation",)),
        ("cutoffs", [6, 16], ("cutoffs: expected [6, 15]", "got [6, 16]")),
    ],
)
def test_an_altered_state_is_refused(name, values, parts, tmp_path):
    head = make(order=shuffled())
    folder = altered(head, tmp_path, **{name: torch.tensor(values)})
    with raises(ValueError, "folder:", "got a modified", *parts):
        Head.load(folder)
    if name == "cutoffs":
        return
    before = head.state_dict()[name].clone()
    with raises(ValueError, *parts):
        head.load_state_dict({**head.state_dict(), name: torch.tensor(values)})
    assert torch.equal(getattr(head, name), before)


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("given", ["order", "counts", "neither"])
def test_its_configuration_makes_the_same_head(given, where):
    options = {"order": shuffled(), "counts": torch.rand(N_CLASSES), "neither": None}
    options = {} if given == "neither" else {given: options[given]}
    head = make(head_bias=True, label_smoothing=0.1, ignore_index=None, reduction="sum", **options)
    source = head if where == "cpu" else make(head_bias=True, device="meta", **options)
    other = AdaptiveSoftmax(**source.config(), dtype=torch.float64)
    for one, two in zip(head.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, two)
    other.load_state_dict(head.state_dict())
    if where == "cpu":
        assert repr(other) == repr(head)
        assert ("order=<(40,)>" in repr(head)) == (given != "neither")
    hidden = torch.randn(3, 12, dtype=torch.float64)
    torch.testing.assert_close(other.log_prob(hidden), head.log_prob(hidden))


@pytest.mark.parametrize("chunk_rows", ["auto", 2])
def test_parameters_changed_before_backward_are_noticed(chunk_rows):
    head, hidden = make(chunk_rows=chunk_rows), torch.randn(5, 12, dtype=torch.float64)
    log_prob = head.log_prob(hidden, torch.tensor([0, 5, 9, 20, 39])).sum()
    with torch.no_grad():
        head.tails[1].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_prob.backward()


@pytest.mark.parametrize("ordered", [False, True])
def test_biases_start_at_the_frequencies(ordered):
    """Of classes at the top, and of clusters as a whole; in a cluster classes are alike."""
    counts = torch.randint(0, 50, (N_CLASSES,)).double()
    head = make(head_bias=True, order=shuffled() if ordered else None)
    head.init_bias_from_counts(counts)
    counts = counts.clamp(min=0.5) / counts.clamp(min=0.5).sum()
    by_place = counts if head.order is None else counts[head.order]
    expected = by_place.clone()
    for first, last in ((6, 15), (15, 40)):
        expected[first:last] = by_place[first:last].mean()
    found = head.log_prob(torch.zeros(12, dtype=torch.float64)).exp()
    torch.testing.assert_close(found if head.order is None else found[head.order], expected)
    with raises(ValueError, "init_bias_from_counts:", "make it with head_bias=True"):
        make().init_bias_from_counts(counts)


# Bad input.


@pytest.mark.parametrize(
    ("options", "kind", "parts"),
    [
        (
            {"cutoffs": [15, 6]},
            ValueError,
            ("cutoffs:", "increasing", "got 6 at position 1 after 15"),
        ),
        ({"cutoffs": [6, 6]}, ValueError, ("cutoffs:", "got 6 at position 1 after 6")),
        ({"cutoffs": [0, 6]}, ValueError, ("cutoffs:", "from 1 to 39", "got 0 at position 0")),
        ({"cutoffs": [6, 40]}, ValueError, ("cutoffs:", "from 1 to 39", "got 40 at position 1")),
        ({"cutoffs": [6, 1.5]}, TypeError, ("cutoffs: position 1:", "got float")),
        ({"cutoffs": 6}, TypeError, ("cutoffs: expected a list", "got int")),
        ({"n_classes": None}, ValueError, ("n_classes:", "got None", "counts")),
        ({"cutoffs": None}, ValueError, ("cutoffs:", "got None", "counts")),
        ({"n_classes": 0}, ValueError, ("n_classes: expected at least 1", "got 0")),
        ({"counts": [1.0] * 39}, ValueError, ("counts: expected shape (40,)", "got (39,)")),
        ({"counts": [1] * 39 + [-1]}, ValueError, ("counts:", "got -1 for class 39")),
        ({"counts": [0] * 40}, ValueError, ("counts: expected at least one above 0",)),
        ({"order": [0] * 40}, ValueError, ("order:", "class 0 at positions 0 and 1")),
        ({"order": [*range(39), 40]}, ValueError, ("order:", "got 40 at position 39")),
        ({"order": [*range(39)]}, ValueError, ("order: expected all 40 classes", "got 39")),
        ({"div_value": 0.5}, ValueError, ("div_value:", "at least 1", "got 0.5")),
        ({"min_width": 0}, ValueError, ("min_width: expected at least 1", "got 0")),
        ({"label_smoothing": 2}, ValueError, ("label_smoothing:", "got 2")),
    ],
)
def test_constructors(options, kind, parts):
    with raises(kind, *parts):
        make(**options)


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_it_is_on_a_cpu():
    head = make(order=shuffled(), label_smoothing=0.1)
    hidden, target = torch.randn(30, 12, dtype=torch.float64), torch.randint(N_CLASSES, (30,))
    target[3] = -100
    expected = head(hidden, target), *head.topk(hidden, 8)
    head.cuda()
    got = head(hidden.cuda(), target.cuda()), *head.topk(hidden.cuda(), 8)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)


@pytest.mark.gpu
@pytest.mark.parametrize("in_features", [64, 320], ids=["top in tiles", "top in chunks"])
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-4), (torch.float16, 4e-3), (torch.bfloat16, 1.5e-2)]
)
def test_loss_and_gradients_on_a_gpu(in_features, dtype, within):
    n_classes = 9001
    order = torch.randperm(n_classes)
    options = {"cutoffs": [300, 1500, 4000], "n_classes": n_classes, "order": order}
    head = AdaptiveSoftmax(in_features, **options, head_bias=True, device="cuda", dtype=dtype)
    right = AdaptiveSoftmax(in_features, **options, head_bias=True, dtype=torch.float64)
    right.load_state_dict(head.state_dict())
    hidden = torch.randn(700, in_features, device="cuda").to(dtype).requires_grad_()
    exact = hidden.detach().double().cpu().requires_grad_()
    # Few in the last cluster, several in the same class, and some that do not count.
    target = order[(n_classes * torch.rand(700).pow(4)).long()]
    target[::9] = -100
    # A loss scale: float16 has nothing as small as the mean's own gradients.
    expected = right(exact, target)
    (1000.0 * expected).backward()
    loss = head(hidden, target.cuda())
    (1000.0 * loss).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=within)
    for got, want in zip([hidden, *head.parameters()], [exact, *right.parameters()], strict=True):
        difference = got.grad.cpu().double() - want.grad
        assert difference.norm() <= within * want.grad.norm()


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: AdaptiveSoftmax(
            16, cutoffs=[5, 20], n_classes=40, order=torch.arange(39, -1, -1), **given
        ),
        lambda **given: DifferentiatedSoftmax(
            16, [(10, 8), (30, 8)], order=torch.arange(39, -1, -1), **given
        ),
    ],
    ids=["adaptive", "differentiated"],
)
def test_made_on_meta_and_filled_later(make, monkeypatch):
    here, later, full_like = make(), make(device="meta"), torch.full_like
    monkeypatch.setattr(torch, "empty_like", lambda *given, **named: full_like(*given, -7, **named))
    later.to_empty(device="cpu").reset_parameters()
    for one, other in zip(here.buffers(), later.buffers(), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        for one, other in zip(here.parameters(), later.parameters(), strict=True):
            other.copy_(one)
    hidden, classes = torch.randn(3, 16), torch.tensor([2, 7, 30])
    assert torch.equal(here.log_prob(hidden, classes), later.log_prob(hidden, classes))


@pytest.mark.parametrize("ordered", [False, True])
def test_predictions_as_a_gpu_makes_them(monkeypatch, ordered):
    from lastlayer.heads import adaptive

    order = torch.randperm(30) if ordered else None
    head = AdaptiveSoftmax(16, cutoffs=[5, 12], n_classes=30, order=order, head_bias=True)
    hidden, target = torch.randn(2, 9, 16), torch.randint(30, (2, 9))
    with torch.no_grad():
        expected, of_target = head.log_prob(hidden), head.log_prob(hidden, target)
        monkeypatch.setattr(adaptive, "_on_gpu", lambda rows: True)
        torch.testing.assert_close(head.log_prob(hidden), expected)
        torch.testing.assert_close(head.log_prob(hidden, target), of_target)


@pytest.mark.parametrize("few", [0, 10**9])
def test_chosen_classes_as_on_a_gpu(few, monkeypatch):
    """By the losses of rows that are sorted by cluster, or from all log-probabilities."""
    head = AdaptiveSoftmax(9, cutoffs=[5, 20], n_classes=67, head_bias=True)
    hidden = torch.randn(11, 9)
    exact = copy.deepcopy(head).double().log_prob(hidden.double())
    monkeypatch.setattr(adaptive, "_on_gpu", lambda _: True)
    monkeypatch.setattr(adaptive, "FEW_SCORES", few)
    for shape in ((11,), (11, 1), (11, 3)):
        classes = torch.randint(67, shape)
        with torch.no_grad():
            found = head.log_prob(hidden, classes)
        expected = exact.gather(-1, classes.view(11, -1)).view(shape)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
