"""The switch that turns on checks of values that live on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_checking_device_values: ContextVar[bool] = ContextVar("lastlayer_debug", default=False)


@contextmanager
def debug() -> Iterator[None]:
    """Check values on every device, also where the check waits for the device.

    Shapes and dtypes are always checked. Values (a target out of range, a distribution that does
    not sum to 1) are always checked on a CPU; on a GPU reading one would stall the stream, so it
    is done only inside this context. While torch.compile traces there are no values to read: class
    ids that go to a fused loss, or on a CPU to a head, are checked when the compiled code runs.

    Example:
        >>> import torch, lastlayer
        >>> with lastlayer.debug():
        ...     loss = lastlayer.sparsemax_loss(torch.zeros(1, 3), torch.tensor([2]))
    """
    token = _checking_device_values.set(True)
    try:
        yield
    finally:
        _checking_device_values.reset(token)


def values_are_checked(tensor: Tensor) -> bool:
    """Whether values of ``tensor`` may be read now, at no cost to what the user asked for."""
    if torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if tensor.device.type == "cpu":
        return not isinstance(tensor, torch._subclasses.FakeTensor)
    return _checking_device_values.get() and tensor.device.type != "meta"
