import pytest
import torch

from benchmarks import timing
from benchmarks.timing import Clock, Timing, replayed_ms

CPU = torch.device("cpu")


def test_percentiles():
    assert Timing.of([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == Timing(3.5, 2.0, 5.0, 6)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


def test_competitors_take_turns_and_nobody_always_follows_the_same_one():
    calls = []
    clock = Clock(CPU, 0.0, fewest_samples=20, sample_ms=0.0)
    timings = clock.time({name: lambda name=name: calls.append(name) for name in "abc"})
    assert {timing.samples for timing in timings.values()} == {20}
    # Two calls each to warm up and to see how long one takes, then the rounds.
    assert "".join(calls[:6]) == "aabbcc"
    rounds = ["".join(calls[first : first + 3]) for first in range(6, 66, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) > 3


class Told(Clock):
    """A call says itself how long it took."""

    def milliseconds(self, thunk, repeats):
        return thunk()


def test_nobody_waits_twice_for_a_slow_competitor():
    calls = []
    thunks = {"slow": lambda: calls.append(1) or 10_001.0, "quick": lambda: 9_999.0}
    timings = Told(CPU, 0.0, fewest_samples=3, patience_s=10.0).time(thunks)
    assert len(calls) == 1
    assert timings["slow"] == Timing(10_001.0, 10_001.0, 10_001.0, 1)
    assert timings["quick"].samples == 3


def test_sampling_ends_with_the_budget_or_with_enough_samples():
    thunks = {"ten": lambda: 10.0}
    assert Told(CPU, 0.1, fewest_samples=2).time(thunks)["ten"].samples == 10
    assert Told(CPU, 9.0, fewest_samples=2, most_samples=7).time(thunks)["ten"].samples == 7


def test_a_competitor_that_raises_early_or_late_does_not_stop_the_others():
    calls = []

    def fails_at_its_third():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    thunks = {"early": lambda: 1 / 0, "late": fails_at_its_third, "good": lambda: None}
    timings = Clock(CPU, 0.0, fewest_samples=3, sample_ms=0.0).time(thunks)
    assert isinstance(timings["early"], ZeroDivisionError)
    assert str(timings["late"]) == "out of memory"
    assert timings["good"].samples == 3


def test_limits_count_bytes_read_and_written_and_operations():
    class Even(Clock):
        def milliseconds(self, thunk, repeats):
            assert thunk() is not None
            return 1.0

    clock = Even(CPU, 0.0)
    assert timing.limits(clock, quick=False)["copy_tb_per_s"] == 2 * 2**14 / 1e9
    assert timing.limits(clock, quick=True)["gemm_tflop_per_s"] == 2 * 16**3 / 1e9


def test_nothing_is_replayed_on_a_cpu():
    assert replayed_ms([lambda: 1 / 0], CPU) is None


@pytest.mark.gpu
def test_a_call_is_replayed_unless_the_host_waits():
    cuda = torch.device("cuda", 0)
    numbers = torch.randn(1000, device=cuda)
    assert 0 < replayed_ms([lambda: numbers.exp().sum()] * 3, cuda) < 5
    assert replayed_ms([lambda: numbers.sum().item()], cuda) is None
    assert torch.randn(3, device=cuda).isfinite().all()
