"""On CUDA: programs look at the number first, so that 1 costs no reading of the tensor."""

import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import cdiv

# A program that finds the number to be 1 costs its launch: few of them, that take several blocks.
MOST_PROGRAMS = 2048


def forward_(values: Tensor, factor: Tensor) -> None:
    """As the reference's; values must be contiguous."""
    if values.numel():
        block = 4096
        blocks = cdiv(values.numel(), block)
        programs = min(blocks, MOST_PROGRAMS)
        _scale[(programs,)](
            values, factor, values.numel(), cdiv(blocks, programs), BLOCK=block,
            num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["trips"])
def _scale(values, factor, n, trips, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        for _ in range(trips):
            place = first + tl.arange(0, BLOCK)
            value = tl.load(values + place, mask=place < n, other=0.0)
            scaled = value.to(tl.float32) * by
            tl.store(values + place, scaled.to(value.dtype), mask=place < n)
            first += tl.num_programs(0).to(tl.int64) * BLOCK
