"""Sizes of grids and tiles, in plain Python: Triton's own functions take microseconds a call.

They are meant for both sides of a launch and unwrap constants on the way; a step of a head that
the host launches in a millisecond calls them dozens of times.
"""


def cdiv(n: int, size: int) -> int:
    """How many pieces of a size cover ``n``."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()
