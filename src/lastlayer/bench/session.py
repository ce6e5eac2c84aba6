"""What every family's run has in common: checks, the limit, all cases, the report."""

from collections.abc import Sequence
from pathlib import Path
from time import time_ns
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lastlayer.bench import plot
from lastlayer.bench import record as records
from lastlayer.bench.cases import CaseT, Family, PlanError, RecordT, VerdictT
from lastlayer.bench.progress import reporting
from lastlayer.bench.runner import Bench

_TABLE_WIDTH = 116


def check(device: str, json_path: Path | None, plot_path: Path | None) -> None:
    """Look at what every run is told.

    Raises:
        PlanError: the device or a folder is not there, or matplotlib where it is needed.
    """
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise PlanError(f"device: expected 'cpu' or 'cuda', got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError("device: 'cuda' was asked for, but torch sees no CUDA device; use 'cpu'")
    for name, path in (("json_path", json_path), ("plot_path", plot_path)):
        if path is not None and not path.absolute().parent.is_dir():
            folder = path.absolute().parent
            raise PlanError(f"{name}: the folder {folder} does not exist; make it first")
    if plot_path is not None:
        try:
            plot.require_matplotlib()
        except plot.MissingPlotLibrary as missing:
            raise PlanError(str(missing)) from missing


def refuse(reason: str, out: Console) -> int:
    """Say why a run is not made; the exit code for that."""
    out.print(f"[bold red]error:[/] {escape(reason)}", highlight=False, soft_wrap=True)
    return 2


def measure(
    family: Family[CaseT, VerdictT, RecordT],
    cases: Sequence[CaseT],
    *,
    device: torch.device,
    quick: bool,
    json_path: Path | None,
    out: Console,
    seed: int | None = None,
) -> Bench[CaseT, VerdictT, RecordT]:
    """Measure the limit of the device, then all cases.

    Args:
        family: what is measured.
        cases: on what.
        device: where.
        quick: see the families.
        json_path: a file that every measurement is appended to.
        out: where progress is told.
        seed: what inputs are drawn with, so that every run has the same; else new ones each time.
    """
    timer = family.timer(device, quick=quick)
    limit = family.limit(device, timer, quick=quick)
    with reporting(out, len(cases), quick=quick) as reporter:
        bench = Bench(
            family=family,
            device=device,
            timer=timer,
            limit=limit,
            environment=records.environment(device, quick=quick),
            reporter=reporter,
            seed=time_ns() % 2**40 if seed is None else seed,
            json_path=json_path,
        )
        for case in cases:
            bench.run(case)
    return bench


def show(
    bench: Bench[Any, Any, Any], tables: Sequence[Table], out: Console, *, limit: str, legend: str
) -> int:
    """Print where it was measured, the tables, and what was left out or wrong.

    Args:
        bench: the run.
        tables: what it found.
        out: where it goes.
        limit: the limit of the device in words.
        legend: what the columns mean.

    Returns:
        The exit code: 1 when a result of ours was wrong.
    """

    def line(text: str, style: str | None = None) -> None:
        out.print(escape(text), style=style, highlight=False, soft_wrap=True)

    # Piped output has no width of its own, and rich would squeeze a table into 80 columns.
    if not out.is_terminal:
        out.width = max(out.width, _TABLE_WIDTH)
    where = bench.environment
    threads = "" if where.threads is None else f", {where.threads} threads"
    kernels = sorted({r.implementation for r in bench.records if r.implementation is not None})
    ran = f" ({', '.join(kernels)})" if kernels else ""
    line(
        f"{where.device}{threads} · torch {where.torch} · lastlayer {where.lastlayer}{ran} · "
        f"{limit}"
    )
    for each in tables:
        out.print(each)
    line(legend, style="dim")
    for source, reason in sorted(bench.absent.items()):
        line(f"{source}: {reason}")
    for note in bench.notes:
        line(note)
    if bench.failures:
        line(f"{len(bench.failures)} of our results failed verification", style="bold red")
    return 1 if bench.failures else 0


def tell_plot(path: Path, out: Console) -> None:
    """Say where the picture went."""
    out.print(f"plot: {escape(str(path))}", highlight=False, soft_wrap=True)
