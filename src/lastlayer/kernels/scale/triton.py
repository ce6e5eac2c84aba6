"""On CUDA: programs look at the number first, so that 1 costs no reading of the tensor."""

import triton
import triton.language as tl
from torch import Tensor


def forward_(values: Tensor, factor: Tensor) -> None:
    """As the reference's; values must be contiguous."""
    if values.numel():
        block = 4096
        _scale[(triton.cdiv(values.numel(), block),)](
            values, factor, values.numel(), BLOCK=block, num_warps=8, enable_fp_fusion=True
        )


@triton.jit
def _scale(values, factor, n, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values + place, mask=place < n, other=0.0)
        scaled = value.to(tl.float32) * by
        tl.store(values + place, scaled.to(value.dtype), mask=place < n)
