"""The kernels of InfoNCE against the reference in float64."""

import pytest
import torch
from implementations import DTYPES, error, every_implementation, few, place

from lastlayer.kernels import info_nce
from lastlayer.kernels.info_nce import reference

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 2e-5,
    torch.float16: 2e-5,
}
WEIGHT_TOLERANCE = TOLERANCE | {torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(1, 1, 0), (5, 70, 3), (70, 9, 9), (70, 300, 100)]
KINDS = ["no groups", "positive", "ignore"]
# Scores of any size; then between -1 and 1, with a scale for which their exponentials need no care,
# one for which they fit with care, and one for which they do not fit.
BOUNDS = pytest.mark.parametrize(
    ("bounded", "scale"), [(False, 9.0), (True, 9.0), (True, 65.0), (True, 90.0)]
)


def dtypes_of(impl: str) -> list[torch.dtype]:
    """One a shape; Triton kernels have no float64."""
    return [torch.float32 if impl == "triton" and d == torch.float64 else d for d in DTYPES]


def groups_of(kind: str, n: int, m: int, device: str):
    if kind == "no groups":
        return None, None, False
    first, second = (torch.randint(4, (k,), dtype=torch.int32, device=device) for k in (n, m))
    return first, second, kind == "positive"


def scores_of(n: int, m: int, dtype: torch.dtype, device: str, *, bounded: bool = False):
    scores = torch.randn(n, m, dtype=torch.float64)
    return (scores.clamp(-1.0, 1.0) if bounded else scores).to(device, dtype)


@every_implementation
@BOUNDS
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_two_chunks(impl, kind, bounded, scale):
    pairs = tuple(zip(SHAPES, dtypes_of(impl), strict=True))
    for (n, m, own), dtype in few(pairs, *pairs[::2]):
        device = place(impl, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        factor = torch.tensor(scale, dtype=wide, device=device)
        columns = m if kind == "positive" else 0
        found = [
            torch.full((m,), -torch.inf, dtype=wide, device=device),
            torch.zeros(columns, dtype=wide, device=device),
        ]
        truth = [each.double() for each in found]
        for chunk in range(2):
            scores = scores_of(n, m, dtype, device, bounded=bounded)
            first, second, positive = groups_of(kind, n, m, device)
            start = min(m, own + chunk * n)
            rows = [torch.empty(n, dtype=wide, device=device) for _ in range(2)]
            expected = [each.double() for each in rows]
            common = first, second, positive, bounded
            reference.statistics_(
                scores.double(), factor.double(), start, *common, *expected, *truth
            )
            if impl == "triton" and device == "cpu":
                scores = scores.float()  # the interpreter cuts bfloat16 off
            info_nce.statistics_(impl, scores, factor, start, *common, *rows, *found)
            for one, other in zip([*rows, *found], [*expected, *truth], strict=True):
                size = other.nan_to_num(neginf=0.0).abs().max().clamp(min=1) if len(other) else 1.0
                assert error(one, other, float(size)) <= TOLERANCE[dtype]


@every_implementation
@BOUNDS
@pytest.mark.parametrize("kind", KINDS)
def test_weights(impl, kind, bounded, scale):
    for ((n, m, own), dtype), two in zip(
        zip(SHAPES, dtypes_of(impl), strict=True), (True, False, True, True), strict=True
    ):
        device = place(impl, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # Triton's interpreter cuts bfloat16 off where hardware rounds.
        stored = torch.float16 if impl == "triton" and dtype == torch.bfloat16 else dtype
        factor = torch.tensor(scale, dtype=wide, device=device)
        scores = scores_of(n, m, stored, device, bounded=bounded)
        first, second, positive = groups_of(kind, n, m, device)
        k = m if two else 0
        pulled = k if positive else 0
        per_row = [torch.randn(n, dtype=wide, device=device) for _ in range(2)]
        per_column = [torch.randn(size, dtype=wide, device=device) for size in (k, pulled)]
        values = scores.to(wide) * factor
        lse = [values.logsumexp(1), values.logsumexp(0)[:k]]
        given = lse[0], *per_row, lse[1], *per_column
        expected = torch.empty(n, m, dtype=torch.float64, device=device)
        common = own, first, second, positive, bounded
        reference.weights_(
            scores.double(), factor.double(), *common, *(each.double() for each in given), expected
        )
        out = torch.empty_like(scores)
        info_nce.weights_(impl, scores.clone(), factor, *common, *given, out)
        assert error(out, expected, 4.0) <= WEIGHT_TOLERANCE[stored]
        info_nce.weights_(impl, scores, factor, *common, *given, scores)
        assert torch.equal(scores, out), "in place is another result"


@every_implementation
@pytest.mark.parametrize("normalize", [True, False])
def test_unit_rows_and_their_gradient(impl, normalize):
    for dtype in DTYPES:
        if impl == "triton" and dtype == torch.float64:
            continue
        device = place(impl, dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows = scores_of(5, 70, dtype, device)
        rows[1] = 0.0
        rows[2] *= 1e4 if dtype == torch.float16 else 1e25
        gradient = scores_of(5, 70, wide, device)
        factor = torch.tensor(0.5, dtype=wide, device=device)
        unit = torch.empty(5, 70, dtype=wide, device=device)
        info_nce.unit_rows_(impl, rows, unit, normalize)
        expected = torch.empty(5, 70, dtype=torch.float64, device=device)
        reference.unit_rows_(rows.double(), expected, normalize)
        size = expected.abs().amax(1, keepdim=True).clamp(min=1e-30).cpu()
        assert error(unit, expected, size) <= TOLERANCE[dtype]
        out, along = torch.empty_like(unit), torch.empty(5, dtype=wide, device=device)
        truth = torch.empty_like(expected), torch.empty_like(expected[:, 0])
        info_nce.row_gradients_(impl, rows, gradient, factor, normalize, out, along)
        reference.row_gradients_(
            rows.double(), gradient.double(), factor.double(), normalize, *truth
        )
        # Relative to the largest of each row: rows have lengths that are far apart.
        size = truth[0].abs().amax(1, keepdim=True).clamp(min=1e-30).cpu()
        assert error(out, truth[0], size) <= 10 * TOLERANCE[dtype]
        size = (unit.abs() * gradient.abs()).sum(1).double().clamp(min=1e-30).cpu()
        assert error(along, truth[1], size) <= TOLERANCE[dtype]
        assert not normalize or not out[1].any(), "a row of zeros has no direction"
