"""exp, tanh and log of the CPU kernels against extended precision."""

import numpy as np
import pytest
import torch
from numba import njit

from lastlayer.kernels import _cpu_math

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
