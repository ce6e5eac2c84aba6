"""Whether the host waits for a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    with _mode("error"):
        yield


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """A list that has an entry for each time that the host waited, once the block has ended."""
    torch.cuda.synchronize()
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with _mode("warn"):
            yield waits
    waits += [str(each.message) for each in seen if "called a synchronizing" in str(each.message)]


@contextmanager
def _mode(mode: str) -> Iterator[None]:
    # torch warns, once, that the mode is a prototype.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
