"""check_sampler: the rules of a sampler, one after the other."""

import torch
from torch import Tensor

from lastlayer.testing import _samplers_torch, _samplers_unique, _samplers_values
from lastlayer.testing._samplers_suite import SamplerSuite
from lastlayer.testing._suite import fresh_seed


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

    Above all that it draws with the probabilities that it says: a χ² test of ``draws`` draws, in
    bins of neighbouring classes with at least 10 expected draws each, and of the first draws of
    1000 steps and of 1000 seeds. By chance it fails less than once in
    a million times. Also checked:
    log-probabilities exponentiate to 1 over all classes, which takes O(n_classes) time; the same
    counter gives the same draws, another step or seed others; a generator repeats its draws; with
    the target left out the rest sums to 1; draws without replacement are different, as many as
    asked for, and as frequent as ``log_expected`` says; ``config`` and ``state_dict`` hold all
    there is; the dtype of a model does not change them; nothing requires a gradient; bad input is
    refused with an error that names the argument.

    Args:
        sampler: the module, which is copied and left alone.
        context: for a sampler that ``needs_context``: a few rows, each of which is tested.
        draws: how many are compared with their probabilities. A class whose probability is wrong
            by a part r shows from about 100 / (q r²) draws on.
        unique: the sampler draws without replacement too; not asked where it needs a context.
        state: ``from_config`` makes such a sampler, and ``load_state_dict`` its state.
        device: where to run.
        seed: repeats an earlier run; a fresh one otherwise.

    Raises:
        AssertionError: names the rule that is broken, the numbers and the seed.

    Example:
        >>> import torch
        >>> from lastlayer.samplers import Uniform
        >>> from lastlayer.testing import check_sampler
        >>> class Forgetful(Uniform):
        ...     def _draw(self, n, counter, context):
        ...         return super()._draw(n, counter, context).clamp(min=1)
        >>> check_sampler(Forgetful(10))
        Traceback (most recent call last):
        ...
        AssertionError: draws are as frequent as log_prob says: ...
    """
    suite = SamplerSuite(
        seed=fresh_seed(seed),
        device=torch.device(device),
        dtypes=(torch.float32,),
        given=sampler,
        context=context,
    )
    suite.hold(_samplers_values.draws_are_class_ids)
    suite.hold(_samplers_values.probabilities_sum_to_one)
    suite.hold(_samplers_values.draws_follow_the_probabilities, draws)
    suite.hold(_samplers_values.a_counter_repeats_the_draws)
    suite.hold(_samplers_values.a_generator_repeats_the_draws)
    suite.hold(_samplers_values.the_target_can_be_left_out)
    if unique and context is None:
        suite.hold(_samplers_unique.unique_draws_are_as_expected)
    if state:
        suite.hold(_samplers_torch.a_state_dict_is_all_it_takes)
    suite.hold(_samplers_torch.a_copy_stands_alone)
    suite.hold(_samplers_torch.a_dtype_changes_nothing)
    suite.hold(_samplers_torch.nothing_is_learned_by_gradients)
    suite.hold(_samplers_torch.bad_input_is_refused)
