"""InfoNCE against all similarities at once, in float64."""

import math

import pytest
import torch
from dense_info_nce import dense_info_nce

from lastlayer.losses import contrastive
from lastlayer.losses.contrastive import InfoNCELoss, info_nce

N, D = 23, 6
SHARED, EACH = (7, D), (N, 3, D)
GROUPED = ("none", "one", "two")


FEW_PAIRS = contrastive._FEW_PAIRS


@pytest.fixture(autouse=True)
def as_many_pairs(monkeypatch):
    """Small losses take the way of large ones; one test sets the limit back."""
    monkeypatch.setattr(contrastive, "_FEW_PAIRS", 0)


def vectors(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def some_groups(kind: str, negatives: torch.Tensor | None) -> dict:
    if kind == "none":
        return {}
    first = torch.randint(-4, 5, (N,))
    groups = first if kind == "one" else (first, torch.randint(-4, 5, (N,), dtype=torch.int32))
    if negatives is None or kind == "one":
        return {"groups": groups}
    return {"groups": groups, "negative_groups": torch.randint(-4, 5, negatives.shape[:-1])}


def compare(leaves, actual, expected, tolerance):
    """Both losses and the gradients of a random mixture of their rows."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    mixture = torch.rand(expected.shape, dtype=torch.float64)
    found = torch.autograd.grad((actual * mixture).sum(), leaves)
    wanted = torch.autograd.grad((expected * mixture).sum(), leaves)
    for leaf, one, other in zip(leaves, found, wanted, strict=True):
        assert one.dtype == leaf.dtype
        size = float(other.double().norm())
        assert float((one.double() - other.double()).norm()) <= tolerance * max(size, 1e-3)


@pytest.mark.parametrize("same_group", ["positive", "ignore"])
@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("shape", [None, SHARED, EACH])
def test_equals_the_definition(shape, kind, same_group):
    for in_batch, symmetric in ((True, True), (True, False), (False, False)):
        if shape is None and not in_batch:
            continue
        for normalize, chunk_rows in ((True, 5), (False, "auto")):
            query, key = vectors(N, D), vectors(N, D)
            negatives = None if shape is None else vectors(*shape)
            temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
            options = dict(
                temperature=temperature,
                symmetric=symmetric,
                in_batch=in_batch,
                same_group=same_group,
                normalize=normalize,
                **some_groups(kind, negatives),
            )
            actual = info_nce(
                query, key, negatives, **options, reduction="none", chunk_rows=chunk_rows
            )
            expected = dense_info_nce(query, key, negatives, **options)
            leaves = [each for each in (query, key, negatives, temperature) if each is not None]
            compare(leaves, actual, expected, 1e-9)


def test_reductions_are_those_of_the_rows():
    query, key = vectors(N, D), vectors(N, D)
    rows = info_nce(query, key, symmetric=True, reduction="none")
    assert rows.shape == (N,)
    torch.testing.assert_close(info_nce(query, key, symmetric=True), rows.mean())
    torch.testing.assert_close(info_nce(query, key, symmetric=True, reduction="sum"), rows.sum())


def check_reduced(negatives, chunk_rows, **options):
    """The gradients of sums and means against the definition, all at once and each alone."""
    query, key = vectors(N, D), vectors(N, D)
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    leaves = [each for each in (query, key, negatives, temperature) if each is not None]
    options |= dict(temperature=temperature)
    expected = dense_info_nce(query, key, negatives, **options)
    given = dict(options, chunk_rows=chunk_rows)
    for reduction, reduced in (("sum", expected.sum()), ("mean", expected.mean())):
        loss = info_nce(query, key, negatives, **given, reduction=reduction)
        torch.testing.assert_close(loss, reduced)
        wanted = torch.autograd.grad(3.0 * reduced, leaves, retain_graph=True)
        for _ in range(2):
            found = torch.autograd.grad(3.0 * loss, leaves, retain_graph=True)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)
    for leaf, other in zip(leaves, wanted, strict=True):
        others = [each.detach() if each is not leaf else each for each in leaves]
        alone = info_nce(*others[:-1], **dict(given, temperature=others[-1]))
        (found,) = torch.autograd.grad(3.0 * alone, leaf)
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("same_group", ["positive", "ignore"])
@pytest.mark.parametrize("kind", GROUPED)
def test_reduced_one_way_losses_make_their_gradients_at_once(kind, same_group):
    for shape, normalize, chunk_rows in ((None, True, 5), (SHARED, False, "auto")):
        negatives = None if shape is None else vectors(*shape)
        groups = some_groups(kind, negatives)
        check_reduced(negatives, chunk_rows, same_group=same_group, normalize=normalize, **groups)


@pytest.mark.parametrize("chunk_rows", [5, N, "auto"])
@pytest.mark.parametrize("normalize", [True, False])
def test_reduced_symmetric_losses(normalize, chunk_rows):
    """Where all queries are one chunk their gradients are made at once."""
    check_reduced(None, chunk_rows, symmetric=True, normalize=normalize)


def test_symmetric_losses_of_one_chunk_are_made_in_one_pass(monkeypatch):
    from lastlayer.fused.similarity import LayerProducts

    made = []

    def counted(product):
        return lambda *given, **more: made.append(1) or product(*given, **more)

    for name in ("scores_into", "hidden_gradient", "weight_gradient"):
        monkeypatch.setattr(LayerProducts, name, counted(getattr(LayerProducts, name)))
    query, key = vectors(N, D), vectors(N, D)
    loss = info_nce(query, key, symmetric=True)
    assert len(made) == 3
    torch.autograd.grad(loss, (query, key))
    assert len(made) == 3


def test_float16_gradients_of_a_mean_come_back_with_a_loss_scale():
    """1/n of a gradient is less than float16 can say; a loss scale is put in before rounding."""
    query, key = (vectors(500, 8, dtype=torch.float16) for _ in range(2))
    exact = [each.detach().double().requires_grad_() for each in (query, key)]
    for symmetric in (False, True):
        loss = info_nce(query, key, temperature=0.5, symmetric=symmetric)
        expected = dense_info_nce(*exact, temperature=0.5, symmetric=symmetric).mean()
        found = torch.autograd.grad(2.0**14 * loss, (query, key))
        wanted = torch.autograd.grad(2.0**14 * expected, exact)
        for one, other in zip(found, wanted, strict=True):
            assert float((one - other).norm() / other.norm()) <= 1e-3


def test_equals_torchs_cross_entropy():
    query, key = vectors(N, D), vectors(N, D)
    scores = query @ key.T
    target = torch.arange(N)
    one_way = torch.nn.functional.cross_entropy(scores, target)
    other_way = torch.nn.functional.cross_entropy(scores.T, target)
    options = dict(normalize=False, temperature=1.0)
    torch.testing.assert_close(info_nce(query, key, **options), one_way)
    both = (one_way + other_way) / 2
    torch.testing.assert_close(info_nce(query, key, symmetric=True, **options), both)


@pytest.mark.parametrize("copies", [2, 3])
def test_groups_take_the_floor_of_repeated_pairs_away(copies):
    """A perfect encoder, whose pairs are all there several times."""
    pairs = torch.eye(8, dtype=torch.float64).repeat(copies, 1)
    groups = torch.arange(8).repeat(copies)
    for symmetric in (False, True):
        options = dict(temperature=0.02, symmetric=symmetric)
        floor = info_nce(pairs, pairs, **options)
        torch.testing.assert_close(floor, torch.tensor(math.log(copies)).double())
        for same_group in ("positive", "ignore"):
            loss = info_nce(pairs, pairs, **options, groups=groups, same_group=same_group)
            torch.testing.assert_close(loss, torch.zeros_like(loss))


@pytest.mark.parametrize("shape", [SHARED, EACH])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_negatives_of_the_querys_group_are_left_out_unless_asked_otherwise(shape, reduction):
    """False negatives are neither pushed away nor pulled, as if they were not there."""
    query, key, negatives = vectors(N, D), vectors(N, D), vectors(*shape)
    groups = torch.arange(N)
    # Every query has one false negative, or those of the first three do.
    of_negatives = torch.full(shape[:-1], -1)
    if shape == EACH:
        of_negatives[:, 1], kept = groups, negatives.detach()[:, [0, 2]]
    else:
        of_negatives[:3] = 4
    options = dict(groups=groups, negative_groups=of_negatives, temperature=0.3)
    loss = info_nce(query, key, negatives, **options, reduction=reduction)
    if shape == EACH:
        expected = info_nce(query, key, kept, temperature=0.3, reduction=reduction)
        (push,) = torch.autograd.grad(loss.sum(), negatives)
        assert (push[:, 1] == 0).all()
        assert (push[:, 0] != 0).all()
        torch.testing.assert_close(loss, expected)
    else:
        rows = info_nce(query, key, negatives, **options, reduction="none")
        all_rows, some_rows = (
            info_nce(query, key, each, temperature=0.3, reduction="none")
            for each in (negatives, negatives[3:])
        )
        torch.testing.assert_close(rows[4], some_rows[4])
        torch.testing.assert_close(rows[5:], all_rows[5:])
    positive = info_nce(
        query, key, negatives, **options, same_group="positive", reduction=reduction
    )
    assert not torch.allclose(loss, positive)


def test_groups_of_one_are_no_groups():
    query, key = vectors(N, D), vectors(N, D)
    plain = info_nce(query, key, symmetric=True)
    for same_group in ("positive", "ignore"):
        grouped = info_nce(
            query, key, symmetric=True, groups=torch.randperm(N) * 2**40, same_group=same_group
        )
        torch.testing.assert_close(grouped, plain)


def test_positives_have_the_gradient_of_supcon():
    """The constant log |P| is all that is between them."""
    query, key = vectors(N, D), vectors(N, D)
    groups = torch.randint(4, (N,))
    same = groups[:, None] == groups
    logs = torch.log_softmax(
        torch.nn.functional.normalize(query, dim=1) @ torch.nn.functional.normalize(key, dim=1).T
        / 0.5, 1,
    )  # fmt: skip
    supcon = -(torch.where(same, logs, 0.0).sum(1) / same.sum(1))
    options = dict(groups=groups, same_group="positive")
    ours = info_nce(query, key, temperature=0.5, **options, reduction="none")
    torch.testing.assert_close(ours, supcon - same.sum(1).double().log())
    for one, other in zip(
        torch.autograd.grad(ours.sum(), (query, key)),
        torch.autograd.grad(supcon.sum(), (query, key)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    query, key = vectors(60, 40, dtype=dtype), vectors(60, 40, dtype=dtype)
    temperature = torch.tensor(0.07, requires_grad=True)
    leaves = [query, key, temperature]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    loss = info_nce(query, key, temperature=temperature, symmetric=True)
    expected = dense_info_nce(*exact[:2], temperature=exact[2], symmetric=True).mean()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    for leaf, one, other in zip(
        leaves,
        torch.autograd.grad(loss, leaves),
        torch.autograd.grad(expected, exact),
        strict=True,
    ):
        assert one.dtype == leaf.dtype
        assert float((one - other).norm() / other.norm()) <= tolerance


def test_autocast_takes_what_modules_give():
    query, key = vectors(N, D, dtype=torch.float32), vectors(N, D, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = info_nce(query, key, symmetric=True, temperature=0.3)
    assert loss.dtype == torch.float32
    loss.backward()
    assert (query.grad.dtype, key.grad.dtype) == (torch.float32, torch.bfloat16)
    expected = dense_info_nce(query, key, symmetric=True, temperature=0.3).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_extreme_temperatures(scale):
    query, key = vectors(N, D, dtype=torch.float32), vectors(N, D, dtype=torch.float32)
    loss = info_nce(query, key, temperature=1 / scale, symmetric=True, chunk_rows=4)
    expected = dense_info_nce(query, key, temperature=1 / scale, symmetric=True).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    assert query.grad.isfinite().all()


def test_a_vector_of_zeros_has_no_direction():
    query, key = vectors(N, D).detach(), vectors(N, D)
    query[3] = 0.0
    query.requires_grad_()
    rows = info_nce(query, key, reduction="none")
    torch.testing.assert_close(rows[3], torch.tensor(math.log(N)).double())
    rows.sum().backward()
    assert not query.grad[3].any()
    assert key.grad.isfinite().all()


def test_empty_batches_and_negatives():
    empty = vectors(0, D)
    for symmetric in (False, True):
        loss = info_nce(empty, empty, symmetric=symmetric)
        assert loss == 0
        loss.backward()
        assert empty.grad.shape == (0, D)
    query, key = vectors(N, D), vectors(N, D)
    plain = info_nce(query, key)
    for none in (vectors(0, D), vectors(N, 0, D)):
        torch.testing.assert_close(info_nce(query, key, none), plain)
        alone = info_nce(query, key, none, in_batch=False)
        torch.testing.assert_close(alone, torch.zeros_like(alone))
        # A gradient all the same: DistributedDataParallel waits for that of each parameter.
        (made,) = torch.autograd.grad(info_nce(query, key, none), none)
        assert made.shape == none.shape


@pytest.mark.parametrize("in_batch", [True, False])
def test_own_negatives_without_a_direction_or_of_any_length(in_batch):
    query, key, negatives = vectors(N, D), vectors(N, D), vectors(N, 3, D)
    for each, at in ((query, 1), (key, 2), (negatives, (0, 1))):
        each.data[at] = 0.0
    leaves = query, key, negatives
    loss = info_nce(*leaves, in_batch=in_batch)
    for each, of_each, at in zip(
        leaves, torch.autograd.grad(loss, leaves), (1, 2, (0, 1)), strict=True
    ):
        assert torch.equal(of_each[at], torch.zeros_like(each[at]))
        assert of_each.abs().max() < 100.0
    for scale in (1e-200, 1e-30, 1e30, 1e200):
        scaled = info_nce(*(each * scale for each in leaves), in_batch=in_batch)
        torch.testing.assert_close(scaled, loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("symmetric", [False, True])
def test_few_pairs_are_as_many(symmetric, dtype, monkeypatch):
    temperature = torch.tensor(0.3, dtype=dtype, requires_grad=True)
    zero, mixed = vectors(N, D, dtype=dtype), vectors(N, D, dtype=dtype)
    zero.data[3] = 0.0
    mixed.data[:6] *= 10.0 ** torch.tensor([-30, -20, -10, 10, 20, 30]).unsqueeze(-1)
    plain = vectors(D, N, dtype=dtype).T, vectors(N, 2 * D, dtype=dtype)[:, ::2]
    for query, key in (plain, plain[::-1], (zero, mixed), (mixed, zero)):
        for normalize, reduction in ((True, "mean"), (True, "sum"), (False, "mean")):
            if not normalize and (query is zero or query is mixed):
                continue
            how = dict(symmetric=symmetric, normalize=normalize, reduction=reduction)
            leaves, made = (query, key, temperature), []
            for limit in (0, FEW_PAIRS):
                monkeypatch.setattr(contrastive, "_FEW_PAIRS", limit)
                loss = info_nce(query, key, temperature=temperature, **how)
                made.append((loss, *torch.autograd.grad(loss, leaves)))
            for many, few in zip(*made, strict=True):
                torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        query[1] = torch.inf
    assert info_nce(query, key, normalize=False).isnan()


def test_gradients_only_where_they_are_wanted():
    query, key = vectors(N, D), vectors(N, D)
    temperature = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    every = dict(query=query, key=key, temperature=temperature)
    expected = torch.autograd.grad(info_nce(**every, symmetric=True), every.values())
    for (name, leaf), wanted in zip(every.items(), expected, strict=True):
        others = {other: each.detach() for other, each in every.items() if other != name}
        loss = info_nce(**others, **{name: leaf}, symmetric=True)
        (found,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        assert not info_nce(**every).requires_grad


def test_layouts_and_repeated_backward():
    query, key = vectors(D, N).T, vectors(N, 2 * D)[:, ::2]
    plain = info_nce(query.contiguous(), key.contiguous(), symmetric=True)
    loss = info_nce(query, key, symmetric=True)
    torch.testing.assert_close(loss, plain)
    first = torch.autograd.grad(loss, (query, key), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, (query, key)), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="info_nce has no second derivatives"):
        torch.autograd.grad(info_nce(query, key), query, create_graph=True)


def test_learns_its_temperature_within_bounds():
    loss = InfoNCELoss(0.5, learn_temperature=True, max_scale=2.0, symmetric=True)
    vectors_ = torch.eye(N, 2 * D)
    vectors_ += 0.01 * torch.randn_like(vectors_)
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
    loss(vectors_, vectors_).backward()
    optimizer.step()
    assert loss.temperature < 0.45, "pairs that are right ask for a larger scale"
    loss(vectors_, vectors_)
    assert loss.temperature == pytest.approx(0.5)
    assert loss.log_scale.grad is not None
    fixed = InfoNCELoss(0.5)
    assert not list(fixed.parameters())
    torch.testing.assert_close(
        fixed(vectors_, vectors_), info_nce(vectors_, vectors_, temperature=0.5)
    )
    again = InfoNCELoss(0.1)
    again.load_state_dict(fixed.state_dict())
    assert again.temperature == pytest.approx(0.5)
    assert "symmetric=True" in repr(loss)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_as_one_graph():
    torch.compiler.reset()
    query, key = vectors(N, D, dtype=torch.float32), vectors(N, D, dtype=torch.float32)
    groups = torch.randint(5, (N,))

    def function(query, key):
        return info_nce(query, key, symmetric=True, groups=groups, temperature=0.3)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(query, key), (query, key))
    for one, other in zip(
        found, torch.autograd.grad(function(query, key), (query, key)), strict=True
    ):
        torch.testing.assert_close(one, other)
