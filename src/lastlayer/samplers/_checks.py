"""Checks of what a sampler is given. Errors name the argument, and the class or position."""

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._checks import as_counts as counts_of_classes
from lastlayer._torch import values_are_checked
from lastlayer.kernels.rng.table import MOST_CLASSES

if TYPE_CHECKING:
    from lastlayer.samplers.base import Sampler


def check_number(name: str, value: Any, *, least: int = 1, most: int = MOST_CLASSES) -> int:
    """A whole number from ``least`` to ``most``."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected an int, got bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if not least <= number <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {number}")
    return number


def check_real(name: str, value: Any, *, least: float, most: float) -> float:
    """A number from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not least <= value <= most or math.isinf(value):
        up_to = "a finite number" if math.isinf(most) else f"{most:g}"
        raise ValueError(f"{name}: expected {least:g} to {up_to}, got {value:g}")
    return float(value)


def as_counts(counts: Any) -> NDArray[np.float64]:
    """One count a class: finite, not negative, not all zero."""
    alike = "where every class is as likely as another use Uniform"
    array = counts_of_classes(counts, kinds="iuf", alike=alike)
    check_number("n_classes", len(array))
    return array


def check_ids(sampler: "Sampler", name: str, ids: Any, *, least: int | None = 0) -> None:
    """Class ids of any shape, on the device of the sampler; anything negative without ``least``."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(ids).__name__}")
    if ids.dtype != torch.int64:
        raise TypeError(
            f"{name}: expected torch.int64 class ids, got {ids.dtype}; convert with {name}.long()"
        )
    check_device(sampler, name, ids)
    if values_are_checked(ids) and ids.numel():
        wrong = ids >= sampler.n_classes
        if least is not None:
            wrong |= ids < least
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"{name}: expected class ids from {least or 0} to {sampler.n_classes - 1}, "
                f"got {ids[place].item()} at {place}"
            )


def check_device(sampler: "Sampler", name: str, tensor: Tensor) -> None:
    """On the device of the sampler."""
    if tensor.device != sampler.device:
        raise ValueError(
            f"{name}: expected the device of the sampler, {sampler.device}, got {tensor.device}; "
            "move one of them with .to(device)"
        )
