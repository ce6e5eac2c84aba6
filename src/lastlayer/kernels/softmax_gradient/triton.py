"""On CUDA: a program takes a piece of one row."""

import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2, tanh

BLOCK = 4096
LOG2E = tl.constexpr(1.4426950408889634)


def forward_(
    scores: Tensor,
    target: Tensor,
    true: Tensor,
    lse: Tensor,
    push: Tensor,
    softcap: float,
    temperature: float,
) -> None:
    """As the reference's."""
    n_rows, n = scores.shape
    if scores.numel():
        block = min(BLOCK, max(32, next_power_of_2(n)))
        _gradient[(n_rows, cdiv(n, block))](
            scores, target, true, lse, push, n, scores.stride(0), softcap, 1.0 / temperature,
            WIDTH=block, CAPPED=softcap != 0.0, num_warps=max(1, block // 512),
            enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit
def _gradient(
    scores, target, true, lse, push, n, stride, softcap, inverse_temperature,
    WIDTH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = column < n
    place = scores + row * stride + column
    values = tl.load(place, mask=live, other=0.0).to(tl.float32)
    slope = inverse_temperature
    if CAPPED:
        bent = tanh(values / softcap)
        # -inf stays: a cap would bring back what is out of the running.
        values = tl.where(values == -float("inf"), values, bent * softcap)
        slope = (1.0 - bent * bent) * inverse_temperature
    power = (values * inverse_temperature - tl.load(lse + row)) * LOG2E
    gradient = tl.exp2(power) * (tl.load(push + row) * slope)
    gradient = tl.where(column == tl.load(target + row), tl.load(true + row), gradient)
    tl.store(place, gradient.to(scores.dtype.element_ty), mask=live)
