"""Rules on the values of a map."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lastlayer.testing._suite import SAME_TOLERANCE, SUM_TOLERANCE, Suite, accepts

SCALES = (0.01, 1.0, 100.0, 1e4, 1e20)
OFFSETS = (0.0, 1e6, -1e6)


@dataclass
class MapSuite(Suite):
    """A map over the last dimension, and what is asked of it."""

    map: Callable[..., Tensor]
    widths: tuple[int, ...]
    sparse: bool


def rows_sum_to_one(suite: MapSuite) -> None:
    """At any scale, offset and width, with no negative entry and in the dtype of the scores."""
    for dtype in suite.dtypes:
        largest = torch.finfo(dtype).max / 16
        for n in suite.widths:
            for scale, offset in [(s, 0.0) for s in SCALES] + [(1.0, o) for o in OFFSETS]:
                if max(scale, abs(offset)) > largest:
                    continue
                scores = (offset + scale * suite.normal(2, n)).to(dtype)
                probs = suite.map(scores)
                name = "dtype and shape stay what they are"
                same = probs.dtype == dtype and probs.shape == scores.shape
                got = f"got {probs.dtype} {tuple(probs.shape)}"
                suite.require(name, same, got, scores)
                lowest = f"the lowest is {probs.min().item():g}"
                suite.require("probabilities are not negative", probs >= 0, lowest, scores)
                rule = f"rows sum to 1, scale {scale:g}, offset {offset:g}"
                total = probs.double().sum(-1)
                suite.close(rule, total, torch.ones_like(total), SUM_TOLERANCE[dtype], scores)


def an_offset_changes_nothing(suite: MapSuite) -> None:
    scores = suite.sixteenths(3, 33)
    for dtype in suite.dtypes:
        if torch.finfo(dtype).eps > 1e-6:
            continue
        expected = suite.map(scores.to(dtype))
        for offset in OFFSETS[1:]:
            moved = (scores + offset).to(dtype)
            rule = f"an offset of {offset:g} changes nothing"
            suite.close(rule, suite.map(moved), expected, SAME_TOLERANCE[dtype], moved)


def a_permutation_permutes(suite: MapSuite) -> None:
    scores = suite.settled(suite.map, 3, 17)
    # In a circle: no place keeps its score.
    circle = suite.permutation(17)
    order = torch.empty_like(circle).scatter_(0, circle, circle.roll(1))
    rule = "permuting the scores permutes the probabilities"
    suite.close(rule, suite.map(scores[:, order]), suite.map(scores)[:, order], suite.same, scores)


def a_higher_score_has_no_lower_probability(suite: MapSuite) -> None:
    for dtype in suite.dtypes:
        scores = (2 * suite.normal(4, 65)).sort(-1, descending=True).values.to(dtype)
        probs = suite.map(scores).double()
        rise = (probs[:, 1:] - probs[:, :-1]).clamp(min=0)
        rule = "a higher score never has a lower probability"
        suite.close(rule, rise, torch.zeros_like(rise), 1e-6, scores)


def zeros_are_where_they_should_be(suite: MapSuite) -> None:
    """A sparse map drops scores far below the maximum; a dense one drops nothing."""
    scores = torch.linspace(-40, 0, 4097, dtype=suite.finest, device=suite.device)
    scores = scores[suite.permutation(4097)]
    lowest = suite.map(scores)[scores.argmin()]
    if suite.sparse:
        rule = "a sparse map gives exactly 0 to a score 40 below the maximum"
        suite.require(rule, bool(lowest == 0), f"got {lowest.item():g}", scores)
    else:
        rule = "a dense map gives every score a probability"
        suite.require(rule, bool(lowest > 0), f"got {lowest.item():g}", scores)


def minus_infinity_removes_a_class(suite: MapSuite, classes_are_alike: bool) -> None:
    allowed = suite.settled(suite.map, 3, 9)
    keep = suite.permutation(14) < 9
    scores = torch.full((3, 14), -math.inf, dtype=suite.finest, device=suite.device)
    scores[:, keep] = allowed
    for dtype in suite.dtypes:
        masked = scores.to(dtype)
        probs = suite.map(masked)
        rule = "a score of -inf has probability 0"
        suite.close(rule, probs[:, ~keep], torch.zeros_like(probs[:, ~keep]), 0.0, masked)
        if classes_are_alike:
            rule = "a score of -inf is the same as no such class"
            expected = suite.map(allowed.to(dtype))
            suite.close(rule, probs[:, keep], expected, SAME_TOLERANCE[dtype], masked)
        if accepts(suite.map, "mask"):
            finite = masked.masked_fill(~keep, 3.0)
            rule = "mask=False is the same as a score of -inf"
            suite.close(rule, suite.map(finite, mask=keep), probs, 0.0, finite)


def a_row_with_nothing_allowed_is_zeros(suite: MapSuite) -> None:
    for dtype in suite.dtypes:
        scores = suite.normal(3, 7, dtype=dtype)
        scores[1] = -math.inf
        scores.requires_grad_()
        probs = suite.map(scores)
        rule = "a row with nothing allowed maps to zeros"
        suite.close(rule, probs[1], torch.zeros_like(probs[1]), 0.0, scores)
        rule = "a row with nothing allowed leaves the others alone"
        others = suite.map(scores.detach()[[0, 2]])
        suite.close(rule, probs[[0, 2]], others, SAME_TOLERANCE[dtype], scores)
        upstream = suite.normal(3, 7, dtype=dtype)
        (gradient,) = torch.autograd.grad(probs, scores, upstream)
        rule = "a row with nothing allowed has gradient 0"
        suite.close(rule, gradient[1], torch.zeros_like(gradient[1]), 0.0, scores)
        finite = gradient.isfinite().all(-1)
        suite.require(rule, finite, "a gradient is not finite", scores)


def a_nan_stays_in_its_row(suite: MapSuite) -> None:
    for dtype in suite.dtypes:
        clean = suite.normal(3, 40, dtype=dtype)
        for place in (0, 17, 39):
            scores = clean.clone()
            scores[1, place] = math.nan
            probs = suite.map(scores)
            rule = "a NaN makes its own row NaN"
            suite.require(rule, probs[1].isnan(), f"got {probs[1].tolist()}", scores)
            rule = "a NaN stays in its own row"
            expected = suite.map(clean)[[0, 2]]
            suite.close(rule, probs[[0, 2]], expected, SAME_TOLERANCE[dtype], scores)


def empty_inputs_give_empty_results(suite: MapSuite) -> None:
    for shape in ((0, 5), (3, 0), (0, 0), (2, 0, 4)):
        scores = suite.normal(*shape, dtype=suite.dtypes[0]).requires_grad_()
        rule = f"empty scores of shape {shape} work"
        probs = suite.runs(rule, scores, suite.map, scores)
        same = probs.shape == scores.shape and probs.dtype == scores.dtype
        suite.require(rule, same, f"got {probs.dtype} {tuple(probs.shape)}", scores)
        (gradient,) = suite.runs(rule, scores, torch.autograd.grad, probs.sum(), scores)
        suite.close(rule, gradient, torch.zeros_like(scores), 0.0, scores)


def any_layout_and_dimension_work(suite: MapSuite) -> None:
    rows = suite.settled(suite.map, 6, 7)
    expected = suite.map(rows)
    layouts = {
        "transposed": rows.t().contiguous().t(),
        "every second column": torch.stack([rows, rows + 1], -1).flatten(-2)[:, ::2],
        "expanded": rows[:1].expand(6, 7),
        "three dimensions": rows.reshape(2, 3, 7).transpose(0, 1),
    }
    for layout, scores in layouts.items():
        wanted = {"expanded": expected[:1].expand(6, 7)}.get(layout, expected)
        if scores.dim() == 3:
            wanted = expected.reshape(2, 3, 7).transpose(0, 1)
        rule = f"the layout does not matter ({layout})"
        suite.close(rule, suite.map(scores), wanted, suite.same, scores)
    rule = "a row alone is the same as a row in a batch"
    suite.close(rule, suite.map(rows[0]), expected[0], suite.same, rows)
    if accepts(suite.map, "dim"):
        cube, wanted = rows.reshape(2, 3, 7), expected.reshape(2, 3, 7)
        for dim in range(-3, 3):
            turned = suite.map(cube.movedim(-1, dim), dim=dim).movedim(dim, -1)
            suite.close(f"any dimension can be mapped, dim={dim}", turned, wanted, suite.same, cube)
