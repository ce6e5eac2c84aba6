"""check_multilabel_loss and check_multilabel_head: the rules for multi-label losses and heads."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lastlayer.testing import head_rules, losses
from lastlayer.testing.head_rules import HeadSuite
from lastlayer.testing.losses import CLASSES, LossSuite
from lastlayer.testing.suite import FLOATING, seeded

# Length of a row's list of labels, including duplicates and padding.
LISTED = 4


@dataclass(kw_only=True)
class MultiLabelLossSuite(LossSuite):
    """A loss of scores and labels of the same shape, with inputs for it."""

    soft: bool
    autocast_tolerance = 1e-5, 1e-5
    empty_shapes = (0, CLASSES), (3, 0)

    def labels(self, *shape: int) -> Tensor:
        """Labels 0 and 1; each row has both."""
        drawn = self.integers(2, *shape)
        drawn[..., :1], drawn[..., 1:2] = 1, 0
        return drawn

    def targets(self, scores: Tensor) -> list[Tensor]:
        """Hard labels, and soft labels, some of which are 0 or 1."""
        hard = self.labels(*scores.shape)
        if not self.soft:
            return [hard]
        between = torch.sigmoid(self.normal(*scores.shape)).to(scores.dtype)
        return [hard, torch.where(self.integers(2, *scores.shape) == 0, hard.to(between), between)]

    def masks(self, scores: Tensor) -> tuple[Tensor, ...]:
        return (self.integers(3, *scores.shape) > 0,)


class MultiLabelHeadSuite(HeadSuite):
    """A head whose targets are padded lists, ``(*batch, 4)``."""

    def targets(self, *batch: int) -> Tensor:
        """Lists with at least one label each, with padding and duplicates."""
        lists = self.integers(self.n_classes, *batch, LISTED)
        lists[..., 1] = lists[..., 0]
        lists[..., 2] = self.padding
        return lists

    def all_targets(self) -> Tensor:
        """One list per label, with padding."""
        ids = torch.arange(self.n_classes, device=self.device).unsqueeze(-1)
        return torch.cat([ids, ids.new_full((len(ids), LISTED - 1), self.padding)], -1)

    def calls(self, head: Any) -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]]:
        return {
            **super().calls(head),
            "probability": ((self.n_classes,), head.probability),
            "predict": ((0,), head.predict),
        }

    @property
    def padding(self) -> int:
        return int(self.given.ignore_index)


def check_multilabel_loss(
    loss: Callable[..., Tensor],
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATING,
    soft: bool = True,
    convex: bool = True,
    derivatives: bool = True,
    compile: str | Literal[False] = "aot_eager",  # noqa: A002 — reads well in a call
    vmap: bool = True,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a loss keeps the rules of a multi-label loss of scores and labels.

    Scores and labels have the same shape. These rules are always checked:

    - The loss is float32, or float64 from float64. Labels may be bool, integer or floating.
    - The loss is never negative, and does not depend on the order of classes.
    - Reductions and batch dimensions agree. An empty batch has loss 0.
    - A masked class has no effect, whatever its label and score (-1e4, -inf, NaN). A row whose
      classes are all masked has loss and gradient 0, and the mean excludes it.
    - A score of -inf has loss 0 for label 0, and +inf for label 1.
    - Large scores give the same loss as in float64. A NaN affects only its own row. Autocast has no
      effect.

    Args:
        loss: ``loss(scores, target, mask=, reduction=)`` for scores ``(*batch, n)``.
        soft: whether labels may be between 0 and 1.
        convex: whether the loss is convex in the scores.
        derivatives: whether to check ``gradcheck`` and ``gradgradcheck`` in float64.
        dtypes: dtypes that the loss accepts; without float64, derivatives are not checked.
        compile: backend of ``torch.compile``, as for :func:`check_map`; False to skip.
        vmap: whether to check ``torch.func.vmap`` and ``torch.func.grad``.
        device: device to run on.
        seed: random seed; a random one if None.

    Raises:
        AssertionError: with the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> import torch, lastlayer
        >>> from lastlayer.testing import check_multilabel_loss
        >>> check_multilabel_loss(lastlayer.zlpr_loss, compile=False)
    """
    suite = MultiLabelLossSuite(*seeded(seed, device), dtypes, compile, loss=loss, soft=soft)
    exact = derivatives and torch.float64 in dtypes
    suite.hold(
        losses.the_dtype_is_float32_or_float64,
        labels_may_have_any_dtype,
        losses.it_is_never_negative,
        *([losses.it_is_convex] if convex else []),
        classes_may_come_in_any_order,
        losses.reductions_agree,
        masked_classes_have_no_part,
        rows_of_which_nothing_is_left_do_not_count,
        a_score_of_minus_infinity_is_legal,
        scores_of_any_size_are_right,
        losses.a_nan_stays_in_its_row,
        losses.an_empty_batch_works,
        losses.autocast_works,
        *([losses.the_derivatives_are_right] if exact else []),
        *([losses.vmap_is_a_loop] if vmap else []),
        *([losses.compiling_changes_nothing] if compile else []),
    )


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

    These rules are checked in addition to the rules of :func:`check_head` that do not require a
    single target class:

    - Log-probabilities are at most 0, and ``probability`` is their exponential.
    - ``predict`` returns ascending lists of the most probable labels, which the loss accepts.
    - Padding and duplicates have no effect, and lists in CSR are equivalent to padded ones.
    - ``torch.autocast`` works.

    Args:
        head: the module, which is copied and not modified, or a function that returns one. It has
            the attributes ``in_features``, ``n_classes``, ``ignore_index`` and ``reduction``. A
            few dozen labels are best.
        gradients: whether to compare the gradients of the loss with finite differences.
        save: whether to check ``save``, ``load`` and ``cls(**head.config())``.
        dtypes: dtypes that the head accepts; without float64, gradients are not checked.
        compile: backend of ``torch.compile``, as for :func:`check_map`; False to skip.
        device: device to run on.
        seed: random seed; a random one if None.

    Raises:
        AssertionError: with the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> from lastlayer.heads.multi_label import MultiLabel
        >>> check_multilabel_head(MultiLabel(8, 20), compile=False)
    """
    suite = MultiLabelHeadSuite(*seeded(seed, device), dtypes, compile, given=head)
    exact = gradients and torch.float64 in dtypes
    others = head_rules.others(
        gradients=exact, log_prob_gradients=exact, checkpoint=True, save=save,
        compiles=bool(compile), transforms=True, distributed=True,
    )  # fmt: skip
    suite.hold(
        *head_rules.FORM,
        probabilities_are_probabilities,
        *head_rules.CHOICES,
        predicted_lists_are_the_most_probable_labels,
        padding_and_duplicates_count_for_nothing,
        csr_is_the_same_as_padded,
        *head_rules.BATCHES,
        *others,
        labels_and_offsets_are_checked,
        head_rules.autocast_works,
    )


def labels_may_have_any_dtype(suite: MultiLabelLossSuite) -> None:
    scores, target = suite.scores(4, CLASSES), suite.labels(4, CLASSES)
    expected = suite.losses(scores, target)
    for dtype in (torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16):
        rule = f"labels of {dtype} give the loss of int64"
        suite.close(rule, suite.losses(scores, target.to(dtype)), expected, suite.same, scores)


def classes_may_come_in_any_order(suite: MultiLabelLossSuite) -> None:
    scores, order = suite.scores(4, CLASSES), suite.permutation(CLASSES)
    for target in suite.targets(scores):
        moved = suite.losses(scores[:, order], target[:, order])
        rule = "classes may come in any order"
        suite.close(rule, moved, suite.losses(scores, target), suite.same, scores)


def masked_classes_have_no_part(suite: MultiLabelLossSuite) -> None:
    mask = torch.ones(CLASSES, dtype=torch.bool, device=suite.device)
    mask[[2, 5]] = False
    odd = (-1e4, 1e4, -1e12, -math.inf, math.inf, math.nan)
    for dtype in suite.dtypes:
        clean = suite.scores(4, CLASSES, dtype=dtype)
        for target in suite.targets(clean):
            expected = suite.losses(clean[:, mask], target[:, mask])
            right = suite.gradient(clean[:, mask], target[:, mask])
            for score, label in [(score, label) for score in odd for label in (0, 1)]:
                scores, labels = clean.clone(), target.clone()
                # As a tensor: a number beyond the range of half precision becomes infinite.
                scores[:, ~mask] = torch.tensor(score, device=suite.device).to(dtype)
                labels[:, ~mask] = label
                rule = f"a masked class with score {score:g} and label {label} has no effect"
                for shown in (mask, mask.expand_as(scores)):
                    found = suite.losses(scores, labels, mask=shown)
                    suite.close(rule, found, expected, 1e-5, scores)
                gradient = suite.gradient(scores, labels, mask=mask)
                suite.close(f"{rule}: gradient", gradient[:, mask], right, 1e-2, scores)
                suite.zero(f"{rule}: its own", gradient[:, ~mask], scores)


def rows_of_which_nothing_is_left_do_not_count(suite: MultiLabelLossSuite) -> None:
    scores = suite.scores(4, CLASSES)
    scores[1], scores[2] = math.nan, -math.inf
    mask = torch.tensor([True, False, False, True], device=suite.device).unsqueeze(-1)
    for target in suite.targets(scores):
        found = suite.losses(scores, target, mask=mask)
        suite.zero("a row that is masked has loss 0", found[1:3], scores)
        mean = suite.losses(scores, target, "mean", mask=mask)
        rule = "the mean is over rows that are not masked"
        suite.close(rule, mean, found.sum() / 2, 1e-6, scores)
        gradient = suite.gradient(scores, target, mask=mask)[1:3]
        suite.zero("a row that is masked has gradient 0", gradient, scores)
        for reduction in ("mean", "sum"):
            loss = suite.losses(scores, target, reduction, mask=torch.zeros_like(mask))
            suite.zero(f"reduction={reduction!r} is 0 if all is masked", loss, scores)


def a_score_of_minus_infinity_is_legal(suite: MultiLabelLossSuite) -> None:
    kept = torch.arange(CLASSES, device=suite.device) != 1
    rule = "a score of -inf"
    for dtype in suite.dtypes:
        scores, target = suite.scores(4, CLASSES, dtype=dtype), suite.labels(4, CLASSES)
        scores[:, 1] = -math.inf
        found = suite.losses(scores, target)
        expected = suite.losses(scores[:, kept], target[:, kept])
        suite.close(f"{rule} has loss 0 if the label is 0", found, expected, 1e-5, scores)
        gradient = suite.gradient(scores, target)
        finite = gradient.isfinite()
        suite.require(f"{rule} leaves the gradient finite", finite, "it is not", scores)
        suite.zero(f"{rule} has gradient 0 if the label is 0", gradient[:, 1], scores)
        scores[2, 0] = -math.inf
        found = suite.losses(scores, target)
        suite.close(f"{rule} has loss +inf if the label is 1", found[2], math.inf, 0.0, scores)
        others = found[[0, 1, 3]].isfinite()
        suite.require(f"{rule} leaves other rows alone", others, "not finite", scores)


def scores_of_any_size_are_right(suite: MultiLabelLossSuite) -> None:
    for dtype in suite.dtypes if torch.float64 in suite.dtypes else ():
        for size in (1e-3, 30.0, 1e3, 3e4):
            scores = (size * suite.normal(6, CLASSES)).clamp(-6e4, 6e4).to(dtype)
            for target in suite.targets(scores):
                for name, function, part in (
                    ("loss", suite.losses, 1e-5),
                    ("gradient", suite.gradient, 1e-2),
                ):
                    found, truth = function(scores, target), function(scores.double(), target)
                    tolerance = part * truth.abs().max().clamp(min=1.0).item()
                    rule = f"{dtype} scores of size {size:g} have the {name} of float64"
                    suite.close(rule, found, truth, tolerance, scores)


def probabilities_are_probabilities(suite: HeadSuite) -> None:
    for dtype in suite.dtypes:
        head = suite.head(dtype)
        for scale in (0.01, 1.0, 20.0):
            hidden = suite.hidden(5, dtype=dtype, scale=scale)
            log_prob = head.log_prob(hidden).detach()
            highest = f"got {log_prob.max():g}"
            suite.require("log_prob is at most 0", (log_prob <= 0).all(-1), highest, hidden)
            probs = head.probability(hidden)
            suite.close("probability is exp(log_prob)", probs, log_prob.exp(), suite.same, hidden)


def predicted_lists_are_the_most_probable_labels(suite: MultiLabelHeadSuite) -> None:
    head, hidden = suite.head(), suite.hidden(2, 3, scale=3.0)
    lists = head.predict(hidden)
    rule = "predict gives lists of class ids, (*batch, m)"
    suite.typed(rule, lists, torch.int64, (2, 3, lists.shape[-1]), hidden)
    log_prob = head.log_prob(hidden).detach().reshape(6, -1)
    for row, labels in enumerate(lists.reshape(6, -1).tolist()):
        chosen = [label for label in labels if label != suite.padding]
        rule = "a list is ascending, followed by padding"
        in_order = chosen == sorted(set(chosen)) and labels[: len(chosen)] == chosen
        suite.require(rule, in_order, f"got {labels}", hidden)
        rest = log_prob[row].clone()
        rest[chosen] = -math.inf
        least = min((log_prob[row, label].item() for label in chosen), default=0.0)
        rule = "no other label is more probable than a predicted one"
        suite.require(rule, rest.max().item() <= least, f"got {labels}", hidden)
    rule = "the loss takes the lists that predict gives"
    loss = suite.runs(rule, hidden, suite.loss, head, hidden, lists)
    suite.require(rule, loss.isfinite(), f"got {loss:g}", hidden)


def padding_and_duplicates_count_for_nothing(suite: MultiLabelHeadSuite) -> None:
    head, hidden, lists = suite.head(reduction="none"), suite.hidden(6), suite.targets(6)
    padding = torch.full_like(lists[:, :2], suite.padding)
    found = suite.loss(head, hidden, torch.cat([padding, lists.flip(-1), lists], -1))
    expected = suite.loss(head, hidden, lists)
    suite.close("padding and duplicates change nothing", found, expected, suite.same, hidden)


def csr_is_the_same_as_padded(suite: MultiLabelHeadSuite) -> None:
    head, hidden, lists = suite.head(reduction="none"), suite.hidden(6), suite.targets(6)
    kept = lists != suite.padding
    offsets = torch.nn.functional.pad(kept.sum(-1).cumsum(0), (1, 0))
    rule = "concatenated lists with offsets are equivalent to padded ones"
    found = suite.runs(rule, hidden, head, hidden, lists[kept], offsets)
    suite.close(rule, found, suite.loss(head, hidden, lists), suite.same, hidden)


def labels_and_offsets_are_checked(suite: HeadSuite) -> None:
    head, hidden, lists = suite.head(), suite.hidden(2, 3), suite.targets(2, 3)
    n = suite.n_classes
    for what, given in {
        f"a label of {n}": torch.full_like(lists, n),
        "lists of another batch": lists[:, :2],
        "lists that are no tensor": lists.tolist(),
        "0/1 labels": torch.zeros_like(lists, dtype=torch.bool),
    }.items():
        suite.refused("positives", what, head, hidden, given)
    wrong = torch.zeros(3, dtype=torch.int64, device=suite.device)
    suite.refused("offsets", "offsets of another length", head, hidden, wrong, wrong)
