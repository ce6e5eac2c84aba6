"""Each implementation of a kernel that can run here, with a device for it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.kernels import _cpu, _registry

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Of a number that is stored; Triton's interpreter cuts bfloat16 off where hardware rounds.
ROUNDING = {
    torch.float64: 2.0**-52,
    torch.float32: 2.0**-23,
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}
# Below these numbers have fewer bits; float16 has such numbers among ordinary gradients.
SMALLEST = {torch.float64: 0.0, torch.float32: 1e-37, torch.bfloat16: 1e-37, torch.float16: 1e-7}

# With LASTLAYER_TEST_FULL=1, as in the nightly run, every combination of parameters is tested.
FULL = os.environ.get("LASTLAYER_TEST_FULL") == "1"


def few(every: Sequence[Any], *some: Any) -> Sequence[Any]:
    """The values of a parameter: some of them, or every one where all tests are run."""
    return every if FULL else some


every_implementation = pytest.mark.parametrize("impl", kernels.IMPLEMENTATIONS)


def place(impl: str, dtype: torch.dtype = torch.float32) -> str:
    """The device on which an implementation is tested; skips what cannot run."""
    reason = kernels.available()[impl]
    if reason is not None:
        pytest.skip(reason)
    if impl == "triton" and dtype == torch.float64:
        pytest.skip("Triton kernels have no float64")
    # The reference too could run on a GPU, where its sums have no fixed order.
    return "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"


@contextmanager
def three_threads() -> Iterator[None]:
    """Three threads for the CPU kernels, for little work too."""
    threads, entries = torch.get_num_threads(), _cpu._ENTRIES_A_THREAD
    torch.set_num_threads(3)
    _cpu._ENTRIES_A_THREAD = 1024
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _cpu._ENTRIES_A_THREAD = entries


@contextmanager
def reference_only() -> Iterator[None]:
    """As in a process without Numba and Triton."""
    absent = {"reference": None, "triton": "it is absent", "cpu": "it is absent"}
    with pytest.MonkeyPatch.context() as patch:
        for module in (kernels, _registry):
            patch.setattr(module, "available", lambda: absent)
        for operation in _registry._operations.values():
            patch.setattr(operation, "_resolved", {})
        yield


@contextmanager
def triton_chosen() -> Iterator[None]:
    """As on a GPU, "auto" takes Triton's kernels for CPU tensors, in Triton's interpreter."""

    def selected(op: str, _device: str, dtype: torch.dtype = torch.float32) -> str:
        return "triton" if _registry._operations[op].triton_takes(dtype) else "reference"

    with pytest.MonkeyPatch.context() as patch:
        for module in (kernels, _registry):
            patch.setattr(module, "selected", selected)
        for operation in _registry._operations.values():
            patch.setattr(operation, "_resolved", {})
        yield


def error(actual: Tensor, expected: Tensor, size: Tensor | float = 1.0) -> float:
    """The largest difference to the float64 truth, in units of ``size``; NaN must meet NaN."""
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan()), "NaN in other places"
    infinite = expected.isinf()
    assert torch.equal(actual[infinite], expected[infinite]), "infinities in other places"
    difference = torch.where(infinite, 0.0, actual - expected).nan_to_num().abs() / size
    return float(difference.max()) if difference.numel() else 0.0
