"""check_map: the rules for maps from scores to probabilities."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer.testing.suite import FLOATING, SAME_TOLERANCE, SUM_TOLERANCE, Suite, accepts, seeded

SCALES = (0.01, 1.0, 100.0, 1e4, 1e20)
OFFSETS = (0.0, 1e6, -1e6)


@dataclass(kw_only=True)
class MapSuite(Suite):
    """A map over the last dimension, and the options of :func:`check_map`."""

    map: Callable[..., Tensor]
    widths: tuple[int, ...]
    sparse: bool
    symmetric: bool

    def away_from_kinks(self, rows: int, n: int) -> Tensor:
        return self.settled(self.map, rows, n)


def check_map(
    map: Callable[..., Tensor],  # noqa: A002 — reads well in a call
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATING,
    widths: tuple[int, ...] = (1, 2, 33, 4097),
    sparse: bool = True,
    symmetric: bool = True,
    masks: bool = True,
    empty_rows: bool = True,
    second_order: bool = True,
    compile: str | Literal[False] = "aot_eager",  # noqa: A002 — reads well in a call
    vmap: bool = True,
    autocast: bool = True,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a function from scores to probabilities keeps the rules of a map.

    These rules are always checked:

    - Rows sum to 1 for any scale, offset and number of classes, within 1e-6 in float32 and 4e-3 in
      half precision. No probability is negative. Dtype and shape do not change.
    - An offset of 1e6 does not change the result.
    - A NaN affects only its own row, which becomes NaN.
    - Empty batches, empty class dimensions and non-contiguous tensors work.
    - The gradient passes ``gradcheck`` away from kinks.
    - If ``map`` has an argument ``dim``, all dimensions work; if it has ``mask``, masking is
      equivalent to scores of -inf.

    Args:
        map: a function or module from scores ``(*batch, n)`` to probabilities over the last
            dimension.
        dtypes: dtypes that the map accepts; without float64, derivatives are not checked.
        widths: numbers of classes to test.
        sparse: whether scores far below the maximum get exactly 0. If False, as for softmax, every
            class must have a positive probability.
        symmetric: whether classes are interchangeable: permuting scores permutes probabilities, a
            higher score never has a lower probability, and removing a class is equivalent to a
            score of -inf. False for a map with parameters per class.
        masks: whether a score of -inf removes its class. False if scores must be finite.
        empty_rows: whether a row that is all -inf maps to zeros with gradient 0. False if the
            result is undefined, as in ``torch.softmax``.
        second_order: whether the map is twice differentiable (``gradgradcheck``).
        compile: backend for ``torch.compile(fullgraph=True)`` with gradient; False to skip. This
            resets the compile cache of the process.
        vmap: whether to check ``torch.func.vmap`` and ``torch.func.jacrev``.
        autocast: whether to check ``torch.autocast``.
        device: device to run on.
        seed: random seed; a random one if None.

    Raises:
        AssertionError: with the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> import torch
        >>> from lastlayer.testing import check_map
        >>> def cubed(scores):
        ...     positive = (scores - scores.amax(-1, keepdim=True) + 1).clamp(min=0) ** 3
        ...     return positive / positive.sum()
        >>> check_map(cubed, compile=False)
        Traceback (most recent call last):
        ...
        AssertionError: rows sum to 1, ...
    """
    suite = MapSuite(
        *seeded(seed, device), dtypes, compile,
        map=map, widths=widths, sparse=sparse, symmetric=symmetric,
    )  # fmt: skip
    exact = torch.float64 in dtypes
    suite.hold(
        rows_sum_to_one,
        an_offset_changes_nothing,
        a_nan_stays_in_its_row,
        empty_inputs_give_empty_results,
        any_layout_and_dimension_work,
        *([a_permutation_permutes, a_higher_score_has_no_lower_probability] if symmetric else []),
        zeros_are_where_they_should_be,
        *([the_gradient_is_right, lower_precision_has_the_same_gradient] if exact else []),
        *([minus_infinity_removes_a_class] if masks else []),
        *([a_row_with_nothing_allowed_is_zeros] if empty_rows else []),
        *([the_second_derivative_is_right] if second_order and exact else []),
        *([vmap_is_a_loop] if vmap else []),
        *([autocast_works] if autocast else []),
        *([compiling_changes_nothing] if compile else []),
    )


def rows_sum_to_one(suite: MapSuite) -> None:
    """For any scale, offset and number of classes, without negative entries, in the same dtype."""
    sizes = [(scale, 0.0) for scale in SCALES] + [(1.0, offset) for offset in OFFSETS]
    for dtype in suite.dtypes:
        for n in suite.widths:
            for scale, offset in sizes:
                if max(scale, abs(offset)) > torch.finfo(dtype).max / 16:
                    continue
                scores = (offset + scale * suite.normal(2, n)).to(dtype)
                probs = suite.map(scores)
                rule = "dtype and shape do not change"
                suite.typed(rule, probs, dtype, scores.shape, scores)
                lowest = f"the lowest is {probs.min().item():g}"
                suite.require("probabilities are not negative", probs >= 0, lowest, scores)
                rule = f"rows sum to 1, scale {scale:g}, offset {offset:g}"
                suite.close(rule, probs.double().sum(-1), 1.0, SUM_TOLERANCE[dtype], scores)


def an_offset_changes_nothing(suite: MapSuite) -> None:
    scores = suite.sixteenths(3, 33)
    for dtype in _fine(suite):
        expected = suite.map(scores.to(dtype))
        for offset in OFFSETS[1:]:
            moved = (scores + offset).to(dtype)
            rule = f"an offset of {offset:g} changes nothing"
            suite.close(rule, suite.map(moved), expected, SAME_TOLERANCE[dtype], moved)


def a_permutation_permutes(suite: MapSuite) -> None:
    scores = suite.away_from_kinks(3, 17)
    # A cyclic permutation: no score keeps its position.
    circle = suite.permutation(17)
    order = torch.empty_like(circle).scatter_(0, circle, circle.roll(1))
    rule = "permuting the scores permutes the probabilities"
    suite.close(rule, suite.map(scores[:, order]), suite.map(scores)[:, order], suite.same, scores)


def a_higher_score_has_no_lower_probability(suite: MapSuite) -> None:
    for dtype in suite.dtypes:
        scores = (2 * suite.normal(4, 65)).sort(-1, descending=True).values.to(dtype)
        probs = suite.map(scores).double()
        rise = (probs[:, 1:] - probs[:, :-1]).clamp(min=0)
        suite.close("a higher score never has a lower probability", rise, 0.0, 1e-6, scores)


def zeros_are_where_they_should_be(suite: MapSuite) -> None:
    """A sparse map gives 0 to scores far below the maximum; a dense one to no score."""
    scores = torch.linspace(-40, 0, 4097, dtype=suite.finest, device=suite.device)
    scores = scores[suite.permutation(4097)]
    lowest = suite.map(scores)[scores.argmin()].item()
    if suite.sparse:
        rule = "a sparse map gives exactly 0 to a score 40 below the maximum"
    else:
        rule = "a dense map gives every score a probability"
    suite.require(rule, (lowest == 0) == suite.sparse, f"got {lowest:g}", scores)


def minus_infinity_removes_a_class(suite: MapSuite) -> None:
    allowed = suite.away_from_kinks(3, 9)
    keep = suite.permutation(14) < 9
    scores = torch.full((3, 14), -math.inf, dtype=suite.finest, device=suite.device)
    scores[:, keep] = allowed
    for dtype in suite.dtypes:
        masked = scores.to(dtype)
        probs = suite.map(masked)
        suite.zero("a score of -inf has probability 0", probs[:, ~keep], masked)
        if suite.symmetric:
            rule = "a score of -inf is the same as no such class"
            expected = suite.map(allowed.to(dtype))
            suite.close(rule, probs[:, keep], expected, SAME_TOLERANCE[dtype], masked)
        if accepts(suite.map, "mask"):
            finite = masked.masked_fill(~keep, 3.0)
            rule = "mask=False is the same as a score of -inf"
            suite.close(rule, suite.map(finite, mask=keep), probs, 0.0, finite)


def a_row_with_nothing_allowed_is_zeros(suite: MapSuite) -> None:
    rule = "a row with nothing allowed"
    for dtype in suite.dtypes:
        scores = suite.normal(3, 7, dtype=dtype)
        scores[1] = -math.inf
        probs = suite.map(scores.requires_grad_())
        suite.zero(f"{rule} maps to zeros", probs[1], scores)
        others = suite.map(scores.detach()[[0, 2]])
        same = SAME_TOLERANCE[dtype]
        suite.close(f"{rule} leaves the others alone", probs[[0, 2]], others, same, scores)
        (gradient,) = torch.autograd.grad(probs, scores, suite.normal(3, 7, dtype=dtype))
        suite.zero(f"{rule} has gradient 0", gradient[1], scores)
        finite = gradient.isfinite().all(-1)
        suite.require(f"{rule} leaves gradients finite", finite, "one is not", scores)


def a_nan_stays_in_its_row(suite: MapSuite) -> None:
    for dtype in suite.dtypes:
        clean = suite.normal(3, 40, dtype=dtype)
        expected = suite.map(clean)[[0, 2]]
        for place in (0, 17, 39):
            scores = clean.clone()
            scores[1, place] = math.nan
            probs = suite.map(scores)
            suite.close("a NaN makes its own row NaN", probs[1], math.nan, 0.0, scores)
            rule = "a NaN stays in its own row"
            suite.close(rule, probs[[0, 2]], expected, SAME_TOLERANCE[dtype], scores)


def empty_inputs_give_empty_results(suite: MapSuite) -> None:
    dtype = suite.dtypes[0]
    for shape in ((0, 5), (3, 0), (0, 0), (2, 0, 4)):
        scores = suite.normal(*shape, dtype=dtype).requires_grad_()
        rule = f"empty scores of shape {shape} work"
        probs = suite.runs(rule, scores, suite.map, scores)
        suite.typed(rule, probs, dtype, shape, scores)
        (gradient,) = suite.runs(rule, scores, torch.autograd.grad, probs.sum(), scores)
        suite.close(rule, gradient, scores, 0.0, scores)


def any_layout_and_dimension_work(suite: MapSuite) -> None:
    rows = suite.away_from_kinks(6, 7)
    expected = suite.map(rows)
    cube, wanted = rows.reshape(2, 3, 7), expected.reshape(2, 3, 7)
    layouts = {
        "transposed": (rows.t().contiguous().t(), expected),
        "every second column": (torch.stack([rows, rows + 1], -1).flatten(-2)[:, ::2], expected),
        "expanded": (rows[:1].expand(6, 7), expected[:1].expand(6, 7)),
        "three dimensions": (cube.transpose(0, 1), wanted.transpose(0, 1)),
        "a row alone": (rows[0], expected[0]),
    }
    for layout, (scores, right) in layouts.items():
        rule = f"the layout does not matter ({layout})"
        suite.close(rule, suite.map(scores), right, suite.same, scores)
    for dim in range(-3, 3) if accepts(suite.map, "dim") else ():
        turned = suite.map(cube.movedim(-1, dim), dim=dim).movedim(dim, -1)
        suite.close(f"any dimension can be mapped, dim={dim}", turned, wanted, suite.same, cube)


def the_gradient_is_right(suite: MapSuite) -> None:
    scores = suite.away_from_kinks(3, 6).requires_grad_()
    suite.runs("gradcheck in float64", scores, torch.autograd.gradcheck, suite.map, (scores,))


def the_second_derivative_is_right(suite: MapSuite) -> None:
    scores = suite.away_from_kinks(2, 5).requires_grad_()
    check = torch.autograd.gradgradcheck
    suite.runs("gradgradcheck in float64", scores, check, suite.map, (scores,))


def lower_precision_has_the_same_gradient(suite: MapSuite) -> None:
    exact = suite.away_from_kinks(4, 33).requires_grad_()
    upstream = suite.normal(4, 33)
    (expected,) = torch.autograd.grad(suite.map(exact), exact, upstream)
    for dtype in _fine(suite):
        scores = exact.detach().to(dtype).requires_grad_()
        (gradient,) = torch.autograd.grad(suite.map(scores), scores, upstream.to(dtype))
        suite.typed("the gradient has the dtype of the scores", gradient, dtype, (4, 33), scores)
        rule = f"the gradient in {dtype} is that in float64"
        suite.close(rule, gradient, expected, 10 * SAME_TOLERANCE[dtype], scores)


def compiling_changes_nothing(suite: MapSuite) -> None:
    for dtype in _fine(suite):
        scores = suite.away_from_kinks(3, 11).to(dtype).requires_grad_()
        upstream = suite.normal(3, 11, dtype=dtype)

        def evaluate(
            function: Any, scores: Tensor = scores, upstream: Tensor = upstream
        ) -> tuple[Tensor, dict[str, Tensor]]:
            probs = function(scores)
            return probs, {"scores": torch.autograd.grad(probs, scores, upstream)[0]}

        suite.compiles(suite.map, evaluate, scores, SAME_TOLERANCE[dtype])


def vmap_is_a_loop(suite: MapSuite) -> None:
    scores = suite.away_from_kinks(12, 6).reshape(4, 3, 6)
    for in_dim in (0, 1):
        rule = f"torch.func.vmap(in_dims={in_dim}) is a loop"
        mapped = suite.runs(rule, scores, torch.func.vmap(suite.map, in_dims=in_dim), scores)
        loop = torch.stack([suite.map(part) for part in scores.unbind(in_dim)])
        suite.close(rule, mapped, loop, suite.same, scores)
    rule, row = "torch.func.jacrev is the Jacobian of a loop", scores[0, 0]
    jacobian = suite.runs(rule, row, torch.func.jacrev(suite.map), row)
    expected = torch.autograd.functional.jacobian(suite.map, row)
    suite.close(rule, jacobian, expected, suite.same, row)


def autocast_works(suite: MapSuite) -> None:
    rule = "autocast to bfloat16"
    scores = suite.away_from_kinks(3, 9).float().requires_grad_()

    def run() -> tuple[Tensor, Tensor]:
        probs = suite.map(scores)
        return probs, torch.autograd.grad(probs.float().square().sum(), scores)[0]

    with torch.autocast(suite.device.type, dtype=torch.bfloat16):
        probs, gradient = suite.runs(rule, scores, run)
    plain, expected = run()
    suite.close(rule, probs, plain, 8e-3, scores)
    suite.close(f"{rule}: its gradient", gradient, expected, 5e-2, scores)


def _fine(suite: MapSuite) -> list[torch.dtype]:
    """The dtypes in which rounding the scores does not change the support."""
    return [dtype for dtype in suite.dtypes if torch.finfo(dtype).eps < 1e-6]
