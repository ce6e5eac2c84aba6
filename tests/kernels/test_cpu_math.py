"""Arithmetic of the CPU kernels against numpy."""

import math

import numpy as np
import pytest
import torch
from numba import njit
from numba.core.errors import TypingError

from lastlayer.kernels import _cpu_math
from lastlayer.kernels._cpu_math import (
    BLOCK,
    find_peaks,
    lanes_of,
    margins,
    room_for_peaks,
    squares,
    top_of,
    top_of_rest,
)

with_each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@njit
def call_top_of(matrix, row, first, count):
    return top_of(matrix, row, first, count)


@njit
def call_margins(matrix, row, count, threshold):
    return margins(matrix, row, count, threshold)


@njit
def call_squares(matrix, row, count, threshold):
    return squares(matrix, row, count, threshold)


def matrix(dtype, vectors=6, rows=4):
    lanes = lanes_of(np.dtype(dtype).itemsize)
    return np.random.default_rng(7).normal(size=(rows, vectors * lanes)).astype(dtype), lanes


@with_each_dtype
def test_sums_over_some_pairs_of_vectors_of_a_row(dtype):
    values, lanes = matrix(dtype)
    for row in range(len(values)):
        for count in range(4):
            above = np.maximum(values[row, : 2 * count * lanes].astype(np.float64) - 0.25, 0)
            total, number = call_margins(values, row, count, dtype(0.25))
            assert number == (above > 0).sum()
            assert total == pytest.approx(above.sum(), rel=1e-6)
            square, plain = call_squares(values, row, count, dtype(0.25))
            assert square == pytest.approx((above**2).sum(), rel=1e-6)
            assert plain == pytest.approx(above.sum(), rel=1e-6)


@with_each_dtype
def test_the_top_of_a_part_of_a_row(dtype):
    values, lanes = matrix(dtype)
    for first in range(lanes):
        expected = values[2, first : first + 2 * lanes].max()
        assert call_top_of(values, 2, first, 2) == (expected, True)
    assert call_top_of(values, 2, 0, 0) == (-math.inf, True)


@with_each_dtype
def test_what_is_sane(dtype):
    values, _ = matrix(dtype)
    top = values[1].max()
    for at in range(values.shape[1]):
        for odd, sane in ((math.nan, False), (math.inf, False), (-math.inf, True)):
            changed = values.copy()
            changed[1, at] = odd
            found, fine = call_top_of(changed, 1, 0, 6)
            assert fine == sane
            if odd != math.inf:
                assert found == np.nanmax(changed[1])
            assert call_top_of(changed, 0, 0, 6)[1]
    assert call_top_of(values, 1, 0, 6) == (top, True)


@with_each_dtype
@pytest.mark.parametrize("n", [1, 15, 64, 65, 200])
def test_peaks_of_blocks(dtype, n):
    values = np.random.default_rng(n).normal(size=(3, n)).astype(dtype)
    values[1] = -math.inf
    peaks = room_for_peaks(values)
    for row, state in ((0, 1), (1, 0)):
        assert find_peaks(values, row, peaks) == state
        blocks = [values[row, first : first + BLOCK].max() for first in range(0, n, BLOCK)]
        np.testing.assert_array_equal(peaks, [*blocks, values[row].max()])
    assert top_of_rest(values, 2, n // 3) == (values[2, n // 3 :].max(), True)
    for odd in (math.nan, math.inf):
        for at in (0, n - 1):
            changed = values.copy()
            changed[2, at] = odd
            assert find_peaks(changed, 2, peaks) == -1
            assert not top_of_rest(changed, 2, 0)[1]


def test_rows_must_be_contiguous():
    values, _ = matrix(np.float32)
    with pytest.raises(TypingError, match="C-contiguous"):
        call_margins(values[:, ::2], 0, 1, np.float32(0))


# As careless as the flags of the kernels: the functions have to keep theirs.
CARELESS = {"reassoc", "contract", "nsz", "arcp"}


def test_exp_and_tanh_are_as_good_as_those_of_the_c_library():
    @njit(fastmath=CARELESS)
    def all_of(x, exp, tanh, slope):
        for i in range(len(x)):
            exp[i] = _cpu_math.exp(x[i])
            tanh[i], slope[i] = _cpu_math.tanh_and_slope(x[i])

    for dtype, least in ((np.float32, -87.0), (np.float64, -708.0)):
        for size in (1.0, -least):
            x = (-torch.rand(5000).double() * size).numpy().astype(dtype)
            exp, tanh, slope = (np.full_like(x, np.nan) for _ in range(3))
            all_of(x, exp, tanh, slope)
            wide = x.astype(np.longdouble)
            unit = np.finfo(dtype).eps
            assert np.max(np.abs(exp / np.exp(wide) - 1)) <= unit
            nonzero = x < 0
            assert np.max(np.abs(tanh[nonzero] / np.tanh(wide[nonzero]) - 1)) <= 3 * unit
            near = x > least / 3
            assert np.max(np.abs(slope[near] * np.cosh(wide[near]) ** 2 - 1)) <= 4 * unit
        x = np.array([0.0, -np.inf, np.nan, least * 1.01, -1e30, 30.0], dtype)
        exp, tanh, slope = (np.full_like(x, 7) for _ in range(3))
        all_of(x, exp, tanh, slope)
        assert np.array_equal(exp[:5], [1, 0, np.nan, 0, 0], equal_nan=True)
        assert abs(exp[5] / np.exp(30.0) - 1) <= 2 * np.finfo(dtype).eps
        assert np.array_equal(tanh, [0, -1, np.nan, -1, -1, 1], equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_is_as_good_as_that_of_the_c_library(dtype):
    @njit(fastmath=CARELESS)
    def all_of(x, out):
        for i in range(len(x)):
            out[i] = _cpu_math.log(x[i])

    limits, share = np.finfo(dtype), torch.rand(5000).double().numpy()
    lowest, highest = np.log(limits.smallest_subnormal.astype(np.longdouble)), np.log(limits.max)
    x = np.concatenate(
        [
            np.exp(lowest + (highest - lowest) * share * 0.999),
            0.5 + 1.5 * share,
            1 + 1e-3 * (share - 0.5),
            [limits.tiny, limits.smallest_subnormal, limits.max, 1, 1 - limits.epsneg],
        ]
    ).astype(dtype)
    out = np.full_like(x, np.nan)
    all_of(x, out)
    right = np.log(x.astype(np.longdouble))
    assert np.all(np.abs(out - right) <= np.spacing(np.abs(right).astype(dtype)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log1p_has_all_digits_from_0_to_1(dtype):
    @njit(fastmath=CARELESS)
    def all_of(x, out, total, lost):
        for i in range(len(x)):
            out[i] = _cpu_math.log1p(x[i])
            total[i], lost[i] = _cpu_math.one_plus(x[i])

    share = torch.rand(5000).double().numpy()
    x = np.concatenate([share, share**8, share**40, [0, 1, math.sqrt(2) - 1]]).astype(dtype)
    out, total, lost = (np.full_like(x, np.nan) for _ in range(3))
    all_of(x, out, total, lost)
    assert np.array_equal(total, 1 + x)
    assert np.array_equal(lost, x - (total - 1))
    right = np.log1p(x.astype(np.longdouble))
    assert np.all(np.abs(out - right) <= 2 * np.spacing(right.astype(dtype)))
    all_of(np.full(1, np.nan, dtype), out, total, lost)
    assert np.isnan(out[0])
