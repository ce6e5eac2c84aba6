"""Rules on the loss, the log-probabilities and the best classes of a head."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer.testing._heads_suite import HeadSuite, wide
from lastlayer.testing._suite import SUM_TOLERANCE

# How far probabilities in half precision may be from those of the same parameters in float64.
HALF_TOLERANCE = 3e-2


def it_says_what_it_is(suite: HeadSuite) -> None:
    head = suite.head()
    shown = head.extra_repr()
    for name in ("in_features", "n_classes"):
        rule = f"extra_repr has {name}"
        suite.require(
            rule, f"{name}={getattr(head, name)}" in shown, f"got {shown}", suite.hidden(1)
        )


def probabilities_sum_to_one(suite: HeadSuite) -> None:
    for dtype in suite.dtypes:
        head = suite.head(dtype)
        for scale in (0.01, 1.0, 20.0):
            hidden = suite.hidden(5, dtype=dtype, scale=scale)
            log_prob = head.log_prob(hidden)
            rule = f"log_prob of {dtype} hidden is {wide(dtype)} with one number a row and class"
            as_promised = log_prob.dtype == wide(dtype) and log_prob.shape == (5, suite.n_classes)
            got = f"got {log_prob.dtype} {tuple(log_prob.shape)}"
            suite.require(rule, as_promised, got, hidden)
            totals = log_prob.detach().double().exp().sum(-1)
            tolerance = 10 * SUM_TOLERANCE[wide(dtype)]
            rule = f"probabilities sum to 1, scale {scale:g}"
            suite.close(rule, totals, torch.ones_like(totals), tolerance, hidden)


def chosen_classes_are_the_gathered_ones(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(2, 3)
    everything = head.log_prob(hidden)
    for width in (1, 4):
        rule = "log_prob(hidden, classes) is log_prob(hidden) at these classes"
        own = suite.integers(suite.n_classes, 2, 3, width)
        suite.close(
            rule, head.log_prob(hidden, own), everything.gather(-1, own), suite.same, hidden
        )
        shared = suite.integers(suite.n_classes, width)
        rule = f"{rule}, the same for every row"
        suite.close(
            rule, head.log_prob(hidden, shared), everything[..., shared], suite.same, hidden
        )


def topk_is_a_sort(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(2, 3, scale=2.0)
    everything = head.log_prob(hidden).detach()
    for k in sorted({1, min(5, suite.n_classes), min(1000, suite.n_classes)}):
        values, classes = head.topk(hidden, k)
        rule = f"topk(hidden, {k}) has the values of a sort of log_prob"
        best = everything.sort(-1, descending=True).values[..., :k]
        suite.close(rule, values, best, suite.same, hidden)
        rule = f"topk(hidden, {k}) has the classes of its values"
        ids = classes.dtype == torch.int64 and classes.shape == values.shape
        suite.require(rule, ids, f"got {classes.dtype} {tuple(classes.shape)}", hidden)
        suite.close(rule, everything.gather(-1, classes), values, suite.same, hidden)
        ordered = classes.sort(-1).values
        rule = f"topk(hidden, {k}) has no class twice"
        different = (ordered[..., 1:] != ordered[..., :-1]).all(-1)
        suite.require(rule, different, f"got {classes.tolist()}", hidden)


def the_loss_is_minus_the_log_probability(suite: HeadSuite) -> None:
    head, hidden, target = suite.head(reduction="none"), suite.hidden(9), suite.targets(9)
    losses = suite.loss(head, hidden, target)
    expected = -head.log_prob(hidden).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    rule = "the loss is minus log_prob of the target"
    suite.close(rule, losses, expected, 10 * suite.same, hidden)


def reductions_agree(suite: HeadSuite) -> None:
    hidden, target = suite.hidden(2, 3), suite.targets(2, 3)
    none, total, mean = (
        suite.loss(suite.head(reduction=each), hidden, target) for each in ("none", "sum", "mean")
    )
    got = f"expected shape (2, 3), got {tuple(none.shape)}"
    suite.require("reduction='none' gives a loss a row", none.shape == (2, 3), got, hidden)
    suite.close("reduction='sum' is the sum of 'none'", total, none.sum(), 1e-5, hidden)
    suite.close("reduction='mean' is the mean of 'none'", mean, none.mean(), 1e-5, hidden)


def batch_dimensions_do_not_matter(suite: HeadSuite) -> None:
    head = suite.head(reduction="none")
    k = min(3, suite.n_classes)
    flat, target = suite.hidden(6), suite.targets(6)
    losses, log_prob, best = suite.loss(head, flat, target), head.log_prob(flat), head.topk(flat, k)
    for batch in ((2, 3), (1, 6, 1), (3, 1, 2)):
        hidden = flat.reshape(*batch, -1)
        rule = f"batch dimensions do not matter, {batch}"
        loss = suite.loss(head, hidden, target.reshape(batch))
        suite.close(f"{rule}: loss", loss, losses.reshape(batch), suite.same, hidden)
        shaped = log_prob.reshape(*batch, -1)
        suite.close(f"{rule}: log_prob", head.log_prob(hidden), shaped, suite.same, hidden)
        values, classes = head.topk(hidden, k)
        suite.close(f"{rule}: topk", values, best.values.reshape(*batch, k), suite.same, hidden)
        suite.require(f"{rule}: topk", classes.shape == (*batch, k), "of its classes", hidden)
    rule = "a row alone is the same as a row in a batch"
    suite.close(rule, suite.loss(head, flat[2], target[2]), losses[2], suite.same, flat)
    suite.close(rule, head.log_prob(flat[2]), log_prob[2], suite.same, flat)
    suite.close(rule, head.topk(flat[2], k).values, best.values[2], suite.same, flat)


def an_empty_batch_works(suite: HeadSuite) -> None:
    for batch in ((0,), (2, 0)):
        hidden, target = suite.hidden(*batch), suite.targets(*batch)
        for reduction, shape in (("none", batch), ("sum", ()), ("mean", ())):
            rule = f"an empty batch {batch} has loss 0, reduction={reduction!r}"
            loss = suite.runs(rule, hidden, suite.loss, suite.head(None, reduction), hidden, target)
            suite.close(rule, loss, torch.zeros(shape, device=suite.device), 0.0, hidden)
        head = suite.head()
        results: dict[str, tuple[tuple[int, ...], Callable[..., Any], Any]] = {
            "log_prob": ((*batch, suite.n_classes), head.log_prob, None),
            "log_prob of a class": ((*batch, 1), head.log_prob, target.new_zeros(1)),
            "topk": ((*batch, 1), head.topk, 1),
            "sample": ((*batch, 4), head.sample, 4),
        }
        for name, (wanted, function, argument) in results.items():
            rule = f"{name} of an empty batch {batch} is empty"
            result = suite.runs(rule, hidden, function, hidden, argument)
            for each in result if isinstance(result, tuple) else (result,):
                suite.require(rule, each.shape == wanted, f"got {tuple(each.shape)}", hidden)


def ignored_rows_count_for_nothing(suite: HeadSuite) -> None:
    if suite.ignore_index is None:
        return
    hidden, target = suite.hidden(6), suite.targets(6)
    target[[1, 4]] = suite.ignore_index
    hidden[1] = math.nan
    counted = [0, 2, 3, 5]
    rule = "an ignored row has loss 0, even where hidden is NaN"
    losses = suite.loss(suite.head(reduction="none"), hidden, target)
    suite.close(rule, losses[[1, 4]], torch.zeros_like(losses[:2]), 0.0, hidden)
    rule = "the mean is over the rows that are not ignored"
    mean = suite.loss(suite.head(), hidden, target)
    suite.close(rule, mean, losses[counted].mean(), 1e-5, hidden)
    head = suite.head(reduction="sum")
    made = _gradients(suite, head, hidden, target)
    fewer = _gradients(suite, head, hidden[counted], target[counted])
    rule = "an ignored row has gradient 0, even where hidden is NaN"
    rows = made.pop("hidden")
    suite.close(rule, rows[[1, 4]], torch.zeros_like(rows[:2]), 0.0, hidden)
    suite.close("other rows have the gradient they have alone", rows[counted],
                fewer.pop("hidden"), 1e-5, hidden)  # fmt: skip
    for name, grad in made.items():
        rule = f"an ignored row adds nothing to the gradient of {name}"
        suite.close(rule, grad, fewer[name], 1e-5, hidden)


def all_rows_ignored_is_a_loss_of_zero(suite: HeadSuite) -> None:
    if suite.ignore_index is None:
        return
    hidden = suite.hidden(3)
    target = torch.full((3,), suite.ignore_index, device=suite.device)
    for reduction in ("mean", "sum"):
        head = suite.head(reduction=reduction)
        loss = suite.loss(head, hidden, target)
        rule = f"reduction={reduction!r} is 0 where all rows are ignored"
        suite.close(rule, loss, torch.zeros_like(loss), 0.0, hidden)
        for name, grad in _gradients(suite, head, hidden, target).items():
            rule = f"the gradient of {name} is 0 where all rows are ignored"
            suite.close(rule, grad, torch.zeros_like(grad), 0.0, hidden)


def a_nan_stays_in_its_row(suite: HeadSuite) -> None:
    head, target = suite.head(reduction="none"), suite.targets(3)
    clean = suite.hidden(3)
    hidden = clean.clone()
    hidden[1, 0] = math.nan
    losses, log_prob = suite.loss(head, hidden, target), head.log_prob(hidden)
    rule = "a NaN makes the loss of its row NaN and no other"
    suite.require(rule, losses[1].isnan(), f"got {losses[1].item():g}", hidden)
    expected = suite.loss(head, clean, target)[[0, 2]]
    suite.close(rule, losses[[0, 2]], expected, suite.same, hidden)
    rule = "a NaN makes the log-probabilities of its row NaN and no others"
    suite.require(rule, log_prob[1].isnan().all(), f"got {log_prob[1].tolist()[:8]}", hidden)
    suite.close(rule, log_prob[[0, 2]], head.log_prob(clean)[[0, 2]], suite.same, hidden)


def half_precision_keeps_to_float64(suite: HeadSuite) -> None:
    for dtype in suite.dtypes:
        rounded = suite.head(dtype, "none")
        hidden, target = suite.hidden(7, dtype=dtype), suite.targets(7)
        losses = suite.loss(rounded, hidden, target)
        rule = f"the loss of {dtype} hidden is {wide(dtype)}"
        suite.require(rule, losses.dtype == wide(dtype), f"got {losses.dtype}", hidden)
        exact = rounded.double()
        tolerance = HALF_TOLERANCE if torch.finfo(dtype).eps > 1e-6 else 1e-4
        rule = f"the loss in {dtype} is that in float64"
        expected = suite.loss(exact, hidden.double(), target)
        suite.close(rule, losses, expected, tolerance, hidden)
        probs = suite.head(dtype).log_prob(hidden).exp()
        rule = f"the probabilities in {dtype} are those in float64"
        suite.close(rule, probs, exact.log_prob(hidden.double()).exp(), tolerance, hidden)


def nothing_is_left_to_chance_in_eval(suite: HeadSuite) -> None:
    head, hidden, target = suite.head().eval(), suite.hidden(5), suite.targets(5)
    k = min(3, suite.n_classes)
    calls = {
        "the loss": lambda: head(hidden, target),
        "log_prob": lambda: head.log_prob(hidden),
        "topk": lambda: head.topk(hidden, k).values,
    }
    for name, call in calls.items():
        rule = f"{name} is the same each time in eval mode"
        suite.close(rule, call(), call(), 0.0, hidden)


def _gradients(
    suite: HeadSuite, head: torch.nn.Module, hidden: Tensor, target: Tensor
) -> dict[str, Tensor]:
    hidden = hidden.detach().requires_grad_()
    return suite.gradients(head, suite.loss(head, hidden, target), hidden)
