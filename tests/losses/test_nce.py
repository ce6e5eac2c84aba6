"""Noise contrastive estimation and negative sampling on scores: values, gradients and optima."""

import itertools
import math

import pytest
import torch

from lastlayer.losses.noise import nce_loss, negative_sampling_loss

DATA = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
NOISE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def problem(batch=(5,), p=None, k=4, dtype=torch.float64):
    shape = (*batch,) if p is None else (*batch, p)
    positive, negative = torch.randn(shape, dtype=dtype), torch.randn(*batch, k, dtype=dtype)
    return positive, negative, -torch.rand(shape).double() - 2, -torch.rand(k).double() - 2


def by_hand(positive, negative, positive_log_q, negative_log_q, log_z=0.0):
    """One row and one positive, by the formula."""
    k = len(negative)

    def sigma(score, log_q):
        model = (score - log_z).exp()
        return model / (model + k * log_q.exp())

    loss = -sigma(positive, positive_log_q).log()
    for score, log_q in zip(negative, negative_log_q, strict=True):
        loss = loss - (1 - sigma(score, log_q)).log()
    return loss


@pytest.mark.parametrize("log_z", [0.0, 1.5])
def test_the_loss_is_that_of_telling_data_from_noise(log_z):
    positive, negative, of_positive, of_negative = problem()
    losses = nce_loss(positive, negative, of_positive, of_negative, log_z=log_z, reduction="none")
    for row in range(5):
        expected = by_hand(positive[row], negative[row], of_positive[row], of_negative, log_z)
        torch.testing.assert_close(losses[row], expected)


def test_its_gradient_is_that_of_the_formula():
    positive, negative, of_positive, of_negative = problem((1,))
    log_z = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    leaves = positive.requires_grad_(), negative.requires_grad_(), log_z
    made = torch.autograd.grad(
        nce_loss(positive, negative, of_positive, of_negative, log_z=log_z), leaves
    )
    truth = by_hand(positive[0], negative[0], of_positive[0], of_negative, log_z)
    for ours, expected in zip(made, torch.autograd.grad(truth, leaves), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("p", [None, 3])
def test_first_and_second_derivatives(p):
    positive, negative, of_positive, of_negative = problem((2, 3), p)
    log_z = torch.randn(2, 3, dtype=torch.float64)
    mask = torch.rand(positive.shape) < 0.7
    leaves = tuple(each.requires_grad_() for each in (positive, negative, log_z))

    def loss(positive, negative, log_z):
        return nce_loss(
            positive, negative, of_positive, of_negative, log_z=log_z, mask=mask, reduction="none"
        )

    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)


def expected_gradient(loss, scores, k):
    """Over all targets of the data and all draws of the noise, each as often as it is probable."""
    scores = scores.clone().requires_grad_()
    total = 0.0
    for y, *draws in itertools.product(range(4), repeat=k + 1):
        total = total + DATA[y] * NOISE[draws].prod() * loss(scores, y, torch.tensor(draws))
    return torch.autograd.grad(total, scores)[0]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("log_z", [0.0, 2.0])
def test_nce_is_least_where_the_model_is_the_data(k, log_z):
    def loss(scores, y, draws):
        return nce_loss(scores[y], scores[draws], NOISE[y].log(), NOISE[draws].log(), log_z=log_z)

    at_data = expected_gradient(loss, DATA.log() + log_z, k)
    torch.testing.assert_close(at_data, torch.zeros_like(at_data))
    elsewhere = expected_gradient(loss, DATA.log() + log_z + 0.1, k)
    assert elsewhere.abs().max() > 1e-3


def test_without_the_hits_the_optimum_is_elsewhere():
    def loss(scores, y, draws):
        kept = torch.where(draws == y, -math.inf, scores[draws])
        return nce_loss(scores[y], kept, NOISE[y].log(), NOISE[draws].log())

    assert expected_gradient(loss, DATA.log(), 2).abs().max() > 1e-2


def test_with_duplicates_merged_the_optimum_is_elsewhere():
    def loss(scores, y, draws):
        different = draws.unique()
        return nce_loss(scores[y], scores[different], NOISE[y].log(), NOISE[different].log())

    assert expected_gradient(loss, DATA.log(), 2).abs().max() > 1e-2


def test_several_positives_keep_the_optimum_and_shared_labels_would_not():
    scores = DATA.log().requires_grad_()
    log_q, draws = NOISE.log(), range(4)
    ours = labels = 0.0
    for first, second, noise in itertools.product(draws, repeat=3):
        weight = DATA[first] * DATA[second] * NOISE[noise]
        found, drawn = torch.tensor([first, second]), torch.tensor([noise])
        ours = ours + weight * nce_loss(scores[found], scores[drawn], log_q[found], log_q[drawn])
        logits = torch.cat([scores[found] - log_q[found], scores[drawn] - log_q[drawn]])
        halves = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
        labels = labels + weight * torch.nn.functional.binary_cross_entropy_with_logits(
            logits, halves, reduction="sum"
        )
    (at_data,) = torch.autograd.grad(ours, scores, retain_graph=True)
    torch.testing.assert_close(at_data, torch.zeros_like(at_data))
    (broken,) = torch.autograd.grad(labels, scores)
    assert broken.abs().max() > 1e-2


@pytest.mark.parametrize("k", [1, 3])
def test_negative_sampling_is_least_at_the_mutual_information(k):
    def loss(scores, y, draws):
        return negative_sampling_loss(scores[y], scores[draws])

    at_optimum = expected_gradient(loss, (DATA / (k * NOISE)).log(), k)
    torch.testing.assert_close(at_optimum, torch.zeros_like(at_optimum))
    assert expected_gradient(loss, DATA.log(), k).abs().max() > 1e-2


def test_negative_sampling_is_nce_with_noise_of_one_over_k():
    positive, negative, *_ = problem()
    log_q = torch.tensor(1 / 4).double().log()
    torch.testing.assert_close(
        negative_sampling_loss(positive, negative), nce_loss(positive, negative, log_q, log_q)
    )


def test_a_row_with_several_positives_is_the_mean_of_rows_with_one():
    positive, negative, of_positive, of_negative = problem((5,), 3)
    together = nce_loss(positive, negative, of_positive, of_negative, reduction="none")
    alone = [
        nce_loss(positive[:, i], negative, of_positive[:, i], of_negative, reduction="none")
        for i in range(3)
    ]
    torch.testing.assert_close(together, torch.stack(alone).mean(0))


@pytest.mark.parametrize("p", [None, 2])
def test_reductions_and_masks(p):
    positive, negative, of_positive, of_negative = problem((2, 3), p)
    mask = torch.ones_like(positive, dtype=torch.bool)
    mask[1, 0] = False
    positive = torch.where(mask, positive, torch.nan)
    negative[1, 0] = torch.nan
    given = positive.requires_grad_(), negative.requires_grad_(), of_positive, of_negative
    none, total, mean = (
        nce_loss(*given, mask=mask, reduction=each) for each in ("none", "sum", "mean")
    )
    assert none.shape == (2, 3)
    assert none[1, 0] == 0
    torch.testing.assert_close(total, none.sum())
    torch.testing.assert_close(mean, none.sum() / 5)
    mean.backward()
    assert positive.grad[mask].isfinite().all()
    assert (positive.grad[~mask] == 0).all()
    assert (negative.grad[1, 0] == 0).all()


def test_where_nothing_counts_the_loss_is_zero():
    positive, negative, of_positive, of_negative = problem()
    mask = torch.zeros(5, dtype=torch.bool)
    for reduction in ("mean", "sum"):
        given = positive, negative, of_positive, of_negative
        assert nce_loss(*given, mask=mask, reduction=reduction) == 0
        assert negative_sampling_loss(positive, negative, mask=mask, reduction=reduction) == 0
    assert negative_sampling_loss(positive[:0], negative[:0]) == 0


def test_shared_negatives_are_those_of_every_row():
    positive, negative, of_positive, of_negative = problem((3, 2))
    one = negative[:1, :1]
    shared = nce_loss(positive, one, of_positive, of_negative)
    spread = nce_loss(positive, one.expand(3, 2, -1), of_positive, of_negative)
    torch.testing.assert_close(shared, spread)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_float32(dtype):
    positive, negative, of_positive, of_negative = problem(dtype=dtype)
    given = positive, negative, of_positive.to(dtype), of_negative.to(dtype)
    loss = nce_loss(*given)
    assert loss.dtype == torch.float32
    exact = nce_loss(*(each.double() for each in given))
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=1e-6)


def test_large_scores_neither_overflow_nor_lose_their_gradient():
    positive = torch.tensor([-1e4, 1e4, 40.0], dtype=torch.float64, requires_grad=True)
    negative = torch.tensor([[-math.inf], [1e4], [40.0]], dtype=torch.float64)
    losses = negative_sampling_loss(positive, negative, reduction="none")
    torch.testing.assert_close(losses, torch.tensor([1e4, 1e4, 40.0]).double())
    losses.sum().backward()
    assert positive.grad[0] == -1
    assert -1e-17 < positive.grad[2] < -1e-18


def test_it_compiles_and_maps():
    positive, negative, of_positive, of_negative = problem()
    compiled = torch.compile(nce_loss, fullgraph=True, backend="aot_eager")
    expected = nce_loss(positive, negative, of_positive, of_negative)
    torch.testing.assert_close(compiled(positive, negative, of_positive, of_negative), expected)
    rows = torch.func.vmap(nce_loss, (0, 0, 0, None))(positive, negative, of_positive, of_negative)
    torch.testing.assert_close(rows.mean(), expected)


def test_errors_name_the_argument():
    positive, negative, of_positive, of_negative = problem()
    with pytest.raises(TypeError, match="positive: expected a floating dtype"):
        negative_sampling_loss(positive.long(), negative)
    with pytest.raises(ValueError, match=r"negative: expected shape \(\*batch, k\)"):
        negative_sampling_loss(positive, negative[:3])
    with pytest.raises(ValueError, match=r"negative: expected shape \(\*batch, k\)"):
        negative_sampling_loss(positive[:, None, None], negative)
    with pytest.raises(ValueError, match="positive_log_q: expected a shape that broadcasts"):
        nce_loss(positive, negative, of_negative, of_negative)
    with pytest.raises(TypeError, match=r"negative_log_q: expected a torch\.Tensor, got float"):
        nce_loss(positive, negative, of_positive, -2.0)
    with pytest.raises(TypeError, match="log_z: expected a number or a tensor, got str"):
        nce_loss(positive, negative, of_positive, of_negative, log_z="learned")
    with pytest.raises(ValueError, match="log_z: expected a finite number, got inf"):
        nce_loss(positive, negative, of_positive, of_negative, log_z=math.inf)
    with pytest.raises(TypeError, match="mask: expected a bool tensor"):
        negative_sampling_loss(positive, negative, mask=torch.ones(5))
    with pytest.raises(ValueError, match="mask: expected the shape of positive"):
        negative_sampling_loss(positive, negative, mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="reduction: expected one of"):
        negative_sampling_loss(positive, negative, reduction="max")
