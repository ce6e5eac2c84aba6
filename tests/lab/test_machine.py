"""Running out of memory is recognised in every part of the lab, whatever raises it."""

import numpy as np
import pytest
import torch
from rich.console import Console

from lastlayer.lab import comparison
from lastlayer.lab.errors import LabError
from lastlayer.lab.machine import is_out_of_memory
from lastlayer.lab.options import CompareOptions

ON_WINDOWS = "[enforce fail] data. DefaultCPUAllocator: not enough memory: you tried to allocate 9"
TOO_MANY = 2**50


@pytest.mark.parametrize("make", [torch.empty, np.empty])
def test_an_allocation_that_fails_is_out_of_memory(make):
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        make(TOO_MANY)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"),
        RuntimeError(ON_WINDOWS),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_messages_of_other_systems_are_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError(ON_WINDOWS)]
)
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def test_a_model_that_does_not_fit_is_refused_before_the_first_run(tmp_path, monkeypatch):
    def too_large(_settings):
        raise RuntimeError(ON_WINDOWS)

    monkeypatch.setattr(comparison, "build_body", too_large)
    data, out = tmp_path / "text.txt", tmp_path / "out"
    data.write_text("a b c d e f g h i j " * 20)
    options = CompareOptions(data=str(data), heads=("full",), budget="1steps", seeds=1)
    with pytest.raises(LabError, match="--width: expected a model that fits into memory"):
        comparison.compare(options, out, resume=False, console=Console(quiet=True))
    assert not out.exists()
