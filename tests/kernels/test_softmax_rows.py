"""Cross entropy of rows, and its gradient in place, against autograd in float64."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from implementations import (
    DTYPES,
    ROUNDING,
    SMALLEST,
    error,
    every_implementation,
    few,
    place,
    three_threads,
)
from torch import Tensor

from lastlayer import kernels


class Options(NamedTuple):
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    temperature: float = 1.0


class Rows(NamedTuple):
    scores: Tensor
    target: Tensor
    target_scores: Tensor
    row_scale: Tensor
    class_weight: Tensor | None


class Truth(NamedTuple):
    loss: Tensor
    lse: Tensor
    entropy: Tensor
    argmax: Tensor
    rank: Tensor
    gradient: Tensor


PLAIN = Options()
EVERYTHING = Options(0.1, 0.01, 5.0, 0.7)
EACH = [
    PLAIN,
    Options(smoothing=0.1),
    Options(smoothing=1.0),
    Options(z_loss=0.02),
    Options(softcap=4.0),
    Options(temperature=0.3),
    EVERYTHING,
]
SHAPES = [(1, 1), (1, 7), (5, 1), (3, 64), (4, 130), (2, 1025)]


def problem(n_rows: int, n: int, dtype=torch.float32, weighted=False, device="cpu") -> Rows:
    exact = 3 * torch.randn(n_rows, n, dtype=torch.float64)
    target = torch.randint(n, (n_rows,))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = Rows(
        exact.to(dtype),
        target,
        exact.gather(-1, target[:, None]).squeeze(-1).to(wide),
        torch.rand(n_rows, dtype=wide) + 0.1,
        (torch.rand(n, dtype=wide) + 0.5) if weighted else None,
    )
    return Rows(*(None if each is None else each.to(device) for each in rows))


def truth(rows: Rows, options: Options) -> Truth:
    """From the definition, differentiated by torch."""
    scores, target, target_scores, row_scale, class_weight = (
        None if each is None else each.cpu().double() if each.is_floating_point() else each.cpu()
        for each in rows
    )
    smoothing, z_loss, softcap, temperature = options
    place_of_target = target[:, None]
    with torch.enable_grad():
        leaf = scores.scatter(-1, place_of_target, target_scores[:, None]).requires_grad_()
        capped = leaf
        if softcap:
            capped = softcap * torch.tanh(leaf / softcap)
            capped = capped.masked_fill(leaf == -math.inf, -math.inf)
        logs = torch.log_softmax(capped / temperature, -1)
        lse = torch.logsumexp(capped / temperature, -1)
        weights = torch.ones(scores.shape[1]).double() if class_weight is None else class_weight
        loss = -(1 - smoothing) * weights[target] * logs.gather(-1, place_of_target).squeeze(-1)
        if smoothing:
            loss = loss - smoothing / scores.shape[1] * (logs * weights).sum(-1)
        if z_loss:
            loss = loss + z_loss * lse.square()
        (gradient,) = torch.autograd.grad((loss * row_scale).sum(), leaf)
    probs = logs.exp()
    entropy = -torch.where(probs == 0, 0.0, probs * logs).sum(-1)
    above = scores > scores.gather(-1, place_of_target)
    return Truth(loss, lse, entropy, scores.argmax(-1), above.sum(-1), gradient)


def run(impl: str, rows: Rows, options: Options, statistics=False, gradient=True):
    """The five results, and what has become of the scores."""
    scores = rows.scores.clone()
    results = kernels.softmax_rows.forward_(
        impl, scores, rows.target, rows.target_scores, rows.row_scale if gradient else None,
        rows.class_weight, *options, statistics,
    )  # fmt: skip
    return *results, scores


def check(impl: str, rows: Rows, options: Options, statistics: bool = False) -> None:
    dtype = rows.scores.dtype
    loss, lse, entropy, argmax, rank, gradient = run(impl, rows, options, statistics)
    expected = truth(rows, options)
    wide = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    assert loss.dtype == lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    # Numbers of this size are added and taken away on the way.
    finite = rows.scores[rows.scores.isfinite()].abs()
    size = float(finite.max()) / options.temperature + 10
    assert error(lse, expected.lse) <= 4 * wide * size
    factor = 2 * (1 + options.z_loss * size) * (1 if rows.class_weight is None else 2)
    assert error(loss, expected.loss) <= 4 * wide * size * factor
    # By what remains of a probability after rounding; then of the result that is stored.
    scale = rows.row_scale.cpu().double()[:, None] / options.temperature
    slack = 4 * wide * size * factor * scale + SMALLEST[dtype]
    slack = slack + ROUNDING[dtype] * expected.gradient.abs()
    assert error(gradient, expected.gradient, slack) <= 1
    if not statistics:
        assert entropy.numel() == argmax.numel() == rank.numel() == 0
        return
    assert error(entropy, expected.entropy) <= 8 * wide * size
    assert torch.equal(argmax.cpu(), expected.argmax)
    assert torch.equal(rank.cpu(), expected.rank)


@every_implementation
@pytest.mark.parametrize("options", EACH)
@pytest.mark.parametrize("weighted", [False, True])
def test_options_and_shapes(impl, options, weighted):
    device = place(impl)
    for shape in few(SHAPES, *SHAPES[::2]):
        check(impl, problem(*shape, weighted=weighted, device=device), options)


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING])
@pytest.mark.parametrize("statistics", few([False, True], True))
def test_dtypes_and_statistics(impl, dtype, options, statistics):
    device = place(impl, dtype)
    for shape in [(1, 1), (3, 100), (2, 1030)]:
        check(impl, problem(*shape, dtype, weighted=True, device=device), options, statistics)


@every_implementation
def test_wider_than_a_block(impl):
    """More scores than are looked at together, the peak in the last of them."""
    rows = problem(2, 4200, device=place(impl))
    rows.scores[:, -1] += 30
    check(impl, rows, PLAIN, statistics=True)
    check(impl, rows, EVERYTHING, statistics=True)


@every_implementation
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_gradient_scores_stay_as_they_are(impl, options, dtype):
    rows = problem(3, 70, dtype, device=place(impl, dtype))
    *results, scores = run(impl, rows, options, statistics=True, gradient=False)
    assert torch.equal(scores, rows.scores)
    *others, _ = run(impl, rows, options, statistics=True)
    for result, other in zip(results, others, strict=True):
        assert torch.equal(result, other)


@every_implementation
@pytest.mark.parametrize("options", [PLAIN, Options(temperature=2.0), Options(softcap=30.0)])
def test_large_scores(impl, options):
    device = place(impl)
    for size, offset in itertools.product((1e4, 1.0), (1e4, -1e4, 0.0)):
        rows = problem(4, 100, device=device)
        scores = rows.scores * size + offset
        at_target = scores.gather(-1, rows.target[:, None]).squeeze(-1)
        check(impl, rows._replace(scores=scores, target_scores=at_target), options)


@every_implementation
@pytest.mark.parametrize("options", [PLAIN, Options(z_loss=0.1, temperature=0.5), EVERYTHING])
def test_masked_classes(impl, options):
    """-inf: no probability, no gradient, with a soft cap as well."""
    rows = problem(5, 90, device=place(impl))
    masked = torch.rand(5, 90, device=rows.scores.device) < 0.6
    masked.scatter_(-1, rows.target[:, None], False)
    masked[0] = True
    masked[0, rows.target[0]] = False
    rows.scores[masked] = -math.inf
    check(impl, rows, options, statistics=True)
    assert (run(impl, rows, options)[-1][masked] == 0).all()


@every_implementation
@pytest.mark.parametrize("options", few(EACH, PLAIN, EVERYTHING))
@pytest.mark.parametrize("weighted", few([False, True], True))
@pytest.mark.parametrize("n", few([1, 40, 1030], 1, 1030))
def test_a_row_with_nothing_allowed_costs_infinity_and_moves_nothing(impl, options, weighted, n):
    rows = problem(3, n, weighted=weighted, device=place(impl))
    rows.scores[1], rows.target_scores[1] = -math.inf, -math.inf
    loss, lse, entropy, argmax, rank, gradient = run(impl, rows, options, statistics=True)
    assert loss[1] == math.inf
    assert lse[1] == -math.inf
    assert entropy[1] == argmax[1] == 0
    assert rank[1] == kernels.softmax_rows.NO_RANK
    assert (gradient[1] == 0).all()
    assert gradient.isfinite().all()
    alone = run(impl, rows, options, statistics=True, gradient=False)
    assert torch.equal(alone[-1], rows.scores)
    assert torch.equal(alone[0], loss)
    kept = torch.tensor([0, 2], device=rows.scores.device)
    others = Rows(*(each if each is None else each[kept] for each in rows[:4]), rows.class_weight)
    check(impl, others, options, statistics=True)
    torch.testing.assert_close(loss[kept], run(impl, others, options)[0])


@every_implementation
@pytest.mark.parametrize("options", [PLAIN, Options(softcap=4.0)])
def test_no_rank_where_a_score_is_no_number_or_the_target_is_out(impl, options):
    rows = problem(5, 80, device=place(impl))
    rows.scores.scatter_(-1, rows.target[:, None], 20.0)
    rows.target_scores.fill_(20.0)
    rows.scores[1, (rows.target[1] + 1) % 80] = math.nan
    rows.scores[2, rows.target[2]] = rows.target_scores[2] = math.nan
    rows.scores[4, rows.target[4]] = rows.target_scores[4] = -math.inf
    *_, argmax, rank, _ = run(impl, rows, options, statistics=True)
    none = kernels.softmax_rows.NO_RANK
    assert rank.tolist() == [0, none, none, 0, none]
    assert argmax[[0, 3]].tolist() == rows.target[[0, 3]].tolist()


@every_implementation
@pytest.mark.parametrize("options", [PLAIN, Options(temperature=0.5), Options(softcap=4.0)])
def test_a_masked_target_costs_infinity(impl, options):
    rows = problem(2, 33, device=place(impl))
    rows.scores.scatter_(-1, rows.target[:, None], -math.inf)
    rows = rows._replace(target_scores=torch.full_like(rows.target_scores, -math.inf))
    check(impl, rows, options)


@every_implementation
def test_a_large_common_part_of_scores(impl):
    """Their common part does not round the logarithm of a sum away."""
    scores = torch.stack([torch.full((1003,), 2.0**33), torch.randn(1003) + 2.0**20])
    target = torch.tensor([5, 7])
    own = scores.gather(-1, target[:, None]).squeeze(-1)
    rows = Rows(scores, target, own, torch.ones(2), None)
    expected = truth(rows, PLAIN)
    rows = Rows(*(None if each is None else each.to(place(impl)) for each in rows))
    loss, *_, gradient = run(impl, rows, PLAIN)
    torch.testing.assert_close(loss.cpu().double(), expected.loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.cpu().double(), expected.gradient, rtol=1e-4, atol=1e-7)


@every_implementation
@pytest.mark.parametrize("options", [PLAIN, EVERYTHING])
def test_nan_stays_in_its_row(impl, options):
    rows = problem(4, 80, device=place(impl))
    at = (rows.target[2] + 1) % 80
    rows.scores[2, at] = math.nan
    loss, lse, *_, gradient = run(impl, rows, options)
    assert loss.isnan().tolist() == lse.isnan().tolist() == [False, False, True, False]
    others = torch.ones(80, dtype=torch.bool)
    others[rows.target[2]] = False
    assert gradient[2].cpu()[others].isnan().all()
    gradient[2] = 0
    assert gradient.isfinite().all()


@every_implementation
def test_plus_infinity_is_no_number(impl):
    rows = problem(2, 40, device=place(impl))
    rows.scores[1, (rows.target[1] + 1) % 40] = math.inf
    loss, *_, gradient = run(impl, rows, PLAIN)
    assert loss.isfinite().tolist() == [True, False]
    assert gradient[0].isfinite().all()
    assert not gradient[1].isfinite().all()


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("missing", [1e-3, 1e-2])
def test_the_true_class_keeps_its_gradient_near_one(impl, dtype, missing):
    """p = 0.999: what is left of 1 must come from the exact score, not from a rounded one."""
    rows = problem(6, 50, dtype, device=place(impl, dtype))
    rest = rows.scores.double().scatter(-1, rows.target[:, None], -math.inf).logsumexp(-1)
    exact = (rest + math.log(1 / missing - 1)).to(rows.target_scores.dtype)
    rows.scores.scatter_(-1, rows.target[:, None], exact[:, None].to(dtype))
    rows = rows._replace(target_scores=exact)
    loss, *_, gradient = run(impl, rows, PLAIN)
    expected = truth(rows, PLAIN)
    at_target = gradient.cpu().double().gather(-1, rows.target.cpu()[:, None]).squeeze(-1)
    true = expected.gradient.gather(-1, rows.target.cpu()[:, None]).squeeze(-1)
    # A difference of numbers around 10 leaves 2e-6 of the 1e-3 open.
    assert error(at_target / true, torch.ones(6)) <= 4e-3 + ROUNDING[dtype]
    assert error(loss, expected.loss) <= 1e-5


def layer(n_rows, depth, n, dtype, device="cpu"):
    """Hidden states, class vectors, biases and targets."""
    sizes = (n_rows, depth), (n, depth), (n,)
    made = [torch.randn(size, device=device).to(dtype) for size in sizes]
    return *made, torch.randint(n, (n_rows,), device=device)


def check_reduced(impl, given, ignore_index=None, options=PLAIN, mean=True, bias=True):
    """Terms and gradient against float64, for scores that are rounded to the dtype."""
    hidden, weight, offset, target = given
    dtype, offset = hidden.dtype, offset if bias else None
    exact = hidden.double() @ weight.double().T + (0.0 if offset is None else offset.double())
    scores = exact.to(dtype, copy=True)
    counts = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        counts = target != ignore_index
    terms, states = kernels.softmax_rows.reduced_(
        impl, scores, hidden, weight, offset, target, ignore_index, mean, True, *options
    )
    assert not terms[~counts].any()
    assert not scores[~counts].any()
    assert not states[~counts].any()
    assert torch.equal(states[counts], hidden[counts])
    if not counts.any():
        return
    n_rows = int(counts.sum())
    share = torch.full((n_rows,), 1 / n_rows if mean else 1.0, dtype=torch.float64)
    right = target[counts]
    rows = Rows(
        exact[counts].to(dtype), right, exact[counts].gather(-1, right[:, None]).squeeze(-1),
        share, None,
    )  # fmt: skip
    expected = truth(rows, options)
    size = float(exact[exact.isfinite()].abs().max()) / options.temperature + 10
    wide = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    factor = 2 * (1 + options.z_loss * size)
    assert error(terms[counts], expected.loss * share) <= 8 * wide * size * factor * share[0]
    slack = 8 * wide * size * factor * share[0] / options.temperature + SMALLEST[dtype]
    slack = slack + ROUNDING[dtype] * expected.gradient.abs()
    assert error(scores[counts], expected.gradient, slack) <= 1


# The CPU takes the reference.
on_gpu_or_reference = pytest.mark.parametrize("impl", ["reference", "triton"])


@on_gpu_or_reference
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_reduced_rows(impl, dtype, mean, bias):
    device = place(impl, dtype)
    for shape in [(1, 1, 1), (5, 33, 130), (3, 7, 4200), (2, 1100, 3)]:
        given = layer(*shape, dtype, device)
        check_reduced(impl, given, None, PLAIN, mean, bias)
        check_reduced(impl, given, int(given[-1][0]), PLAIN, mean, bias)


@on_gpu_or_reference
@pytest.mark.parametrize("options", EACH)
def test_reduced_rows_with_options(impl, options):
    check_reduced(impl, layer(6, 20, 70, torch.float32, place(impl)), -100, options)


@on_gpu_or_reference
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced_rows_do_not_read_ignored_rows(impl, dtype):
    hidden, weight, bias, target = layer(7, 20, 70, dtype, place(impl, dtype))
    target[::2] = -100
    hidden[::2] = math.nan
    check_reduced(impl, (hidden, weight, bias, target), -100)
    target.fill_(-100)
    check_reduced(impl, (hidden, weight, bias, target), -100)


@on_gpu_or_reference
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduced_rows_with_masked_classes(impl, dtype):
    """A bias of -inf masks a class; where it masks all, losses are infinite and nothing moves."""
    hidden, weight, bias, target = layer(5, 20, 70, dtype, place(impl, dtype))
    bias[target] = 0.0
    bias[(target[0] + 1) % 70] = -math.inf
    target[:] = target[0]
    check_reduced(impl, (hidden, weight, bias, target), -100)
    bias[:] = -math.inf
    scores = torch.full((5, 70), -math.inf, dtype=dtype, device=hidden.device)
    target[3] = -100
    for gradient in (False, True):
        terms, _ = kernels.softmax_rows.reduced_(
            impl, scores, hidden, weight, bias, target, -100, True, gradient, *PLAIN
        )
        assert terms.tolist() == [math.inf, math.inf, math.inf, 0.0, math.inf]
        assert bool((scores == (0.0 if gradient else -math.inf)).all())


@pytest.mark.parametrize("missing", [1e-3, 1e-6, 1e-9])
def test_the_cpu_takes_what_is_left_of_one_from_the_other_classes(missing):
    """No difference of nearly equal numbers at all: relative accuracy for any p."""
    place("cpu")
    rows = problem(6, 3000)
    rest = rows.scores.double().scatter(-1, rows.target[:, None], -math.inf).logsumexp(-1)
    exact = (rest + math.log(1 / missing - 1)).float()
    rows = rows._replace(target_scores=exact)
    loss, *_, gradient = run("cpu", rows, PLAIN)
    gap = rest - exact.double()
    left = gradient.gather(-1, rows.target[:, None]).squeeze(-1).double() / -rows.row_scale
    assert error(left / torch.sigmoid(gap), torch.ones(6)) <= 1e-6
    assert error(loss / torch.nn.functional.softplus(gap), torch.ones(6)) <= 1e-6


def test_large_scores_cost_the_cpu_no_accuracy():
    """Distances to the peak are exact, so a probability does not depend on an offset."""
    place("cpu")
    rows = problem(4, 2000)
    scores = (rows.scores * 8).round() / 8
    results = []
    for offset in (0.0, 16384.0):
        shifted = scores + offset
        at_target = shifted.gather(-1, rows.target[:, None]).squeeze(-1)
        moved = rows._replace(scores=shifted, target_scores=at_target)
        results.append(run("cpu", moved, Options(smoothing=0.1), statistics=True))
    for index in (0, 2, 3, 4, 5):  # all but the logsumexp
        assert torch.equal(results[0][index], results[1][index])


@every_implementation
def test_the_first_of_equal_scores_is_the_largest(impl):
    device = place(impl)
    rows = problem(3, 200, device=device)
    scores = torch.randint(3, (3, 200), device=device).float()
    scores[2] = torch.where(torch.arange(200, device=device) % 2 == 0, -0.0, 0.0)
    at_target = scores.gather(-1, rows.target[:, None]).squeeze(-1)
    check(impl, rows._replace(scores=scores, target_scores=at_target), PLAIN, statistics=True)


@every_implementation
@pytest.mark.parametrize("options", EACH)
def test_the_score_of_the_target_need_not_be_given(impl, options):
    rows = problem(5, 130, device=place(impl))
    at_target = rows.scores.gather(-1, rows.target[:, None]).squeeze(-1)
    given = run(impl, rows._replace(target_scores=at_target), options)
    without = run(impl, rows._replace(target_scores=None), options)
    for made, expected in zip(without, given, strict=True):
        assert torch.equal(made, expected)


@every_implementation
def test_rows_of_a_wider_matrix(impl):
    rows = problem(4, 60, device=place(impl))
    memory = torch.full((4, 100), 7.0, device=rows.scores.device)
    memory[:, :60] = rows.scores
    results = kernels.softmax_rows.forward_(
        impl, memory[:, :60], *rows[1:4], None, *EVERYTHING, False
    )
    *expected, gradient = run(impl, rows, EVERYTHING)
    assert torch.equal(memory[:, :60], gradient)
    assert (memory[:, 60:] == 7.0).all()
    assert torch.equal(results[0], expected[0])


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(impl, dtype):
    rows = problem(0, 5, dtype, device=place(impl, dtype))
    for statistics in (False, True):
        *results, scores = run(impl, rows, EVERYTHING, statistics)
        assert [tuple(each.shape) for each in results] == [(0,)] * 5
        assert scores.shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_share_the_rows(dtype, monkeypatch):
    """The same to the last bit on three threads, in pieces of a few rows."""
    place("cpu")
    from lastlayer.kernels.softmax_rows import cpu

    rows = problem(41, 3000, dtype)
    alone = run("cpu", rows, EVERYTHING, statistics=True)
    monkeypatch.setattr(cpu, "WIDENED", 20 * 3000)
    with three_threads():
        together = run("cpu", rows, EVERYTHING, statistics=True)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)
