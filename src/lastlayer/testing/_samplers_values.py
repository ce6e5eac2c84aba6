"""Rules on what a sampler draws, and on what it says about that."""

import torch

from lastlayer.testing._samplers_suite import SamplerSuite

# Of a sum of probabilities; each is rounded as its logarithm in float32 is.
SUM_TOLERANCE = 4e-6
# Steps that are drawn from once each.
STEPS = 1000


def draws_are_class_ids(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.context
    for n in (1, 2, 77):
        shape = (n,) if context is None else (len(context), n)
        given = None if context is None else context.to(suite.device)
        ids = sampler.sample(n, context=given, counter=(suite.seed, 0))
        kind = f"got {ids.dtype} {tuple(ids.shape)}"
        right = ids.dtype == torch.int64 and ids.shape == shape
        suite.demand(f"sample({n}) gives int64 {shape}", right, kind)
        inside = bool(((ids >= 0) & (ids < suite.n_classes)).all())
        suite.demand("draws are class ids", inside, f"from {int(ids.min())} to {int(ids.max())}")
        log_prob = sampler.log_prob(ids, given)
        kind = f"got {log_prob.dtype} {tuple(log_prob.shape)}"
        right = log_prob.dtype in (torch.float32, torch.float64) and log_prob.shape == shape
        suite.demand("log_prob has the shape of ids, in float32 or float64", right, kind)
        suite.demand("on the device of the sampler", log_prob.device == ids.device, kind)


def probabilities_sum_to_one(suite: SamplerSuite) -> None:
    sampler = suite.sampler()
    for context in suite.contexts():
        total = float(suite.probs(sampler, context).sum())
        right = abs(total - 1.0) <= SUM_TOLERANCE
        suite.demand("log_prob exponentiates to 1 over all classes", right, f"got {total:.9g}")


def draws_follow_the_probabilities(suite: SamplerSuite, draws: int) -> None:
    sampler = suite.sampler()
    rule = "draws are as frequent as log_prob says"
    for context in suite.contexts():
        probs = suite.probs(sampler, context)
        suite.follows(rule, suite.drawn(sampler, draws, context), probs)
    context = suite.contexts()[0]
    probs = suite.probs(sampler, context)
    ids = [suite.drawn(sampler, 1, context, step) for step in range(STEPS)]
    rule = "steps draw on their own: the first draw of each is as frequent as log_prob says"
    suite.follows(rule, torch.cat(ids), probs)
    ids = [
        sampler.sample(1, context=context, counter=(seed, 0)).reshape(-1)
        for seed in range(suite.seed, suite.seed + STEPS)
    ]
    rule = "seeds draw on their own: the first draw of each is as frequent as log_prob says"
    suite.follows(rule, torch.cat(ids), probs)


def a_counter_repeats_the_draws(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    ids = suite.drawn(sampler, 1000, context)
    suite.equal("the same counter gives the same draws", suite.drawn(sampler, 1000, context), ids)
    counter = torch.tensor([suite.seed, 0], device=suite.device)
    again = sampler.sample(1000, context=context, counter=counter).reshape(-1)
    suite.equal("a counter may be a tensor", again, ids)
    both = sampler.sample_with_log_prob(1000, context=context, counter=counter)
    suite.equal("sample_with_log_prob draws what sample draws", both.ids.reshape(-1), ids)
    far = (both.log_prob.reshape(-1) - suite.log_prob(sampler, ids, context)).abs().max()
    rule = "sample_with_log_prob says what log_prob says"
    suite.demand(rule, float(far) <= 4e-6, f"up to {float(far):.3g} apart")
    if context is None:
        rule = "the first draws do not depend on how many are asked for"
        suite.equal(rule, suite.drawn(sampler, 333, context), ids[:333])
    # Where one class has nearly all of the probability, draws are the same by chance.
    if (suite.probs(sampler, context) ** 2).sum() < 0.97:
        step = not torch.equal(suite.drawn(sampler, 1000, context, 1), ids)
        suite.demand("another step gives other draws", step, "got the same 1000")
        other = sampler.sample(1000, context=context, counter=(suite.seed + 1, 0)).reshape(-1)
        seed = not torch.equal(other, ids)
        suite.demand("another seed gives other draws", seed, "got the same 1000")


def a_generator_repeats_the_draws(suite: SamplerSuite) -> None:
    sampler, context = suite.sampler(), suite.contexts()[0]
    first, second = (
        sampler.sample(
            500,
            context=context,
            generator=torch.Generator(suite.device).manual_seed(suite.seed + 1),
        )
        for _ in range(2)
    )
    suite.equal("a generator with the same seed gives the same draws", second, first)
    if (suite.probs(sampler, context) ** 2).sum() < 0.97:
        other = not torch.equal(sampler.sample(500, context=context), first)
        suite.demand("without a generator chance is torch's own", other, "got the same 500")


def the_target_can_be_left_out(suite: SamplerSuite) -> None:
    sampler = suite.sampler()
    if suite.n_classes == 1 or suite.n_classes > 1 << 16:
        return
    for context in suite.contexts():
        everything = torch.arange(suite.n_classes, device=suite.device)
        target = suite.integers(suite.n_classes, 1)
        asked = everything if context is None else everything[None]
        log_prob = sampler.without(target, asked, context).double()
        rule = f"without target {int(target)} the others exponentiate to 1"
        total = float(log_prob.exp().sum())
        suite.demand(rule, abs(total - 1.0) <= 2 * SUM_TOLERANCE, f"got {total:.9g}")
        left_out = float(log_prob[0, int(target)]) == -torch.inf
        suite.demand("the target has probability 0", left_out, f"got {log_prob[0, int(target)]}")
