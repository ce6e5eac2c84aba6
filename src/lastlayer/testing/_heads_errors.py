"""Rules on what a head says about bad input."""

from collections.abc import Callable
from typing import Any

import torch

from lastlayer._torch import debug
from lastlayer.testing._heads_suite import HeadSuite


def bad_input_is_refused(suite: HeadSuite) -> None:
    head, hidden, target = suite.head(), suite.hidden(2, 3), suite.targets(2, 3)
    n = suite.n_classes
    wider = torch.cat([hidden, hidden[..., :1]], -1)
    calls: dict[str, Callable[[Any], Any]] = {
        "forward": lambda given: head(given, target),
        "log_prob": head.log_prob,
        "topk": lambda given: head.topk(given, 1),
        "sample": head.sample,
    }
    for name, call in calls.items():
        _refused(suite, "hidden", f"hidden of another width ({name})", call, wider)
        _refused(suite, "hidden", f"hidden of integers ({name})", call, hidden.long())
        _refused(suite, "hidden", f"hidden that is no tensor ({name})", call, hidden.tolist())

    def loss(given: Any) -> Any:
        return head(hidden, given)

    outside = target.clone()
    outside[1, 2] = n
    message = _refused(suite, "target", f"a target of {n}", loss, outside)
    rule = "a target out of range is named with its position"
    told = str(n) in message and "(1, 2)" in message
    suite.require(rule, told, f"expected {n} and (1, 2) in {message!r}", hidden)
    _refused(suite, "target", "targets of another shape", loss, target[:, :2])
    _refused(suite, "target", "floating targets", loss, target.double())
    _refused(suite, "target", "int32 targets", loss, target.int())

    def chosen(given: Any) -> Any:
        return head.log_prob(hidden, given)

    _refused(suite, "classes", f"a class of {n}", chosen, torch.full_like(target, n)[0])
    _refused(suite, "classes", "a class of -1", chosen, torch.full_like(target, -1)[0])
    _refused(suite, "classes", "classes of another batch", chosen, target.new_zeros(3, 2, 1))
    _refused(suite, "classes", "floating classes", chosen, target.new_zeros(1).double())

    def best(given: Any) -> Any:
        return head.topk(hidden, given)

    for k in (0, -1, n + 1, 1.0, True):
        _refused(suite, "k", f"k={k}", best, k)

    def drawn(given: Any) -> Any:
        return head.sample(hidden, given)

    for m in (0, -1, 1.0):
        _refused(suite, "n_samples", f"n_samples={m}", drawn, m)


def _refused(suite: HeadSuite, name: str, what: str, call: Callable[[Any], Any], given: Any) -> str:
    """The message of the error; anything but a good one breaks the rule."""
    rule = f"{what}: a ValueError or TypeError that names the argument"
    try:
        with debug():  # values on a GPU are checked here alone
            call(given)
    except (ValueError, TypeError) as error:
        message = str(error)
    except Exception as error:
        raise suite.failure(rule, f"raised {type(error).__name__}: {error}") from error
    else:
        raise suite.failure(rule, "nothing was raised")
    good = message.startswith(f"{name}: ") and "expected" in message and "got" in message
    if not good:
        raise suite.failure(rule, f"expected '{name}: expected …, got …', got {message!r}")
    return message
