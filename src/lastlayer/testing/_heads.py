"""check_head: the rules of a head, one after the other."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from lastlayer.testing import _heads_errors, _heads_samples, _heads_torch, _heads_values
from lastlayer.testing._heads_suite import HeadSuite
from lastlayer.testing._maps import FLOATING
from lastlayer.testing._suite import fresh_seed


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
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a module keeps the contract of :class:`lastlayer.heads.Head`.

    Always checked: log-probabilities exponentiate to 1 over all classes at any scale of hidden;
    for chosen classes they are the gathered ones; ``topk`` is a sort of them; ``sample`` draws
    classes as often as they are probable, independently from row to row, and repeatably with a
    generator; reductions and batch dimensions agree; ignored rows have no loss and no gradient,
    and where all are ignored the loss is 0; empty batches work; a NaN stays in its row; losses
    and log-probabilities are float32, or float64 from float64; every parameter gets a gradient;
    ``state_dict`` and ``deepcopy`` keep everything; in eval mode nothing is left to chance; bad
    input is refused with an error that names the argument.

    Args:
        head: the module, which is copied and left alone, or a function that makes one. It has
            the attributes ``in_features``, ``n_classes``, ``ignore_index`` and ``reduction``. A
            few dozen classes make the sharpest test; two are the fewest, more are only slower.
        dtypes: what the head accepts; without float64 gradients are not checked.
        loss_is_nll: the loss is minus ``log_prob`` of the target. False where it is another one,
            such as that of entmax, a smoothed or a sampled one.
        gradients: the gradient of the loss by hidden and by each parameter is its slope, with
            chance held fixed. False where a gradient is an estimate.
        log_prob_gradients: ``log_prob`` is differentiable.
        draws: how often ``sample`` is asked to draw for a row.
        save: ``save`` and ``load`` work. False for a module that is no ``Head``.
        compile: the backend for ``torch.compile(fullgraph=True)`` with gradient; False where the
            head cannot be compiled. Compiled code that is cached in this process is dropped.
        autocast: the head works under ``torch.autocast``.
        device: where to run.
        seed: repeats the inputs of an earlier run; fresh ones otherwise.

    Raises:
        AssertionError: names the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> from lastlayer.heads import FullSoftmax
        >>> from lastlayer.testing import check_head
        >>> class Unnormalised(FullSoftmax):
        ...     def _log_probs(self, scores):
        ...         return scores
        >>> check_head(Unnormalised(8, 20), compile=False)
        Traceback (most recent call last):
        ...
        AssertionError: probabilities sum to 1, ...
    """
    seed = fresh_seed(seed)
    suite = HeadSuite(
        seed=seed, device=torch.device(device), dtypes=dtypes, given=_made(head, seed)
    )
    suite.hold(_heads_values.it_says_what_it_is)
    suite.hold(_heads_values.probabilities_sum_to_one)
    suite.hold(_heads_values.chosen_classes_are_the_gathered_ones)
    suite.hold(_heads_values.topk_is_a_sort)
    suite.hold(_heads_samples.samples_are_class_ids)
    suite.hold(_heads_samples.samples_follow_the_probabilities, draws)
    suite.hold(_heads_samples.a_generator_repeats_the_samples)
    if loss_is_nll:
        suite.hold(_heads_values.the_loss_is_minus_the_log_probability)
    suite.hold(_heads_values.reductions_agree)
    suite.hold(_heads_values.batch_dimensions_do_not_matter)
    suite.hold(_heads_values.an_empty_batch_works)
    suite.hold(_heads_values.ignored_rows_count_for_nothing)
    suite.hold(_heads_values.all_rows_ignored_is_a_loss_of_zero)
    suite.hold(_heads_values.a_nan_stays_in_its_row)
    suite.hold(_heads_values.half_precision_keeps_to_float64)
    suite.hold(_heads_values.nothing_is_left_to_chance_in_eval)
    suite.hold(_heads_torch.every_parameter_gets_a_gradient)
    if gradients and torch.float64 in dtypes:
        suite.hold(_heads_torch.the_gradient_is_right)
    if log_prob_gradients and torch.float64 in dtypes:
        suite.hold(_heads_torch.the_gradient_of_log_prob_is_right)
    suite.hold(_heads_torch.a_state_dict_is_all_it_takes)
    suite.hold(_heads_torch.a_copy_stands_alone)
    if save:
        suite.hold(_heads_torch.saving_and_loading_change_nothing)
    suite.hold(_heads_errors.bad_input_is_refused)
    if autocast:
        suite.hold(_heads_torch.autocast_works)
    if compile:
        suite.hold(_heads_torch.compiling_changes_nothing, compile)


def _made(head: Any, seed: int) -> Any:
    if isinstance(head, torch.nn.Module):
        return head
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return head()
