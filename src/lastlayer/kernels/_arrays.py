"""Tensors as the arrays that the CPU kernels work on."""

import math
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._memory import empty


def as_rows(tensor: Tensor) -> NDArray[Any]:
    """The rows of a tensor; half precision is widened to float32, in which it is computed."""
    tensor = tensor.detach()
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.float()
    if tensor.dim() != 2 or not tensor.is_contiguous():
        tensor = tensor.contiguous().view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return tensor.numpy()


def empty_rows(tensor: Tensor) -> tuple[NDArray[Any], Tensor]:
    """Memory for a result of that shape, as rows and as a tensor."""
    dtype = accumulation_dtype(tensor.dtype)
    result = empty(tensor.shape, dtype)
    return as_rows(result), result
