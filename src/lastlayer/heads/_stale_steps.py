"""Optimisers that keep numbers for a parameter which has since got more rows."""

import weakref
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

# Parameters, and how many rows each had before it got more.
_watched: list[tuple[weakref.ref[Parameter], set[int]]] = []
_hooks: list[Any] = []


def refuse_stale_steps(parameter: Parameter, n_rows: int) -> None:
    """From now on, optimisers that keep numbers for ``n_rows`` of ``parameter`` make no step.

    Fused ones would not notice, and write beyond the end of their numbers.

    Args:
        parameter: that has got more rows.
        n_rows: how many it had.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))
    for each, before in _watched:
        if each() is parameter:
            before.add(n_rows)
            return
    _watched.append((weakref.ref(parameter), {n_rows}))


def _check(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    state = getattr(optimizer, "state", {})
    _watched[:] = [pair for pair in _watched if pair[0]() is not None]
    for each, before in _watched:
        parameter = each()
        if parameter is None:
            continue
        for name, kept in state.get(parameter, {}).items():
            if isinstance(kept, Tensor) and _is_stale(kept, parameter, before):
                raise RuntimeError(
                    f"optimizer: expected its {name!r} of a parameter to have "
                    f"{parameter.shape[0]} rows, as the parameter has, got shape "
                    f"{tuple(kept.shape)}; classes were added since it was made: make a new "
                    "optimizer"
                )


def _is_stale(kept: Tensor, parameter: Parameter, before: set[int]) -> bool:
    """Numbers for each row, or for each number of it, as the rows were before."""
    if not kept.dim() or kept.shape[0] not in before:
        return False
    # One row may as well be what all rows share.
    return kept.shape[0] > 1 or kept.shape[1:] == parameter.shape[1:]
