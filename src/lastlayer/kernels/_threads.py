"""Rows shared out over threads for the CPU kernels."""

import os
import threading
from collections.abc import Callable
from typing import Any

import numba
import torch
from numba import njit, prange

# Numba's first look at its threads sets those of OpenMP, which torch shares: torch's are put back.
_torch_threads = torch.get_num_threads()
numba.get_num_threads()
torch.set_num_threads(_torch_threads)
# Not asked at every call: get_num_threads takes a lock of the whole process. Where fewer are set,
# parts take turns.
_MOST_THREADS = numba.config.NUMBA_NUM_THREADS

# Below this many entries a second thread costs more than it brings.
_ENTRIES_A_THREAD = 16_384

# One of Numba's threading layers aborts the process when two threads enter it at once, and
# another when it is entered after a fork: whoever finds the lock taken, or was forked, goes alone.
_entrance = threading.Lock()


def by_rows(kernel: Callable[..., None]) -> Callable[..., None]:
    """From ``kernel(start, stop, *args)`` a function ``(n_rows, n_columns, *args)`` for all rows.

    It uses as many threads as torch does. ``kernel`` is compiled by Numba.
    """

    @njit(nogil=True, parallel=True)
    def in_parallel(parts, n_rows, *args):
        for part in prange(parts):
            kernel(n_rows * part // parts, n_rows * (part + 1) // parts, *args)

    def run(n_rows: int, n_columns: int, *args: Any) -> None:
        wanted = max(1, n_rows * n_columns // _ENTRIES_A_THREAD)
        parts = min(torch.get_num_threads(), _MOST_THREADS, n_rows, wanted)
        if parts > 1 and _entrance.acquire(blocking=False):
            try:
                in_parallel(parts, n_rows, *args)
            finally:
                _entrance.release()
        else:
            kernel(0, n_rows, *args)

    return run


if hasattr(os, "register_at_fork"):
    # Taken for good in a child.
    os.register_at_fork(after_in_child=lambda: _entrance.acquire(blocking=False))
