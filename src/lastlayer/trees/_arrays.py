"""The arrays that a tree is made of, and small work on them."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Nodes, classes and positions: half the memory of int64, and there are never 2³¹ of them.
Ids: TypeAlias = NDArray[np.int32]
# Places in other arrays, of which a deep tree may have more.
Offsets: TypeAlias = NDArray[np.int64]
Integers: TypeAlias = NDArray[np.int64]
Reals: TypeAlias = NDArray[np.float64]

MOST_IDS = int(np.iinfo(np.int32).max)


def offsets(sizes: NDArray[Any]) -> Offsets:
    """Where each of consecutive parts starts, and where the last one ends."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def ranges(starts: NDArray[Any], sizes: NDArray[Any]) -> Integers:
    """``starts[i], starts[i] + 1, …``, ``sizes[i]`` of them, for each i in turn."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    shift: Integers = np.repeat(np.asarray(starts, np.int64) - (ends - sizes), sizes)
    return shift + np.arange(total)


def frozen(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """A contiguous copy that cannot be written to."""
    copy = np.array(array, dtype=dtype, order="C")
    copy.flags.writeable = False
    return copy
