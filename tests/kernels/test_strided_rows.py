"""Rows of scores that are further apart than there are classes: what is between is left alone."""

import pytest
import torch
from implementations import place

from lastlayer import kernels

N, V, WIDE = 5, 67, 128
IMPLEMENTATIONS = [name for name, missing in kernels.available().items() if missing is None]


def softmax(impl, scores):
    target, scale = torch.arange(N), torch.rand(N)
    exact = scores.float().gather(1, target[:, None])[:, 0].clone()
    return kernels.softmax_rows.forward_(
        impl, scores, target, exact, scale, None, 0.1, 0.1, 0.0, 1.0, True
    )


def softmax_slab(impl, scores):
    each = torch.rand(N)
    return kernels.softmax_rows.gradient_(
        impl, scores, torch.arange(N) - 1, each, each + 4, each, 0.0, 1.0
    )


def entmax_rows(impl, scores):
    probs = scores.float().softmax(1).to(scores.dtype)
    return kernels.entmax_rows.forward_(impl, probs, scores, torch.arange(N), torch.rand(N), 1.5)


def info_nce_statistics(impl, scores):
    rows, columns = torch.zeros(2, N), torch.full((V,), -torch.inf)
    kernels.info_nce.statistics_(
        impl, scores, torch.tensor(2.0), 0, None, None, False, True, rows[0], rows[1], columns,
        torch.zeros(0),
    )  # fmt: skip
    return rows, columns


def info_nce_weights(impl, scores):
    each, columns = torch.rand(N), torch.rand(V)
    kernels.info_nce.weights_(
        impl, scores, torch.tensor(2.0), 0, None, None, False, True, each, each, each, columns,
        columns, torch.zeros(0), scores,
    )  # fmt: skip


OPERATIONS = {
    "softmax": softmax,
    "softmax slab": softmax_slab,
    "entmax": lambda impl, scores: kernels.entmax.forward(impl, scores, 1.5, None),
    "entmax 1.25": lambda impl, scores: kernels.entmax.forward(impl, scores, 1.25, None),
    "support": lambda impl, scores: kernels.entmax.support(impl, scores, 2.0, None, 8, True, 1.0)[
        2
    ],
    "entmax rows": entmax_rows,
    "top k": lambda impl, scores: kernels.topk_softmax.forward(impl, scores, 5),
    "zlpr sums": lambda impl, scores: kernels.zlpr.slab_sums(impl, scores, True),
    "zlpr gradient": lambda impl, scores: kernels.zlpr.slab_gradient_(
        impl, scores, torch.rand(N), torch.rand(N) + 4, torch.rand(N) + 4
    ),
    "logistic": lambda impl, scores: kernels.label_loss.slab_(
        impl, scores, 0.0, 0.0, 0.0, True, 0.1, torch.rand(N)
    ),
    "info_nce": info_nce_statistics,
    "info_nce weights": info_nce_weights,
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_may_be_apart(impl, dtype, name):
    with torch.device(place(impl)):
        check(impl, dtype, name)


def check(impl, dtype, name):
    scores = torch.randn(N, V).to(dtype)
    memory = torch.full((N, WIDE), torch.nan, dtype=dtype)
    apart = memory[:, :V]
    apart.copy_(scores)
    made = []
    for given in (scores, apart):
        torch.manual_seed(0)
        made.append(OPERATIONS[name](impl, given))
    torch.testing.assert_close(made[1], made[0])
    torch.testing.assert_close(apart, scores)
    assert memory[:, V:].isnan().all()


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="Triton is not there")
def test_flat_rows_may_be_apart():
    from lastlayer.kernels.entmax_rows.triton import flat_

    with torch.device(place("triton")):
        scores, target = torch.randn(N, V), torch.arange(N)
        memory = torch.full((N, WIDE), torch.nan)
    apart = memory[:, :V].copy_(scores)
    made = [flat_(each, target, torch.ones_like(target).float(), 1.5) for each in (scores, apart)]
    torch.testing.assert_close(made[1], made[0])
    torch.testing.assert_close(apart, scores)
    assert memory[:, V:].isnan().all()
