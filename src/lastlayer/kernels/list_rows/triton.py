"""The loss of listed classes on CUDA: one launch, in which a program holds a few rows."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, row_max
from lastlayer.kernels.entmax._solve import (
    is_broken,
    per_class,
    row_sum,
    solved_tile,
    unsolved_row,
)
from lastlayer.kernels.entmax._tiles import as_alpha, register_tile, tile
from lastlayer.kernels.entmax_rows._entropy_triton import entropy_and_slope, entropy_kind


def forward(
    scores: Tensor,
    classes: Tensor,
    target: Tensor,
    target_scores: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    n, k = classes.shape
    gradient = row_scale is not None
    loss = torch.empty(n, device=scores.device, dtype=torch.float32)
    values = torch.empty((n, k + 1) if gradient else 0, device=scores.device, dtype=torch.float32)
    entries = torch.empty(values.shape, device=scores.device, dtype=torch.int64)
    if n:
        width, rows, warps = register_tile(k)
        _list_rows[(cdiv(n, rows),)](
            scores.contiguous(), classes.contiguous(), target.contiguous(),
            target_scores.contiguous(), row_scale, class_weight, loss, values, entries, n, k,
            math.log(k), alpha, ROWS=rows, WIDTH=width, KIND=as_alpha(alpha, None).kind,
            ENTROPY=entropy_kind(alpha), GRADIENT=gradient, WEIGHTED=class_weight is not None,
            num_warps=warps, enable_fp_fusion=False,  # ../entmax/_solve.py says why
        )  # fmt: skip
    return loss, values, entries


# Chunks begin anywhere, and lists are as long as the longest one.
@triton.jit(
    do_not_specialize=["n", "k"],
    do_not_specialize_on_alignment=["target", "target_scores", "row_scale"],
)
def _list_rows(
    scores, classes, target, target_scores, row_scale, class_weight, loss, values, entries, n, k,
    log_k, alpha, ROWS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    ENTROPY: tl.constexpr, GRADIENT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 0 if ROWS == 1 else 1
    row, slot, live = tile(n, k, ROWS, WIDTH)
    here = row < n
    place = per_class(row, AXIS) * k + slot
    listed = tl.load(classes + place, mask=live, other=-1)
    own = tl.load(scores + place, mask=live & (listed >= 0), other=-float("inf"))
    peak = row_max(own, AXIS)
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    excess = tl.zeros_like(peak) + (alpha - 1.0)
    distance = own - per_class(origin, AXIS)
    broken = is_broken(peak, excess, KIND)
    probs = solved_tile(distance, unsolved_row(peak, KIND), broken, log_k, excess, KIND, AXIS)

    right = tl.load(target + row, mask=here, other=0)
    at_target = tl.load(target_scores + row, mask=here, other=0.0)
    out = at_target == -float("inf")
    lead_of_peak = origin - tl.where(out, 0.0, at_target)
    lead = tl.where(probs == 0.0, 0.0, distance + per_class(lead_of_peak, AXIS))
    entropy, _ = entropy_and_slope(probs, alpha, ENTROPY)
    total = row_sum(probs * lead + entropy, AXIS)
    # A target that is out of the running cannot be met; a NaN stays one.
    total = tl.where(out & (total == total), float("inf"), total)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(class_weight + right, mask=here, other=0.0).to(tl.float32)
    tl.store(loss + row, total * weight, mask=here)
    if GRADIENT:
        scale = tl.load(row_scale + row, mask=here, other=0.0) * weight
        into = per_class(row, AXIS) * (k + 1) + slot
        tl.store(values + into, probs * per_class(scale, AXIS), mask=live)
        tl.store(entries + into, tl.maximum(listed, 0), mask=live)
        # A row without any probability has nothing to move.
        last = row * (k + 1) + k
        tl.store(values + last, tl.where(row_sum(probs, AXIS) == 0.0, 0.0, -scale), mask=here)
        tl.store(entries + last, right, mask=here)
