"""Small products of gathered rows, and sigmoids, as vector instructions inside Numba.

A window of words needs the matrix product of a few rows of one table with a few rows of another.
Calling BLAS takes longer than such a product, and LLVM does not keep several sums in registers on
its own. So the two loops are written with LLVM vectors of 64 bytes, for blocks of up to 8 rows;
LLVM splits the vectors on machines with narrower ones.

Matrices are C-contiguous, and the bytes of a row are a multiple of :data:`LANES_BYTES`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

LANES_BYTES = 64
"""Rows are padded to a multiple of this many bytes."""
BLOCK = 8
"""Maximum number of rows per block."""
_LOG2E = np.float32(1.0 / math.log(2.0))
# Coefficients of 2^x = sum of (x log 2)^k / k! for |x| <= 1/2; the next term is below 1e-7.
_P1, _P2, _P3, _P4, _P5, _P6 = (
    np.float32(math.log(2.0) ** k / math.factorial(k)) for k in range(1, 7)
)
_EXACT = {"fastmath": {"contract"}, "error_model": "numpy"}
# Beyond these exp is not a normal number, and the sigmoid is 0 or 1 after rounding.
_MOST_32, _MOST_64 = np.float32(80.0), 700.0


def exp(x):
    """``exp(x)``, vectorised by LLVM in float32; x is clamped so that the result is normal."""
    return np.exp(x)


@overload(exp, jit_options=_EXACT)
def _compiled_exp(x):
    if x != types.float32:
        return lambda x: np.exp(min(max(x, -_MOST_64), _MOST_64))

    def compiled(x):
        t = min(max(x, -_MOST_32), _MOST_32) * _LOG2E
        whole = np.floor(t + np.float32(0.5))
        f = t - whole
        series = ((((_P6 * f + _P5) * f + _P4) * f + _P3) * f + _P2) * f + _P1
        # The casts keep Numba from widening to int64.
        power = np.int32(np.int32(np.int32(whole) + np.int32(127)) << np.int32(23))
        scale = power.view(np.float32)
        return scale + scale * (f * series)

    return compiled


@njit(nogil=True, **_EXACT)
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    one = type(x)(1)
    return one / (one + exp(-x))


class _Code:
    """Builds LLVM code that loads, stores and combines vectors of one dtype."""

    def __init__(self, context: Any, builder: Any, dtype: Any) -> None:
        self.context, self.builder = context, builder
        self.size = dtype.bitwidth // 8
        self.lanes = LANES_BYTES // self.size
        self.scalar = ir.DoubleType() if self.size == 8 else ir.FloatType()
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.zero = ir.Constant(self.vector, [0.0] * self.lanes)

    def start(self, kind: Any, array: Any, row: Any = None) -> tuple[Any, Any]:
        """Pointer to an array, or to one of its rows; and the number of columns."""
        struct = self.context.make_array(kind)(self.context, self.builder, array)
        width = self.builder.extract_value(struct.shape, kind.ndim - 1)
        if row is None:
            return struct.data, width
        return self.builder.gep(struct.data, [self.builder.mul(row, width)]), width

    def item(self, start: Any, at: Any, further: int = 0) -> Any:
        at = self.builder.add(at, ir.Constant(at.type, further))
        return self.builder.load(self.builder.gep(start, [at]))

    def load(self, start: Any, at: Any) -> Any:
        place = self.builder.bitcast(self.builder.gep(start, [at]), self.vector.as_pointer())
        value = self.builder.load(place)
        value.align = self.size
        return value

    def store(self, value: Any, start: Any, at: Any) -> None:
        place = self.builder.gep(start, [at])
        stored = self.builder.store(value, self.builder.bitcast(place, value.type.as_pointer()))
        stored.align = self.size

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        flags = ("contract",)
        return self.builder.fadd(self.builder.fmul(a, b, flags=flags), c, flags=flags)

    def spread(self, value: Any) -> Any:
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        return self._shuffle(first, nothing, [0] * self.lanes)

    def _shuffle(self, a: Any, b: Any, places: list[int]) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)
        return self.builder.shuffle_vector(a, b, mask)

    def sums(self, vectors: list[Any]) -> Any:
        """The sums of 8 vectors as one vector, in a third of the steps of 8 separate sums."""
        width = self.lanes
        while len(vectors) > 1:
            half = width // 2
            low = [g + i for g in range(0, 2 * self.lanes, width) for i in range(half)]
            high = [i + half for i in low]
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [
                self.builder.fadd(self._shuffle(a, b, low), self._shuffle(a, b, high))
                for a, b in pairs
            ]
            width = half
        (left,) = vectors
        while width > 1:
            half = width // 2
            n = left.type.count
            low = [g + i for g in range(0, n, width) for i in range(half)]
            high = [i + half for i in low]
            left = self.builder.fadd(
                self._shuffle(left, left, low), self._shuffle(left, left, high)
            )
            width = half
        return left

    @contextmanager
    def each(self, width: Any) -> Iterator[Any]:
        """A loop over the vectors of a row; yields the column."""
        lanes = ir.Constant(width.type, self.lanes)
        with cgutils.for_range(self.builder, self.builder.udiv(width, lanes)) as loop:
            yield self.builder.mul(loop.index, lanes)

    @contextmanager
    def by_count(self, count: Any) -> Iterator[Any]:
        """A switch with separate code for each number of rows from 1 to 8."""
        done = self.builder.append_basic_block("done")
        switch = self.builder.switch(count, done)

        def cases() -> Iterator[int]:
            for n in range(1, BLOCK + 1):
                block = self.builder.append_basic_block(f"rows{n}")
                switch.add_case(ir.Constant(count.type, n), block)
                self.builder.position_at_end(block)
                yield n
                self.builder.branch(done)

        yield cases()
        self.builder.position_at_end(done)


@intrinsic
def dots(_typing: Any, count: Any, y: Any, rows: Any, first: Any, n: Any, x: Any, x_rows: Any,
         copies: Any, out: Any, at: Any, step: Any) -> Any:  # fmt: skip
    """Dot products of ``n`` rows of x with ``count`` rows of y, and copies of the rows of x.

    For each c < n: ``copies[c] = x[x_rows[c]]``, and ``out[at + c * step + k]`` is its dot product
    with ``y[rows[first + k]]`` for k < ``count``, and 0 for other k < 8.
    """
    place = types.intp
    signature = types.void(place, y, rows, place, place, x, x_rows, copies, out, place, place)

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        make = _Code(context, builder, x.dtype)
        count, y_, rows_, first, n, x_, x_rows_, copies_, out_, at, step = args
        ids, out_start = make.start(rows, rows_)[0], make.start(out, out_)[0]
        x_ids = make.start(x_rows, x_rows_)[0]
        with make.by_count(count) as cases:
            for k in cases:
                starts = [make.start(y, y_, make.item(ids, first, i))[0] for i in range(k)]
                with cgutils.for_range(builder, n) as loop:
                    left, width = make.start(x, x_, make.item(x_ids, loop.index))
                    copy, _ = make.start(copies, copies_, loop.index)
                    sums = [cgutils.alloca_once_value(builder, make.zero) for _ in range(k)]
                    with make.each(width) as column:
                        value = make.load(left, column)
                        make.store(value, copy, column)
                        for start, total in zip(starts, sums, strict=True):
                            added = make.fused(value, make.load(start, column), builder.load(total))
                            builder.store(added, total)
                    found = [builder.load(total) for total in sums] + [make.zero] * (BLOCK - k)
                    to = builder.add(at, builder.mul(loop.index, step))
                    make.store(make.sums(found), out_start, to)
        return context.get_dummy_value()

    return signature, code


@intrinsic
def add_rows(_typing: Any, count: Any, y: Any, rows: Any, first: Any, n: Any, x: Any, x_rows: Any,
             factors: Any, at: Any, step: Any, stride: Any) -> Any:  # fmt: skip
    """Adds a weighted sum of ``count`` rows of y to each of ``n`` rows of x.

    ``x[x_rows[c]]`` += sum over k of ``factors[at + c * step + k * stride] * y[rows[first + k]]``.
    """
    place = types.intp
    signature = types.void(place, y, rows, place, place, x, x_rows, factors, place, place, place)

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        make = _Code(context, builder, x.dtype)
        count, y_, rows_, first, n, x_, x_rows_, factors_, at, step, stride = args
        ids, numbers = make.start(rows, rows_)[0], make.start(factors, factors_)[0]
        x_ids = make.start(x_rows, x_rows_)[0]
        with make.by_count(count) as cases:
            for k in cases:
                starts = [make.start(y, y_, make.item(ids, first, i))[0] for i in range(k)]
                with cgutils.for_range(builder, n) as loop:
                    left, width = make.start(x, x_, make.item(x_ids, loop.index))
                    of = builder.add(at, builder.mul(loop.index, step))
                    scales = []
                    for i in range(k):
                        where = builder.add(of, builder.mul(stride, ir.Constant(of.type, i)))
                        scales.append(make.spread(make.item(numbers, where)))
                    with make.each(width) as column:
                        value = make.load(left, column)
                        for start, scale in zip(starts, scales, strict=True):
                            value = make.fused(scale, make.load(start, column), value)
                        make.store(value, left, column)
        return context.get_dummy_value()

    return signature, code


@intrinsic
def clear_row(_typing: Any, x: Any, i: Any) -> Any:
    """``x[i] = 0``. An assignment in Numba would take as long as several products."""
    signature = types.void(x, types.intp)

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        make = _Code(context, builder, x.dtype)
        start, width = make.start(x, args[0], args[1])
        with make.each(width) as column:
            make.store(make.zero, start, column)
        return context.get_dummy_value()

    return signature, code


@intrinsic
def prefetch_row(_typing: Any, x: Any, i: Any) -> Any:
    """Prefetches ``x[i]``, which is needed soon."""
    signature = types.void(x, types.intp)

    def code(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        make = _Code(context, builder, x.dtype)
        start, width = make.start(x, args[0], args[1])
        pointer, whole = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, whole, whole, whole])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # Arguments: read access, highest locality, data cache.
        how = [ir.Constant(whole, n) for n in (0, 3, 1)]
        with make.each(width) as column:
            builder.call(fetch, [builder.bitcast(builder.gep(start, [column]), pointer), *how])
        return context.get_dummy_value()

    return signature, code
