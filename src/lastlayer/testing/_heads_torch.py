"""Rules on the gradients of a head, and on how it works with the rest of torch."""

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lastlayer.testing._heads_suite import HeadSuite

# Classes that are tried for a gradient of every parameter.
_MOST_TARGETS = 512
# Of a step that is made to find a slope; its error is then far below that of a wrong gradient.
STEP = 1e-5
SLOPE_TOLERANCE = 1e-6


def the_gradient_is_right(suite: HeadSuite) -> None:
    hidden, target = suite.hidden(6), suite.targets(6)
    upstream = suite.normal(6)
    for reduction in ("mean", "none"):
        head = suite.head(torch.float64, reduction)

        def value(head: Any = head, rows: Tensor = hidden) -> Tensor:
            return (suite.loss(head, rows, target) * upstream).sum()

        _compare_slopes(
            suite, f"the gradient of the loss, reduction={reduction!r}", value, head, hidden
        )


def the_gradient_of_log_prob_is_right(suite: HeadSuite) -> None:
    head, hidden = suite.head(torch.float64), suite.hidden(4)
    best = head.topk(hidden, 1).classes

    def chosen() -> Tensor:
        total: Tensor = head.log_prob(hidden, best).sum()
        return total

    def gathered() -> Tensor:
        total: Tensor = head.log_prob(hidden).gather(-1, best).sum()
        return total

    _compare_slopes(suite, "the gradient of log_prob(hidden, classes)", chosen, head, hidden)
    _compare_slopes(suite, "the gradient of log_prob(hidden)", gathered, head, hidden)


def every_parameter_gets_a_gradient(suite: HeadSuite) -> None:
    head = suite.head()
    # Every class where they are few: a parameter may belong to some of them alone.
    target = torch.cat([suite.targets(32), suite.all_targets()[:_MOST_TARGETS]])
    hidden = suite.hidden(len(target)).requires_grad_()
    for name, grad in suite.gradients(head, suite.loss(head, hidden, target), hidden).items():
        rule = f"{name} gets a gradient"
        suite.require(rule, bool((grad != 0).any()), "it is 0 everywhere", hidden)
        suite.require(rule, grad.isfinite().all(), "it is not finite", hidden)


def a_state_dict_is_all_it_takes(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(4)
    other = _changed(suite, head)
    rule = "a head with another's state_dict gives the same"
    keys = suite.runs(rule, hidden, other.load_state_dict, head.state_dict())
    suite.require(rule, not keys.missing_keys, f"without {keys.missing_keys}", hidden)
    suite.close(rule, other.log_prob(hidden), head.log_prob(hidden), 0.0, hidden)


def a_copy_stands_alone(suite: HeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(4)
    before = head.log_prob(hidden).detach().clone()
    rule = "a deepcopy gives the same"
    suite.close(rule, copy.deepcopy(head).log_prob(hidden), before, 0.0, hidden)
    _changed(suite, head)
    suite.close("a deepcopy shares nothing", head.log_prob(hidden), before, 0.0, hidden)


def saving_and_loading_change_nothing(suite: HeadSuite) -> None:
    for dtype in {suite.finest, suite.dtypes[0]}:
        head, hidden = suite.head(dtype), suite.hidden(4, dtype=dtype)
        rule = "load gives what save was given"
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "head"
            suite.runs(rule, hidden, head.save, place)
            loaded = suite.runs(rule, hidden, type(head).load, place)
        suite.require(rule, type(loaded) is type(head), f"got {type(loaded).__name__}", hidden)
        loaded = loaded.to(suite.device)
        suite.require(rule, repr(loaded) == repr(head), f"got {loaded!r}", hidden)
        suite.close(rule, loaded.log_prob(hidden), head.log_prob(hidden), 0.0, hidden)


def autocast_works(suite: HeadSuite) -> None:
    rule = "autocast to bfloat16"
    head, target = suite.head(torch.float32), suite.targets(5)
    hidden = suite.hidden(5, dtype=torch.float32).requires_grad_()
    plain = suite.loss(head, hidden, target)
    expected = suite.gradients(head, plain, hidden)

    def run() -> tuple[Tensor, dict[str, Tensor], Tensor]:
        with torch.autocast(suite.device.type, dtype=torch.bfloat16):
            loss = suite.loss(head, hidden, target)
            probs = head.log_prob(hidden).exp()
        return loss, suite.gradients(head, loss, hidden), probs

    loss, made, probs = suite.runs(rule, hidden, run)
    for name, each in {"the loss": loss, "log_prob": probs, **made}.items():
        got = f"got {each.dtype}"
        suite.require(f"{rule}: {name} is float32", each.dtype == torch.float32, got, hidden)
    suite.close(rule, loss, plain, 5e-2, hidden)
    totals = probs.sum(-1)
    suite.close(f"{rule}: log_prob", totals, torch.ones_like(totals), 1e-4, hidden)
    for name, grad in made.items():
        # By its norm: a sparse head may count other classes in once scores are rounded.
        error, norm = float((grad - expected[name]).norm()), float(expected[name].norm())
        away = f"it is off by {error:g}, with a norm of {norm:g}"
        suite.require(f"{rule}: the gradient of {name}", error <= 0.4 * norm, away, hidden)


def compiling_changes_nothing(suite: HeadSuite, backend: str) -> None:
    rule = f"torch.compile(fullgraph=True, backend={backend!r}) with gradient"
    head, target = suite.head(), suite.targets(5)
    hidden = suite.hidden(5).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(head, fullgraph=True, backend=backend)
    with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
        loss = suite.runs(rule, hidden, suite.loss, compiled, hidden, target)
        made = suite.runs(rule, hidden, suite.gradients, head, loss, hidden)
    plain = suite.loss(head, hidden, target)
    suite.close(rule, loss, plain, suite.same, hidden)
    for name, expected in suite.gradients(head, plain, hidden).items():
        suite.close(f"{rule}: that of {name}", made[name], expected, suite.same, hidden)
    if suite.device.type == "cpu":
        _refuses_outside(suite, rule, compiled, hidden, target)


def _refuses_outside(
    suite: HeadSuite, rule: str, compiled: Any, hidden: Tensor, target: Tensor
) -> None:
    outside = target.clone()
    # As far out as a segmentation fault would be.
    outside[-1] = suite.n_classes + 2**40
    try:
        suite.loss(compiled, hidden, outside)
    except Exception:  # noqa: BLE001  # whatever a head raises
        return
    raise suite.failure(f"{rule}: a target out of range is refused", "nothing was raised")


def _changed(suite: HeadSuite, head: Any) -> Any:
    """A copy with other parameters."""
    other = copy.deepcopy(head)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(suite.normal(*parameter.shape, dtype=parameter.dtype))
    return other


def _compare_slopes(suite: HeadSuite, rule: str, value: Any, head: Any, hidden: Tensor) -> None:
    """The gradient against differences of the value, along one random direction a tensor."""
    hidden.requires_grad_()
    made = suite.gradients(head, value(), hidden)
    for name, leaf in suite.leaves(head, hidden).items():
        direction = suite.normal(*leaf.shape)
        direction /= direction.norm()
        expected = (made[name] * direction).sum()
        with torch.no_grad():
            before = leaf.detach().clone()
            leaf.copy_(before + STEP * direction)
            above = value()
            leaf.copy_(before - STEP * direction)
            below = value()
            leaf.copy_(before)
        slope = (above - below) / (2 * STEP)
        tolerance = SLOPE_TOLERANCE * max(1.0, float(made[name].norm()))
        suite.close(f"{rule} by {name}: against differences", expected, slope, tolerance, hidden)
