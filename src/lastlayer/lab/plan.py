"""What a training step of each head takes at a size that a person names, measured here."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastlayer.lab import metrics
from lastlayer.lab.errors import LabError

DEVICES = ("cpu", "cuda")
# Pairs have no classes of their own.
TASKS = ("lm", "classification", "multilabel")
# Of measuring, all heads together.
SECONDS = 60.0
# Trees and bands are made for the frequencies of all classes, in some 150 bytes each.
MOST_CLASSES = 20_000_000
# Of each row, where a row has several.
LABELS = 5
# Heads are first measured at a size so many times smaller: it shows which can be at the asked one.
_SMALLER, _FEWEST = 16, 256
_LETTERS = 11
# Processes per core from which on times are not to be trusted.
BUSY = 1.5


@dataclass(frozen=True)
class PlannedHead:
    """A training step of a head: forward and backward of its loss, without the optimiser.

    Attributes:
        head: its spec, as ``lastlayer compare --head`` takes it.
        ms: median milliseconds; None where it could not be measured.
        low_ms: 20th percentile.
        high_ms: 80th percentile.
        samples: how many steps were timed.
        peak_memory_mb: of the head and its step; None where it could not be measured.
        parameters: how many numbers it learns.
        reason: why it could not be measured, else empty.
        smaller: what it took with fewer classes, where it could not be measured.
    """

    head: str
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    samples: int = 0
    peak_memory_mb: float | None = None
    parameters: int | None = None
    reason: str = ""
    smaller: str = ""

    def as_json(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def plan(
    classes: int,
    hidden: int,
    rows: int,
    device: str = "cpu",
    *,
    task: str = "lm",
    heads: Sequence[str] = (),
    seconds: float = SECONDS,
    tell: Callable[[str], None] = lambda _: None,
) -> list[PlannedHead]:
    """A few steps of each head, the fastest first; those that could not be measured come last.

    Class frequencies follow Zipf's law, one over the rank, in float32.

    Args:
        classes: number of classes.
        hidden: size of the hidden state.
        rows: targets in a step: batch size times length.
        device: ``"cpu"`` or ``"cuda"``.
        task: ``"lm"`` or ``"classification"`` for heads that choose one class, ``"multilabel"`` for
            several labels per row.
        heads: specs; none for all that suit the task.
        seconds: for measuring all of them. A head that would take longer than what is left of it
            has a reason instead of a time.
        tell: hears which head is measured.
    """
    for name, value, least in (("classes", classes, 2), ("hidden", hidden, 1), ("rows", rows, 1)):
        _check_size(name, value, least)
    if classes > MOST_CLASSES:
        raise ValueError(f"classes: expected at most {MOST_CLASSES:,}, got {classes:,}")
    for name, text, known in (("device", device, DEVICES), ("task", task, TASKS)):
        if text not in known:
            raise ValueError(f"{name}: expected one of {known}, got {text!r}")
    import numpy as np
    import torch

    from lastlayer.heads.recipes import ClassData
    from lastlayer.lab.costs import Meter, Problem, zipf_shares
    from lastlayer.lab.machine import give_back
    from lastlayer.lab.specs import catalogue, parse_specs

    suited = [each.recipe for each in catalogue().values() if task in each.tasks]
    every = [spec for recipe in suited for spec in (recipe.compared or (recipe.name,))]
    specs = parse_specs(list(heads) or every, task=task)
    _check_memory(classes, hidden, rows, device)
    counts = np.maximum(100 * classes * zipf_shares(classes), 1).astype(np.int64)
    spelled = [f"{i:0{_LETTERS}d}" for i in range(_FEWEST)]
    several = task == "multilabel"
    lengths = np.full(rows, min(LABELS, classes)) if several else None
    shape = (rows, min(LABELS, classes)) if several else (1, rows)
    needs = ClassData(hidden, counts, spelled)
    meter = Meter(Problem(needs, shape, lengths, torch.device(device)), specs, seconds, [])
    smaller = classes // _SMALLER
    for size in (*([smaller] if smaller >= _FEWEST else []), classes):
        # What the smaller size took is not taken from the asked one.
        meter.left = seconds
        meter.at(size, lambda spec, n: tell(f"{spec.label} with {n:,} classes"))
    give_back()
    specs_by_slug = {spec.slug: spec for spec in specs}
    found = []
    for cost in meter.found:
        if cost.classes != classes:
            continue
        before = [c for c in meter.found if c.slug == cost.slug and c.classes == smaller and c.ms]
        took = f"{metrics.STEP_MS.format(before[0].ms)} with {smaller:,} classes" if before else ""
        kept = {k: v for k, v in asdict(cost).items() if k not in ("slug", "classes")}
        text = specs_by_slug[cost.slug].text
        found.append(PlannedHead(text, **kept, smaller=took if cost.reason else ""))
    return sorted(found, key=lambda each: float("inf") if each.ms is None else each.ms)


def _check_size(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _check_memory(classes: int, hidden: int, rows: int, device: str) -> None:
    """Not even the parameters and their gradient fit: refused before anything is built."""
    import torch

    from lastlayer.lab.costs import free_memory

    free = free_memory(torch.device(device))
    needed = 8 * hidden * (classes / _SMALLER + rows)
    if free is not None and needed > free:
        raise LabError(
            f"--classes, --hidden, --rows: expected a problem that fits into the "
            f"{free / 1e9:.3g} GB of free memory, got {classes:,} × {hidden:,} with {rows:,} rows"
        )


def render_plan(planned: Sequence[PlannedHead], console: Console) -> None:
    """A table, what could not be measured and why, and what the numbers are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("head", no_wrap=True)
    for name in ("time", "20–80%", "memory", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in planned:
        if each.ms is None:
            continue
        low, high = metrics.STEP_MS.format(each.low_ms), metrics.STEP_MS.format(each.high_ms)
        table.add_row(
            each.head,
            metrics.STEP_MS.format(each.ms),
            f"{low.removesuffix(' ms')}–{high}",
            metrics.MEMORY.format(each.peak_memory_mb),
            metrics.PARAMETERS.format(each.parameters),
        )
    console.print(table)
    for reason in dict.fromkeys(each.reason for each in planned if each.ms is None):
        console.print(Text(f"Not measured: {reason}"), soft_wrap=True)
        for each in planned:
            if each.ms is None and each.reason == reason:
                smaller = f" ({each.smaller})" if each.smaller else ""
                console.print(Text(f"    {each.head}{smaller}"), soft_wrap=True)
    text = (
        "Time and peak memory of a training step, measured here: forward and backward of the loss "
        "in float32, without backbone and optimiser (Adam adds two numbers per parameter), with "
        "class frequencies by Zipf's law."
    )
    console.print(Text(text, style="dim"))
    if (busy := load()) is not None and busy > BUSY:
        console.print(
            f"The machine is busy (load {busy:.1f} per core): these times are not to be trusted.",
            style="yellow", highlight=False,
        )  # fmt: skip


def load() -> float | None:
    """Processes that want to run, per core; None where the system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None
