"""check_loss: the rules of a loss, one after the other."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lastlayer.testing import _loss_torch, _loss_values
from lastlayer.testing._loss_values import LossSuite
from lastlayer.testing._maps import FLOATING
from lastlayer.testing._suite import fresh_seed


def check_loss(
    loss: Callable[..., Tensor],
    map: Callable[[Tensor], Tensor] | None = None,  # noqa: A002 — reads well in a call
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATING,
    distributions: bool = True,
    reachable: bool = True,
    ignore_index: int | None = -100,
    masks: bool = True,
    derivatives: bool = True,
    compile: str | Literal[False] = "aot_eager",  # noqa: A002 — reads well in a call
    vmap: bool = True,
    autocast: bool = True,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a loss keeps the rules of the loss of a map.

    Always checked: the gradient is ``map(scores) - target``; the loss is zero where the map hits
    the target, never negative and convex; reductions and batch dimensions agree; float32 comes
    out, or float64 from float64; an offset of 1e6 costs no accuracy in float32; a NaN stays in
    its own row; an empty batch has loss 0.

    Args:
        loss: ``loss(scores, target, reduction=)`` for scores ``(*batch, n)``, or a module with an
            attribute ``reduction``.
        map: the map of this loss, over the last dimension. Without it, it is read off the
            gradient, and the Hessian is not compared with its Jacobian.
        dtypes: what the loss accepts; without float64 derivatives are not checked.
        distributions: targets may be distributions ``(*batch, n)``, of which class ids are the
            one-hot ones. False where targets are class ids only.
        reachable: every distribution is a value of the map, or a limit of values. False for
            top-k softmax, whose loss may be negative for a target with more than k classes.
        ignore_index: the class id that is left out by default: loss and gradient 0 whatever the
            scores, not counted by "mean", which is 0 where nothing counts. None for no such id.
        masks: a score of -inf removes its class, and makes the loss of a target there +inf.
            False where the loss takes finite scores only.
        derivatives: ``gradcheck``, ``gradgradcheck`` and the Hessian are right.
        compile: the backend for ``torch.compile(fullgraph=True)`` with gradient; False where the
            loss cannot be compiled. Compiled code that is cached in this process is dropped.
        vmap: the loss works under ``torch.func.vmap`` and ``torch.func.grad``.
        autocast: the loss works under ``torch.autocast``.
        device: where to run.
        seed: repeats the inputs of an earlier run; fresh ones otherwise.

    Raises:
        AssertionError: names the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> import torch
        >>> from lastlayer.testing import check_loss
        >>> check_loss(torch.nn.CrossEntropyLoss(), distributions=False, compile=False)
        Traceback (most recent call last):
        ...
        AssertionError: a loss of torch.float16 scores is torch.float32: got torch.float16
        ...
    """
    suite = LossSuite(
        seed=fresh_seed(seed),
        device=torch.device(device),
        dtypes=dtypes,
        loss=loss,
        map=map,
        ignore_index=ignore_index,
        distributions=distributions,
        reachable=reachable,
    )
    suite.hold(_loss_values.the_dtype_is_float32_or_float64)
    suite.hold(_loss_values.the_gradient_is_map_minus_target)
    suite.hold(_loss_values.it_is_zero_at_the_target_and_never_negative)
    suite.hold(_loss_values.it_is_convex)
    suite.hold(_loss_values.reductions_agree)
    suite.hold(_loss_values.an_offset_costs_no_accuracy)
    suite.hold(_loss_values.a_nan_stays_in_its_row)
    suite.hold(_loss_values.an_empty_batch_works)
    suite.hold(_loss_values.ignored_rows_count_for_nothing)
    if distributions:
        suite.hold(_loss_values.ids_are_one_hot_distributions)
    if masks:
        suite.hold(_loss_values.masked_scores_are_handled)
    if derivatives:
        suite.hold(_loss_torch.the_derivatives_are_right)
        suite.hold(_loss_torch.the_hessian_is_the_jacobian_of_the_map)
    if vmap:
        suite.hold(_loss_torch.vmap_is_a_loop)
    if autocast:
        suite.hold(_loss_torch.autocast_works)
    if compile:
        suite.hold(_loss_torch.compiling_changes_nothing, compile)
