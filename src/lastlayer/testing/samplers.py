"""check_sampler: the rules for samplers."""

import copy
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastlayer.testing.suite import MOST_DEVIATIONS, Reals, Suite, pooled, seeded

# Tolerance of a sum of probabilities, whose logarithms are rounded to float32.
SUM_TOLERANCE = 4e-6
# Number of steps, and of seeds, whose first draws are tested.
STEPS = 1000
# Classes per call of log_prob.
CHUNK = 1 << 20
# Repetitions of draws without replacement, and minimum expected draws per bin.
REPEATS, LEAST_EXPECTED = 300, 200.0
# The test of a bin fails by chance with probability e^-28.
EXPONENT = 28.0


@dataclass(kw_only=True)
class SamplerSuite(Suite):
    """A sampler, which is copied and not modified, and contexts for it."""

    # Any, since the suite checks whether it is a sampler.
    given: Any
    context: Tensor | None
    draws: int

    def sampler(self) -> Any:
        """A copy of the sampler on the device of the suite."""
        return copy.deepcopy(self.given).to(self.device)

    @property
    def n_classes(self) -> int:
        return int(self.given.n_classes)

    def contexts(self) -> list[Tensor | None]:
        """Contexts of one row each; ``[None]`` for a sampler without context."""
        return [None] if self.context is None else list(self.context.to(self.device).split(1))

    def drawn(self, sampler: Any, n: int, context: Tensor | None, step: int = 0) -> Tensor:
        """``(n,)`` ids for one context."""
        ids: Tensor = sampler.sample(n, context=context, rng_counter=(self.seed, step))
        return ids.reshape(-1)

    def log_prob(self, sampler: Any, ids: Tensor, context: Tensor | None) -> Tensor:
        """``(n,)`` log-probabilities for one context."""
        found: Tensor = sampler.log_prob(ids if context is None else ids[None], context)
        return found.reshape(-1)

    def probs(self, sampler: Any, context: Tensor | None) -> Reals:
        """Probabilities of all classes, in float64."""
        ids = torch.arange(self.n_classes, device=self.device).split(CHUNK)
        found = [self.log_prob(sampler, each, context).double().exp().cpu() for each in ids]
        return torch.cat(found).numpy()


def check_sampler(
    sampler: torch.nn.Module,
    *,
    context: Tensor | None = None,
    draws: int = 200_000,
    unique: bool = True,
    state: bool = True,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a module keeps the contract of :class:`lastlayer.samplers.Sampler`.

    Most important, draws have the probabilities of ``log_prob``: this is a χ² test of ``draws``
    draws, in bins of neighbouring classes with at least 10 expected draws each, and of the first
    draws of 1000 steps and of 1000 seeds. It fails by chance in less than one of a million runs.
    These rules are checked too:

    - Probabilities of all classes sum to 1, also without the target. This takes O(n_classes) time.
    - The same counter gives the same draws, another step or seed gives other draws, and a generator
      with the same seed repeats its draws.
    - Draws without replacement are unique, of the given number, and follow ``log_expected``.
    - ``config`` and ``state_dict`` are complete, ``deepcopy`` shares nothing, and ``module.to``
      with another dtype changes nothing. There are no gradients.
    - Bad input raises an error that names the argument.

    Args:
        sampler: the module, which is copied and not modified.
        context: a few rows of context for a sampler with ``needs_context``; each row is tested.
        draws: number of draws to compare with their probabilities. A relative error r of the
            probability q of a class is found from about 100 / (q r²) draws on.
        unique: whether to check draws without replacement; skipped if there is a context.
        state: whether to check that ``cls(**sampler.config())``, and ``from_config`` with
            ``load_state_dict``, give the same sampler.
        device: device to run on.
        seed: random seed; a random one if None.

    Raises:
        AssertionError: with the rule that is broken, the numbers and the seed.

    Example:
        >>> import torch
        >>> from lastlayer.samplers import Uniform
        >>> from lastlayer.testing import check_sampler
        >>> class Forgetful(Uniform):
        ...     def _draw(self, n, rng_counter, context):
        ...         return super()._draw(n, rng_counter, context).clamp(min=1)
        >>> check_sampler(Forgetful(10))
        Traceback (most recent call last):
        ...
        AssertionError: draws follow log_prob: ...
    """
    suite = SamplerSuite(*seeded(seed, device), given=sampler, context=context, draws=draws)
    suite.hold(
        draws_are_class_ids,
        probabilities_sum_to_one,
        draws_follow_the_probabilities,
        a_counter_repeats_the_draws,
        a_generator_repeats_the_draws,
        the_target_can_be_left_out,
        *([unique_draws_are_as_expected] if unique and context is None else []),
        *([a_state_dict_is_all_it_takes] if state else []),
        a_copy_stands_alone,
        a_dtype_changes_nothing,
        nothing_is_learned_by_gradients,
        bad_input_is_refused,
    )


def draws_are_class_ids(suite: SamplerSuite) -> None:
    sampler = suite.sampler()
    context = None if suite.context is None else suite.context.to(suite.device)
    for n in (1, 2, 77):
        shape = (n,) if context is None else (len(context), n)
        ids = sampler.sample(n, context=context, rng_counter=(suite.seed, 0))
        suite.typed(f"sample({n}) gives int64 {shape}", ids, torch.int64, shape)
        inside = bool(((ids >= 0) & (ids < suite.n_classes)).all())
        suite.require("draws are class ids", inside, f"from {int(ids.min())} to {int(ids.max())}")
        log_prob = sampler.log_prob(ids, context)
        kind = f"got {log_prob.dtype} {tuple(log_prob.shape)} on {log_prob.device}"
        right = log_prob.dtype in (torch.float32, torch.float64) and log_prob.shape == shape
        suite.require("log_prob has the shape of ids, in float32 or float64", right, kind)
        suite.require("on the device of the sampler", log_prob.device == ids.device, kind)


def probabilities_sum_to_one(suite: SamplerSuite) -> None:
    sampler = suite.sampler()
    for context in suite.contexts():
        total = float(suite.probs(sampler, context).sum())
        right = abs(total - 1.0) <= SUM_TOLERANCE
        suite.require("log_prob exponentiates to 1 over all classes", right, f"got {total:.9g}")


def draws_follow_the_probabilities(suite: SamplerSuite) -> None:
    sampler = suite.sampler()
    for context in suite.contexts():
        ids = suite.drawn(sampler, suite.draws, context)
        probs = suite.probs(sampler, context)
        suite.follows("draws follow log_prob", ids, probs)
    context = suite.contexts()[0]
    probs = suite.probs(sampler, context)
    for name, counters in {
        "steps": [(suite.seed, step) for step in range(STEPS)],
        "seeds": [(suite.seed + more, 0) for more in range(STEPS)],
    }.items():
        first = [
            sampler.sample(1, context=context, rng_counter=each).reshape(-1) for each in counters
        ]
        rule = f"{name} draw independently: the first draws of all follow log_prob"
        suite.follows(rule, torch.cat(first), probs)


def a_counter_repeats_the_draws(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    ids = suite.drawn(sampler, 1000, context)
    again = suite.drawn(sampler, 1000, context)
    suite.close("the same counter gives the same draws", again, ids, 0.0)
    counter = torch.tensor([suite.seed, 0], device=suite.device)
    again = sampler.sample(1000, context=context, rng_counter=counter).reshape(-1)
    suite.close("a counter may be a tensor", again, ids, 0.0)
    both = sampler.sample_with_log_prob(1000, context=context, rng_counter=counter)
    suite.close("sample_with_log_prob has the draws of sample", both.ids.reshape(-1), ids, 0.0)
    rule = "sample_with_log_prob has the values of log_prob"
    right = suite.log_prob(sampler, ids, context)
    suite.close(rule, both.log_prob.reshape(-1), right, 4e-6)
    if context is None:
        rule = "the first draws do not depend on the number of draws"
        suite.close(rule, suite.drawn(sampler, 333, context), ids[:333], 0.0)
    if _leaves_much_to_chance(suite, sampler, context):
        step = suite.drawn(sampler, 1000, context, 1)
        seed = sampler.sample(1000, context=context, rng_counter=(suite.seed + 1, 0)).reshape(-1)
        for name, other in {"step": step, "seed": seed}.items():
            differs = not torch.equal(other, ids)
            suite.require(f"another {name} gives other draws", differs, "got the same 1000")


def a_generator_repeats_the_draws(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]

    def drawn() -> Tensor:
        generator = torch.Generator(suite.device).manual_seed(suite.seed + 1)
        ids: Tensor = sampler.sample(500, context=context, generator=generator)
        return ids

    first = drawn()
    suite.close("a generator with the same seed gives the same draws", drawn(), first, 0.0)
    if _leaves_much_to_chance(suite, sampler, context):
        other = not torch.equal(sampler.sample(500, context=context), first)
        suite.require("without a generator draws use torch's default", other, "got the same 500")


def the_target_can_be_left_out(suite: SamplerSuite) -> None:
    sampler = suite.sampler()
    if suite.n_classes == 1 or suite.n_classes > 1 << 16:
        return
    everything = torch.arange(suite.n_classes, device=suite.device)
    for context in suite.contexts():
        target = suite.integers(suite.n_classes, 1)
        asked = everything if context is None else everything[None]
        log_prob = sampler.without(target, asked, context).double()
        rule = f"without target {int(target)} the other probabilities sum to 1"
        total = float(log_prob.exp().sum())
        suite.require(rule, abs(total - 1.0) <= 2 * SUM_TOLERANCE, f"got {total:.9g}")
        suite.close("the target has probability 0", log_prob[0, int(target)], -math.inf, 0.0)


def unique_draws_are_as_expected(suite: SamplerSuite) -> None:
    for n in sorted({1, max(1, suite.n_classes // 3), min(suite.n_classes, 20)}):
        for method in ("fixed", "poisson"):
            _check_unique(suite, n, method)


def a_state_dict_is_all_it_takes(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    ids = suite.drawn(sampler, 300, context)
    right = suite.log_prob(sampler, ids, context)
    rule = "cls(**sampler.config()) draws the same"
    made = suite.runs(rule, None, lambda: type(sampler)(**sampler.config())).to(suite.device)
    if context is None:
        _gives_the_same(suite, rule, made, context, ids, right)
    rule = "a sampler from a saved config, with the state_dict of another, gives the same draws"
    config = suite.runs(rule, None, lambda: json.loads(json.dumps(sampler._saved_config())))
    made = suite.runs(rule, None, type(sampler).from_config, config).to(suite.device)
    suite.runs(rule, None, made.load_state_dict, sampler.state_dict())
    _gives_the_same(suite, rule, made, context, ids, right)
    suite.require(rule, repr(made) == repr(sampler), f"got {made!r} for {sampler!r}")


def a_copy_stands_alone(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    ids = suite.drawn(sampler, 300, context)
    for value in copy.deepcopy(sampler).state_dict().values():
        value.zero_()
    suite.close("a deepcopy shares nothing", suite.drawn(sampler, 300, context), ids, 0.0)


def a_dtype_changes_nothing(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    ids = suite.drawn(sampler, 300, context)
    log_prob = suite.log_prob(sampler, ids, context)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        rule = f"a sampler in a model in {dtype} does not change"
        _gives_the_same(suite, rule, sampler.to(dtype), context, ids, log_prob)


def nothing_is_learned_by_gradients(suite: SamplerSuite) -> None:
    sampler = suite.sampler()
    names = [name for name, _ in sampler.named_parameters()]
    suite.require("a sampler has no parameters", not names, f"got {names}")
    for context in suite.contexts():
        log_prob = suite.log_prob(sampler, suite.drawn(sampler, 3, context), context)
        rule = "log_prob is a constant"
        suite.require(rule, not log_prob.requires_grad, "got one that requires gradients")


def bad_input_is_refused(suite: SamplerSuite) -> None:
    sampler, context, n = suite.sampler(), suite.contexts()[0], suite.n_classes

    def sample(m: Any, context: Any = context, **chance: Any) -> Any:
        return sampler.sample(m, context=context, **chance)

    def log_prob(given: Any) -> Any:
        return sampler.log_prob(given, context)

    for number in (0, -1, 2.5, True, None):
        suite.refused("n", f"sample({number})", sample, number)
    for counter in (3, (1,), (1, 2.5), (1, 2**63), torch.zeros(2), torch.zeros(3).long()):
        what = f"a counter of {counter}"
        suite.refused("rng_counter", what, lambda given: sample(3, rng_counter=given), counter)
    both = {"rng_counter": (1, 2), "generator": torch.Generator(suite.device)}
    suite.refused("rng_counter", "a counter and a generator", lambda: sample(3, **both))
    ids = torch.zeros((3,) if context is None else (1, 3), dtype=torch.int64, device=suite.device)
    outside = ids.clone()
    outside[..., 2] = n
    message = suite.refused("ids", f"an id of {n}", log_prob, outside)
    rule = "an id out of range is named with its position"
    suite.require(rule, str(n) in message and "2" in message, f"got {message!r}")
    suite.refused("ids", "an id of -1", log_prob, ids - 1)
    suite.refused("ids", "floating ids", log_prob, ids.double())
    suite.refused("ids", "ids that are no tensor", log_prob, [0])
    wrong = ids if context is None else context[:, :0]
    suite.refused("context", "a context of the wrong shape", sample, 3, wrong)
    if context is not None:
        suite.refused("context", "no context", sample, 3, None)
    else:
        suite.refused("n", f"unique({n + 1})", sampler.unique, n + 1)


def _leaves_much_to_chance(suite: SamplerSuite, sampler: Any, context: Tensor | None) -> bool:
    """Whether draws with other seeds should differ: no class has almost all of the probability."""
    return bool((suite.probs(sampler, context) ** 2).sum() < 0.97)


def _gives_the_same(
    suite: SamplerSuite, rule: str, sampler: Any, context: Tensor | None, ids: Tensor, right: Tensor
) -> None:
    suite.close(rule, suite.drawn(sampler, len(ids), context), ids, 0.0)
    suite.close(rule, suite.log_prob(sampler, ids, context), right, 0.0)


def _check_unique(suite: SamplerSuite, n: int, method: str) -> None:
    sampler, what = suite.sampler(), f"unique({n}, method={method!r})"
    everything = torch.arange(suite.n_classes, device=suite.device)
    probs = sampler.log_expected(everything, n).double().exp().cpu().numpy()
    total, most = float(probs.sum()), float(probs.max())
    rule = f"{what} has inclusion probabilities that sum to {n}, none above 1"
    fine = abs(total - n) <= 1e-5 * n and most <= 1.0 + 1e-6
    suite.require(rule, fine, f"got a sum of {total:.9g}, and a maximum of {most:.9g}")
    counts = np.zeros(suite.n_classes)
    for step in range(REPEATS):
        ids, log_expected = sampler.unique(n, method=method, rng_counter=(suite.seed, step))
        rule = f"{what} has the values of log_expected"
        suite.close(rule, log_expected, sampler.log_expected(ids, n), 0.0)
        if method == "fixed":
            suite.require(f"{what} draws {n}", len(ids) == n, f"got {len(ids)}")
        drawn = np.bincount(ids.cpu().numpy(), minlength=suite.n_classes)
        suite.require(f"{what} draws no class twice", drawn.max(initial=0) <= 1, f"got {ids}")
        counts += drawn
    rule = f"{what} draws classes with the probabilities of log_expected"
    missed = (probs == 1.0) & (counts < REPEATS)
    worst = int(missed.argmax())
    told = f"class {worst} has probability 1, and was drawn {counts[worst]:.0f} of {REPEATS} times"
    suite.require(rule, not missed.any(), told)
    expected, found, first = pooled(REPEATS * probs, counts, LEAST_EXPECTED)
    # Bernstein's bound, for classes that are independent or exclude each other.
    variance = np.add.reduceat(REPEATS * probs * np.clip(1.0 - probs, 0.0, 1.0), first)
    allowed = np.sqrt(2 * EXPONENT * variance) + 2 * EXPONENT / 3
    worst = int((np.abs(found - expected) - allowed).argmax())
    told = (
        f"from class {first[worst]} on expected {expected[worst]:.1f} draws in {REPEATS} runs, "
        f"got {found[worst]:.0f}; chance explains a difference of {allowed[worst]:.1f}"
    )
    suite.require(rule, abs(found[worst] - expected[worst]) <= allowed[worst], told)
    mean = counts.sum() / REPEATS
    near = abs(mean - n) <= MOST_DEVIATIONS * math.sqrt(n / REPEATS)
    suite.require(f"{what} draws {n} on average", near, f"got {mean}")
