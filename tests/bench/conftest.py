"""Made-up records, and runs that are small enough to take a second."""

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lastlayer.bench import fused as bench_fused
from lastlayer.bench import maps as bench_maps
from lastlayer.bench import runner, timing
from lastlayer.bench.cases import Family
from lastlayer.bench.fused import cases as fused_cases
from lastlayer.bench.fused.record import FusedRecord
from lastlayer.bench.losses import Losses
from lastlayer.bench.maps import cases as map_cases
from lastlayer.bench.maps import family as map_family
from lastlayer.bench.maps.record import MapRecord
from lastlayer.bench.record import Record
from lastlayer.bench.results import read
from lastlayer.bench.timing import CpuTimer
from made_up_record import MADE_UP
from rich.console import Console

from lastlayer import maps
from lastlayer.kernels import _registry

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

MAP = dict(
    family="maps",
    section="shapes",
    method="sparsemax",
    computes="sparsemax",
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
    error=5e-8,
    row_sum_error=2e-7,
)
FUSED = dict(
    family="fused",
    section="large width",
    method="cross_entropy",
    computes="cross_entropy",
    shape=(8192, 4096, 128256),
    dtype="bfloat16",
    scores="flat",
    scores_made="hidden ~ N(0, 1)",
    support_mean=None,
    support_max=None,
    direction="forward+backward",
    median_ms=39.8,
    p20_ms=39.7,
    p80_ms=40.0,
    samples=10,
    tflop_per_s=648.7,
    gemm_tflop_per_s=745.0,
    fraction_of_gemm=0.871,
    baseline="torch compiled",
    ratio_to_baseline=1.008,
    peak_bytes=1_060_000_000,
    loss_error=3e-7,
    hidden_error=2.1e-3,
    weight_error=2.3e-3,
)


@pytest.fixture
def make_record():
    """A record of a map that differs from the made-up one as told."""
    return lambda **changes: MapRecord(**{**MADE_UP, **MAP, **changes})


@pytest.fixture
def make_fused():
    """A record of a fused loss that differs from the made-up one as told."""
    return lambda **changes: FusedRecord(**{**MADE_UP, **FUSED, **changes})


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
def fast(monkeypatch):
    """One sample of everything, on one set of inputs."""
    monkeypatch.setattr(runner, "_ROTATED_BYTES", 0)
    timer = CpuTimer(budget_s=0.0, fewest_samples=1, sample_ms=0.01)
    for family in (Family, Losses):
        monkeypatch.setattr(family, "timer", lambda self, device, *, quick: timer)


def outcome_of(run, tmp_path, *, plot: bool, **settings) -> Outcome:
    text, json_path, plot_path = io.StringIO(), tmp_path / "r.jsonl", tmp_path / "p.png"
    code = run(
        device="cpu",
        json_path=json_path,
        plot_path=plot_path if plot else None,
        out=Console(file=text),
        **settings,
    )
    records = read(json_path) if json_path.exists() else []
    return Outcome(code, text.getvalue(), records, plot_path)


@pytest.fixture
def small_run(monkeypatch, tmp_path, fast):
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
    monkeypatch.setattr(map_family, "_copy_bytes", lambda device, *, quick: 2**16)

    def run(
        *, quick: bool = True, peers: bool = False, dtypes: tuple[str, ...] = (), plot: bool = False
    ) -> Outcome:
        return outcome_of(
            bench_maps.run, tmp_path, plot=plot, quick=quick, peers=peers, dtypes=dtypes
        )

    return run


@pytest.fixture
def small_fused_run(monkeypatch, tmp_path, fast):
    """Runs the bench of fused losses on tiny shapes, by the reference implementations."""
    monkeypatch.setattr(_registry, "selected", lambda op, device_type, dtype: "reference")
    shapes = {
        fused_cases.LARGE: ((12, 8, 90),),
        fused_cases.SMALL: (),
        fused_cases.SPARSE: ((10, 8, 90),),
    }
    monkeypatch.setattr(fused_cases, "QUICK_CPU_SHAPES", shapes)
    monkeypatch.setattr(fused_cases, "CPU_SHAPES", shapes)
    monkeypatch.setattr(timing, "_PRODUCT", {"cpu": (64, torch.float32)})

    def run(
        *, quick: bool = True, peers: bool = False, only: str = "", plot: bool = False
    ) -> Outcome:
        return outcome_of(bench_fused.run, tmp_path, plot=plot, quick=quick, peers=peers, only=only)

    return run
