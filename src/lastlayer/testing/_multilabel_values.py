"""Rules on the values of a multi-label loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.testing._suite import Suite

CLASSES = 7


@dataclass
class MultilabelSuite(Suite):
    """A loss of scores and labels, and what is asked of it."""

    loss: Callable[..., Tensor]
    soft: bool

    def losses(
        self, scores: Tensor, target: Tensor, mask: Tensor | None = None, reduction: str = "none"
    ) -> Tensor:
        return self.loss(scores, target, mask=mask, reduction=reduction)

    def gradient(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The gradient of the sum of the losses."""
        scores = scores.detach().requires_grad_()
        return torch.autograd.grad(self.losses(scores, target, mask, "sum"), scores)[0]

    def labels(self, *shape: int) -> Tensor:
        """Labels 0 and 1; each row has both."""
        drawn = self.integers(2, *shape)
        drawn[..., 0], drawn[..., 1] = 1, 0
        return drawn

    def targets(self, *shape: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Hard labels, and soft ones with some 0 and 1 among them."""
        hard = self.labels(*shape)
        if not self.soft:
            return [hard]
        between = torch.sigmoid(self.normal(*shape)).to(dtype or self.finest)
        return [hard, torch.where(self.integers(2, *shape) == 0, hard.to(between), between)]


def the_dtype_is_float32_or_float64(suite: MultilabelSuite) -> None:
    for dtype in suite.dtypes:
        scores = suite.normal(3, CLASSES, dtype=dtype)
        expected = accumulation_dtype(dtype)
        for reduction in ("none", "mean", "sum"):
            got = suite.losses(scores, suite.labels(3, CLASSES), None, reduction).dtype
            rule = f"a loss of {dtype} scores is {expected}"
            suite.require(rule, got == expected, f"got {got}", scores)
        got = suite.gradient(scores, suite.labels(3, CLASSES)).dtype
        rule = "the gradient has the dtype of the scores"
        suite.require(rule, got == dtype, f"got {got}", scores)


def labels_may_have_any_dtype(suite: MultilabelSuite) -> None:
    scores, target = suite.normal(4, CLASSES, dtype=suite.finest), suite.labels(4, CLASSES)
    expected = suite.losses(scores, target)
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16):
        rule = f"labels of {dtype} are those of int64"
        suite.close(rule, suite.losses(scores, target.to(dtype)), expected, suite.same, scores)


def it_is_never_negative(suite: MultilabelSuite, convex: bool) -> None:
    left, right = (3 * suite.normal(40, CLASSES, dtype=suite.finest) for _ in range(2))
    for target in suite.targets(40, CLASSES):
        losses = suite.losses(left, target)
        lowest = f"the lowest is {losses.min().item():g}"
        suite.require("a loss is never negative", losses >= -1e-9, lowest, left)
        if convex:
            between = suite.losses((left + right) / 2, target)
            chord = (losses + suite.losses(right, target)) / 2
            above = f"it lies {(between - chord).max().item():g} above a chord"
            suite.require("a loss is convex", between <= chord + 1e-5, above, left)


def classes_may_come_in_any_order(suite: MultilabelSuite) -> None:
    scores, order = suite.normal(4, CLASSES, dtype=suite.finest), suite.permutation(CLASSES)
    for target in suite.targets(4, CLASSES):
        moved = suite.losses(scores[:, order], target[:, order])
        rule = "classes may come in any order"
        suite.close(rule, moved, suite.losses(scores, target), suite.same, scores)


def reductions_agree(suite: MultilabelSuite) -> None:
    scores = 2 * suite.normal(2, 3, CLASSES, dtype=suite.finest)
    for target in suite.targets(2, 3, CLASSES):
        none = suite.losses(scores, target)
        rule = "reduction='none' gives a loss a row"
        suite.require(rule, none.shape == (2, 3), f"got shape {tuple(none.shape)}", scores)
        total, mean = (suite.losses(scores, target, None, kind) for kind in ("sum", "mean"))
        suite.close("reduction='sum' is the sum of 'none'", total, none.sum(), 1e-5, scores)
        suite.close("reduction='mean' is the mean of 'none'", mean, none.mean(), 1e-5, scores)
        flat = suite.losses(scores.flatten(0, 1), target.flatten(0, 1))
        suite.close("batch dimensions do not matter", flat.reshape(2, 3), none, 1e-5, scores)
        one = suite.losses(scores[1, 2], target[1, 2])
        suite.close("a single row has no batch dimension", one, none[1, 2], 1e-5, scores)


def masked_classes_have_no_part(suite: MultilabelSuite) -> None:
    kept = torch.tensor([0, 1, 3, 4, 6], device=suite.device)
    mask = torch.zeros(CLASSES, dtype=torch.bool, device=suite.device)
    mask[kept] = True
    for dtype in suite.dtypes:
        clean = suite.normal(4, CLASSES, dtype=dtype)
        for target in suite.targets(4, CLASSES, dtype=dtype):
            expected = suite.losses(clean[:, kept], target[:, kept])
            right = suite.gradient(clean[:, kept], target[:, kept])
            for odd in (-1e4, 1e4, -1e12, -math.inf, math.inf, math.nan):
                for label in (0, 1):
                    scores, labels = clean.clone(), target.clone()
                    scores[:, ~mask], labels[:, ~mask] = odd, label
                    rule = f"a masked class with score {odd:g} and label {label} has no part"
                    for shown in (mask, mask.expand_as(scores)):
                        losses = suite.losses(scores, labels, shown)
                        suite.close(rule, losses, expected, 1e-5, scores)
                    gradient = suite.gradient(scores, labels, mask)
                    suite.close(f"{rule}: gradient", gradient[:, kept], right, 1e-2, scores)
                    none = torch.zeros_like(gradient[:, ~mask])
                    suite.close(f"{rule}: its own", gradient[:, ~mask], none, 0.0, scores)


def rows_of_which_nothing_is_left_do_not_count(suite: MultilabelSuite) -> None:
    scores = suite.normal(4, CLASSES, dtype=suite.finest)
    scores[1], scores[2] = math.nan, -math.inf
    mask = torch.ones(4, 1, dtype=torch.bool, device=suite.device)
    mask[1:3] = False
    for target in suite.targets(4, CLASSES):
        losses = suite.losses(scores, target, mask)
        nothing = torch.zeros_like(losses[1:3])
        suite.close("a row that is masked has loss 0", losses[1:3], nothing, 0.0, scores)
        mean = suite.losses(scores, target, mask, "mean")
        rule = "the mean is over rows that have a class that counts"
        suite.close(rule, mean, losses.sum() / 2, 1e-6, scores)
        gradient = suite.gradient(scores, target, mask)[1:3]
        rule = "a row that is masked has gradient 0"
        suite.close(rule, gradient, torch.zeros_like(gradient), 0.0, scores)
        for reduction in ("mean", "sum"):
            loss = suite.losses(scores, target, torch.zeros_like(mask), reduction)
            rule = f"reduction={reduction!r} is 0 where all is masked"
            suite.close(rule, loss, torch.zeros_like(loss), 0.0, scores)


def a_score_of_minus_infinity_is_legal(suite: MultilabelSuite) -> None:
    for dtype in suite.dtypes:
        scores, target = suite.normal(4, CLASSES, dtype=dtype), suite.labels(4, CLASSES)
        kept = torch.arange(CLASSES, device=suite.device) != 1
        scores[:, 1] = -math.inf
        rule = "a score of -inf costs nothing where the label is 0"
        expected = suite.losses(scores[:, kept], target[:, kept])
        suite.close(rule, suite.losses(scores, target), expected, 1e-5, scores)
        gradient = suite.gradient(scores, target)
        rule = "a score of -inf leaves the gradient finite"
        suite.require(rule, gradient.isfinite(), "a gradient is not finite", scores)
        rule = "a score of -inf has gradient 0 where the label is 0"
        suite.close(rule, gradient[:, 1], torch.zeros_like(gradient[:, 1]), 0.0, scores)
        scores[2, 0] = -math.inf
        losses = suite.losses(scores, target)
        endless = torch.full_like(losses[2], math.inf)
        suite.close("a score of -inf costs +inf where it is 1", losses[2], endless, 0.0, scores)
        others = losses[[0, 1, 3]]
        suite.require("it leaves other rows alone", others.isfinite(), "not finite", scores)


def scores_of_any_size_are_right(suite: MultilabelSuite) -> None:
    if torch.float64 not in suite.dtypes:
        return
    for dtype in suite.dtypes:
        for size in (1e-3, 30.0, 1e3, 3e4):
            scores = (size * suite.normal(6, CLASSES)).clamp(-6e4, 6e4).to(dtype)
            for target in suite.targets(6, CLASSES, dtype=dtype):
                losses, truth = suite.losses(scores, target), suite.losses(scores.double(), target)
                scale = truth.abs().max().clamp(min=1.0).item()
                rule = f"{dtype} scores of the size {size:g} have the loss of float64"
                suite.close(rule, losses, truth, 1e-5 * scale, scores)
                gradient = suite.gradient(scores, target)
                right = suite.gradient(scores.double(), target)
                largest = right.abs().max().clamp(min=1.0).item()
                rule = f"{dtype} scores of the size {size:g} have the gradient of float64"
                suite.close(rule, gradient, right, 1e-2 * largest, scores)


def a_nan_stays_in_its_row(suite: MultilabelSuite) -> None:
    clean = suite.normal(3, CLASSES, dtype=suite.finest)
    for target in suite.targets(3, CLASSES):
        for column in (0, 1):
            scores = clean.clone()
            scores[1, column] = math.nan
            losses, expected = suite.losses(scores, target), suite.losses(clean, target)
            expected[1] = math.nan
            rule = "a NaN makes the loss of its row NaN and no other"
            suite.close(rule, losses, expected, suite.same, scores)


def an_empty_batch_works(suite: MultilabelSuite) -> None:
    for shape in ((0, CLASSES), (3, 0)):
        scores, target = suite.normal(*shape, dtype=suite.finest), suite.integers(2, *shape)
        for reduction, of_result in (("none", shape[:1]), ("sum", ()), ("mean", ())):
            rule = f"scores of shape {shape} work, reduction={reduction!r}"
            loss = suite.runs(rule, scores, suite.losses, scores, target, None, reduction)
            suite.close(rule, loss, torch.zeros(of_result, device=suite.device), 0.0, scores)
