"""check_loss: the rules for losses of scores and targets."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.testing.suite import FLOATING, INTEGERS, REDUCTIONS, Suite, accepts, seeded

CLASSES = 7


@dataclass(kw_only=True)
class LossSuite(Suite):
    """A loss of scores and targets, with inputs for it."""

    loss: Callable[..., Tensor]
    # Tolerances of the loss and of its gradient under autocast.
    autocast_tolerance: ClassVar[tuple[float, float]] = (5e-2, 2e-2)
    empty_shapes: ClassVar[tuple[tuple[int, int], ...]] = ((0, CLASSES),)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.by_reduction: dict[str, Callable[..., Tensor]] = {
            each: _with(self.loss, reduction=each) for each in REDUCTIONS
        }

    def losses(
        self, scores: Tensor, target: Tensor, reduction: str = "none", **options: Any
    ) -> Tensor:
        loss = self.by_reduction[reduction]
        return (_with(loss, **options) if options else loss)(scores, target)

    def takes(self, option: str) -> bool:
        """Whether the loss has this option: a function as an argument, a module as an attribute."""
        if isinstance(self.loss, torch.nn.Module):
            return hasattr(self.loss, option)
        return accepts(self.loss, option)

    def gradient(self, scores: Tensor, target: Tensor, **options: Any) -> Tensor:
        """The gradient of the sum of the losses."""
        scores = scores.detach().requires_grad_()
        return torch.autograd.grad(self.losses(scores, target, "sum", **options), scores)[0]

    def scores(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.normal(*shape, dtype=dtype or self.finest)

    def away_from_kinks(self, rows: int, n: int = CLASSES) -> Tensor:
        return self.scores(rows, n)

    def targets(self, scores: Tensor) -> list[Tensor]:
        """Hard targets for these scores, and soft ones if the loss accepts them."""
        raise NotImplementedError

    def masks(self, _scores: Tensor) -> tuple[Tensor, ...]:
        """A mask for these scores, if the loss accepts one."""
        return ()

    def of_tensors(self, reduction: str) -> Callable[..., Tensor]:
        """The loss as a function of scores, target, and the mask if there is one."""

        def loss(scores: Tensor, target: Tensor, *masks: Tensor) -> Tensor:
            return self.losses(scores, target, reduction, **({"mask": masks[0]} if masks else {}))

        return loss


@dataclass(kw_only=True)
class MapLossSuite(LossSuite):
    """The loss of a map, whose targets are class ids or distributions."""

    map: Callable[[Tensor], Tensor] | None
    ignore_index: int | None
    distributions: bool
    reachable: bool

    def predict(self, scores: Tensor) -> Tensor:
        """The map; if None, the gradient of the loss plus the target."""
        if self.map is not None:
            return self.map(scores)
        target = torch.zeros(scores.shape[:-1], dtype=torch.int64, device=scores.device)
        return self.gradient(scores, target) + _one_hot(target, scores)

    def away_from_kinks(self, rows: int, n: int = CLASSES) -> Tensor:
        return self.settled(self.predict, rows, n)

    def ids(self, *batch: int, n: int = CLASSES) -> Tensor:
        return self.integers(n, *batch)

    def targets(self, scores: Tensor) -> list[Tensor]:
        """Class ids, and distributions with some zeros."""
        ids = self.ids(*scores.shape[:-1], n=scores.shape[-1])
        return [ids, self.distributions_like(scores)] if self.distributions else [ids]


def check_loss(
    loss: Callable[..., Tensor],
    map: Callable[[Tensor], Tensor] | None = None,  # noqa: A002 — reads well in a call
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATING,
    distributions: bool = True,
    reachable: bool = True,
    ignore_index: int | None = -100,
    masks: bool = True,
    derivatives: bool = True,
    compile: str | Literal[False] = "aot_eager",  # noqa: A002 — reads well in a call
    vmap: bool = True,
    autocast: bool = True,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a loss keeps the rules of the loss of a map.

    These rules are always checked:

    - The gradient is ``map(scores) - target``.
    - The loss is convex, never negative, and zero if the map equals the target.
    - Reductions and batch dimensions agree. An empty batch has loss 0.
    - The loss is float32, or float64 from float64. Class ids may have any integer dtype.
    - An offset of 1e6 costs no accuracy in float32. A NaN affects only its own row.
    - If the loss has an option ``ignore_index``, with None no target is ignored. If it has
      ``class_weight``, rows are weighted by the weight of their target, and "mean" divides by the
      sum of these weights.

    Args:
        loss: ``loss(scores, target, reduction=)`` for scores ``(*batch, n)``, or a module with an
            attribute ``reduction``; options of a module are attributes too.
        map: the map of this loss, over the last dimension. If None, it is computed from the
            gradient, and the Hessian is not compared with its Jacobian.
        distributions: whether targets may be distributions ``(*batch, n)``, with class ids as
            one-hot distributions. False if targets are class ids only.
        reachable: whether every distribution is a value of the map, or a limit of values. False for
            top-k softmax, whose loss may be negative for a target with more than k classes.
        ignore_index: the class id that is ignored by default: its rows have loss and gradient 0 for
            any scores, and "mean" excludes them; it is 0 if all rows are ignored. None if no id is
            ignored.
        masks: whether a score of -inf removes its class, and a target there has loss +inf. False if
            scores must be finite.
        derivatives: whether to check ``gradcheck``, ``gradgradcheck`` and the Hessian.
        dtypes: dtypes that the loss accepts; without float64, derivatives are not checked.
        compile: backend of ``torch.compile``, as for :func:`check_map`; False to skip.
        vmap: whether to check ``torch.func.vmap`` and ``torch.func.grad``.
        autocast: whether to check ``torch.autocast``.
        device: device to run on.
        seed: random seed; a random one if None.

    Raises:
        AssertionError: with the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> import torch
        >>> from lastlayer.testing import check_loss
        >>> check_loss(torch.nn.CrossEntropyLoss(), distributions=False, compile=False)
        Traceback (most recent call last):
        ...
        AssertionError: a loss of torch.float16 scores is torch.float32: got torch.float16
        ...
    """
    suite = MapLossSuite(
        *seeded(seed, device), dtypes, compile, loss=loss, map=map, ignore_index=ignore_index,
        distributions=distributions, reachable=reachable,
    )  # fmt: skip
    exact = derivatives and torch.float64 in dtypes
    suite.hold(
        the_dtype_is_float32_or_float64,
        the_gradient_is_map_minus_target,
        it_is_zero_where_the_map_hits_the_target,
        it_is_never_negative,
        it_is_convex,
        reductions_agree,
        class_ids_may_have_any_integer_dtype,
        without_an_ignored_index_every_target_counts,
        class_weights_count_as_in_cross_entropy,
        an_offset_costs_no_accuracy,
        a_nan_stays_in_its_row,
        an_empty_batch_works,
        *([ignored_rows_count_for_nothing] if ignore_index is not None else []),
        *([ids_are_one_hot_distributions] if distributions else []),
        *([masked_scores_are_handled] if masks else []),
        *([the_derivatives_are_right] if exact else []),
        *([the_hessian_is_the_jacobian_of_the_map] if exact and map else []),
        *([vmap_is_a_loop] if vmap else []),
        *([autocast_works] if autocast else []),
        *([compiling_changes_nothing] if compile else []),
    )


# Rules for all losses of scores and targets, including multi-label losses.


def the_dtype_is_float32_or_float64(suite: LossSuite) -> None:
    for dtype in suite.dtypes:
        scores = suite.scores(3, CLASSES, dtype=dtype)
        target, expected = suite.targets(scores)[0], accumulation_dtype(dtype)
        for reduction in REDUCTIONS:
            got = suite.losses(scores, target, reduction).dtype
            rule = f"a loss of {dtype} scores is {expected}"
            suite.require(rule, got == expected, f"got {got}", scores)
        gradient, rule = suite.gradient(scores, target), "the gradient has the dtype of the scores"
        suite.typed(rule, gradient, dtype, (3, CLASSES), scores)


def it_is_never_negative(suite: LossSuite) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        if dtype not in suite.dtypes:
            continue
        scores = 3 * suite.scores(40, CLASSES, dtype=dtype)
        targets = suite.targets(scores)
        if isinstance(suite, MapLossSuite) and not suite.reachable:
            targets = targets[:1]
        for target in targets:
            losses = suite.losses(scores, target)
            lowest = f"the lowest is {losses.min().item():g}"
            suite.require("a loss is never negative", losses >= -tolerance, lowest, scores)


def it_is_convex(suite: LossSuite) -> None:
    left, right = (3 * suite.scores(40, CLASSES) for _ in range(2))
    for target in suite.targets(left):
        for share in (0.25, 0.5, 0.75):
            between = suite.losses(share * left + (1 - share) * right, target)
            chord = share * suite.losses(left, target) + (1 - share) * suite.losses(right, target)
            above = f"it lies {(between - chord).max().item():g} above a chord"
            suite.require("a loss is convex", between <= chord + 1e-5, above, left)


def reductions_agree(suite: LossSuite) -> None:
    scores = 2 * suite.scores(2, 3, CLASSES)
    for target in suite.targets(scores):
        none, mean, total = (suite.losses(scores, target, each) for each in REDUCTIONS)
        suite.reductions(none, mean, total, (2, 3), scores)
        flat, one = scores.flatten(0, 1), suite.losses(scores[1, 2], target[1, 2])
        again = suite.losses(flat, target.flatten(0, 1)).reshape(2, 3)
        suite.close("batch dimensions do not matter", again, none, 1e-5, scores)
        suite.close("a single row needs no batch dimension", one, none[1, 2], 1e-5, scores)


def a_nan_stays_in_its_row(suite: LossSuite) -> None:
    rule = "a NaN makes the loss of its row NaN and no other"
    clean = suite.scores(3, CLASSES)
    for target in suite.targets(clean):
        expected, slopes = suite.losses(clean, target), suite.gradient(clean, target)
        expected[1] = math.nan
        for column in (0, 1):
            scores = clean.clone()
            scores[1, column] = math.nan
            suite.close(rule, suite.losses(scores, target), expected, 1e-5, scores)
            others = suite.gradient(scores, target)[[0, 2]]
            suite.close(f"{rule}: gradient", others, slopes[[0, 2]], 1e-5, scores)


def an_empty_batch_works(suite: LossSuite) -> None:
    for shape in suite.empty_shapes:
        scores = suite.scores(*shape)
        target = suite.targets(scores)[0]
        for reduction in REDUCTIONS:
            rule = f"an empty batch works, scores {shape}, reduction={reduction!r}"
            loss = suite.runs(rule, scores, suite.losses, scores, target, reduction)
            of_rows = shape[:1] if reduction == "none" else ()
            suite.close(rule, loss, torch.zeros(of_rows, device=suite.device), 0.0, scores)


def the_derivatives_are_right(suite: LossSuite) -> None:
    scores = suite.away_from_kinks(3, 5).requires_grad_()
    for target in suite.targets(scores.detach()):
        inputs = scores, target, *suite.masks(scores.detach())
        for reduction in ("mean", "none"):
            rule = f"gradcheck in float64, reduction={reduction!r}"
            loss = suite.of_tensors(reduction)
            suite.runs(rule, scores, torch.autograd.gradcheck, loss, inputs)
        rule = "gradgradcheck in float64"
        suite.runs(rule, scores, torch.autograd.gradgradcheck, loss, inputs)


def compiling_changes_nothing(suite: LossSuite) -> None:
    scores = suite.away_from_kinks(4).requires_grad_()
    for target in suite.targets(scores.detach()):
        masks = suite.masks(scores.detach())

        def evaluate(
            loss: Any, target: Tensor = target, masks: Any = masks
        ) -> tuple[Tensor, dict[str, Tensor]]:
            value = loss(scores, target, *masks)
            return value, {"scores": torch.autograd.grad(value, scores)[0]}

        suite.compiles(suite.of_tensors("mean"), evaluate, scores, suite.same)


def vmap_is_a_loop(suite: LossSuite) -> None:
    scores = suite.away_from_kinks(6).reshape(2, 3, -1)
    none, total = suite.of_tensors("none"), suite.of_tensors("sum")
    for target in suite.targets(scores):
        inputs = scores, target, *suite.masks(scores)
        rule = "torch.func.vmap is a loop"
        mapped = suite.runs(rule, scores, torch.func.vmap(none), *inputs)
        loop = torch.stack([none(*(each[row] for each in inputs)) for row in range(2)])
        suite.close(rule, mapped, loop, suite.same, scores)
        rule = "torch.func.vmap of the gradient is a loop"
        slopes = suite.runs(rule, scores, torch.func.vmap(torch.func.grad(total)), *inputs)
        leaf = scores.detach().requires_grad_()
        (expected,) = torch.autograd.grad(total(leaf, *inputs[1:]), leaf)
        suite.close(rule, slopes, expected, suite.same, scores)


def autocast_works(suite: LossSuite) -> None:
    rule = "autocast to bfloat16"
    scores = suite.away_from_kinks(4).float()
    target = suite.targets(scores)[0]

    def run() -> tuple[Tensor, Tensor]:
        return suite.losses(scores, target), suite.gradient(scores, target)

    with torch.autocast(suite.device.type, dtype=torch.bfloat16):
        losses, gradient = suite.runs(rule, scores, run)
    (plain, expected), (near, near_slope) = run(), suite.autocast_tolerance
    suite.close(rule, losses, plain, near, scores)
    suite.close(f"{rule}: its gradient", gradient, expected, near_slope, scores)


# Rules for the loss of a map.


def the_gradient_is_map_minus_target(suite: MapLossSuite) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-6)):
        if dtype not in suite.dtypes:
            continue
        scores = suite.away_from_kinks(5).to(dtype)
        probs, rule = suite.predict(scores), "the gradient is map(scores) - target"
        for target in suite.targets(scores):
            y = _one_hot(target, scores)
            suite.close(rule, suite.gradient(scores, target), probs - y, tolerance, scores)


def it_is_zero_where_the_map_hits_the_target(suite: MapLossSuite) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        if suite.distributions and dtype in suite.dtypes:
            scores = 3 * suite.scores(40, CLASSES, dtype=dtype)
            losses = suite.losses(scores, suite.predict(scores).clamp(min=0))
            suite.close("a loss is 0 if the map equals the target", losses, 0.0, tolerance, scores)


def ids_are_one_hot_distributions(suite: MapLossSuite) -> None:
    scores, ids = 2 * suite.scores(6, CLASSES), suite.ids(6)
    one_hot = suite.losses(scores, _one_hot(ids, scores))
    suite.close("a class id is a one-hot distribution", suite.losses(scores, ids), one_hot, 1e-5)


def class_ids_may_have_any_integer_dtype(suite: MapLossSuite) -> None:
    scores, ids = suite.scores(6, CLASSES), suite.ids(6)
    expected, slopes = suite.losses(scores, ids), suite.gradient(scores, ids)
    for dtype in INTEGERS:
        rule = f"class ids of {dtype} give the results of int64"
        losses = suite.runs(rule, scores, suite.losses, scores, ids.to(dtype))
        suite.close(rule, losses, expected, 0.0, scores)
        suite.close(rule, suite.gradient(scores, ids.to(dtype)), slopes, 0.0, scores)


def without_an_ignored_index_every_target_counts(suite: MapLossSuite) -> None:
    if not suite.takes("ignore_index"):
        return
    scores, ids = suite.scores(6, CLASSES), suite.ids(6)
    losses = suite.losses(scores, ids)
    for reduction, expected in zip(REDUCTIONS, (losses, losses.mean(), losses.sum()), strict=True):
        rule = f"with ignore_index=None every target counts, reduction={reduction!r}"
        found = suite.runs(
            rule, scores, lambda of=reduction: suite.losses(scores, ids, of, ignore_index=None)
        )
        suite.close(rule, found, expected, 1e-5, scores)
    chosen = int(ids[0])
    found = suite.losses(scores, ids, ignore_index=chosen)
    rule = f"with ignore_index={chosen} rows of this class have loss 0"
    suite.close(rule, found, torch.where(ids == chosen, 0.0, losses), 1e-5, scores)


def class_weights_count_as_in_cross_entropy(suite: MapLossSuite) -> None:
    if not suite.takes("class_weight"):
        return
    scores = suite.scores(6, CLASSES)
    weight = suite.normal(CLASSES, dtype=suite.finest).exp()
    for target in suite.targets(scores):
        of_rows = (_one_hot(target, scores) * weight).sum(-1)
        expected = of_rows * suite.losses(scores, target)
        for reduction, right in zip(
            REDUCTIONS, (expected, expected.sum() / of_rows.sum(), expected.sum()), strict=True
        ):
            rule = f"a row counts with the weight of its target, reduction={reduction!r}"
            found = suite.losses(scores, target, reduction, class_weight=weight)
            suite.close(rule, found, right, 1e-5, scores)


def ignored_rows_count_for_nothing(suite: MapLossSuite) -> None:
    ignored = int(suite.ignore_index or 0)
    for dtype in suite.dtypes:
        scores, target = suite.scores(5, CLASSES, dtype=dtype), suite.ids(5)
        target[1] = target[3] = ignored
        scores[1], scores[3] = math.nan, -math.inf
        counted = target != ignored
        losses = suite.losses(scores, target)
        rule = "an ignored row has loss 0, even if its scores are NaN"
        suite.zero(rule, losses[~counted], scores)
        rule = "an ignored row has gradient 0, even if its scores are NaN"
        suite.zero(rule, suite.gradient(scores, target)[~counted], scores)
        mean = suite.losses(scores, target, "mean")
        rule = "the mean is over the rows that are not ignored"
        suite.close(rule, mean, losses[counted].mean(), 1e-5, scores)
        target[:] = ignored
        for reduction in ("mean", "sum"):
            leaf = scores.detach().requires_grad_()
            loss = suite.losses(leaf, target, reduction)
            rule = f"reduction={reduction!r} is 0 if all rows are ignored"
            suite.zero(rule, loss, scores)
            suite.zero(f"{rule}: its gradient", torch.autograd.grad(loss, leaf)[0], scores)


def an_offset_costs_no_accuracy(suite: MapLossSuite) -> None:
    if torch.float32 not in suite.dtypes:
        return
    scores = suite.sixteenths(6, 33).float()
    for target in suite.targets(scores):
        expected = suite.losses(scores, target)
        for offset in (1e6, -1e6):
            moved = scores + offset
            rule = f"an offset of {offset:g} costs no accuracy in float32"
            suite.close(rule, suite.losses(moved, target), expected, 1e-5, moved)


def masked_scores_are_handled(suite: MapLossSuite) -> None:
    kept = torch.tensor([0, 2, 3, 5, 7], device=suite.device)
    short = torch.tensor([0, 1, 3, 4], device=suite.device)
    target, masked = kept[short], torch.tensor([0, 2, 5, 1], device=suite.device)
    for dtype in suite.dtypes:
        allowed = suite.scores(4, 5, dtype=dtype)
        scores = torch.full((4, 8), -math.inf, dtype=dtype, device=suite.device)
        scores[:, kept] = allowed
        rule = "a score of -inf is the same as no such class"
        losses = suite.losses(scores, target)
        suite.close(rule, losses, suite.losses(allowed, short), 1e-4, scores)
        finite = suite.gradient(scores, target).isfinite()
        suite.require("a score of -inf leaves the gradient finite", finite, "it is not", scores)
        losses = suite.losses(scores, masked)
        suite.close("a target that is masked has loss +inf", losses[3], math.inf, 0.0, scores)
        rule = "a target that is masked leaves other rows alone"
        suite.require(rule, losses[:3].isfinite(), "another loss is not finite", scores)
        scores[1] = -math.inf
        rule = "a row with nothing allowed has loss +inf unless it is ignored"
        suite.close(rule, suite.losses(scores, target)[1], math.inf, 0.0, scores)


def the_hessian_is_the_jacobian_of_the_map(suite: MapLossSuite) -> None:
    rule = "the Hessian of the loss is the Jacobian of the map"
    # Several rows: if one class has probability 1, the Jacobian is 0.
    for row in suite.away_from_kinks(8):
        jacobian = torch.autograd.functional.jacobian(suite.predict, row)
        for target in suite.targets(row):
            hessian = torch.autograd.functional.hessian(
                lambda x, target=target: suite.losses(x, target, "sum"), row
            )
            suite.close(rule, hessian, jacobian, 1e-8, row)


def _with(loss: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """The loss with options set: as arguments of a function, or as attributes of a module."""
    if not isinstance(loss, torch.nn.Module):
        return partial(loss, **options)
    module = copy.deepcopy(loss)
    for name, value in options.items():
        setattr(module, name, value)
    return module


def _one_hot(target: Tensor, scores: Tensor) -> Tensor:
    """Distributions: ``target`` itself, or class ids as one-hot."""
    if target.is_floating_point():
        return target
    return torch.nn.functional.one_hot(target, scores.shape[-1]).to(scores.dtype)
