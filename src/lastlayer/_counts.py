"""How often each class occurs, as trees, samplers and heads are given it."""

from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def as_array(name: str, values: Any, expected: str, kinds: str = "iufb") -> NDArray[Any]:
    """Numbers from a sequence, an array or a tensor on any device; ``kinds`` are numpy's."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # numpy has no bfloat16.
        values = (values.double() if values.is_floating_point() else values).numpy()
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise TypeError(f"{name}: expected {expected}, got {type(values).__name__}")
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise TypeError(f"{name}: expected {expected}, got values that are not: {error}") from None
    if array.dtype.kind not in kinds and array.size:
        raise TypeError(f"{name}: expected {expected}, got {_first_that_is_none(values, array)}")
    return array


def _first_that_is_none(values: Any, array: NDArray[Any]) -> str:
    """What was given in place of a number, and where."""
    if array.ndim == 0:
        return type(values).__name__
    if array.ndim == 1 and isinstance(values, (list, tuple)):
        for place, each in enumerate(values):
            if not isinstance(each, (Real, np.bool_, torch.Tensor)):
                return f"{each!r} at position {place}"
    return f"an array of {array.dtype}"


def as_counts(
    counts: Any,
    n_classes: int | None = None,
    *,
    name: str = "counts",
    kinds: str = "iufb",
    alike: str = "give ones where every class is as likely as another",
) -> NDArray[np.float64]:
    """One count a class: finite, not negative, not all zero. ``alike`` is what to do instead."""
    expected = "one number a class"
    array = as_array(name, counts, expected, kinds)
    if array.ndim != 1 or (n_classes is not None and len(array) != n_classes):
        shape = "(n_classes,)" if n_classes is None else f"({n_classes},)"
        raise ValueError(f"{name}: expected shape {shape}, {expected}, got {array.shape}")
    if not len(array):
        raise ValueError(f"{name}: expected {expected}, got none; there is at least one class")
    result: NDArray[np.float64] = array.astype(np.float64)
    wrong = ~((result >= 0) & np.isfinite(result))
    if wrong.any():
        c = int(wrong.argmax())
        raise ValueError(
            f"{name}: expected finite numbers of at least 0, got {result[c]:g} for class {c}"
        )
    if not result.any():
        raise ValueError(f"{name}: expected at least one above 0, got {len(result)} zeros; {alike}")
    return result
