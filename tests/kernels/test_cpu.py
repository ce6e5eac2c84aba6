"""What CPU kernels share: threads, caches on the disk, and memory."""

import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from lastlayer.kernels import _cpu
from lastlayer.kernels._cpu import by_rows

PROGRAM = """
import os, threading
import numpy as np
import torch
import lastlayer

torch.set_num_threads(2)
scores = torch.randn(1024, 257)
expected = lastlayer.sparsemax(scores, impl="reference").numpy()

def is_right():  # compared by numpy, since torch's own threads do not outlive a fork either
    return np.allclose(lastlayer.sparsemax(scores).numpy(), expected, atol=1e-6)

def helpers():
    return [each for each in threading.enumerate() if each.name.startswith("lastlayer")]

assert is_right()
assert len(helpers()) == 1
assert torch.get_num_threads() == 2
{body}
"""

FROM_THREADS = """
answers = []
workers = [
    threading.Thread(target=lambda: answers.append(all(is_right() for _ in range(50))))
    for _ in range(4)
]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert answers == [True] * 4, answers
assert len(helpers()) == 1
"""

AFTER_A_FORK = """
child = os.fork()
if child == 0:
    before = len(helpers())
    os._exit(0 if before == 0 and is_right() and len(helpers()) == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert is_right()
"""

FIRST_CALLS = """
import sys
import torch
import lastlayer
from lastlayer import heads, samplers

scores, target = torch.randn(64, 1000, requires_grad=True), torch.randint(1000, (64,))
hidden = torch.randn(64, 16)
lastlayer.sparsemax(scores).sum().backward()
lastlayer.entmax_loss(scores, target).backward()
heads.FullSoftmax(16, 1000)(hidden, target).backward()
sampler = samplers.Unigram(torch.arange(1.0, 1001.0))
heads.SampledSoftmax(16, 1000, sampler=sampler)(hidden, target).backward()

from numba.core.dispatcher import Dispatcher

compiled = {
    f"{name}.{key}": sum(kernel.stats.cache_misses.values())
    for name, module in list(sys.modules.items()) if name.startswith("lastlayer")
    for key, value in vars(module).items()
    if isinstance(kernel := getattr(value, "__wrapped__", value), Dispatcher) and kernel.overloads
}
print(len(compiled), [name for name, misses in compiled.items() if misses])
"""


def _run(program):
    """In a process of its own: where this goes wrong the process is ended, not the test."""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_kernels_run_in_any_thread_and_after_a_fork():
    _run(PROGRAM.format(body=FROM_THREADS + (AFTER_A_FORK if hasattr(os, "fork") else "")))


def test_a_second_process_compiles_nothing():
    """The first calls of a process take compiled kernels from the disk, all of them."""
    loaded, compiled = _run(FIRST_CALLS).split(maxsplit=1)
    if compiled.strip() != "[]":  # by the first process on this machine
        loaded, compiled = _run(FIRST_CALLS).split(maxsplit=1)
    assert int(loaded) > 5
    assert compiled.strip() == "[]"


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_every_row_is_taken_once(three_threads):
    taken, threads = [], set()

    def kernel(start, stop, offset):
        threads.add(threading.current_thread())
        taken.extend(range(start + offset, stop + offset))

    for n_rows in (1, 2, 3, 7, 1000):
        taken.clear()
        by_rows(kernel)(n_rows, 1 << 20, 10)
        assert sorted(taken) == list(range(10, 10 + n_rows))
    assert threading.current_thread() in threads


def test_little_work_stays_in_the_calling_thread(three_threads):
    calls = []
    by_rows(lambda *args: calls.append((threading.current_thread(), *args)))(100, 1000)
    assert calls == [(threading.current_thread(), 0, 100)]


def test_an_error_of_any_thread_reaches_the_caller(three_threads):
    def kernel(start, stop, failing):
        if start <= failing < stop:
            raise ValueError(f"row {failing}")

    for failing in (0, 500, 999):
        with pytest.raises(ValueError, match=f"row {failing}"):
            by_rows(kernel)(1000, 1 << 10, failing)
    by_rows(kernel)(1000, 1 << 10, -1)


def test_arrays_are_let_go_when_a_call_returns(three_threads):
    array = np.zeros(3)
    gone = weakref.ref(array)
    by_rows(lambda _start, _stop, _array: None)(1000, 1 << 10, array)
    # A worker that was late may still hold the job for a moment.
    by_rows(lambda _start, _stop: None)(1000, 1 << 10)
    del array
    for thread in threading.enumerate():
        thread.join(0.05) if thread.name.startswith("lastlayer") else None
    assert gone() is None


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (_cpu.LARGE // 4,), (1031, 1033)], ids=str)
def test_it_is_what_torch_gives(shape):
    made = _cpu.empty(shape, torch.float32)
    assert (made.shape, made.dtype, made.device.type) == (shape, torch.float32, "cpu")
    assert made.fill_(2.0).sum().item() == 2.0 * made.numel()


def test_the_advice_covers_whole_pages_inside_the_result(monkeypatch):
    asked = []
    monkeypatch.setattr(_cpu, "_advise", lambda: lambda *given: asked.append(given))
    made = _cpu.empty((1 << 20,), torch.float64)
    ((start, length, advice),) = asked
    assert start % _cpu.mmap.PAGESIZE == 0
    assert made.data_ptr() <= start
    assert start + length == made.data_ptr() + made.nbytes
    assert advice == 14


def test_small_results_are_left_alone(monkeypatch):
    monkeypatch.setattr(_cpu, "_advise", lambda: pytest.fail("it was asked for"))
    _cpu.empty((100,), torch.float32)


def test_a_system_without_huge_pages_changes_nothing(monkeypatch):
    monkeypatch.setattr(_cpu, "_advise", lambda: lambda *_: -1)
    assert _cpu.empty((1 << 20,), torch.float32).zero_().sum() == 0
