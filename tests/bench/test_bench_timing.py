import importlib

import pytest
import torch
from lastlayer.bench import timing
from lastlayer.bench.timing import (
    CpuTimer,
    CudaTimer,
    CudaTurnsTimer,
    Timing,
    copy_tb_per_s,
    gemm_tflop_per_s,
    tera_per_s,
)


def test_percentiles():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_competitors_take_turns_and_nobody_always_follows_the_same_one():
    calls = []
    timer = CpuTimer(budget_s=0.0, fewest_samples=20, sample_ms=0.0)
    timings = dict(timer.time({name: lambda name=name: calls.append(name) for name in "abc"}))
    assert {timing.samples for timing in timings.values()} == {20}
    # Two calls each to warm up and to see how long one takes, then the rounds.
    assert "".join(calls[:6]) == "aabbcc"
    rounds = ["".join(calls[first : first + 3]) for first in range(6, 66, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3


def test_nobody_waits_twice_for_a_slow_competitor():
    class Told(CpuTimer):
        def milliseconds(self, thunk, repeats):
            return thunk()

    calls = []
    timer = Told(budget_s=0.0, fewest_samples=3, patience_s=10.0)
    thunks = {"slow": lambda: calls.append("slow") or 10_001.0, "quick": lambda: 9_999.0}
    timings = dict(timer.time(thunks))
    assert calls == ["slow"]
    assert timings["slow"] == Timing(10_001.0, 10_001.0, 10_001.0, 1)
    assert timings["quick"].samples == 3


def test_on_cuda_the_events_are_read_once_the_device_is_done(monkeypatch):
    told = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("event")

        def elapsed_time(self, end):
            assert told[-1] == "wait"
            return 12.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    buffer = torch.ones(4)
    monkeypatch.setattr("lastlayer.bench.timing._cache_sized_buffer", lambda: buffer)
    timer = CudaTurnsTimer(budget_s=0.0)
    assert timer.milliseconds(lambda: told.append("call"), 2) == 6.0
    assert told == ["event", "call", "call", "event", "wait"]
    assert not buffer.any()


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


class OneMillisecond:
    """Stands in for a timer: every call took a millisecond."""

    def time(self, thunks):
        for key, thunk in thunks.items():
            thunk()
            yield key, Timing(1.0, 1.0, 1.0, 1)


def test_a_copy_counts_bytes_read_and_written():
    assert copy_tb_per_s(torch.device("cpu"), 4096, OneMillisecond()) == 8192 / 1e9
    assert tera_per_s(4_000_000_000, 2.0) == pytest.approx(2.0)


@pytest.mark.parametrize(("quick", "size"), [(False, 16), (True, 4)])
def test_a_product_counts_a_multiplication_and_an_addition(quick, size, monkeypatch):
    monkeypatch.setattr(timing, "_PRODUCT", {"cpu": (16, torch.float32)})
    rate = gemm_tflop_per_s(torch.device("cpu"), OneMillisecond(), quick=quick)
    assert rate == 2 * size**3 / 1e9


def test_a_competitor_that_fails_later_has_no_time():
    calls = []

    def fails_at_its_third():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    timer = CpuTimer(budget_s=0.0, fewest_samples=3, sample_ms=0.0)
    timings = dict(timer.time({"bad": fails_at_its_third, "good": lambda: None}))
    assert str(timings["bad"]) == "out of memory"
    assert timings["good"].samples == 3
