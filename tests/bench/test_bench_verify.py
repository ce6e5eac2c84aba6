import pytest
import torch
from lastlayer.bench.cases import Method
from lastlayer.bench.maps.cases import TOPK, K, MapCase
from lastlayer.bench.maps.family import Maps
from lastlayer.bench.maps.verify import judge, sample_rows
from lastlayer.bench.verify import Verdict, relative_error

from lastlayer import maps


def reference(scores, alpha=2.0):
    return maps.entmax(scores, alpha, impl="reference")


def verdict_of(
    call, computes="sparsemax", *, shape=(6, 96), backward=False, scores=None, **options
):
    direction = "forward+backward" if backward else "forward"
    case = MapCase("shapes", shape, options.pop("dtype", "float32"), (), direction, 2.0)
    inputs = Maps().draw(case, torch.device("cpu"), 3)
    if scores is not None:
        inputs = (scores,)
    method = Method("m", "lastlayer", computes, lambda: call, **options)
    return Maps().verify(case, method, call, inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_right_map_passes(dtype, backward):
    assert verdict_of(reference, backward=backward, dtype=dtype).ok


def test_sums_that_are_off_are_found_in_rows_that_are_not_sampled():
    def one_bad_row(scores):
        result = reference(scores)
        result[150] *= 1.01
        return result

    # At most 64 of these rows are compared with the reference.
    verdict = verdict_of(one_bad_row, shape=(300, 1024))
    assert verdict.reason == f"row sums off by {verdict.row_sum_error:.1e}"
    assert verdict.row_sum_error == pytest.approx(0.01, rel=1e-3)


def test_wrong_entries_are_found_where_the_sums_are_right():
    verdict = verdict_of(lambda scores: torch.softmax(scores, -1))
    assert verdict.row_sum_error < 1e-6
    assert verdict.reason is not None
    assert verdict.reason.startswith("entries off by")


def test_a_wrong_gradient_is_found():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, result):
            return result.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    verdict = verdict_of(lambda scores: Halved.apply(reference(scores)), backward=True)
    assert verdict.error == pytest.approx(0.5, rel=1e-3)
    assert verdict.reason == "gradient off by 5.0e-01"


def test_another_support_is_not_passed_over():
    verdict = verdict_of(lambda scores: torch.softmax(scores, -1), backward=True)
    assert verdict.reason == "the support differs from the truth in most rows"


def test_nan_never_passes():
    assert not judge(float("nan"), 0.0, torch.float32, gradient=False).ok
    assert not judge(0.0, float("nan"), torch.float32, gradient=True).ok
    assert not verdict_of(lambda scores: reference(scores) * float("nan")).ok


def topk_by_position(scores, *, from_the_right):
    """Of tied scores the leftmost are kept, or the rightmost."""
    seen = scores.flip(-1) if from_the_right else scores
    order = seen.argsort(dim=-1, descending=True, stable=True)[..., :K]
    kept = torch.zeros_like(seen, dtype=torch.bool).scatter_(-1, order, True)
    result = seen.masked_fill(~kept, -torch.inf).softmax(-1)
    return result.flip(-1) if from_the_right else result


def test_of_tied_scores_any_may_be_kept():
    tied = torch.randint(0, 3, (6, 96), generator=torch.Generator().manual_seed(1)).float()
    left, right = (topk_by_position(tied, from_the_right=side) for side in (False, True))
    assert not torch.equal(left, right)
    for side in (False, True):
        assert verdict_of(
            lambda scores, side=side: topk_by_position(scores, from_the_right=side),
            TOPK,
            scores=tied,
        ).ok


def test_a_smaller_score_may_not_be_kept():
    def misplaced(scores):
        result = topk_by_position(scores, from_the_right=False)
        return result.roll(1, -1)

    assert verdict_of(misplaced, TOPK).reason is not None


def support(scores, size=128):
    return maps.entmax_support(scores, 1.5, size, impl="reference")


def test_a_right_support_passes():
    assert verdict_of(support, "entmax 1.5", variant=True).ok


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s._replace(indices=s.indices.roll(1, 0)), "entries off"),
        (lambda s: s._replace(values=2 * s.values), "row sums off"),
        (lambda s: s._replace(size=torch.zeros_like(s.size)), "sizes smaller"),
        (lambda s: s._replace(size=s.size + 1000), "no row's support fits"),
    ],
)
def test_a_wrong_support_is_found(change, reason):
    verdict = verdict_of(lambda scores: change(support(scores)), "entmax 1.5", variant=True)
    assert verdict.reason is not None
    assert reason in verdict.reason


def test_the_first_and_last_row_are_always_compared():
    rows = sample_rows(torch.empty(1000, 4096))
    assert len(rows) == 64
    assert {0, 999} <= set(rows.tolist())


def test_a_verdict_without_a_reason_is_ok():
    assert Verdict().ok
    assert not Verdict(reason="wrong").ok


def test_the_relative_error_is_that_of_the_whole_matrix(monkeypatch):
    truth = torch.randn(7, 3, dtype=torch.float64)
    got = (truth + 0.1 * torch.randn(7, 3)).float()
    expected = float((got.double() - truth).norm() / truth.norm())
    assert relative_error(got, truth) == pytest.approx(expected)
    monkeypatch.setattr("lastlayer.bench.verify._COPIED", 6)
    assert relative_error(got, truth) == pytest.approx(expected)
    assert relative_error(truth[:0], truth[:0]) == 0
