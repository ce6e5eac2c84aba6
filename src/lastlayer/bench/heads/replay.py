"""What the device alone needs for a call: a CUDA graph of it, captured once and replayed."""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lastlayer.bench import memory

# A call that takes longer hides what the host does, and its graph may need memory for a second one.
LONGEST_MS = 20.0
_SAMPLES, _WARM_UPS = 20, 3


def replayed_ms(calls: Sequence[Callable[[], Any]], device: torch.device) -> float | None:
    """The median time of a call, from replays of one graph that has all of them.

    None on a CPU, for calls that are longer than ``LONGEST_MS``, and where the host waits for the
    device: such a call cannot be captured, or is another one while it is.

    Args:
        calls: the same call on several inputs, more than the cache of the device holds.
        device: where they run.
    """
    if device.type != "cuda":
        return None
    # What is compiled, or made once for an optimiser, is there before anything is timed.
    calls[0]()
    if _milliseconds(calls[0]) > LONGEST_MS or _waits(calls[0]):
        return None
    memory.release(device)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        _let_go_of_capture(device, stream)
        return None
    for _ in range(_WARM_UPS):
        graph.replay()
    samples = [_milliseconds(graph.replay) / len(calls) for _ in range(_SAMPLES)]
    del graph
    memory.release(device)
    return statistics.median(samples)


def _milliseconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _waits(call: Callable[[], Any]) -> bool:
    # Found out before a capture fails: not everything recovers from that.
    torch.cuda.synchronize()
    with _errors_where_the_host_waits():
        try:
            call()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return True
    return False


def _let_go_of_capture(device: torch.device, stream: torch.cuda.Stream) -> None:
    """A capture that fails leaves its stream current, and the generator to captures alone."""
    torch.cuda.synchronize()
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())


@contextmanager
def _errors_where_the_host_waits() -> Iterator[None]:
    # torch warns, once, that the mode is a prototype.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
