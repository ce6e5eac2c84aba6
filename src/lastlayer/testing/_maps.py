"""check_map: the rules of a map, one after the other."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lastlayer.testing import _map_torch, _map_values
from lastlayer.testing._map_values import MapSuite
from lastlayer.testing._suite import fresh_seed

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_map(
    map: Callable[..., Tensor],  # noqa: A002 — reads well in a call
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATING,
    widths: tuple[int, ...] = (1, 2, 33, 4097),
    sparse: bool = True,
    symmetric: bool = True,
    masks: bool = True,
    empty_rows: bool = True,
    second_order: bool = True,
    compile: str | Literal[False] = "aot_eager",  # noqa: A002 — reads well in a call
    vmap: bool = True,
    autocast: bool = True,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> None:
    """Check that a function from scores to probabilities keeps the rules of a map.

    Always checked: rows sum to 1 at any scale, offset and width (within 1e-6 in float32, 4e-3 in
    half precision), no probability is negative, dtype and shape stay, an offset of 1e6 changes
    nothing, a NaN makes its own row NaN and no other, empty batches and empty class dimensions
    work, so do layouts that are not contiguous, and the gradient passes ``gradcheck`` away from
    kinks. Where ``map`` takes ``dim=``, every
    dimension is tried; where it takes ``mask=``, a mask must do what -inf does.

    Args:
        map: from scores ``(*batch, n)`` to probabilities over the last dimension; a function or
            a module.
        dtypes: what the map accepts; without float64 derivatives are not checked.
        widths: numbers of classes to try.
        sparse: scores far below the maximum get exactly 0. False for a dense map such as
            softmax, which is then held to give every class a probability.
        symmetric: classes are treated alike: permuting scores permutes probabilities, a higher
            score never has a lower probability, and without a class the others are as if it had
            never been. False for a map with parameters of its own for each class.
        masks: a score of -inf removes its class. False where the map takes finite scores only.
        empty_rows: a row of nothing but -inf maps to zeros with gradient 0. False where that is
            left undefined, as ``torch.softmax`` does.
        second_order: the map can be differentiated twice (``gradgradcheck``).
        compile: the backend for ``torch.compile(fullgraph=True)`` with gradient; False where the
            map cannot be compiled. Compiled code that is cached in this process is dropped.
        vmap: the map works under ``torch.func.vmap`` and ``torch.func.jacrev``.
        autocast: the map works under ``torch.autocast``.
        device: where to run.
        seed: repeats the inputs of an earlier run; fresh ones otherwise.

    Raises:
        AssertionError: names the rule that is broken, the input, the numbers and the seed.

    Example:
        >>> import torch
        >>> from lastlayer.testing import check_map
        >>> def cubed(scores):
        ...     positive = (scores - scores.amax(-1, keepdim=True) + 1).clamp(min=0) ** 3
        ...     return positive / positive.sum()
        >>> check_map(cubed, compile=False)
        Traceback (most recent call last):
        ...
        AssertionError: rows sum to 1, ...
    """
    suite = MapSuite(
        seed=fresh_seed(seed),
        device=torch.device(device),
        map=map,
        dtypes=dtypes,
        widths=widths,
        sparse=sparse,
    )
    suite.hold(_map_values.rows_sum_to_one)
    suite.hold(_map_values.an_offset_changes_nothing)
    suite.hold(_map_values.a_nan_stays_in_its_row)
    suite.hold(_map_values.empty_inputs_give_empty_results)
    suite.hold(_map_values.any_layout_and_dimension_work)
    if symmetric:
        suite.hold(_map_values.a_permutation_permutes)
        suite.hold(_map_values.a_higher_score_has_no_lower_probability)
    suite.hold(_map_values.zeros_are_where_they_should_be)
    if torch.float64 in dtypes:
        suite.hold(_map_torch.the_gradient_is_right)
        suite.hold(_map_torch.lower_precision_has_the_same_gradient)
    if masks:
        suite.hold(_map_values.minus_infinity_removes_a_class, symmetric)
    if empty_rows:
        suite.hold(_map_values.a_row_with_nothing_allowed_is_zeros)
    if second_order and torch.float64 in dtypes:
        suite.hold(_map_torch.the_second_derivative_is_right)
    if vmap:
        suite.hold(_map_torch.vmap_is_a_loop)
    if autocast:
        suite.hold(_map_torch.autocast_works)
    if compile:
        suite.hold(_map_torch.compiling_changes_nothing, compile)
