"""Planned heads, and the table of them."""

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastlayer.lab._machine import Machine

_BYTES = (" B", " kB", " MB", " GB")
# Columns of a terminal from which on settings fit into the table.
_WIDE = 110


@dataclass(frozen=True)
class PlannedHead:
    """What a training step of a head should take, forward and backward, without the optimiser.

    Attributes:
        head: its spec, as ``lastlayer compare --head`` takes it.
        settings: what was chosen for it, in words.
        ms: the time of a step; expected between ``low_ms`` and ``high_ms``.
        flops: of matrix products.
        parameters: numbers that it learns.
        parameter_bytes: of these.
        gradient_bytes: of their gradients: all of them, or those of the rows that a step reads.
        held_bytes: what a step holds beside them.
        adam_bytes: two moments in float32 for each number.
    """

    head: str
    settings: str
    ms: float
    low_ms: float
    high_ms: float
    flops: float
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    held_bytes: int
    adam_bytes: int

    @property
    def memory_bytes(self) -> int:
        """All of it, with Adam."""
        held = self.gradient_bytes + self.held_bytes
        return self.parameter_bytes + held + self.adam_bytes

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "memory_bytes": self.memory_bytes}


def render_plan(planned: list[PlannedHead], machine: Machine, console: Console) -> None:
    """A table, and what it rests on."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("head", no_wrap=True)
    for name in ("ms", "between", "numbers", "memory", "in step"):
        table.add_column(name, justify="right", no_wrap=True)
    wide = console.width >= _WIDE
    if wide:
        table.add_column("settings")
    for each in planned:
        in_step = each.gradient_bytes + each.held_bytes
        table.add_row(
            each.head,
            _digits(each.ms),
            f"{_digits(each.low_ms)} – {_digits(each.high_ms)}",
            _scaled(each.parameters, ("", "k", "M", "G")),
            _scaled(each.memory_bytes, _BYTES),
            _scaled(in_step, _BYTES),
            *([Text(each.settings)] if wide else []),
        )
    console.print(table)
    rates = (
        f"Measured here: {1e-12 / machine.flop:.3g} TFLOP/s, {1e-9 / machine.byte:.3g} GB/s, "
        f"{1e6 * machine.call:.3g} µs a call. Milliseconds of a step, forward and backward, with "
        "classes by Zipf's law. Memory is what the numbers that are learned, Adam's moments and a "
        "step need; in step is the gradients and what is held beside them."
    )
    console.print(Text(rates, style="dim"))
    if machine.device == "cuda":
        text = "Counts of a CPU at the rates of this GPU: trust the order more than the times."
        console.print(Text(text, style="dim"))


def _digits(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _scaled(number: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}{units[-1]}" if number < 999.5 else f"{number:,.0f}{units[-1]}"
