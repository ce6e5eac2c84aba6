"""Rows shared out over threads for the CPU kernels.

Kernels release the GIL, so Python threads suffice; Numba's own layers either abort when two
threads of a program use them at once or need a library that is not always there.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

# Below this many entries a second thread costs more than it brings.
_ENTRIES_A_THREAD = 262_144

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def over_rows(kernel: Callable[..., None], n_rows: int, n_columns: int, *args: Any) -> None:
    """Runs ``kernel(start, stop, *args)`` over all rows on torch's number of threads."""
    wanted = max(1, n_rows * n_columns // _ENTRIES_A_THREAD)
    threads = min(torch.get_num_threads(), n_rows, wanted)
    if threads == 1:
        kernel(0, n_rows, *args)
        return
    bounds = [n_rows * part // threads for part in range(threads + 1)]
    pool = _threads(threads - 1)
    others = [
        pool.submit(kernel, bounds[part], bounds[part + 1], *args) for part in range(1, threads)
    ]
    kernel(0, bounds[1], *args)
    for other in others:
        other.result()


def _threads(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    if _pool is None or _pool_size < size:
        _pool, _pool_size = ThreadPoolExecutor(size, "lastlayer"), size
    return _pool


def _forget_threads() -> None:
    global _pool, _pool_size
    _pool, _pool_size = None, 0


if hasattr(os, "register_at_fork"):
    # A forked child has none of the parent's threads.
    os.register_at_fork(after_in_child=_forget_threads)
