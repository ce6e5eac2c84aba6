"""Made-up records, and runs of one sample."""

import pytest
import torch

from benchmarks import driver, timing
from benchmarks.record import Record

CPU = torch.device("cpu")


@pytest.fixture
def make_record():
    """A record that differs from the made-up one as told."""
    usual = dict(
        run="run 1", date="2026-11-15T09:00:00+00:00", quick=False, device="NVIDIA H200",
        device_type="cuda", commit="abc1234", family="fused", section="large width",
        method="cross_entropy", source="lastlayer", computes="cross_entropy",
        shape=(8192, 4096, 128256), dtype="bfloat16", direction="forward+backward",
        scores="flat", median_ms=39.8, p20_ms=39.7, p80_ms=40.0, samples=10, verified=True,
        status="ok", flop=2.6e13, gemm_tflop_per_s=745.0, copy_tb_per_s=4.2,
        baseline="torch compiled", peak_bytes=1_060_000_000,
        errors={"loss": 3e-7, "hidden": 2.1e-3, "weight": 2.3e-3},
    )  # fmt: skip
    return lambda **changes: Record(**usual | changes)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """One sample of everything, on one set of inputs, and limits of small buffers."""
    monkeypatch.setattr(timing, "PRODUCT", {"cpu": (64, torch.float32)})
    monkeypatch.setattr(timing, "COPIED", {"cpu": 2**14})
    monkeypatch.setattr(driver, "_ROTATED", {"cpu": (0, 1), "cuda": (0, 1)})
    quickly = timing.Clock(CPU, 0.0, fewest_samples=1, sample_ms=0.0)
    monkeypatch.setattr(timing.Clock, "of", classmethod(lambda *_, **__: quickly))
