"""check_head: the rules for heads that predict one of many classes."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.testing import head_rules as rules
from lastlayer.testing.head_rules import HeadSuite
from lastlayer.testing.suite import FLOATING, SUM_TOLERANCE, seeded

# Maximum number of equal rows to draw from, and of their probabilities.
MOST_ROWS, MOST_NUMBERS = 1000, 1_000_000


class ClassSuite(HeadSuite):
    """A head that predicts one class."""

    def calls(self, head: Any) -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]]:
        return {**super().calls(head), "sample": ((4,), lambda hidden: head.sample(hidden, 4))}


def check_head(
    head: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATING,
    loss_is_nll: bool = True,
    gradients: bool = True,
    log_prob_gradients: bool = True,
    draws: int = 20_000,
    save: bool = True,
    compile: str | Literal[False] = "aot_eager",  # noqa: A002 — reads well in a call
    autocast: bool = True,
    checkpoint: bool = True,
    transforms: bool = True,
    distributed: bool = True,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a module keeps the contract of :class:`lastlayer.heads.Head`.

    These rules are always checked:

    - Probabilities sum to 1 for any scale of hidden. ``log_prob`` of given classes, one or several
      per row, agrees with ``log_prob`` of all classes. ``topk`` agrees with a sort.
    - ``sample`` draws from these probabilities, independently for each row, and repeatably with a
      generator.
    - Reductions and batch dimensions agree, and empty batches work. Class ids may have any integer
      dtype. Losses and log-probabilities are float32, or float64 from float64.
    - Ignored rows have loss and gradient 0; if all rows are ignored, the loss is 0.
    - A NaN affects only its own row. If all classes are masked, log-probabilities are -inf.
    - Every parameter gets a gradient. Backward can be repeated with ``retain_graph=True``, and
      parameters that are modified in place before backward do not give wrong gradients.
    - A forward pass under ``no_grad`` has no side effects, and eval mode is deterministic.
    - ``state_dict`` and ``deepcopy`` are complete, also after the meta device, with ``to_empty``,
      ``assign=True``, or a loader that sets tensors one by one. Storages stay resizable.
    - Bad input raises an error that names the argument.

    Args:
        head: the module, which is copied and not modified, or a function that returns one. It has
            the attributes ``in_features``, ``n_classes``, ``ignore_index`` and ``reduction``. A
            few dozen classes are best; at least two are needed, and many are slower.
        loss_is_nll: whether the loss is minus ``log_prob`` of the target. False for other losses,
            such as entmax losses, label smoothing and sampled losses.
        gradients: whether to compare the gradients of the loss by hidden and parameters with finite
            differences, at fixed random draws. False if gradients are estimates.
        log_prob_gradients: whether ``log_prob`` is differentiable.
        draws: number of draws per row to compare with its probabilities.
        save: whether to check ``save``, ``load`` and ``cls(**head.config())``. False for a module
            that is not a ``Head``.
        checkpoint: whether to check ``torch.utils.checkpoint`` with ``use_reentrant=False``. False
            if a forward pass affects the next one.
        transforms: whether to check ``torch.func.grad`` of ``functional_call``.
        distributed: whether to check ``DistributedDataParallel`` and ``fully_shard``, on a CPU in a
            temporary group of one process; skipped if a process group exists, or without gloo.
        dtypes: dtypes that the head accepts; without float64, gradients are not checked.
        compile: backend of ``torch.compile``, as for :func:`check_map`; False to skip. Also checks
            ``torch.export`` of ``log_prob`` and ``topk`` with a dynamic number of rows.
        autocast: whether to check ``torch.autocast``.
        device: device to run on.
        seed: random seed; a random one if None.

    Raises:
        AssertionError: with the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> from lastlayer.heads import FullSoftmax
        >>> from lastlayer.testing import check_head
        >>> class Unnormalised(FullSoftmax):
        ...     def log_prob(self, hidden, classes=None):
        ...         return super().log_prob(hidden, classes) + 0.1
        >>> check_head(Unnormalised(8, 20), compile=False)
        Traceback (most recent call last):
        ...
        AssertionError: probabilities sum to 1, ...
    """
    suite = ClassSuite(
        *seeded(seed, device), dtypes, compile, given=head, draws=draws, loss_is_nll=loss_is_nll
    )
    exact = torch.float64 in dtypes
    others = rules.others(
        gradients=gradients and exact, log_prob_gradients=log_prob_gradients and exact,
        checkpoint=checkpoint, save=save, compiles=bool(compile), transforms=transforms,
        distributed=distributed,
    )  # fmt: skip
    suite.hold(
        *rules.FORM,
        probabilities_sum_to_one,
        *rules.CHOICES,
        samples_are_class_ids,
        samples_follow_the_probabilities,
        a_generator_repeats_the_samples,
        *([the_loss_is_minus_the_log_probability] if loss_is_nll else []),
        *rules.BATCHES,
        ignored_rows_count_for_nothing,
        all_rows_ignored_is_a_loss_of_zero,
        *others,
        targets_and_numbers_of_samples_are_checked,
        *([rules.autocast_works, autocast_keeps_sums_of_one] if autocast else []),
    )


def probabilities_sum_to_one(suite: HeadSuite) -> None:
    for dtype in suite.dtypes:
        head = suite.head(dtype)
        for scale in (0.01, 1.0, 20.0):
            hidden = suite.hidden(5, dtype=dtype, scale=scale)
            totals = head.log_prob(hidden).detach().double().exp().sum(-1)
            tolerance = 10 * SUM_TOLERANCE[accumulation_dtype(dtype)]
            suite.close(f"probabilities sum to 1, scale {scale:g}", totals, 1.0, tolerance, hidden)


def samples_are_class_ids(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(2, 3)
    drawn, rule = head.sample(hidden, 50), "sample(hidden, m) has m class ids per row"
    suite.typed(rule, drawn, torch.int64, (2, 3, 50), hidden)
    inside = (drawn >= 0) & (drawn < suite.n_classes)
    between = f"got ids from {drawn.min().item()} to {drawn.max().item()}"
    suite.require(rule, inside.all(-1), between, hidden)
    possible = (head.log_prob(hidden).gather(-1, drawn) > -math.inf).all(-1)
    rule = "a class of probability 0 is never drawn"
    suite.require(rule, possible, f"got {drawn.tolist()}", hidden)
    suite.typed("sample(hidden) is one draw per row", head.sample(hidden), torch.int64, (2, 3, 1))


def samples_follow_the_probabilities(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(3, scale=2.0)
    probs = head.log_prob(hidden).detach().double().exp().cpu().numpy()
    drawn = head.sample(hidden, suite.draws, generator=_generator(suite))
    for row in range(3):
        rule = "draws follow the probabilities of their row"
        suite.follows(rule, drawn[row], probs[row], hidden)
    rows = min(MOST_ROWS, max(100, MOST_NUMBERS // suite.n_classes))
    alike = hidden[0].expand(rows, -1)
    drawn = head.sample(alike, 1, generator=_generator(suite)).flatten()
    rule = "rows draw independently: the draws of equal rows follow their probabilities"
    suite.follows(rule, drawn, probs[0], hidden)


def a_generator_repeats_the_samples(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(4, scale=0.1)
    first, second = (head.sample(hidden, 20, generator=_generator(suite)) for _ in range(2))
    suite.close("a generator with the same seed gives the same draws", first, second, 0.0, hidden)


def the_loss_is_minus_the_log_probability(suite: HeadSuite) -> None:
    head, hidden, target = suite.head(reduction="none"), suite.hidden(9), suite.targets(9)
    losses, expected = suite.loss(head, hidden, target), -head.log_prob(hidden, target)
    rule = "the loss is minus log_prob of the target"
    suite.close(rule, losses, expected, 10 * suite.same, hidden)


def ignored_rows_count_for_nothing(suite: HeadSuite) -> None:
    if suite.ignore_index is None:
        return
    hidden, target = suite.hidden(6), suite.targets(6)
    ignored, counted = [1, 4], [0, 2, 3, 5]
    target[ignored] = suite.ignore_index
    hidden[1] = math.nan
    losses = suite.loss(suite.head(reduction="none"), hidden, target)
    suite.zero("an ignored row has loss 0, even if hidden is NaN", losses[ignored], hidden)
    mean = suite.loss(suite.head(), hidden, target)
    rule = "the mean is over the rows that are not ignored"
    suite.close(rule, mean, losses[counted].mean(), 1e-5, hidden)
    head = suite.head(reduction="sum")
    made = _gradients(suite, head, hidden, target)
    fewer = _gradients(suite, head, hidden[counted], target[counted])
    rows = made.pop("hidden")
    suite.zero("an ignored row has gradient 0, even if hidden is NaN", rows[ignored], hidden)
    rule = "other rows have the same gradient as without ignored rows"
    suite.close(rule, rows[counted], fewer.pop("hidden"), 1e-5, hidden)
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
        rule = f"reduction={reduction!r} is 0 if all rows are ignored"
        suite.zero(rule, suite.loss(head, hidden, target), hidden)
        for name, grad in _gradients(suite, head, hidden, target).items():
            suite.zero(f"the gradient of {name} is 0 if all rows are ignored", grad, hidden)


def autocast_keeps_sums_of_one(suite: HeadSuite) -> None:
    head, hidden = suite.head(torch.float32), suite.hidden(5, dtype=torch.float32)
    with torch.autocast(suite.device.type, dtype=torch.bfloat16):
        totals = head.log_prob(hidden).exp().sum(-1)
    suite.close("autocast to bfloat16: probabilities sum to 1", totals, 1.0, 1e-4, hidden)


def targets_and_numbers_of_samples_are_checked(suite: HeadSuite) -> None:
    head, hidden, target = suite.head(), suite.hidden(2, 3), suite.targets(2, 3)
    n = suite.n_classes

    def loss(given: Any) -> Any:
        return head(hidden, given)

    outside = target.clone()
    outside[1, 2] = n
    message = suite.refused("target", f"a target of {n}", loss, outside)
    told = str(n) in message and "(1, 2)" in message
    rule = "a target out of range is named with its position"
    suite.require(rule, told, f"expected {n} and (1, 2) in {message!r}", hidden)
    suite.refused("target", "targets of another shape", loss, target[:, :2])
    suite.refused("target", "floating targets", loss, target.double())
    suite.refused("target", "bool targets", loss, target > 0)
    for m in (0, -1, 1.0):
        suite.refused("n_samples", f"n_samples={m}", head.sample, hidden, m)


def _generator(suite: HeadSuite) -> torch.Generator:
    return torch.Generator(suite.device).manual_seed(suite.seed)


def _gradients(suite: HeadSuite, head: Any, hidden: Tensor, target: Tensor) -> dict[str, Tensor]:
    hidden = hidden.detach().requires_grad_()
    return suite.gradients(head, suite.loss(head, hidden, target), hidden)
