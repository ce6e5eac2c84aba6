"""Class vectors that are kept for as long as the parameters that made them stay as they are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

# Steps of any optimiser so far: fused ones write to parameters and leave their version as it is.
_n_steps = 0
_hooks: list[Any] = []


def _count_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    global _n_steps  # noqa: PLW0603
    _n_steps += 1


class VectorCache:
    """One tensor, and what it was made of. A copy of it begins empty."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = ()
        self._parameters: list[Parameter] = []
        self._vectors: Tensor | None = None
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_count_step))

    def get(self, parameters: Sequence[Parameter], make: Callable[[], Tensor]) -> Tensor:
        """The vectors of before, or those of ``make`` where a parameter changed since."""
        if any(_is_unversioned(each) for each in parameters):
            return make()
        now = _n_steps, _modes(parameters[0].device.type), *map(_state, parameters)
        if self._vectors is None or now != self._made_of or not self._are(parameters):
            self._vectors = make()
            self._made_of, self._parameters = now, list(parameters)
        return self._vectors

    def drop(self) -> None:
        """Forget them."""
        self._made_of, self._parameters, self._vectors = (), [], None

    def _are(self, parameters: Sequence[Parameter]) -> bool:
        """The very same ones: that they are held here keeps their identity from others."""
        return len(parameters) == len(self._parameters) and all(
            mine is given for mine, given in zip(self._parameters, parameters, strict=True)
        )

    def __reduce__(self) -> tuple[type["VectorCache"], tuple[()]]:
        return VectorCache, ()


def _is_unversioned(parameter: Tensor) -> bool:
    """Nothing tells when such a tensor changes: it has no version, or no memory of its own."""
    return (
        parameter.is_inference()
        or type(parameter) not in (Tensor, Parameter)
        or torch._C._functorch.is_functorch_wrapped_tensor(parameter)
    )


def _state(parameter: Tensor) -> tuple[Any, ...]:
    # The version counts what is written in place, the pointer tells what is put in its place.
    return parameter._version, parameter.data_ptr(), parameter.dtype, parameter.device


def _modes(device: str) -> tuple[Any, ...]:
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast, torch.is_inference_mode_enabled()
