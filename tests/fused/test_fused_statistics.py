"""What one pass tells beside the loss, against all scores."""

import pytest
import torch
from unfused import cross_entropy, gradients, make_problem, scores, unfused

from lastlayer.fused import linear_cross_entropy, linear_statistics

N, V = 13, 29
BENDS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "temperature": {"temperature": 0.4},
    "both": {"softcap": 2.0, "temperature": 3.0},
}


@pytest.mark.parametrize("bend", BENDS.values(), ids=BENDS)
@pytest.mark.parametrize("chunk_rows", [1, 4, "auto"])
@pytest.mark.parametrize("bias", [False, True])
def test_all_fields(bend, chunk_rows, bias):
    problem = hidden, weight, target, offset = make_problem(N, v=V, bias=bias)
    options = {**bend, "label_smoothing": 0.1, "z_loss": 0.01}
    known = linear_statistics(*problem, k=3, chunk_rows=chunk_rows, **options)
    values = scores(hidden, weight, offset, **bend).detach()
    logs = values.log_softmax(-1)
    torch.testing.assert_close(known.loss, unfused(cross_entropy, *problem, **options))
    torch.testing.assert_close(known.log_prob, logs.gather(-1, target[:, None])[:, 0])
    torch.testing.assert_close(known.entropy, -(logs.exp() * logs).sum(-1))
    torch.testing.assert_close(known.logsumexp, values.logsumexp(-1))
    assert torch.equal(known.argmax, values.argmax(-1))
    assert torch.equal(known.in_top_k, (values.topk(3).indices == target[:, None]).any(-1))
    assert known.in_top_k.dtype == torch.bool


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_and_gradients_are_those_of_the_cross_entropy(reduction):
    problem = make_problem(N, v=V, ignored=(2, 3))
    options = {"row_weight": torch.rand(N, dtype=torch.float64), "reduction": reduction}
    known = linear_statistics(*problem, chunk_rows=4, **options)
    loss = linear_cross_entropy(*problem, chunk_rows=4, **options)
    torch.testing.assert_close(known.loss, loss)
    upstream = torch.randn_like(loss)
    torch.testing.assert_close(
        gradients(known.loss, problem, upstream), gradients(loss, problem, upstream)
    )


def test_only_the_loss_has_a_gradient():
    known = linear_statistics(*make_problem(N))
    assert known.loss.requires_grad
    assert not any(each.requires_grad for each in known[1:])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_loss_without_an_upstream_gradient_has_none_itself(reduction):
    """Autograd passes None, not zeros, to a function with outputs that have no gradient."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(_, loss):
            return loss.clone()

        @staticmethod
        def backward(*_):
            return None

    problem = make_problem(N)
    loss = Stop.apply(linear_statistics(*problem, reduction=reduction).loss).sum()
    assert torch.autograd.grad(loss, problem[0], allow_unused=True) == (None,)


def test_ignored_rows_are_zero_everywhere():
    problem = make_problem(N, v=V, ignored=(0, 4, 12))
    known = linear_statistics(*problem, k=V, chunk_rows=4, reduction="none")
    ignored = problem[2] == -100
    for each in known:
        assert not each[ignored].any()
    assert known.in_top_k[~ignored].all()
    assert (known.entropy[~ignored] > 0).all()


def test_unsigned_8_bit_targets():
    """-100 as an unsigned 8-bit integer is 156, which is a class here."""
    hidden, weight, _, bias = make_problem(2, v=200)
    target = torch.tensor([156, 3])
    given = linear_statistics(hidden, weight, target.to(torch.uint8), bias, k=200)
    torch.testing.assert_close(given, linear_statistics(hidden, weight, target, bias, k=200))
    assert given.in_top_k.all()


def test_all_rows_ignored():
    known = linear_statistics(*make_problem(3, ignored=range(3)))
    assert not any(each.any() for each in known)


def test_equal_scores_share_the_better_place():
    """``in_top_k`` asks how many classes are strictly better than the target."""
    hidden = torch.ones(4, 1)
    weight = torch.tensor([[1.0], [3.0], [1.0], [1.0], [0.0]])
    target = torch.tensor([0, 1, 3, 4])
    for k, expected in (
        (1, [False, True, False, False]),
        (2, [True, True, True, False]),
        (4, [True, True, True, False]),
        (5, [True, True, True, True]),
        (50, [True, True, True, True]),
    ):
        assert linear_statistics(hidden, weight, target, k=k).in_top_k.tolist() == expected


def test_shapes_and_dtypes():
    for dtype, of_loss in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        known = linear_statistics(*make_problem((3, 2), dtype=dtype))
        assert all(each.shape == (3, 2) for each in known[1:])
        assert all(each.dtype == of_loss for each in known[:4])
        assert known.argmax.dtype == torch.int64


def test_classes_that_are_out_of_the_running():
    hidden, weight, target, bias = make_problem(N, v=V)
    target = target % 10
    with torch.no_grad():
        bias[10:] = -float("inf")
    known = linear_statistics(hidden, weight, target, bias, chunk_rows=4)
    fewer = linear_statistics(hidden, weight[:10], target, bias[:10])
    for all_of_them, few in zip(known, fewer, strict=True):
        torch.testing.assert_close(all_of_them, few)
