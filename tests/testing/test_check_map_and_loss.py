"""The conformance suites catch what they are there to catch, and say it well."""

import re
from functools import partial

import pytest
import torch
from torch.nn import functional

from lastlayer import fenchel_young_loss, sparsemax, sparsemax_loss
from lastlayer.testing import check_loss, check_map

softmax = partial(torch.softmax, dim=-1)
quick_map = partial(check_map, compile=False, widths=(1, 2, 33))
quick_loss = partial(check_loss, compile=False)


class Scaled(torch.autograd.Function):
    """sparsemax with half its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(probs):
        return probs.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        return None

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def test_torch_softmax_is_a_dense_map_that_leaves_empty_rows_undefined():
    check_map(softmax, sparse=False, empty_rows=False)


def broken_maps():
    return {
        "rows sum to 1": lambda s: softmax(s) * 1.001,
        "rows sum to 1, scale 1, offset 1e+06": lambda s: sparsemax(s) * _at_a_million(s),
        "dtype and shape do not change": lambda s: sparsemax(s).float(),
        "not negative": lambda s: (
            sparsemax(s)
            + torch.where(torch.arange(s.shape[-1]) == 0, 0.5, 0.0).to(s.dtype)
            - torch.where(torch.arange(s.shape[-1]) == s.shape[-1] - 1, 0.5, 0.0).to(s.dtype)
        ),
        "a NaN makes its own row NaN": lambda s: sparsemax(s.nan_to_num(neginf=-torch.inf)),
        "a sparse map gives exactly 0": softmax,
        "gradcheck": lambda s: Scaled.apply(sparsemax(s)),
        "a row with nothing allowed": lambda s: torch.where(
            (s == -torch.inf).all(-1, keepdim=True), 1 / max(1, s.shape[-1]), sparsemax(s)
        ).to(s.dtype),
        "a score of -inf": _without_masks,
        "raised RuntimeError: no gradient here": _without_gradient,
    }


def _at_a_million(scores):
    near = scores.numel() and 1e5 < scores.abs().max() < 1e7
    return 0.98 if near else 1.0


def _without_masks(scores):
    if not scores.numel():
        return sparsemax(scores)
    near_the_top = scores.amax(-1, keepdim=True) - 0.5
    return sparsemax(torch.where(scores == -torch.inf, near_the_top, scores))


def _without_gradient(scores):
    if scores.requires_grad:
        raise RuntimeError("no gradient here")
    return sparsemax(scores)


@pytest.mark.parametrize("rule", broken_maps())
def test_a_broken_map_is_told_its_rule(rule):
    with pytest.raises(AssertionError, match=re.escape(rule)) as caught:
        quick_map(broken_maps()[rule], seed=3)
    assert "seed=3" in str(caught.value)


def test_a_map_that_is_not_symmetric():
    def favours_the_first(scores):
        bonus = torch.zeros_like(scores)
        bonus[..., :1] = 4.0
        return sparsemax(scores + bonus)

    with pytest.raises(AssertionError, match="permuting the scores permutes"):
        quick_map(favours_the_first)
    quick_map(favours_the_first, symmetric=False)


def test_messages_have_numbers_and_input():
    with pytest.raises(AssertionError) as caught:
        check_map(lambda s: sparsemax(s) * 0.5, dtypes=(torch.float32,), widths=(3,), seed=11)
    text = str(caught.value)
    assert text.startswith("rows sum to 1, scale 0.01, offset 0: expected 1 within 1e-06, got 0.5")
    assert re.search(r"scores: float32 \(2, 3\), row \(0,\) = \[-?\d", text)
    assert text.endswith("repeat with: seed=11")


def test_a_seed_repeats_the_inputs():
    seen = []

    def recorded(scores):
        seen.append(scores.detach().clone())
        return sparsemax(scores)

    for _ in range(2):
        seen.append(None)
        check_map(recorded, dtypes=(torch.float32,), widths=(5,), vmap=False, compile=False, seed=5)
    half = len(seen) // 2
    for first, second in zip(seen[1:half], seen[half + 1 :], strict=True):
        assert torch.equal(first, second) or (first.isnan() == second.isnan()).all()


def test_a_suite_leaves_the_random_state_alone():
    state = torch.random.get_rng_state()
    quick_map(sparsemax)
    quick_loss(sparsemax_loss, sparsemax)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_graph_break_is_told():
    def breaks(scores):
        torch._dynamo.graph_break()
        return sparsemax(scores)

    with pytest.raises(AssertionError, match=r"torch.compile\(fullgraph=True"):
        check_map(breaks, widths=(5,))


def smoothed_wrong(scores, target, reduction="mean"):
    """A loss whose gradient is right and whose value is not zero at the target."""
    return sparsemax_loss(scores, target, reduction=reduction) + 0.1


def through_the_map(scores, target, reduction="mean"):
    """The squared error of a map: no loss of that map."""
    y = functional.one_hot(target, scores.shape[-1]) if not target.is_floating_point() else target
    scores = scores if scores.dtype == torch.float64 else scores.float()
    rows = (sparsemax(scores) - y).square().sum(-1)
    return {"none": rows, "sum": rows.sum(), "mean": rows.mean()}[reduction]


def averaged_over_all(scores, target, reduction="mean"):
    """Counts ignored rows in the mean."""
    rows = sparsemax_loss(scores, target, reduction="none")
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / max(1, rows.numel())}[reduction]


def counts_none_as_nothing(scores, target, reduction="mean", ignore_index=-100):
    """Takes ignore_index=None for class 0."""
    return sparsemax_loss(scores, target, reduction=reduction, ignore_index=ignore_index or 0)


def unweighted_mean(scores, target, reduction="mean", class_weight=None):
    """Divides by the number of rows where the sum of their weights is meant."""
    rows = sparsemax_loss(scores, target, reduction="none")
    if class_weight is not None:
        soft = target.is_floating_point()
        rows = rows * (target @ class_weight if soft else class_weight[target])
    counted = rows.numel() if target.is_floating_point() else (target != -100).sum().clamp(min=1)
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / max(1, counted)}[reduction]


def long_ids_alone(scores, target, reduction="mean"):
    if target.dtype not in (torch.int64, torch.float16, torch.bfloat16, scores.dtype):
        raise TypeError(f"target: expected torch.int64, got {target.dtype}")
    return sparsemax_loss(scores, target, reduction=reduction)


def flat_hessian(scores, target, reduction="mean"):
    """Treats the probabilities as constants, as if the loss were linear."""
    return fenchel_young_loss(
        scores,
        target,
        lambda s: sparsemax(s.detach()),
        lambda p: (1 - p.square().sum(-1)) / 2,
        reduction=reduction,
    )


@pytest.mark.parametrize(
    ("loss", "rule"),
    [
        (smoothed_wrong, "a loss is 0 if the map equals the target"),
        (through_the_map, "the gradient is map(scores) - target"),
        (averaged_over_all, "the mean is over the rows that are not ignored"),
        (counts_none_as_nothing, "with ignore_index=None every target counts"),
        (unweighted_mean, "a row counts with the weight of its target, reduction='mean'"),
        (long_ids_alone, "class ids of torch.uint8 give the results of int64"),
    ],
)
def test_a_broken_loss_is_told_its_rule(loss, rule):
    with pytest.raises(AssertionError, match=re.escape(rule)):
        quick_loss(loss, sparsemax)


def test_a_flat_hessian_is_told():
    """By the rule that meets it first: a support of one class has no curvature to miss."""
    with pytest.raises(AssertionError, match=r"gradgradcheck|the Hessian of the loss"):
        quick_loss(flat_hessian, sparsemax)


def test_the_loss_of_another_map_is_told():
    with pytest.raises(AssertionError, match=re.escape("the gradient is map(scores) - target")):
        quick_loss(sparsemax_loss, softmax)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "a loss of torch.float16 scores is torch.float32"),
        ({"dtypes": (torch.float32, torch.float64)}, "reductions agree: raised RuntimeError"),
    ],
)
def test_cross_entropy_of_torch_keeps_to_other_rules(options, rule):
    with pytest.raises(AssertionError, match=re.escape(rule)):
        quick_loss(torch.nn.CrossEntropyLoss(), distributions=False, **options)


def test_cross_entropy_of_torch_is_nan_where_all_is_ignored():
    def flattened(scores, target, reduction="mean"):
        target = target.long()
        if scores.dim() > 2:
            rows = functional.cross_entropy(
                scores.flatten(0, -2), target.flatten(), reduction="none"
            )
            rows = rows.reshape(target.shape)
            return {"none": rows, "sum": rows.sum(), "mean": rows.mean()}[reduction]
        return functional.cross_entropy(scores, target, reduction=reduction)

    with pytest.raises(AssertionError, match="an empty batch works"):
        quick_loss(flattened, softmax, distributions=False, dtypes=(torch.float32, torch.float64))
