import importlib

import pytest
import torch

from lastlayer.bench.timing import CpuTimer, CudaTimer, Timing, copy_timing, tb_per_s


def test_percentiles():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_competitors_take_turns_and_each_starts_a_round():
    calls = []
    timer = CpuTimer(budget_s=0.0, fewest_samples=3, sample_ms=0.0)
    timings = dict(timer.time({name: lambda name=name: calls.append(name) for name in "ab"}))
    assert {name: timing.samples for name, timing in timings.items()} == {"a": 3, "b": 3}
    # Two calls each to warm up and to see how long one takes, then the rounds.
    assert "".join(calls) == "aabb" + "ab" + "ba" + "ab"


def test_a_fast_competitor_is_sampled_until_its_own_limit():
    timer = CpuTimer(budget_s=60.0, fewest_samples=1, most_samples=7, sample_ms=0.0)
    ((_, timing),) = timer.time({"fast": lambda: None})
    assert timing.samples == 7


def test_a_competitor_that_raises_does_not_stop_the_others():
    def fails():
        raise RuntimeError("no such shape")

    timings = dict(CpuTimer(0.0).time({"bad": fails, "good": lambda: None}))
    assert str(timings["bad"]) == "no such shape"
    assert timings["good"].samples == 3


@pytest.fixture
def do_bench_calls(monkeypatch):
    """Stands in for do_bench where there is no GPU: three samples, and what it was asked for."""
    calls = []

    def do_bench(thunk, **options):
        thunk()
        calls.append(options)
        return [3.0, 1.0, 2.0]

    monkeypatch.setattr(importlib.import_module("triton.testing"), "do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return calls


def test_cuda_times_are_the_median_of_do_bench(do_bench_calls):
    timings = dict(CudaTimer(10, 60).time({"a": lambda: None, "b": lambda: 1 / 0}))
    assert timings["a"] == Timing(2.0, 1.0, 3.0, 3)
    assert isinstance(timings["b"], ZeroDivisionError)
    assert do_bench_calls == [{"warmup": 10, "rep": 60, "return_mode": "all"}]


def test_slow_calls_are_few(do_bench_calls):
    calls = []
    timer = CudaTimer(warmup_ms=1, rep_ms=0, fewest_samples=3)
    ((_, timing),) = timer.time({"slow": lambda: calls.append(1)})
    assert timing.samples == 3
    assert len(calls) == 4
    assert not do_bench_calls


def test_a_copy_counts_bytes_read_and_written():
    timing, moved = copy_timing(torch.device("cpu"), 4096, CpuTimer(0.0))
    assert moved == 8192
    assert timing.median_ms > 0
    assert tb_per_s(4_000_000_000, 2.0) == pytest.approx(2.0)
