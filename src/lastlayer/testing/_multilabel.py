"""check_multilabel_loss: the rules of a loss of scores and labels, one after the other."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lastlayer.testing import _multilabel_torch, _multilabel_values
from lastlayer.testing._maps import FLOATING
from lastlayer.testing._multilabel_values import MultilabelSuite
from lastlayer.testing._suite import fresh_seed


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
    """Check that a loss keeps the rules of a loss of scores and labels of the same shape.

    Always checked: float32 comes out, or float64 from float64; labels may be bool, integers or
    floating; the loss is never negative; classes may come in any order; reductions and batch
    dimensions agree; a class that the mask leaves out has no part, whatever its score (-1e4, -inf,
    NaN) or label; a row of which nothing is left has loss and gradient 0 and does not count in
    the mean; a score of -inf costs nothing where the label is 0, and +inf where it is 1; scores of
    any size give the loss that they give in float64; a NaN stays in its own row; an empty batch
    has loss 0; autocast changes nothing.

    Args:
        loss: ``loss(scores, target, mask=, reduction=)`` for scores ``(*batch, n)``.
        dtypes: what the loss accepts; without float64 derivatives are not checked.
        soft: labels may lie between 0 and 1.
        convex: the loss is convex in the scores.
        derivatives: ``gradcheck`` and ``gradgradcheck`` in float64.
        compile: the backend for ``torch.compile(fullgraph=True)`` with gradient; False where the
            loss cannot be compiled. Compiled code that is cached in this process is dropped.
        vmap: the loss works under ``torch.func.vmap`` and ``torch.func.grad``.
        device: where to run.
        seed: repeats the inputs of an earlier run; fresh ones otherwise.

    Raises:
        AssertionError: names the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> import torch, lastlayer
        >>> from lastlayer.testing import check_multilabel_loss
        >>> check_multilabel_loss(lastlayer.zlpr_loss, compile=False)
    """
    suite = MultilabelSuite(
        seed=fresh_seed(seed), device=torch.device(device), dtypes=dtypes, loss=loss, soft=soft
    )
    values = _multilabel_values
    suite.hold(values.the_dtype_is_float32_or_float64)
    suite.hold(values.labels_may_have_any_dtype)
    suite.hold(values.it_is_never_negative, convex)
    suite.hold(values.classes_may_come_in_any_order)
    suite.hold(values.reductions_agree)
    suite.hold(values.masked_classes_have_no_part)
    suite.hold(values.rows_of_which_nothing_is_left_do_not_count)
    suite.hold(values.a_score_of_minus_infinity_is_legal)
    suite.hold(values.scores_of_any_size_are_right)
    suite.hold(values.a_nan_stays_in_its_row)
    suite.hold(values.an_empty_batch_works)
    suite.hold(_multilabel_torch.autocast_changes_nothing)
    if derivatives:
        suite.hold(_multilabel_torch.the_derivatives_are_right)
    if vmap:
        suite.hold(_multilabel_torch.vmap_is_a_loop)
    if compile:
        suite.hold(_multilabel_torch.compiling_changes_nothing, compile)
