"""Kernels are tested with memory that is poisoned until they write it."""

import warnings

import numpy as np
import pytest
import torch

from lastlayer.kernels import _cpu

SENTINEL = 0x5A5A


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))  # not recorded: it may be a leaf
        return tensor
    if tensor.dtype in (torch.int16, torch.int32, torch.int64):
        return tensor.fill_(SENTINEL)
    return tensor


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """torch.empty and its like give NaN, or a number that is no class."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        original = getattr(owner, name)

        def poisoned(*args, _original=original, **kwargs):
            return _poisoned(_original(*args, **kwargs))

        monkeypatch.setattr(owner, name, poisoned)

    def poisoned_array(shape, dtype):
        return _poisoned(torch.from_numpy(np.empty(shape, dtype))).numpy()

    monkeypatch.setattr(_cpu, "new_array", poisoned_array)


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    """Triton's interpreter is numpy, which warns where hardware makes an inf or a NaN."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice encountered", RuntimeWarning)
        yield
