"""check_multilabel_head: the rules of a head with any number of labels a row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer.testing import _heads_torch, _heads_values
from lastlayer.testing import _multilabel_rules as rules
from lastlayer.testing._heads_suite import HeadSuite
from lastlayer.testing._maps import FLOATING
from lastlayer.testing._suite import fresh_seed

# Labels listed for a row, some of them twice and some padding.
LISTED = 4


@dataclass
class MultiLabelSuite(HeadSuite):
    """A head whose targets are padded lists, ``(*batch, 4)``."""

    def targets(self, *batch: int) -> Tensor:
        """Lists with at least one label each, with padding and with duplicates."""
        lists = self.integers(self.n_classes, *batch, LISTED)
        lists[..., 1] = lists[..., 0]
        lists[..., 2] = self.padding
        return lists

    def all_targets(self) -> Tensor:
        """A list for each label."""
        ids = torch.arange(self.n_classes, device=self.device).unsqueeze(-1)
        return torch.cat([ids, ids.new_full((len(ids), LISTED - 1), self.padding)], -1)

    @property
    def padding(self) -> int:
        return int(self.given.ignore_index)


def check_multilabel_head(
    head: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATING,
    gradients: bool = True,
    save: bool = True,
    compile: str | Literal[False] = "aot_eager",  # noqa: A002 — reads well in a call
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a module keeps the contract of :class:`lastlayer.heads.MultiLabel`.

    Always checked: log-probabilities are at most 0, and for chosen labels the gathered ones;
    ``probability`` exponentiates them; ``topk`` is a sort; ``predict`` gives ascending lists, none
    of them with a label that is less probable than one that was left out, in the form that the
    loss takes; padding and duplicates change nothing, and lists in CSR are the same as padded
    ones; reductions and batch dimensions agree; empty batches work; a NaN stays in its row; losses
    and log-probabilities are float32, or float64 from float64; every parameter gets a gradient;
    ``state_dict`` and ``deepcopy`` keep everything; autocast works; bad input is refused with an
    error that names the argument.

    Args:
        head: the module, which is copied and left alone, or a function that makes one. It has
            the attributes ``in_features``, ``n_classes``, ``ignore_index`` and ``reduction``. A
            few dozen labels make the sharpest test.
        dtypes: what the head accepts; without float64 gradients are not checked.
        gradients: the gradient of the loss by hidden and by each parameter is its slope.
        save: ``save`` and ``load`` work. False for a module that is no ``Head``.
        compile: the backend for ``torch.compile(fullgraph=True)`` with gradient; False where the
            head cannot be compiled. Compiled code that is cached in this process is dropped.
        device: where to run.
        seed: repeats the inputs of an earlier run; fresh ones otherwise.

    Raises:
        AssertionError: names the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> from lastlayer.heads.multi_label import MultiLabel
        >>> check_multilabel_head(MultiLabel(8, 20), compile=False)
    """
    seed = fresh_seed(seed)
    suite = MultiLabelSuite(
        seed=seed, device=torch.device(device), dtypes=dtypes, given=_made(head, seed)
    )
    suite.hold(_heads_values.it_says_what_it_is)
    suite.hold(rules.probabilities_are_probabilities)
    suite.hold(_heads_values.chosen_classes_are_the_gathered_ones)
    suite.hold(_heads_values.topk_is_a_sort)
    suite.hold(rules.predicted_lists_are_the_most_probable_labels)
    suite.hold(rules.padding_and_duplicates_count_for_nothing)
    suite.hold(rules.csr_is_the_same_as_padded)
    suite.hold(_heads_values.reductions_agree)
    suite.hold(rules.batch_dimensions_do_not_matter)
    suite.hold(rules.an_empty_batch_works)
    suite.hold(_heads_values.a_nan_stays_in_its_row)
    suite.hold(_heads_values.half_precision_keeps_to_float64)
    suite.hold(_heads_values.nothing_is_left_to_chance_in_eval)
    suite.hold(_heads_torch.every_parameter_gets_a_gradient)
    if gradients and torch.float64 in dtypes:
        suite.hold(_heads_torch.the_gradient_is_right)
        suite.hold(_heads_torch.the_gradient_of_log_prob_is_right)
    suite.hold(_heads_torch.a_state_dict_is_all_it_takes)
    suite.hold(_heads_torch.a_copy_stands_alone)
    if save:
        suite.hold(_heads_torch.saving_and_loading_change_nothing)
    suite.hold(rules.bad_input_is_refused)
    suite.hold(rules.autocast_keeps_float32)
    if compile:
        suite.hold(_heads_torch.compiling_changes_nothing, compile)


def _made(head: Any, seed: int) -> Any:
    if isinstance(head, torch.nn.Module):
        return head
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return head()
