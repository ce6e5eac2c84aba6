"""Rules on the state of a sampler, its dtypes, and what it says about bad input."""

import copy
import json
from collections.abc import Callable
from typing import Any

import torch

from lastlayer._torch import debug
from lastlayer.testing._samplers_suite import SamplerSuite


def a_state_dict_is_all_it_takes(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    ids = suite.drawn(sampler, 300, context)
    rule = "a sampler from config() with another's state_dict gives the same"
    config = suite.runs(rule, None, lambda: json.loads(json.dumps(sampler.config())))
    made = suite.runs(rule, None, type(sampler).from_config, config).to(suite.device)
    suite.runs(rule, None, made.load_state_dict, sampler.state_dict())
    suite.equal(rule, suite.drawn(made, 300, context), ids)
    suite.equal(rule, suite.log_prob(made, ids, context), suite.log_prob(sampler, ids, context))
    suite.demand(rule, repr(made) == repr(sampler), f"got {made!r} for {sampler!r}")


def a_copy_stands_alone(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    ids = suite.drawn(sampler, 300, context)
    other = copy.deepcopy(sampler)
    for value in other.state_dict().values():
        value.zero_()
    suite.equal("a deepcopy shares nothing", suite.drawn(sampler, 300, context), ids)


def a_dtype_changes_nothing(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    ids = suite.drawn(sampler, 300, context)
    log_prob = suite.log_prob(sampler, ids, context)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        sampler = sampler.to(dtype)
        rule = f"a sampler within a model in {dtype} stays as it is"
        suite.equal(rule, suite.drawn(sampler, 300, context), ids)
        suite.equal(rule, suite.log_prob(sampler, ids, context), log_prob)


def nothing_is_learned_by_gradients(suite: SamplerSuite) -> None:
    sampler = suite.sampler()
    names = [name for name, _ in sampler.named_parameters()]
    suite.demand("a sampler has no parameters", not names, f"got {names}")
    for context in suite.contexts():
        log_prob = suite.log_prob(sampler, suite.drawn(sampler, 3, context), context)
        rule = "log_prob is a constant"
        suite.demand(rule, not log_prob.requires_grad, "got one that requires gradients")


def bad_input_is_refused(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    n = suite.n_classes

    def draws(given: Any) -> Any:
        return sampler.sample(given, context=context)

    for number in (0, -1, 2.5, True, None):
        _refused(suite, "n", f"sample({number})", draws, number)

    def counted(given: Any) -> Any:
        return sampler.sample(3, context=context, counter=given)

    for counter in (3, (1,), (1, 2.5), (1, 2**63), torch.zeros(2), torch.zeros(3).long()):
        _refused(suite, "counter", f"a counter of {counter}", counted, counter)
    generator = torch.Generator(suite.device)

    def with_both(given: Any) -> Any:
        return sampler.sample(3, context=context, counter=(1, 2), generator=given)

    _refused(suite, "counter", "a counter and a generator", with_both, generator)

    def asked(given: Any) -> Any:
        return sampler.log_prob(given, context)

    shape = (3,) if context is None else (1, 3)
    ids = torch.zeros(shape, dtype=torch.int64, device=suite.device)
    outside = ids.clone()
    outside[..., 2] = n
    message = _refused(suite, "ids", f"an id of {n}", asked, outside)
    rule = "an id out of range is named with its position"
    suite.demand(rule, str(n) in message and "2" in message, f"got {message!r}")
    _refused(suite, "ids", "an id of -1", asked, ids - 1)
    _refused(suite, "ids", "floating ids", asked, ids.double())
    _refused(suite, "ids", "int32 ids", asked, ids.int())
    _refused(suite, "ids", "ids that are no tensor", asked, [0])

    def in_context(given: Any) -> Any:
        return sampler.sample(3, context=given)

    wrong = ids if context is None else context[:, :0]
    _refused(suite, "context", "a context of the wrong shape", in_context, wrong)
    if context is not None:
        _refused(suite, "context", "no context", in_context, None)
    else:
        _refused(suite, "n", f"unique({n + 1})", sampler.unique, n + 1)


def _refused(
    suite: SamplerSuite, name: str, what: str, call: Callable[[Any], Any], given: Any
) -> str:
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
    suite.demand(rule, good, f"expected '{name}: expected …, got …', got {message!r}")
    return message
