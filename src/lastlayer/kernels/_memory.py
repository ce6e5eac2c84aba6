"""Memory for large results."""

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from lastlayer._torch import is_eager

LARGE = 1 << 22
_MADV_HUGEPAGE = 14


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
