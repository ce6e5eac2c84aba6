"""The options of the cross entropy, checked, as the row loss takes them."""

import math
from typing import Any


def cross_entropy_options(
    label_smoothing: Any, z_loss: Any, softcap: Any, temperature: Any
) -> tuple[float, float, float, float]:
    """Smoothing, z loss, soft cap (0 for none) and temperature."""
    _check_number("label_smoothing", label_smoothing, "from 0 to 1", lambda x: 0.0 <= x <= 1.0)
    _check_number("z_loss", z_loss, "at least 0", lambda x: 0.0 <= x < math.inf)
    if softcap is not None:
        _check_number("softcap", softcap, "above 0, or None", lambda x: 0.0 < x < math.inf)
    _check_number("temperature", temperature, "above 0", lambda x: 0.0 < x < math.inf)
    return float(label_smoothing), float(z_loss), float(softcap or 0.0), float(temperature)


def _check_number(name: str, value: Any, expected: str, fits: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not fits(value):
        raise ValueError(f"{name}: expected a number {expected}, got {value}")
