"""The pass of one target a row through its kernels, as on a GPU: against the general one."""

import math

import pytest
import torch

from lastlayer import kernels, samplers
from lastlayer.fused import sampled
from lastlayer.fused.function import Call
from lastlayer.fused.sampled import Rule, general, one_target
from lastlayer.heads import ImportanceSampling, NegativeSampling, NoiseContrastive, SampledSoftmax
from lastlayer.heads.sampled import base
from lastlayer.kernels.rng import GIVEN
from lastlayer.kernels.sampled_rows import Draws

needs_triton = pytest.mark.skipif(
    kernels.available()["triton"] is not None, reason="neither a GPU nor Triton's interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = {
    "exact": Rule(average=True),
    "self-normalised": Rule(with_target=False, drop_hits=False),
    "logistic": Rule(logistic=True, drop_hits=False),
}
V = 30
COUNTS = 1.0 / torch.arange(1, V + 1)
SAMPLERS = {
    "uniform": lambda: samplers.Uniform(30),
    "log-uniform": lambda: samplers.LogUniform(30),
    "ordered": lambda: samplers.LogUniform(30, order=torch.arange(29, -1, -1)),
    "unigram": lambda: samplers.Unigram(COUNTS),
}


HEADS = {
    "exact": lambda **o: SampledSoftmax(8, V, samplers.Unigram(COUNTS), 12, **o),
    "classic": lambda **o: SampledSoftmax(
        8, V, samplers.LogUniform(V), 12, correction="classic", head_classes=4, **o
    ),
    "uniform": lambda **o: SampledSoftmax(8, V, samplers.Uniform(V), 12, temperature=0.5, **o),
    "unique": lambda **o: SampledSoftmax(8, V, samplers.Unigram(COUNTS), 12, unique=True, **o),
    "importance": lambda **o: ImportanceSampling(8, V, samplers.Unigram(COUNTS), 12, **o),
    "noise": lambda **o: NoiseContrastive(8, V, samplers.Unigram(COUNTS), 12, log_z="learned", **o),
    "negative": lambda **o: NegativeSampling(8, V, samplers.Unigram(COUNTS), 12, **o),
}


def problem(n, m, d, v, rule, full):
    """Rows of which some have no target; options that are only there in a ``full`` one."""
    generator = torch.Generator().manual_seed(n)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    target = torch.randint(0, v, (n, 1), generator=generator)
    target[::4] = -1
    counts = (target[:, 0] >= 0).float()
    given = sampled._Problem(
        hidden=numbers(n, d), weight=numbers(v, d), bias=numbers(v) if full else None,
        row_shift=numbers(n) if full else None, target=target,
        ids=torch.randint(0, v, (m,), generator=generator), log_expected=numbers(m) + 2.0,
        target_log_expected=numbers(n, 1) if full else None, shift=numbers(n), labels=None,
        target_labels=None, scores=None, scale=counts / counts.sum(),
        row_scale=counts / counts.sum(), factor=0.7 if full else 1.0,
        n_exact=3 if full else 0, rule=rule, chunk_rows="5", to_hidden=True, to_weight=True,
        to_bias=full,
    )  # fmt: skip
    if full:
        # Masked, and drawn: it counts as a draw, without any mass.
        given.bias[given.ids[5]] = -torch.inf
    return mapped(given, lambda x: x.to(DEVICE))


def mapped(given, change):
    return sampled._Problem(*(change(x) if isinstance(x, torch.Tensor) else x for x in given))


@pytest.fixture
def products(monkeypatch):
    """The kernels of a GPU, and products of half precision in float32 where torch has none."""

    def wide(left, right, _narrow):
        return left.float() @ right.float()

    def on_gpu(_hidden):
        from lastlayer.kernels.sampled_rows.triton import OneTarget

        return OneTarget

    if DEVICE == "cpu":
        monkeypatch.setattr(sampled, "_wide_product", wide)
        monkeypatch.setattr(sampled, "_step_of_one_target", on_gpu)
        monkeypatch.setattr(sampled, "_has_slots", lambda _hidden: True)


def run(given, draws, reduction="mean", upstream=None):
    """What the engine is asked for, as an engine of its own would be."""
    options = (1.0 / given.factor, given.n_exact, given.rule, given.chunk_rows)
    wanted = True, True, given.to_bias, given.row_shift is not None
    operands = *given[:5], None, None, None
    return one_target(Call(operands, options, reduction, wanted, upstream), draws)


def close(result, right, dtype):
    size = float(right.norm()) if right.numel() else 1.0
    bound = (1e-5 if dtype == torch.float32 else 1.2e-2) * max(size, 1e-3)
    return float((result.cpu().double().view_as(right) - right).norm()) < bound


@needs_triton
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(("m", "d"), [(20, 24), (9, 5)])
def test_it_agrees_with_the_general_pass(products, rule, dtype, full, m, d):
    given = problem(9, m, d, 30, rule, full)
    given = given._replace(hidden=given.hidden.to(dtype), weight=given.weight.to(dtype))
    wide = mapped(given, lambda x: x.cpu().double() if x.is_floating_point() else x.cpu())
    truth = general(wide)
    # What a row without a target holds comes into nothing.
    given.hidden[::4] = torch.nan
    draws = Draws(
        GIVEN, m, given.ids, given.log_expected, of_targets=given.target_log_expected,
        shift=given.shift,
    )  # fmt: skip
    loss, (of_hidden, push, columns, _, numbers, entries), (ess,), size = run(given, draws)
    assert size is None
    assert close(loss, truth.losses.sum(), dtype)
    assert close(of_hidden, truth.hidden, dtype)
    assert close(columns, truth.columns, dtype)
    assert close(numbers[m:], truth.slopes.flatten(), dtype)
    if full:
        assert close(numbers[:m], truth.column_biases, dtype)
    if rule.logistic:
        assert not ess.any()
        assert push is None or close(push, truth.push, dtype)
    else:
        counts = given.scale.cpu() != 0
        rtol = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            ess.cpu().double()[counts], truth.ess[counts], rtol=rtol, atol=rtol
        )
    # Where there is no target the kernel names the first draw's class, the other pass none.
    named = torch.where(truth.entries < 0, truth.entries[0], truth.entries)
    assert torch.equal(entries.cpu(), named.int())


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="sizes are constants of compiled kernels")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_long_rows_are_read_in_pieces(products, monkeypatch, rule):
    from lastlayer.kernels.sampled_rows import triton

    given = problem(9, 40, 8, 30, rule, True)
    draws = Draws(GIVEN, 40, given.ids, given.log_expected, shift=given.shift)
    whole = run(given, draws)
    monkeypatch.setattr(triton, "MOST_HELD", 16)
    monkeypatch.setattr(triton, "PIECE", 16)
    made = run(given, draws)
    for one, other in zip(made.pieces[:-1], whole.pieces[:-1], strict=True):
        if other is not None:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(made.loss, whole.loss)
    torch.testing.assert_close(made.statistics[0], whole.statistics[0], rtol=2e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
@pytest.mark.parametrize("targets", [0, 1, 2])
def test_it_draws_what_the_sampler_draws(products, sampler, targets):
    given, sampler, m = problem(9, 11, 8, 30, Rule(average=True), True), sampler().to(DEVICE), 11
    given = given._replace(n_exact=0)
    counter = torch.tensor([5, 3], device=DEVICE)
    kind, *tables, n_classes = sampler._tables()
    less = math.log(m)
    drawn = run(
        given,
        Draws(kind, m, counter, *tables, n_classes, less, True, targets, counts=True),
    )
    assert counter.tolist() == [5, 4]
    ids, log_prob = sampler.sample_with_log_prob(m, rng_counter=(5, 3))
    target = given.target[:, 0]
    of_target = sampler.log_prob(target.clamp(min=0)) + less
    shift = sampler.log_complement(target)
    right = run(
        given,
        Draws(
            GIVEN, m, ids, log_prob + less, of_targets=of_target if targets == 1 else None,
            shift=shift if targets == 2 else None,
        ),
    )  # fmt: skip
    assert torch.equal(drawn.pieces[-1], right.pieces[-1])
    for made, expected in zip(drawn.pieces[:-1], right.pieces[:-1], strict=True):
        if expected is not None:
            torch.testing.assert_close(made, expected, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(drawn.loss, right.loss, rtol=1e-5, atol=1e-6)


@needs_triton
def test_float16_is_divided_in_the_end_and_rows_have_factors(products):
    given = problem(9, 12, 8, 30, Rule(average=True), True)
    draws = Draws(GIVEN, 12, given.ids, given.log_expected, shift=given.shift)
    whole = run(given, draws)
    half = given._replace(hidden=given.hidden.half(), weight=given.weight.half())
    made = run(half, draws)
    torch.testing.assert_close(made.loss, whole.loss, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(made.pieces[0] * made.size, whole.pieces[0], rtol=2e-2, atol=2e-3)
    alone = run(given, draws, "none", torch.full((9,), 1 / 6, device=DEVICE))
    assert alone.loss.shape == (9,)
    torch.testing.assert_close(alone.pieces[0], whole.pieces[0])
    torch.testing.assert_close(alone.pieces[2], whole.pieces[2])


@pytest.fixture
def as_on_a_gpu(products, monkeypatch):
    """Heads take the way of a GPU; its kernels are interpreted where there is none."""
    if DEVICE == "cpu":

        def taken(hidden, *_):
            return hidden.dtype != torch.float64

        for module, name in (
            (sampled, "_has_kernels"),
            (sampled, "_has_slots"),
            (base, "kernels_draw"),
        ):
            monkeypatch.setattr(module, name, taken)


@needs_triton
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("sparse", "reduction"), [(True, "mean"), (False, "mean"), (False, "sum"), (True, "none")]
)
@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_heads_train_through_it(make, sparse, reduction):
    torch.manual_seed(3)
    head = make(device=DEVICE, sparse=sparse, reduction=reduction)
    exact = make(dtype=torch.float64, reduction=reduction)
    exact.load_state_dict({name: each.cpu() for name, each in head.state_dict().items()})
    hidden, target = torch.randn(11, 8, device=DEVICE), torch.randint(30, (11,), device=DEVICE)
    target[::5] = -100
    results = []
    for each, rows, wanted in (
        (head, hidden.requires_grad_(), target),
        (exact, hidden.detach().cpu().double().requires_grad_(), target.cpu()),
    ):
        loss = each(rows, wanted)
        # Upstream gradients of rows as those of a sum have a stride of 0.
        results.append((loss, *torch.autograd.grad(loss.sum(), [rows, *each.parameters()])))
    for one, two in zip(*results, strict=True):
        assert close(one.detach().to_dense(), two.detach(), torch.float32)


def strided(tensor):
    """The same numbers, with others between them."""
    return torch.stack([tensor, torch.full_like(tensor, 7)], -1)[..., 0]


@needs_triton
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_operands_need_not_be_contiguous(products, rule):
    given = problem(9, 12, 8, 30, rule, True)
    names = ("hidden", "weight", "bias", "row_shift", "target", "shift")
    apart = {name: strided(each) for name in names if (each := getattr(given, name)) is not None}
    other = given._replace(**apart)
    upstream = torch.full((9,), 0.25, device=DEVICE)
    made = [
        run(each, Draws(GIVEN, 12, each.ids, each.log_expected, shift=each.shift), "none", upstream)
        for each in (given, other)
    ]
    for one, two in zip(made[0].pieces, made[1].pieces, strict=True):
        assert (one is None) == (two is None)
        assert one is None or torch.equal(one, two)
    assert torch.equal(made[0].loss, made[1].loss)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float32, None)])
def test_slots_have_the_sums_of_classes(sparse, dtypes):
    """A GPU's way to sum what belongs to a class, which waits for nothing, against a CPU's."""
    n, m, d, v = 7, 9, 5, 6
    target = torch.randint(v, (n, 1))
    target[::3] = -1
    slopes = torch.where(target < 0, 0.0, torch.randn(n, 1))
    columns, biases, hidden = torch.randn(m, d), torch.randn(m), torch.randn(n, d)
    entries = torch.cat([torch.randint(v, (m,)), target.flatten()])
    given, factor = (columns, biases, slopes, hidden), torch.tensor(0.3)
    known, sums = sampled._summed((entries, *given, factor), v, dtypes)
    mapped = torch.where(entries < 0, entries[0], entries).int()
    numbers = torch.cat([biases, slopes.flatten()])
    slotted = mapped, columns, None, numbers, hidden, factor
    keys, slots = sampled._slotted(slotted, ((v, d), (v,)), dtypes, sparse)
    for right, made, dtype in zip(sums, slots, dtypes, strict=True):
        if dtype is None:
            assert right is made is None
            continue
        expected = torch.zeros(v, *right.shape[1:], dtype=dtype).index_copy_(0, known, right)
        found = torch.zeros_like(expected).index_add_(0, keys[0], made) if sparse else made
        assert made.dtype == dtype
        torch.testing.assert_close(found, expected)


class TestOnACpu:
    """The same pass through the kernels of a CPU."""

    @pytest.fixture(autouse=True)
    def numba(self):
        if kernels.available()["cpu"] is not None:
            pytest.skip("numba is not installed")

    @staticmethod
    def given(rule, full, dtype):
        made = problem(9, 20, 24, 30, rule, full)
        return mapped(made, lambda x: x.cpu().to(dtype) if x.is_floating_point() else x.cpu())

    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("full", [True, False])
    def test_it_agrees_with_the_general_pass(self, rule, dtype, full):
        given = self.given(rule, full, dtype)
        truth = general(mapped(given, lambda x: x.double() if x.is_floating_point() else x))
        given.hidden[::4] = torch.nan
        draws = Draws(
            GIVEN, 20, given.ids, given.log_expected, of_targets=given.target_log_expected,
            shift=given.shift,
        )  # fmt: skip
        loss, pieces, (ess,), size = run(given, draws)
        of_hidden, push, columns, column_biases, slopes, entries = pieces
        assert size is None
        assert torch.equal(entries, truth.entries)
        bound = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
        pairs = [
            (loss, truth.losses.sum()), (of_hidden, truth.hidden), (columns, truth.columns),
            (slopes, truth.slopes), (column_biases, truth.column_biases),
            (push, truth.push if full and rule.logistic else None),
            (ess, torch.zeros_like(truth.ess) if rule.logistic else truth.ess),
        ]  # fmt: skip
        for made, expected in pairs:
            if expected is not None:
                torch.testing.assert_close(made, expected.to(dtype), **bound)

    @pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
    @pytest.mark.parametrize("targets", [0, 1, 2])
    def test_it_draws_what_the_sampler_draws(self, sampler, targets):
        given, sampler = self.given(Rule(average=True), True, torch.float64), sampler()
        given, m, counter = given._replace(n_exact=0), 11, torch.tensor([5, 3])
        kind, *tables, n_classes = sampler._tables()
        less, target = math.log(m), given.target[:, 0]
        drawn = run(
            given, Draws(kind, m, counter, *tables, n_classes, less, True, targets, counts=True)
        )
        assert counter.tolist() == [5, 4]
        ids = sampler.sample(m, rng_counter=(5, 3))
        log_prob = sampler.log_prob(ids, dtype=torch.float64)
        of_target = sampler.log_prob(target.clamp(min=0), dtype=torch.float64) + less
        shift = sampler.log_complement(target, dtype=torch.float64)
        right = run(
            given,
            Draws(
                GIVEN, m, ids, log_prob + less, of_targets=of_target if targets == 1 else None,
                shift=shift if targets == 2 else None,
            ),
        )  # fmt: skip
        assert torch.equal(drawn.pieces[-1], right.pieces[-1])
        for made, expected in zip(drawn.pieces[:-1], right.pieces[:-1], strict=True):
            if expected is not None:
                torch.testing.assert_close(made, expected)
        torch.testing.assert_close(drawn.loss, right.loss)

    def test_a_sampler_that_draws_in_its_own_way_is_asked(self):
        class Last(samplers.Unigram):
            def _draw_both(self, n, _counter, _context):
                ids = torch.full((n,), self.n_classes - 1)
                return samplers.Sampled(ids, self.log_prob(ids))

        head = ImportanceSampling(8, V, Last(COUNTS), 12, sparse=True)
        head(torch.randn(3, 8), torch.zeros(3, dtype=torch.int64)).backward()
        assert head.weight.grad.coalesce().indices().tolist() == [[0, V - 1]]
