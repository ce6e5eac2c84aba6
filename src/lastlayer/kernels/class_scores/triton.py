"""Scores of chosen classes on CUDA: a program takes a few classes of one row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2


def forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    """As the reference's."""
    scores = torch.empty(classes.shape, device=hidden.device, dtype=torch.float32)
    n, k = classes.shape
    if scores.numel():
        depth = hidden.shape[1]
        group = min(16, next_power_of_2(k))
        _class_scores[(n, cdiv(k, group))](
            hidden, weight, None if bias is None else bias.contiguous(), classes.contiguous(),
            scores, k, depth, hidden.stride(0), hidden.stride(1), weight.stride(0),
            weight.stride(1), GROUP=group,
            DEPTH=min(1024, max(16, next_power_of_2(depth))), BIASED=bias is not None,
            enable_fp_fusion=True,
        )  # fmt: skip
    return scores


# Classes are often a part of a longer list, which may begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["classes", "scores"])
def _class_scores(
    hidden, weight, bias, classes, scores, k, depth, hidden_row, hidden_step, weight_row,
    weight_step, GROUP: tl.constexpr, DEPTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    live = slot < k
    chosen = tl.load(classes + row * k + slot, mask=live, other=-1)
    live = chosen >= 0
    sums = tl.zeros((GROUP, DEPTH), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        step = first + tl.arange(0, DEPTH)
        inside = step < depth
        state = tl.load(hidden + row * hidden_row + step * hidden_step, mask=inside, other=0.0)
        vectors = tl.load(
            weight + chosen[:, None] * weight_row + step[None, :] * weight_step,
            mask=live[:, None] & inside[None, :],
            other=0.0,
        )
        sums += vectors.to(tl.float32) * state.to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    if BIASED:
        total += tl.load(bias + chosen, mask=live, other=0.0).to(tl.float32)
    tl.store(scores + row * k + slot, total, mask=slot < k)
