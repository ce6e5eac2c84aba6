"""How long each head trains: ``30s``, ``2m``, ``2000steps`` or ``3epochs``."""

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Literal

from lastlayer.lab.errors import LabError

Kind = Literal["seconds", "steps", "epochs"]

_UNITS: dict[str, tuple[Kind, float]] = {
    "s": ("seconds", 1.0),
    "sec": ("seconds", 1.0),
    "second": ("seconds", 1.0),
    "seconds": ("seconds", 1.0),
    "m": ("seconds", 60.0),
    "min": ("seconds", 60.0),
    "minutes": ("seconds", 60.0),
    "h": ("seconds", 3600.0),
    "step": ("steps", 1.0),
    "steps": ("steps", 1.0),
    "epoch": ("epochs", 1.0),
    "epochs": ("epochs", 1.0),
}
# Where a run is judged on the way, as shares of it: close together early, where most is learned,
# so that the quality of a fast head can be read at the few steps that a slow one has done.
_JUDGED = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.55, 0.75, 1.0)
# Points of the training loss on the way.
_TOLD = 100


@dataclass(frozen=True)
class Budget:
    """An amount of training: seconds of it alone, steps, or passes over the data."""

    kind: Kind
    amount: float

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """From the text of ``--budget``."""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
        unit = _UNITS.get(found[2]) if found else None
        if found is None or unit is None or float(found[1]) <= 0:
            raise LabError(
                "--budget: expected an amount above 0 with its unit, such as 30s, 5m, 2000steps "
                f"or 3epochs, got {text!r}"
            )
        kind, times = unit
        amount = float(found[1]) * times
        if kind == "steps" and amount != int(amount):
            raise LabError(f"--budget: expected a whole number of steps, got {text!r}")
        return cls(kind, amount)

    def steps(self, steps_per_epoch: int) -> int | None:
        """How many steps these are; None where the clock decides."""
        if self.kind == "seconds":
            return None
        times = steps_per_epoch if self.kind == "epochs" else 1
        return max(1, round(self.amount * times))

    def as_json(self) -> dict[str, Any]:
        """For compare.json."""
        amount = int(self.amount) if self.amount == int(self.amount) else self.amount
        return {"kind": self.kind, "amount": amount}

    def __str__(self) -> str:
        unit = {"seconds": "s", "steps": " steps", "epochs": " epochs"}[self.kind]
        return f"{self.amount:g}{unit}"


class Schedule:
    """When a run ends, when it is judged and when its loss is told.

    The points of a budget in steps are numbers of steps, so that they are the same in every run.

    Args:
        budget: of the run.
        steps_per_epoch: steps in one pass over the data.
    """

    def __init__(self, budget: Budget, steps_per_epoch: int) -> None:
        steps = budget.steps(steps_per_epoch)
        self.in_steps = steps is not None
        self.total = float(budget.amount if steps is None else steps)
        self._judged = self._points(_JUDGED)
        self._told = self._points(tuple(i / _TOLD for i in range(1, _TOLD + 1)))

    def _points(self, shares: tuple[float, ...]) -> list[float]:
        points = {share * self.total for share in shares}
        return sorted({float(round(each)) for each in points} if self.in_steps else points)

    def place(self, step: int, seconds: float) -> float:
        """How far a run is, in steps or in seconds; it ends at ``total``."""
        return float(step) if self.in_steps else seconds

    def judged(self, place: float) -> int:
        """How many of the points at which a run is judged it has reached."""
        return bisect_right(self._judged, place)

    def told(self, place: float) -> int:
        """The same for the points at which its loss is told."""
        return bisect_right(self._told, place)

    def steps_to_next(self, step: int) -> int | None:
        """Steps to the next point of either kind; None where the clock decides."""
        if not self.in_steps:
            return None
        ahead = [
            points[reached] for points in (self._judged, self._told)
            if (reached := bisect_right(points, step)) < len(points)
        ]  # fmt: skip
        return int(min(ahead)) - step if ahead else None
