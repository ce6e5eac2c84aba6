"""What every family's run has in common: checks, the limit, all cases, the report."""

from collections.abc import Sequence
from pathlib import Path
from time import time_ns

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lastlayer.bench import plot, table
from lastlayer.bench import record as records
from lastlayer.bench.cases import DTYPES, Case, Family
from lastlayer.bench.progress import reporting
from lastlayer.bench.runner import Bench
from lastlayer.bench.timing import CpuTimer, CudaTimer, Timer, copy_timing, tb_per_s

_TABLE_WIDTH = 116


def problem(
    device: str, dtypes: tuple[str, ...], json_path: Path | None, plot_path: Path | None
) -> str | None:
    """Why a run cannot be made as asked, found before any work; None if it can."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        return f"device: expected 'cpu' or 'cuda', got {device!r}"
    if kind == "cuda" and not torch.cuda.is_available():
        return "device: 'cuda' was asked for, but torch sees no CUDA device; use 'cpu'"
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        return f"dtypes: expected names among {', '.join(DTYPES)}, got {', '.join(unknown)}"
    for name, path in (("json_path", json_path), ("plot_path", plot_path)):
        if path is not None and not path.absolute().parent.is_dir():
            return f"{name}: the folder {path.absolute().parent} does not exist; make it first"
    if plot_path is not None:
        try:
            plot.require_matplotlib()
        except plot.MissingPlotLibrary as missing:
            return str(missing)
    return None


def measure(
    family: Family,
    cases: Sequence[Case],
    *,
    device: torch.device,
    quick: bool,
    json_path: Path | None,
    out: Console,
) -> Bench:
    """Measure the copy bandwidth, then all cases."""
    timer = _timer(device, quick=quick)
    copy, copied_bytes = copy_timing(device, _copy_bytes(device, quick=quick), timer)
    with reporting(out, len(cases), quick=quick) as reporter:
        bench = Bench(
            family=family,
            device=device,
            timer=timer,
            copy_tb_per_s=tb_per_s(copied_bytes, copy.median_ms),
            environment=records.environment(device, quick=quick),
            reporter=reporter,
            seed=time_ns() % 2**40,
            json_path=json_path,
        )
        for case in cases:
            bench.run(case)
    return bench


def _timer(device: torch.device, *, quick: bool) -> Timer:
    if device.type == "cuda":
        return CudaTimer(warmup_ms=10, rep_ms=20 if quick else 60)
    return CpuTimer(budget_s=0.1 if quick else 1.0)


def _copy_bytes(device: torch.device, *, quick: bool) -> int:
    if device.type == "cuda":
        return 2**30 if quick else 2**32
    return 2**26 if quick else 2**28


def show(bench: Bench, tables: Sequence[Table], out: Console) -> None:
    """Print where it was measured, the tables, and what was left out or wrong."""

    def line(text: str, style: str | None = None) -> None:
        out.print(escape(text), style=style, highlight=False, soft_wrap=True)

    # Piped output has no width of its own, and rich would squeeze a table into 80 columns.
    if not out.is_terminal:
        out.width = max(out.width, _TABLE_WIDTH)
    where = bench.environment
    threads = "" if where.threads is None else f", {where.threads} threads"
    unit = table.unit_for(bench.copy_tb_per_s)
    kernels = sorted({r.implementation for r in bench.records if r.implementation is not None})
    line(
        f"{where.device}{threads} · torch {where.torch} · lastlayer {where.lastlayer} "
        f"({', '.join(kernels)}) · copy {unit.show(bench.copy_tb_per_s)} {unit.name}"
    )
    for each in tables:
        out.print(each)
    line(table.legend(), style="dim")
    for source, reason in sorted(bench.absent.items()):
        line(f"{source}: {reason}")
    for note in bench.notes:
        line(note)
    if bench.failures:
        line(f"{len(bench.failures)} of our results failed verification", style="bold red")
