"""How long each head trains: ``2000steps``, ``3epochs``, or a time that is converted to steps."""

import re
from dataclasses import dataclass
from typing import Literal

from lastlayer.lab.errors import LabError

Kind = Literal["seconds", "steps", "epochs"]

_UNITS: dict[str, tuple[Kind, float]] = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), ("seconds", 1.0)),
    **dict.fromkeys(("m", "min", "minute", "minutes"), ("seconds", 60.0)),
    **dict.fromkeys(("h", "hour", "hours"), ("seconds", 3600.0)),
    **dict.fromkeys(("step", "steps"), ("steps", 1.0)),
    **dict.fromkeys(("epoch", "epochs"), ("epochs", 1.0)),
}  # fmt: skip
# Fractions of the steps at which a run is validated: dense at the start, where most is learned, and
# near the end, to see whether the curve is still falling.
_VALIDATED_AT = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.875, 1.0)
# How often the training loss is recorded in a run.
_LOSS_POINTS = 100


@dataclass(frozen=True)
class Budget:
    """An amount of training, the same for every head: steps, epochs, or a time.

    A time is the training time of the slowest head: all heads make as many steps as it does.
    """

    kind: Kind
    amount: float

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """From the text of ``--budget``."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
        unit = _UNITS.get(match[2]) if match else None
        if match is None or unit is None or float(match[1]) <= 0:
            raise LabError(
                "--budget: expected an amount above 0 with its unit, such as 2000steps, 3epochs, "
                f"30s or 5m, got {text!r}"
            )
        kind, factor = unit
        amount = float(match[1]) * factor
        if kind == "steps" and amount != int(amount):
            raise LabError(f"--budget: expected a whole number of steps, got {text!r}")
        return cls(kind, amount)

    def steps(self, steps_per_epoch: int, slowest_ms: float | None = None) -> int:
        """Number of steps of every head; a time budget needs the slowest head's step time."""
        if self.kind == "seconds":
            if slowest_ms is None:
                raise ValueError("slowest_ms: expected the time of a step, got None")
            return max(1, int(1e3 * self.amount / slowest_ms))
        return max(1, round(self.amount * (steps_per_epoch if self.kind == "epochs" else 1)))

    def __str__(self) -> str:
        unit = {"seconds": "s", "steps": " steps", "epochs": " epochs"}[self.kind]
        return f"{self.amount:g}{unit}"


class Schedule:
    """The steps of a run at which it is validated, and at which its training loss is recorded."""

    def __init__(self, steps: int) -> None:
        self.total = steps
        self.judged = {round(share * steps) for share in _VALIDATED_AT}
        self.told = {round(i / _LOSS_POINTS * steps) for i in range(1, _LOSS_POINTS + 1)}

    def steps_to_next(self, step: int) -> int:
        """Steps until the next validation or recorded loss; 0 at the end."""
        return min((at for at in self.judged | self.told if at > step), default=step) - step
