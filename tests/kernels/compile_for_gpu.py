"""Compiles Triton kernels for an H100 or H200, on a machine that has no GPU; prints each."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lastlayer.kernels import _peaks
from lastlayer.kernels.entmax import _backward_triton as backward
from lastlayer.kernels.entmax import triton as entmax
from lastlayer.kernels.topk_softmax import triton as topk

TENSORS = {"indices": "*i64", "size": "*i64", "peaks": "*fp32", "chosen": "*i32"}
TENSORS |= {"alphas": "*fp32", "sums": "*fp32", "excess": "fp32", "log_n": "fp32"}
OF_SCORES = ("scores", "rows", "out", "zeros", "probs", "grad")

BLOCKS = dict(BLOCKS=128, WIDTH=64, GROUP=16)
ONE_ROW, MANY_ROWS = dict(ROWS=1, WIDTH=1024), dict(ROWS=64, WIDTH=16)
CASES = [
    (_peaks._find_peaks, "*bf16", dict(BLOCKS=32, WIDTH=64, ZEROS=True)),
    *[
        (entmax._forward_in_registers, dtype, dict(**tile, KIND=kind, PER_ROW=kind == 0, COMPACT=c))
        for dtype, tile, kind, c in (
            ("*fp32", MANY_ROWS, 1, False),
            ("*bf16", ONE_ROW, 2, True),
            ("*fp16", ONE_ROW, 0, False),
        )
    ],
    *[
        (
            entmax._forward_of_chosen,
            dtype,
            dict(**BLOCKS, KIND=kind, PER_ROW=kind == 0, COMPACT=c, IN_ONE=one),
        )
        for dtype, kind, c, one in (
            ("*fp32", 1, False, True),
            ("*bf16", 2, True, False),
            ("*fp32", 0, False, False),
        )
    ],
    (backward._backward_in_registers, "*bf16", dict(**ONE_ROW, KIND=2, PER_ROW=False)),
    (backward._backward_sums, "*fp32", dict(BLOCKS=32, WIDTH=64, KIND=1, PER_ROW=False)),
    (backward._backward_of_chosen, "*fp32", dict(**BLOCKS, KIND=0, PER_ROW=True)),
    (topk._forward_in_registers, "*bf16", dict(WIDTH=1024)),
    (topk._forward_of_chosen, "*fp32", dict(**BLOCKS, IN_ONE=False)),
]


def main() -> None:
    for kernel, dtype, constants in CASES:
        types = TENSORS | dict.fromkeys(OF_SCORES, dtype) | dict.fromkeys(constants, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = dict(num_warps=4, enable_fp_fusion=False)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(kernel.__name__, dtype, len(compiled.asm["cubin"]) > 0)  # noqa: T201


if __name__ == "__main__":
    main()
