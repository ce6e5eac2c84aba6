"""Products with a sparse score gradient in plain torch: defines the truth."""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype

# Vectors gathered at a time, in numbers: bounds the memory.
_GATHERED = 1 << 24


def to_hidden(values: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    """``sum_k values[i, k] * weight[classes[i, k]]`` for each row i, in the dtype of weight."""
    dtype = accumulation_dtype(weight.dtype)
    out = weight.new_empty(values.shape[0], weight.shape[1])
    for part in _parts(values, weight.shape[1]):
        vectors = weight[classes[part]].to(dtype)
        out[part] = torch.einsum("nk,nkd->nd", values[part].to(dtype), vectors).to(out.dtype)
    return out


def add_to_weight_(
    values: Tensor, classes: Tensor, hidden: Tensor, weight_gradient: Tensor
) -> None:
    """Adds ``values[i, k] * hidden[i]`` to row ``classes[i, k]`` of ``weight_gradient``."""
    dtype = accumulation_dtype(hidden.dtype)
    sums = weight_gradient.to(dtype, copy=True)
    for part in _parts(values, hidden.shape[1]):
        product = values[part].to(dtype).unsqueeze(-1) * hidden[part].to(dtype).unsqueeze(1)
        sums.index_add_(0, classes[part].flatten(), product.flatten(0, 1))
    weight_gradient.copy_(sums)


def _parts(values: Tensor, depth: int) -> list[slice]:
    rows = max(1, _GATHERED // max(1, values.shape[1] * depth))
    return [slice(first, first + rows) for first in range(0, values.shape[0], rows)]
