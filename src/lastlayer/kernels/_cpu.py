"""Host code shared by the CPU kernels: rows of tensors, memory for results, threads.

Threads are Python threads, since kernels release the GIL. Numba's own parallel loops would be
compiled again in every process, interfere with torch's OpenMP threads, and abort after a fork.
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

# Number of entries that are widened, or gathered, per part.
WIDENED, GATHERED = 1 << 20, 1 << 24
LARGE = 1 << 22
_MADV_HUGEPAGE = 14
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}
# A separate name, so that tests can fill new arrays with NaN.
new_array = np.empty
# With fewer entries per thread, waking a thread (about 40 us) costs more than it saves.
_ENTRIES_A_THREAD = 98_304


def parts(shape: Sequence[int], most: int = GATHERED) -> list[slice]:
    """Cuts the rows of a matrix into parts of at most ``most`` entries, to bound memory."""
    step = max(1, most // max(1, shape[1]))
    return [slice(first, first + step) for first in range(0, shape[0], step)]


def as_array(tensor: Tensor, dtype: torch.dtype | None = None) -> NDArray[Any]:
    """A tensor as a contiguous array, copied only if it is not contiguous or not in ``dtype``."""
    if dtype is not None and tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    return as_numpy(tensor if tensor.is_contiguous() else tensor.contiguous())


def as_rows(tensor: Tensor) -> NDArray[Any]:
    """The rows of a tensor as a matrix; half precision becomes float32, the dtype of kernels."""
    rows = as_array(tensor, accumulation_dtype(tensor.dtype))
    return rows if rows.ndim == 2 else rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def empty_array(shape: Sequence[int], dtype: torch.dtype) -> tuple[NDArray[Any], Tensor]:
    """Uninitialised memory for a result, as an array and as a tensor.

    Small results are allocated by numpy, which costs much less host time than torch.
    """
    if math.prod(shape) * dtype.itemsize >= LARGE:
        result = empty(shape, dtype)
        return as_numpy(result), result
    array = new_array(shape, _NUMPY[dtype])
    return array, torch.from_numpy(array)


def full(n: int, value: float, dtype: torch.dtype, like: Tensor) -> Tensor:
    """``n`` times ``value``, on the device of ``like``; by numpy in eager mode on a CPU."""
    if like.is_cpu and is_eager(like):
        made = np.empty(n, _NUMPY[dtype])
        made.fill(value)
        return torch.from_numpy(made)
    return like.new_full((n,), value, dtype=dtype)


def empty_rows(tensor: Tensor) -> tuple[NDArray[Any], Tensor]:
    """Uninitialised memory for a result of the tensor's shape, as a matrix and as a tensor."""
    made, result = empty_array(tensor.shape, accumulation_dtype(tensor.dtype))
    if made.ndim != 2:
        made = made.reshape(math.prod(made.shape[:-1]), made.shape[-1])
    return made, result


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """``torch.empty``; a large result on a CPU is in huge pages if the system supports them.

    Fresh memory costs a page fault per 4 KiB when it is first written, which takes several times as
    long as a kernel needs to write it. With huge pages it is one fault per 2 MiB. On Linux they
    have to be requested, unless the system uses them by default.
    """
    result = torch.empty(shape, dtype=dtype, device=device)
    if result.nbytes >= LARGE and is_eager(result) and result.device.type == "cpu":
        _ask_for_huge_pages(result.data_ptr(), result.nbytes)
    return result


def _ask_for_huge_pages(address: int, n_bytes: int) -> None:
    if (advise := _advise()) is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        # Without huge pages the call fails, and has no other effect.
        advise(start, address + n_bytes - start, _MADV_HUGEPAGE)


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise


def by_rows(kernel: Callable[..., None]) -> Callable[..., None]:
    """Turns ``kernel(start, stop, *args)`` into a function ``(n_rows, n_columns, *args)``.

    That function runs the kernel on all rows, with at most as many threads as torch uses, including
    the calling one. ``kernel`` is compiled by Numba with ``nogil``; its result for a row must not
    depend on where the rows are cut.
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
    """The rows of one call, cut into parts: a free thread takes the next part."""

    def __init__(self, kernel: Callable[..., None], n_rows: int, size: int, args: Any) -> None:
        self._kernel, self._n_rows, self._size, self._args = kernel, n_rows, size, args
        self._lock, self._finished = threading.Lock(), threading.Lock()
        self._next, self._left = 0, n_rows
        self._error: BaseException | None = None

    def run(self, helpers: int) -> None:
        self._finished.acquire()
        _workers.help(self, helpers)
        # If all workers are busy with other calls, this thread computes every part.
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
    """A pool of threads, started when they are first needed."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._jobs: SimpleQueue[_Job] = SimpleQueue()

    def help(self, job: _Job, count: int) -> None:
        """Queues ``job`` for ``count`` threads."""
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
            # Otherwise the arrays of this job would stay alive until the next one.
            del job


def _start_anew() -> None:
    """Replaces the pool in a forked child: its threads are gone, and a lock may stay locked."""
    global _workers  # noqa: PLW0603
    _workers = _Workers()


_workers = _Workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
