"""A made-up record, and a run that is small enough to take a second."""

import io
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from rich.console import Console

from lastlayer import maps
from lastlayer.bench import map_cases, runner, session
from lastlayer.bench import maps as bench_maps
from lastlayer.bench.record import Record, read
from lastlayer.bench.timing import CpuTimer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

MADE_UP = Record(
    run="run 1",
    quick=False,
    device="NVIDIA H200",
    device_type="cuda",
    threads=None,
    python="3.12.3",
    torch="2.11.0",
    triton="3.6.0",
    numba="0.62.0",
    lastlayer="0.1.0",
    date="2026-11-15T09:00:00+00:00",
    family="maps",
    section="shapes",
    seed=7,
    method="sparsemax",
    source="lastlayer",
    source_version="0.1.0",
    computes="sparsemax",
    implementation="triton",
    shape=(65536, 1024),
    dtype="float32",
    scale=2.0,
    direction="forward",
    median_ms=0.131,
    p20_ms=0.130,
    p80_ms=0.133,
    samples=400,
    bytes=536870912,
    tb_per_s=4.098,
    copy_tb_per_s=4.26,
    fraction_of_copy=0.962,
    ratio_to_softmax=0.956,
    ratio_to_ours=None,
    error=5e-8,
    row_sum_error=2e-7,
    verified=True,
    status="ok",
)


@pytest.fixture
def make_record():
    """A record that differs from the made-up one as told."""

    def make(**changes) -> Record:
        return Record(**{**asdict(MADE_UP), **changes})

    return make


@pytest.fixture
def render(monkeypatch):
    """The module benchmarks/render.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import render

    return render


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str
    records: list[Record]
    plot_path: Path


@pytest.fixture
def small_run(monkeypatch, tmp_path):
    """Runs the bench of maps on tiny shapes, our maps by their reference implementation."""
    entmax, topk, support = maps.entmax, maps.topk_softmax, maps.entmax_support
    monkeypatch.setattr(maps, "sparsemax", lambda x: entmax(x, 2.0, impl="reference"))
    monkeypatch.setattr(maps, "entmax", lambda x, a, **_: entmax(x, a, impl="reference"))
    monkeypatch.setattr(maps, "topk_softmax", lambda x, k, **_: topk(x, k, impl="reference"))
    monkeypatch.setattr(
        maps, "entmax_support", lambda x, a, size: support(x, a, size, impl="reference")
    )
    monkeypatch.setattr(map_cases, "CPU_SHAPES", ((8, 16), (6, 96)))
    monkeypatch.setattr(map_cases, "CPU_WIDTHS", range(4, 7))
    monkeypatch.setattr(map_cases, "CPU_SWEEP", 8)
    monkeypatch.setattr(runner, "_ROTATED_BYTES", 0)
    monkeypatch.setattr(session, "_copy_bytes", lambda device, *, quick: 2**16)
    timer = CpuTimer(budget_s=0.0, fewest_samples=1, sample_ms=0.01)
    monkeypatch.setattr(session, "_timer", lambda device, *, quick: timer)

    def run(
        *, quick: bool = True, peers: bool = False, dtypes: tuple[str, ...] = (), plot: bool = False
    ) -> Outcome:
        text, json_path, plot_path = io.StringIO(), tmp_path / "r.jsonl", tmp_path / "p.png"
        code = bench_maps.run(
            device="cpu",
            dtypes=dtypes,
            quick=quick,
            peers=peers,
            json_path=json_path,
            plot_path=plot_path if plot else None,
            out=Console(file=text),
        )
        return Outcome(code, text.getvalue(), read(json_path), plot_path)

    return run
