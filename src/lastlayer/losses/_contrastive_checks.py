"""Checks of what is passed to the contrastive losses."""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_scores
from lastlayer._torch import values_are_checked

SAME_GROUP = ("positive", "ignore")
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def check_temperature(temperature: Any) -> None:
    """A number above 0, or a floating tensor of one such number without dimensions."""
    if isinstance(temperature, Tensor):
        if not temperature.is_floating_point():
            raise TypeError(
                "temperature: expected a number or a floating tensor, got a tensor of "
                f"{temperature.dtype}"
            )
        if temperature.dim():
            raise ValueError(
                "temperature: expected a tensor without dimensions, one number for all pairs, got "
                f"shape {tuple(temperature.shape)}"
            )
        if not values_are_checked(temperature):
            return
        number = float(temperature.detach())
    elif isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(
            f"temperature: expected a number or a floating tensor, got {type(temperature).__name__}"
        )
    else:
        number = float(temperature)
    if not 0.0 < number < math.inf:
        raise ValueError(
            f"temperature: expected a number above 0, got {number}; similarities are divided by it"
        )


def check_number(temperature: Any) -> None:
    """As :func:`check_temperature`, for a module, which makes the tensor itself."""
    if isinstance(temperature, Tensor):
        raise TypeError(
            "temperature: expected a number, got a tensor; learn_temperature=True makes it one"
        )
    check_temperature(temperature)


def check_max_scale(max_scale: Any) -> None:
    """A number above 0, or None for no bound."""
    if max_scale is None:
        return
    if isinstance(max_scale, bool) or not isinstance(max_scale, (int, float)):
        raise TypeError(f"max_scale: expected a number or None, got {type(max_scale).__name__}")
    if not max_scale > 0.0:
        raise ValueError(f"max_scale: expected a number above 0 or None, got {max_scale}")


def check_vectors(query: Any, key: Any) -> None:
    """Two matrices of one shape, dtype and device; autocast may bring dtypes together."""
    check_scores(query, name="query")
    if query.dim() != 2:
        raise ValueError(f"query: expected shape (n, d), got {tuple(query.shape)}")
    _check_like("key", key, query)
    if key.shape != query.shape:
        raise ValueError(
            f"key: expected the shape of query, {tuple(query.shape)}, key i for query i, got "
            f"{tuple(key.shape)}; further keys are negatives"
        )


def check_negatives(negatives: Any, query: Tensor) -> None:
    """``(m, d)`` for all queries, or ``(n, m, d)`` for each."""
    _check_like("negatives", negatives, query)
    n, d = query.shape
    fits = negatives.dim() in (2, 3) and negatives.shape[-1] == d
    if not fits or (negatives.dim() == 3 and negatives.shape[0] != n):
        raise ValueError(
            f"negatives: expected shape (m, {d}), the same for all queries, or ({n}, m, {d}), own "
            f"ones for each, got {tuple(negatives.shape)}"
        )


def check_groups(name: str, groups: Any, shape: torch.Size, device: torch.device, of: str) -> None:
    """Integers of a shape."""
    if not isinstance(groups, Tensor):
        raise TypeError(f"{name}: expected an integer tensor, got {type(groups).__name__}")
    if groups.dtype not in _INTEGERS:
        raise TypeError(f"{name}: expected an integer tensor, got {groups.dtype}")
    if groups.shape != shape:
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}, one group a {of}, got {tuple(groups.shape)}"
        )
    if groups.device != device:
        raise ValueError(f"{name}: expected the device of query, {device}, got {groups.device}")


def check_same_group(same_group: Any) -> None:
    """What becomes of keys of a query's group."""
    if same_group not in SAME_GROUP:
        raise ValueError(f"same_group: expected one of {SAME_GROUP}, got {same_group!r}")


def _check_like(name: str, vectors: Any, query: Tensor) -> None:
    check_scores(vectors, name=name)
    if vectors.device != query.device:
        raise ValueError(
            f"{name}: expected the device of query, {query.device}, got {vectors.device}"
        )
    if vectors.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
        raise TypeError(
            f"{name}: expected the dtype of query, {query.dtype}, got {vectors.dtype}; convert one "
            "of them, or use torch.autocast"
        )
