"""Rows of a parameter by their numbers, with a gradient as precise and as sparse as asked for."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding


def gathered(values: Tensor, picked: Tensor, dtype: torch.dtype, sparse: bool) -> Tensor:
    """``values[picked]`` in ``dtype``; with row-sparse gradient where asked for."""
    if not (torch.is_grad_enabled() and values.requires_grad):
        return values[picked].to(dtype)
    if values.dim() == 2 and values.dtype == dtype:
        return embedding(picked, values, sparse=sparse)
    if not sparse and values.dtype == dtype:
        return values[picked]
    made: Tensor = _GatheredRows.apply(values, picked, dtype, sparse)
    return made


class _GatheredRows(torch.autograd.Function):
    """Sums the gradient of a row in the wider dtype: the root has a part from every row."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, picked: Tensor, dtype: torch.dtype, sparse: bool
    ) -> Tensor:
        ctx.save_for_backward(picked)
        ctx.like = values.shape, values.dtype, sparse
        return values[picked].to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (picked,) = ctx.saved_tensors
        shape, dtype, sparse = ctx.like
        at, grad = picked.reshape(-1), grad.reshape(-1, *shape[1:])
        if not sparse:
            total = grad.new_zeros(shape).index_add(0, at, grad)
            return total.to(dtype), None, None, None
        made = torch.sparse_coo_tensor(at.unsqueeze(0), grad, shape, check_invariants=False)
        if dtype != grad.dtype:
            made = made.coalesce().to(dtype)
        return made, None, None, None
