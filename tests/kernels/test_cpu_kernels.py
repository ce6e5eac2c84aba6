"""The CPU kernels equal the reference in float64."""

import numpy as np
import pytest
import torch
from compare import (
    ALPHAS,
    check_entmax,
    check_entmax_backward,
    check_entmax_support,
    check_topk,
    rows,
)
from implementations import three_threads

from lastlayer import kernels
from lastlayer.kernels.topk_softmax.cpu import order_of, value_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WIDTHS = (1, 2, 63, 64, 65, 1000, 1025, 2049)
CHECKS = (check_entmax, check_entmax_backward, check_entmax_support)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_entmax(check, alpha, dtype):
    for n in WIDTHS:
        check("cpu", rows(n, dtype), alpha)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_alpha_a_row(check, dtype):
    for n in WIDTHS:
        scores = rows(n, dtype)
        check("cpu", scores, float("nan"), 1 + 1.5 * torch.rand(len(scores)))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logs_take_the_place_of_scores(alpha, dtype):
    for n in WIDTHS:
        scores = rows(n, dtype)
        truth = kernels.entmax.forward("reference", scores.double(), alpha, None)
        logs = scores.clone()
        assert kernels.entmax.log_("cpu", logs, alpha) is None
        torch.testing.assert_close(logs.double().exp(), truth, rtol=1e-4, atol=2e-6, equal_nan=True)
        assert bool(((truth < 1e-3) | truth.isnan() | (logs > -torch.inf)).all())


@pytest.mark.parametrize("k", [1, 2, 7, 64, 500, 10_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_topk(k, dtype):
    for n in WIDTHS:
        check_topk("cpu", rows(n, dtype), k)


def test_many_rows_are_shared_out_over_threads():
    """More rows than one thread is given, in an order that shows who wrote where."""
    scores = torch.randn(700, 200)
    with three_threads():
        for check in CHECKS:
            check("cpu", scores, 1.5)
        check_topk("cpu", scores, 5)


@pytest.mark.parametrize("alpha", [1.5, 1.3])
def test_layouts(alpha):
    base = torch.randn(65, 2 * 130)
    for scores in (base[:, ::2], base.t(), base[:, 3:70], base[0].expand(5, 260)):
        check_entmax("cpu", scores, alpha)
        check_topk("cpu", scores, 4)


def test_minus_zero_equals_zero():
    """An order of bits would tell them apart; scores do not."""
    from lastlayer import topk_softmax

    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert topk_softmax(scores, 2, impl="cpu").tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0]]
    assert topk_softmax(scores, 2, impl="reference").tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kth_of_numbers_that_are_hard_to_halve(dtype):
    """Neighbours, the smallest and the largest numbers there are, both zeros, and many equal."""
    last = torch.finfo(dtype)
    pool = [-torch.inf, last.min, -1.0, -last.tiny, -last.tiny / 8, -0.0, 0.0, last.tiny / 8]
    pool += [last.tiny, 1.0 - last.eps, 1.0, 1.0 + last.eps, last.max / 2, last.max]
    scores = torch.tensor(pool, dtype=dtype)[torch.randint(len(pool), (40, 150))]
    scores[:20] = torch.where(scores[:20] > 2, 1.0, scores[:20])
    for k in (1, 2, 3, 40, 149, 150):
        check_topk("cpu", scores, k)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_integers_have_the_order_of_their_floats(dtype):
    last = np.finfo(dtype)
    values = np.array([-np.inf, last.min, -1, -last.tiny, 0, last.tiny, 1, last.max, np.inf], dtype)
    orders = [order_of(value) for value in values]
    assert orders == sorted(orders)
    assert [value_of(order, dtype(0)) for order in orders] == values.tolist()
    assert value_of(order_of(dtype(1)) - 1, dtype(0)) == np.nextafter(dtype(1), dtype(0))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_scores_on_the_threshold_do_not_come_and_go_for_ever(alpha):
    """Rounding lets them leave the support and return; one row in a thousand of these did."""
    scores = 0.8 * torch.randn(8192, 384).bfloat16().float()
    probs = kernels.entmax.forward("cpu", scores, alpha, None)
    assert (probs.double().sum(-1) - 1).abs().max() < 1e-6
