"""Rules on the values of a loss."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.testing._suite import Suite

CLASSES = 7


@dataclass
class LossSuite(Suite):
    """A loss of scores and targets, its map where it is known, and what is asked of it."""

    loss: Callable[..., Tensor]
    map: Callable[[Tensor], Tensor] | None
    ignore_index: int | None
    distributions: bool
    reachable: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        # The reduction is an argument of a function and an attribute of a module.
        self.by_reduction: dict[str, Callable[..., Tensor]] = {}
        for reduction in ("none", "mean", "sum"):
            if isinstance(self.loss, torch.nn.Module):
                module: Any = copy.copy(self.loss)
                module.reduction = reduction
                self.by_reduction[reduction] = module
            else:
                self.by_reduction[reduction] = partial(self.loss, reduction=reduction)

    def losses(self, scores: Tensor, target: Tensor, reduction: str = "none") -> Tensor:
        return self.by_reduction[reduction](scores, target)

    def gradient(self, scores: Tensor, target: Tensor) -> Tensor:
        """The gradient of the sum of the losses."""
        scores = scores.detach().requires_grad_()
        return torch.autograd.grad(self.losses(scores, target, "sum"), scores)[0]

    def settled_scores(self, rows: int, n: int = CLASSES) -> Tensor:
        """Scores away from the kinks of the map, or of what the loss shows of it."""
        return self.settled(self.map or self.map_by_gradient, rows, n)

    def map_by_gradient(self, scores: Tensor) -> Tensor:
        """The map that a loss implies: its gradient plus the target."""
        target = torch.zeros(scores.shape[:-1], dtype=torch.int64, device=scores.device)
        one_hot = torch.nn.functional.one_hot(target, scores.shape[-1])
        return self.gradient(scores, target) + one_hot


def the_gradient_is_map_minus_target(suite: LossSuite) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        if dtype not in suite.dtypes:
            continue
        scores = suite.settled_scores(5).to(dtype)
        probs = (suite.map or suite.map_by_gradient)(scores)
        for target in targets_for(suite, scores):
            y = _as_distribution(target, scores)
            rule = "the gradient is map(scores) - target"
            suite.close(rule, suite.gradient(scores, target), probs - y, tolerance, scores)


def it_is_zero_at_the_target_and_never_negative(suite: LossSuite) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        if dtype not in suite.dtypes:
            continue
        scores = (3 * suite.normal(40, CLASSES)).to(dtype)
        targets = targets_for(suite, scores)
        for target in targets if suite.reachable else targets[:1]:
            losses = suite.losses(scores, target)
            lowest = f"the lowest is {losses.min().item():g}"
            suite.require("a loss is never negative", losses >= -tolerance, lowest, scores)
        if suite.distributions:
            hit = (suite.map or suite.map_by_gradient)(scores).clamp(min=0)
            losses = suite.losses(scores, hit)
            rule = "a loss is 0 where the map hits the target"
            suite.close(rule, losses, torch.zeros_like(losses), tolerance, scores)


def it_is_convex(suite: LossSuite) -> None:
    left = 3 * suite.normal(40, CLASSES, dtype=suite.finest)
    right = 3 * suite.normal(40, CLASSES, dtype=suite.finest)
    for target in targets_for(suite, left):
        for share in (0.25, 0.5, 0.75):
            between = suite.losses(share * left + (1 - share) * right, target)
            chord = share * suite.losses(left, target) + (1 - share) * suite.losses(right, target)
            above = f"it lies {(between - chord).max().item():g} above a chord"
            suite.require("a loss is convex", between <= chord + 1e-5, above, left)


def ids_are_one_hot_distributions(suite: LossSuite) -> None:
    scores = 2 * suite.normal(6, CLASSES, dtype=suite.finest)
    ids = suite.integers(CLASSES, 6)
    one_hot = _as_distribution(ids, scores)
    rule = "a class id is a one-hot distribution"
    suite.close(rule, suite.losses(scores, ids), suite.losses(scores, one_hot), 1e-5, scores)


def reductions_agree(suite: LossSuite) -> None:
    scores = 2 * suite.normal(2, 3, CLASSES, dtype=suite.finest)
    for target in targets_for(suite, scores):
        none = suite.losses(scores, target)
        suite.require(
            "reduction='none' gives a loss a row",
            none.shape == (2, 3),
            f"expected shape (2, 3), got {tuple(none.shape)}",
            scores,
        )
        total, mean = suite.losses(scores, target, "sum"), suite.losses(scores, target, "mean")
        suite.close("reduction='sum' is the sum of 'none'", total, none.sum(), 1e-5, scores)
        suite.close("reduction='mean' is the mean of 'none'", mean, none.mean(), 1e-5, scores)
        flat = suite.losses(scores.flatten(0, 1), target.flatten(0, 1))
        suite.close("batch dimensions do not matter", flat.reshape(2, 3), none, 1e-5, scores)


def ignored_rows_count_for_nothing(suite: LossSuite) -> None:
    ignored_id = suite.ignore_index
    if ignored_id is None:
        return
    for dtype in suite.dtypes:
        scores = suite.normal(5, CLASSES, dtype=dtype)
        target = suite.integers(CLASSES, 5)
        target[1] = target[3] = ignored_id
        scores[1] = math.nan
        scores[3] = -math.inf
        counted = target != ignored_id
        rule = "an ignored row has loss 0, even where its scores are NaN"
        losses = suite.losses(scores, target)
        suite.close(rule, losses[~counted], torch.zeros_like(losses[~counted]), 0.0, scores)
        gradient = suite.gradient(scores, target)
        rule = "an ignored row has gradient 0, even where its scores are NaN"
        suite.close(rule, gradient[~counted], torch.zeros_like(gradient[~counted]), 0.0, scores)
        mean = suite.losses(scores, target, "mean")
        rule = "the mean is over the rows that are not ignored"
        suite.close(rule, mean, losses[counted].mean(), 1e-5, scores)
        nothing = torch.full_like(target, ignored_id)
        for reduction in ("mean", "sum"):
            leaf = scores.detach().requires_grad_()
            loss = suite.losses(leaf, nothing, reduction)
            rule = f"reduction={reduction!r} is 0 where all rows are ignored"
            suite.close(rule, loss, torch.zeros_like(loss), 0.0, scores)
            (gradient,) = torch.autograd.grad(loss, leaf)
            suite.close(f"{rule}: its gradient", gradient, torch.zeros_like(gradient), 0.0, scores)


def an_offset_costs_no_accuracy(suite: LossSuite) -> None:
    if torch.float32 not in suite.dtypes:
        return
    scores = suite.sixteenths(6, 33).float()
    for target in targets_for(suite, scores):
        expected = suite.losses(scores, target)
        for offset in (1e6, -1e6):
            moved = scores + offset
            rule = f"an offset of {offset:g} costs no accuracy in float32"
            suite.close(rule, suite.losses(moved, target), expected, 1e-5, moved)


def masked_scores_are_handled(suite: LossSuite) -> None:
    for dtype in suite.dtypes:
        allowed = suite.normal(4, 5, dtype=dtype)
        scores = torch.full((4, 8), -math.inf, dtype=dtype, device=suite.device)
        scores[:, [0, 2, 3, 5, 7]] = allowed
        target = torch.tensor([0, 2, 5, 7], device=suite.device)
        short = torch.tensor([0, 1, 3, 4], device=suite.device)
        rule = "a score of -inf is the same as no such class"
        losses = suite.losses(scores, target)
        suite.close(rule, losses, suite.losses(allowed, short), 1e-4, scores)
        gradient = suite.gradient(scores, target)
        rule = "a score of -inf leaves the gradient finite"
        suite.require(rule, gradient.isfinite(), "a gradient is not finite", scores)
        losses = suite.losses(scores, torch.tensor([0, 2, 5, 1], device=suite.device))
        rule = "a target that is masked has loss +inf"
        suite.close(rule, losses[3], torch.full_like(losses[3], math.inf), 0.0, scores)
        rule = "a target that is masked leaves other rows alone"
        suite.require(rule, losses[:3].isfinite(), "another loss is not finite", scores)
        scores[1] = -math.inf
        losses = suite.losses(scores, target)
        rule = "a row with nothing allowed has loss +inf where its target counts"
        suite.close(rule, losses[1], torch.full_like(losses[1], math.inf), 0.0, scores)


def the_dtype_is_float32_or_float64(suite: LossSuite) -> None:
    for dtype in suite.dtypes:
        scores = suite.normal(3, CLASSES, dtype=dtype)
        expected = accumulation_dtype(dtype)
        for reduction in ("none", "mean", "sum"):
            got = suite.losses(scores, suite.integers(CLASSES, 3), reduction).dtype
            rule = f"a loss of {dtype} scores is {expected}"
            suite.require(rule, got == expected, f"got {got}", scores)
        gradient = suite.gradient(scores, suite.integers(CLASSES, 3))
        rule = "the gradient has the dtype of the scores"
        suite.require(rule, gradient.dtype == dtype, f"got {gradient.dtype}", scores)


def a_nan_stays_in_its_row(suite: LossSuite) -> None:
    clean = suite.normal(3, CLASSES, dtype=suite.finest)
    target = suite.integers(CLASSES, 3)
    scores = clean.clone()
    scores[1, 2] = math.nan
    losses = suite.losses(scores, target)
    rule = "a NaN makes the loss of its row NaN and no other"
    suite.require(rule, losses[1].isnan(), f"got {losses[1].item():g}", scores)
    suite.close(rule, losses[[0, 2]], suite.losses(clean, target)[[0, 2]], 1e-5, scores)
    gradient = suite.gradient(scores, target)[[0, 2]]
    suite.close(rule, gradient, suite.gradient(clean, target)[[0, 2]], 1e-5, scores)


def an_empty_batch_works(suite: LossSuite) -> None:
    scores = suite.normal(0, CLASSES, dtype=suite.finest)
    target = suite.integers(CLASSES, 0)
    for reduction, shape in (("none", (0,)), ("sum", ()), ("mean", ())):
        rule = f"an empty batch works, reduction={reduction!r}"
        loss = suite.runs(rule, scores, suite.losses, scores, target, reduction)
        suite.close(rule, loss, torch.zeros(shape, device=suite.device), 0.0, scores)


def targets_for(suite: LossSuite, scores: Tensor) -> list[Tensor]:
    ids = suite.integers(scores.shape[-1], *scores.shape[:-1])
    if not suite.distributions:
        return [ids]
    return [ids, suite.distributions_like(scores)]


def _as_distribution(target: Tensor, scores: Tensor) -> Tensor:
    if target.is_floating_point():
        return target
    return torch.nn.functional.one_hot(target, scores.shape[-1]).to(scores.dtype)
