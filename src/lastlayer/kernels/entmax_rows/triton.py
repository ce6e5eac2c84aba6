"""The loss of entmax from its probabilities on CUDA: one program a row, one reading."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import next_power_of_2
from lastlayer.kernels.entmax_rows._entropy_triton import entropy_and_slope, entropy_kind

WIDEST_BLOCK = 4096


def forward_(
    probs: Tensor, scores: Tensor, target: Tensor, row_scale: Tensor | None, alpha: float
) -> Tensor:
    """As the reference's."""
    n_rows, n = probs.shape
    loss = torch.empty(n_rows, device=probs.device, dtype=torch.float32)
    if n_rows:
        block = min(WIDEST_BLOCK, max(32, next_power_of_2(n)))
        _entmax_row[(n_rows,)](
            probs, scores, target, row_scale, loss, n, probs.stride(0), scores.stride(0), alpha,
            BLOCK=block, GRADIENT=row_scale is not None,
            KIND=entropy_kind(alpha),
            num_warps=max(1, block // 512), enable_fp_fusion=True,
        )  # fmt: skip
    return loss


@triton.jit
def _entmax_row(
    probs, scores, target, row_scale, loss, n, probs_row, scores_row, alpha,
    BLOCK: tl.constexpr, GRADIENT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    probs += row * probs_row
    scores += row * scores_row
    right = tl.load(target + row)
    at_target = tl.load(scores + right).to(tl.float32)
    scale = 1.0
    if GRADIENT:
        scale = tl.load(row_scale + row).to(tl.float32)
        own = tl.load(probs + right).to(tl.float32)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    given = tl.zeros((BLOCK,), dtype=tl.float32)
    prices = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, n, BLOCK):
        column = first + tl.arange(0, BLOCK)
        live = column < n
        shares = tl.load(probs + column, mask=live, other=0.0).to(tl.float32)
        present = shares != 0.0
        values = tl.load(scores + column, mask=live & present, other=0.0).to(tl.float32)
        lead = tl.where(present, values - at_target, 0.0)
        entropy, slope = entropy_and_slope(shares, alpha, KIND)
        sums += shares * lead + entropy
        given += shares
        prices += shares * (lead + slope)
        if GRADIENT:
            gradient = (shares * scale).to(probs.dtype.element_ty)
            tl.store(probs + column, gradient, mask=live & present & (column != right))
    # Rounded probabilities need not sum to 1: what is missing has its price, see the reference.
    mass = tl.sum(given, 0)
    if GRADIENT:
        # A row without any probability has nothing to move.
        short = tl.where(mass == 0.0, 0.0, own - 1.0) * scale
        tl.store(probs + right, short.to(probs.dtype.element_ty))
    price = tl.sum(prices, 0) / mass
    total = tl.sum(sums, 0) - (mass - 1.0) * price
    # A target that is out of the running cannot be met; a NaN stays one.
    out = (at_target == -float("inf")) & (mass == mass)
    tl.store(loss + row, tl.where(out, float("inf"), total))
