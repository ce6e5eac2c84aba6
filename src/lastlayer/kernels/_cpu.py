"""What the CPU kernels share on the host's side: rows of tensors, memory for results, threads.

The threads are Python's: kernels release the GIL, and Numba's own parallel loops would be compiled
again in every process, meddle with torch's OpenMP threads, and abort after a fork.
"""

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, wraps
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import accumulation_dtype, as_numpy, is_eager

# Numbers that are widened, or gathered, at a time.
WIDENED, GATHERED = 1 << 20, 1 << 24
LARGE = 1 << 22
_MADV_HUGEPAGE = 14
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}
# Tests poison it.
new_array = np.empty
# Below this many entries per thread, waking a thread (some 40 us) costs more than it brings.
_ENTRIES_A_THREAD = 98_304


def parts(shape: Sequence[int], most: int = GATHERED) -> list[slice]:
    """The rows of a matrix in parts of at most ``most`` numbers: bounds the memory."""
    step = max(1, most // max(1, shape[1]))
    return [slice(first, first + step) for first in range(0, shape[0], step)]


def as_array(tensor: Tensor, dtype: torch.dtype | None = None) -> NDArray[Any]:
    """The memory of a tensor; in another dtype, or contiguous, where it is not."""
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return as_numpy(tensor if tensor.is_contiguous() else tensor.contiguous())


def as_rows(tensor: Tensor) -> NDArray[Any]:
    """The rows of a tensor; half precision is widened to float32, in which it is computed."""
    rows = as_array(tensor, accumulation_dtype(tensor.dtype))
    return rows if rows.ndim == 2 else rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def empty_array(shape: Sequence[int], dtype: torch.dtype) -> tuple[NDArray[Any], Tensor]:
    """Memory for a result, as an array and as a tensor.

    Small ones are made by numpy, which takes the host a fraction of a tensor's time.
    """
    if math.prod(shape) * dtype.itemsize >= LARGE:
        result = empty(shape, dtype)
        return as_numpy(result), result
    array = new_array(shape, _NUMPY[dtype])
    return array, torch.from_numpy(array)


def full(n: int, value: float, dtype: torch.dtype, like: Tensor) -> Tensor:
    """``n`` times a number, on the device of another tensor; by numpy where that is eager code."""
    if like.is_cpu and is_eager(like):
        made = np.empty(n, _NUMPY[dtype])
        made.fill(value)
        return torch.from_numpy(made)
    return like.new_full((n,), value, dtype=dtype)


def empty_rows(tensor: Tensor) -> tuple[NDArray[Any], Tensor]:
    """Memory for a result of that shape, as rows and as a tensor."""
    made, result = empty_array(tensor.shape, accumulation_dtype(tensor.dtype))
    if made.ndim != 2:
        made = made.reshape(math.prod(made.shape[:-1]), made.shape[-1])
    return made, result


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """``torch.empty``, on a CPU in huge pages where the result is large and the system has them.

    What an allocator takes fresh from the system costs a page fault for every 4 KiB when it is
    first written, several times what a kernel takes to write it; with huge pages it is one for
    every 2 MiB. On Linux they have to be asked for, unless the system gives them to everyone.
    """
    result = torch.empty(shape, dtype=dtype, device=device)
    if result.nbytes >= LARGE and is_eager(result) and result.device.type == "cpu":
        _ask_for_huge_pages(result.data_ptr(), result.nbytes)
    return result


def _ask_for_huge_pages(address: int, n_bytes: int) -> None:
    if (advise := _advise()) is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        # It is advice: where the system has no huge pages it fails, and nothing else changes.
        advise(start, address + n_bytes - start, _MADV_HUGEPAGE)


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise


def by_rows(kernel: Callable[..., None]) -> Callable[..., None]:
    """From ``kernel(start, stop, *args)`` a function ``(n_rows, n_columns, *args)`` for all rows.

    It uses as many threads as torch does, the calling one among them. ``kernel`` is compiled by
    Numba with ``nogil``; what it makes of a row must not depend on where the rows are cut.
    """

    @wraps(kernel)
    def run(n_rows: int, n_columns: int, *args: Any) -> None:
        threads = min(n_rows, n_rows * n_columns // _ENTRIES_A_THREAD)
        if threads > 1:
            threads = min(threads, torch.get_num_threads())
        if threads > 1:
            _Job(kernel, n_rows, -(-n_rows // threads), args).run(threads - 1)
        else:
            kernel(0, n_rows, *args)

    return run


class _Job:
    """The rows of one call, in parts: whoever is free takes the next one."""

    def __init__(self, kernel: Callable[..., None], n_rows: int, size: int, args: Any) -> None:
        self._kernel, self._n_rows, self._size, self._args = kernel, n_rows, size, args
        self._lock, self._finished = threading.Lock(), threading.Lock()
        self._next, self._left = 0, n_rows
        self._error: BaseException | None = None

    def run(self, helpers: int) -> None:
        self._finished.acquire()
        _workers.help(self, helpers)
        # Where all workers are busy with other calls, this thread does every part.
        self.work()
        self._finished.acquire()
        if self._error is not None:
            raise self._error

    def work(self) -> None:
        while True:
            with self._lock:
                start = self._next
                self._next = stop = min(start + self._size, self._n_rows)
            if start == stop:
                return
            try:
                self._kernel(start, stop, *self._args)
            except BaseException as error:  # noqa: BLE001 — the calling thread raises it
                self._error = error
            with self._lock:
                self._left -= stop - start
                last = self._left == 0
            if last:
                self._finished.release()


class _Workers:
    """Threads that wait for jobs, started when they are first needed."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()

    def help(self, job: _Job, count: int) -> None:
        """Have ``count`` threads work on ``job``, as soon as they are free."""
        if self._count < count:
            with self._lock:
                for number in range(self._count, count):
                    name = f"lastlayer-{number}"
                    threading.Thread(target=self._serve, name=name, daemon=True).start()
                self._count = max(self._count, count)
        for _ in range(count):
            self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            job.work()
            # The arrays of a job must not live until the next one.
            del job


def _start_anew() -> None:
    """In a forked child, where no thread is left and a lock may have been taken for good."""
    global _workers  # noqa: PLW0603
    _workers = _Workers()


_workers = _Workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
