"""Optimisers that keep numbers for a parameter which has since got more rows."""

import weakref
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

_watched: list[weakref.ref[Parameter]] = []
_hooks: list[Any] = []


def refuse_stale_steps(parameter: Parameter) -> None:
    """From now on, optimisers whose numbers have not the shape of ``parameter`` make no step.

    Fused ones would not notice, and write beyond the end of their numbers.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))
    if not any(each() is parameter for each in _watched):
        _watched.append(weakref.ref(parameter))


def _check(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    state = getattr(optimizer, "state", {})
    _watched[:] = [each for each in _watched if each() is not None]
    for parameter in (each() for each in _watched):
        if parameter is None:
            continue
        for name, kept in state.get(parameter, {}).items():
            if isinstance(kept, Tensor) and kept.dim() and kept.shape != parameter.shape:
                raise RuntimeError(
                    f"optimizer: expected its {name!r} of a parameter to have the shape of the "
                    f"parameter, {tuple(parameter.shape)}, got {tuple(kept.shape)}; classes were "
                    "added since it was made: make a new optimizer"
                )
