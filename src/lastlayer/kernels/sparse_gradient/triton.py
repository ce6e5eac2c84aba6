"""Products with a sparse score gradient on CUDA, without atomics: the order of a sum is fixed.

To the rows of hidden, a program gathers the class vectors of its row. To the classes, the entries
are sorted by class, and a program gathers the rows of its class; classes without entries are not
touched.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2

# Entries that a program adds up together.
GROUP = 16
WIDEST = 512


def to_hidden(values: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    """As the reference's."""
    n, k = values.shape
    depth = weight.shape[1]
    out = torch.empty(n, depth, device=weight.device, dtype=weight.dtype)
    if out.numel():
        width = _width(depth)
        _gather_classes[(n, cdiv(depth, width))](
            values.contiguous(), classes.contiguous(), weight, out, k, depth, weight.stride(0),
            weight.stride(1), GROUP=GROUP, WIDTH=width, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def add_to_weight_(
    values: Tensor, classes: Tensor, hidden: Tensor, weight_gradient: Tensor
) -> None:
    """As the reference's."""
    n_classes, depth = weight_gradient.shape
    if not values.numel() or not weight_gradient.numel():
        return
    # Padding sorts behind the last class.
    key = torch.where(values == 0, n_classes, classes).flatten()
    key, order = torch.sort(key.int(), stable=True)
    edges = torch.arange(n_classes + 1, device=key.device, dtype=torch.int32)
    starts = torch.searchsorted(key, edges)
    width = _width(depth)
    _gather_rows[(n_classes, cdiv(depth, width))](
        values.contiguous(), order, starts, hidden, weight_gradient, values.shape[1], depth,
        hidden.stride(0), hidden.stride(1), weight_gradient.stride(0), weight_gradient.stride(1),
        GROUP=GROUP, WIDTH=width, enable_fp_fusion=True,
    )  # fmt: skip


def _width(depth: int) -> int:
    return min(WIDEST, max(16, next_power_of_2(depth)))


@triton.jit
def _gather_classes(
    values, classes, weight, out, k, depth, weight_row, weight_step,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = step < depth
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for first in range(0, k, GROUP):
        slot = first + tl.arange(0, GROUP)
        value = tl.load(values + row * k + slot, mask=slot < k, other=0.0).to(tl.float32)
        used = value != 0.0
        if tl.max(used.to(tl.int32), 0) > 0:
            chosen = tl.load(classes + row * k + slot, mask=used, other=0)
            vectors = tl.load(
                weight + chosen[:, None] * weight_row + step[None, :] * weight_step,
                mask=used[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(vectors.to(tl.float32) * value[:, None], 0)
    tl.store(out + row * depth + step, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gather_rows(
    values, order, starts, hidden, out, k, depth, hidden_row, hidden_step, out_row, out_step,
    GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chosen = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + chosen)
    stop = tl.load(starts + chosen + 1)
    if start < stop:
        step = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = step < depth
        total = tl.zeros((WIDTH,), dtype=tl.float32)
        for first in range(start, stop, GROUP):
            slot = first + tl.arange(0, GROUP)
            entry = tl.load(order + slot, mask=slot < stop, other=0)
            value = tl.load(values + entry, mask=slot < stop, other=0.0).to(tl.float32)
            states = tl.load(
                hidden + (entry // k)[:, None] * hidden_row + step[None, :] * hidden_step,
                mask=(slot < stop)[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.sum(states.to(tl.float32) * value[:, None], 0)
        place = out + chosen * out_row + step * out_step
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)
