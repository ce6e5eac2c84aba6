"""Arithmetic for the CPU kernels, in a form that LLVM turns into vector instructions.

- exp, tanh and log: Numba's own call the C library once per number, see softmax_rows/README.md.
- Reductions over a row in vectors of 64 bytes: LLVM does not vectorise a float maximum that detects
  NaN, and uses half the vector width for other loops. As explicit vectors, 64 scores are four
  registers on AVX-512, and a count is a mask. On other CPUs LLVM splits the vectors.
- The maximum of each block of a row, which tells which blocks matter.

Arrays are C-contiguous.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload

# Sums may be reordered and therefore vectorised; NaN and infinities keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}
# The caller's flags must not apply to exp and log: reordering would cancel the addition and
# subtraction of a shift, and remove corrections of rounding.
_EXACT = {"fastmath": {"contract"}, "error_model": "numpy"}
# Scores per block. Loops over a block have this fixed length, so that LLVM vectorises them.
BLOCK = 64
_VECTOR_BYTES = 64

# Adding the shift to x leaves the nearest integer to x in the lowest bits. Conversely, adding a
# small integer to the bits of the shift adds it to the shift.
_SHIFT_32, _SHIFT_64 = np.float32(1.5 * 2**23), np.float64(1.5 * 2**52)
_SHIFT_BITS_32, _SHIFT_BITS_64 = _SHIFT_32.view(np.int32), _SHIFT_64.view(np.int64)
_LOG2E_32, _LOG2E_64 = np.float32(1.4426950408889634), np.float64(1.4426950408889634)
# log(2) in two parts; the first has few enough bits to be multiplied without rounding.
_HIGH_32, _LOW_32 = np.float32(0.693359375), np.float32(-2.1219444005469057e-4)
_HIGH_64, _LOW_64 = np.float64(0.6931471803691238), np.float64(1.9082149292705877e-10)
# Below these, exp returns 0: the result would be subnormal.
_LEAST_32, _LEAST_64 = np.float32(-87.0), np.float64(-708.0)
# Coefficients of the series of exp, with enough terms for |r| up to log(2) / 2.
_A2, _A3, _A4, _A5, _A6, _A7 = (np.float32(1 / math.factorial(k)) for k in range(2, 8))
_B2, _B3, _B4, _B5, _B6, _B7, _B8, _B9, _B10, _B11, _B12, _B13 = (
    np.float64(1 / math.factorial(k)) for k in range(2, 14)
)
# The bits of sqrt(1/2), the lower end of the mantissas after the powers of 2 are split off.
_ROOT_32, _ROOT_64 = (
    dtype(math.sqrt(0.5)).view(whole)
    for dtype, whole in ((np.float32, np.int32), (np.float64, np.int64))
)
# Numbers below are subnormal. They are scaled up before their logarithm is computed.
_TINY_32, _TINY_64 = np.float32(2.0**-126), np.float64(2.0**-1022)
_UP_32, _UP_64 = np.float32(2.0**32), np.float64(2.0**64)
# Coefficients of the series of 2 * atanh(s), in powers of s^2.
_C1, _C2, _C3, _C4 = (np.float32(2 / (2 * k + 1)) for k in range(1, 5))
_D1, _D2, _D3, _D4, _D5, _D6, _D7, _D8, _D9, _D10, _D11 = (
    np.float64(2 / (2 * k + 1)) for k in range(1, 12)
)
# The multipliers and key increments of Philox.
_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_LEFT, _RIGHT = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP_LEFT, _STEP_RIGHT = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@njit(nogil=True, **_EXACT)
def _exp_parts_32(x):
    """``(scale, rest)`` with ``exp(x) = scale + scale * rest``, for x from ``_LEAST_32`` to 80."""
    shifted = np.float32(x * _LOG2E_32 + _SHIFT_32)
    whole = shifted - _SHIFT_32
    r = (x - whole * _HIGH_32) - whole * _LOW_32
    series = ((((_A7 * r + _A6) * r + _A5) * r + _A4) * r + _A3) * r + _A2
    # Numba would widen to int64 without the casts.
    exponent = np.int32(np.int32(shifted.view(np.int32) + np.int32(127)) << np.int32(23))
    return exponent.view(np.float32), r + (r * r) * series


@njit(nogil=True, **_EXACT)
def _exp_parts_64(x):
    shifted = np.float64(x * _LOG2E_64 + _SHIFT_64)
    whole = shifted - _SHIFT_64
    r = (x - whole * _HIGH_64) - whole * _LOW_64
    series = ((((_B13 * r + _B12) * r + _B11) * r + _B10) * r + _B9) * r + _B8
    series = (((((series * r + _B7) * r + _B6) * r + _B5) * r + _B4) * r + _B3) * r + _B2
    exponent = np.int64((shifted.view(np.int64) + 1023) << 52)
    return exponent.view(np.float64), r + (r * r) * series


def exp(x):
    """``exp(x)`` for x up to 80, within 2 units in the last place; 0 if it would be subnormal."""
    return np.exp(x)


@overload(exp, jit_options=_EXACT)
def _compiled_exp(x):
    narrow = x == types.float32
    parts, least = (_exp_parts_32, _LEAST_32) if narrow else (_exp_parts_64, _LEAST_64)
    zero = type(least)(0)

    def compiled(x):
        # The comparisons are False for NaN, which is therefore passed on.
        small = x < least
        scale, rest = parts(least if small else x)
        return zero if small else scale + scale * rest

    return compiled


def tanh_and_slope(x):
    """``tanh(x)`` and its derivative, both without cancellation."""
    bent = np.tanh(x)
    return bent, 1 - bent * bent


@overload(tanh_and_slope, jit_options=_EXACT)
def _compiled_tanh(x):
    narrow = x == types.float32
    parts, least = (_exp_parts_32, _LEAST_32) if narrow else (_exp_parts_64, _LEAST_64)
    zero, one, two, four = (type(least)(number) for number in (0, 1, 2, 4))

    def compiled(x):
        double = -two * abs(x)
        scale, rest = parts(least if double < least else double)
        # With u = exp(-2|x|), tanh(|x|) is (1 - u) / (1 + u), and its derivative 4 u / (1 + u)^2.
        u = scale + scale * rest
        share = one / (one + u)
        size = ((one - scale) - scale * rest) * share
        return -size if x < zero else size, four * u * share * share

    return compiled


@njit(nogil=True, **_EXACT)
def _split_32(x):
    """``(power, f)`` with ``x = 2 ** power * (1 + f)``, for a normal number x."""
    bits = np.float32(x).view(np.int32)
    power = np.int32(np.int32(bits - _ROOT_32) >> np.int32(23))
    mantissa = np.int32(bits - np.int32(power << np.int32(23))).view(np.float32)
    # Converts power to float by adding it to the bits of the shift: a conversion instruction is not
    # vectorised on all CPUs.
    shifted = np.int32(_SHIFT_BITS_32 + power).view(np.float32)
    return shifted - _SHIFT_32, mantissa - np.float32(1)


@njit(nogil=True, **_EXACT)
def _split_64(x):
    bits = np.float64(x).view(np.int64)
    power = (bits - _ROOT_64) >> 52
    mantissa = np.int64(bits - (power << 52)).view(np.float64)
    shifted = np.int64(_SHIFT_BITS_64 + power).view(np.float64)
    return shifted - _SHIFT_64, mantissa - 1.0


@njit(nogil=True, **_EXACT)
def _log_series_32(z):
    return z * (_C1 + z * (_C2 + z * (_C3 + z * _C4)))


@njit(nogil=True, **_EXACT)
def _log_series_64(z):
    late = _D7 + z * (_D8 + z * (_D9 + z * (_D10 + z * _D11)))
    return z * (_D1 + z * (_D2 + z * (_D3 + z * (_D4 + z * (_D5 + z * (_D6 + z * late))))))


def log(x):
    """``log(x)`` for x > 0, within 2 units in the last place of the result or of 1e-3."""
    return np.log(x)


@overload(log, jit_options=_EXACT)
def _compiled_log(x):
    if x == types.float32:
        number, parts, series = np.float32, _split_32, _log_series_32
        tiny, up, bits, high, low = _TINY_32, _UP_32, number(32), _HIGH_32, _LOW_32
    else:
        number, parts, series = np.float64, _split_64, _log_series_64
        tiny, up, bits, high, low = _TINY_64, _UP_64, number(64), _HIGH_64, _LOW_64
    zero, half, two = number(0), number(0.5), number(2)

    def compiled(x):
        small = x < tiny
        power, f = parts(x * up if small else x)
        power = power - (bits if small else zero)
        # With s = f / (2 + f), log(1 + f) = 2 (s + s^3 / 3 + ...), computed as f less a small term.
        s = f / (two + f)
        square = half * f * f
        rest = s * (square + series(s * s)) + power * low
        return power * high - ((square - rest) - f)

    return compiled


@njit(nogil=True, **_EXACT)
def one_plus(x):
    """``1 + x`` for x from 0 to 1, and its rounding error."""
    total = np.float32(1) + x
    return total, x - (total - np.float32(1))


def log1p(x):
    """``log(1 + x)`` for x from 0 to 1, within 2 units in the last place."""
    return np.log1p(x)


@overload(log1p, jit_options=_EXACT)
def _compiled_log1p(x):
    narrow = x == types.float32
    number, series = (np.float32, _log_series_32) if narrow else (np.float64, _log_series_64)
    one, two, three, zero, log_2 = (number(each) for each in (1, 2, 3, 0, math.log(2.0)))
    far = number(math.sqrt(2.0) - 1.0)

    def compiled(x):
        # For larger x: log(1 + x) = log(2) + log(1 + (x - 1) / 2).
        above = x > far
        s = (x - one if above else x) / ((three if above else two) + x)
        return (log_2 if above else zero) + (two * s + s * series(s * s))

    return compiled


@njit(nogil=True, inline="always")
def philox(block, seed, step):
    """Four random 32-bit words of a block, see rng/README.md; all three arguments are uint64."""
    a, b = block & _WORD, block >> _HALF
    c, d = step & _WORD, step >> _HALF
    k, m = seed & _WORD, seed >> _HALF
    for _ in range(10):
        left, right = a * _LEFT, c * _RIGHT
        a, b, c, d = (right >> _HALF) ^ b ^ k, right & _WORD, (left >> _HALF) ^ d ^ m, left & _WORD
        k, m = (k + _STEP_LEFT) & _WORD, (m + _STEP_RIGHT) & _WORD
    return a, b, c, d


@njit(nogil=True, fastmath=FAST)
def dot(left, right):
    """The dot product of two vectors."""
    total = left.dtype.type(0.0)
    for i in range(len(left)):
        total += left[i] * right[i]
    return total


@njit(nogil=True, fastmath={"contract"})
def add_scaled(total, factor, vector):
    """``total += factor * vector``."""
    for i in range(len(total)):
        total[i] += factor * vector[i]


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def sum_of(x):
    """The sum of a vector."""
    total = x.dtype.type(0.0)
    for i in range(len(x)):
        total += x[i]
    return total


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def sum_of_distances(shares, values, origin):
    """``sum(shares * (values - origin))``; a share of 0 contributes 0 to it for any value."""
    zero = shares.dtype.type(0.0)
    total = zero
    for i in range(len(shares)):
        product = shares[i] * (values[i] - origin)
        total += zero if shares[i] == zero else product
    return total


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def multiply(x, factor):
    """``x *= factor``; a factor of 0 also turns NaN into 0."""
    if factor == 0.0:
        x[:] = 0.0
        return
    for i in range(len(x)):
        x[i] *= factor


@njit(nogil=True)
def largest(x, lanes, least):
    """The maximum of a vector and ``least``, ignoring NaN, which later sums propagate.

    ``lanes`` is scratch memory of ``BLOCK`` numbers.
    """
    lanes[:] = least
    whole = len(x) // BLOCK * BLOCK
    for first in range(0, whole, BLOCK):
        # One maximum per lane: a single maximum is not vectorised if there may be a NaN.
        for i in range(BLOCK):
            value = x[first + i]
            lanes[i] = value if value > lanes[i] else lanes[i]
    best = lanes[0]
    for i in range(1, BLOCK):
        best = max(best, lanes[i])
    for i in range(whole, len(x)):
        best = x[i] if x[i] > best else best
    return best


@njit(nogil=True)
def lanes_of(itemsize: int) -> int:
    """Numbers per vector; rows to be reduced are padded to a multiple of it."""
    return _VECTOR_BYTES // itemsize


class _Row:
    """Emits code that reads a row of a matrix, from column ``first`` on, vector by vector."""

    def __init__(
        self, context: Any, builder: Any, kind: Any, array: Any, row: Any, first: Any = None
    ) -> None:
        self.builder, self._double = builder, kind.dtype == types.float64
        self.scalar = ir.DoubleType() if self._double else ir.FloatType()
        self.lanes = _VECTOR_BYTES // (8 if self._double else 4)
        self.vector = ir.VectorType(self.scalar, self.lanes)
        matrix = context.make_array(kind)(context, builder, array)
        width = builder.extract_value(matrix.shape, 1)
        at = builder.mul(row, width)
        self._start = builder.gep(matrix.data, [at if first is None else builder.add(at, first)])

    def all(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [value] * self.lanes)

    def spread(self, value: Any) -> Any:
        nothing = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        places = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, nothing, places)

    @contextmanager
    def each(self, count: Any, step: int = 1) -> Iterator[list[Any]]:
        """A loop of ``count`` steps over the row, each of which loads ``step`` vectors."""
        with cgutils.for_range(self.builder, count) as loop:
            first = self.builder.mul(loop.index, ir.Constant(loop.index.type, step * self.lanes))
            yield [self._load(first, i * self.lanes) for i in range(step)]

    def _load(self, first: Any, further: int) -> Any:
        at = self.builder.add(first, ir.Constant(first.type, further))
        loaded = self.builder.load(self._place(self.builder.gep(self._start, [at])))
        loaded.align = 8 if self._double else 4
        return loaded

    def _place(self, at: Any) -> Any:
        return self.builder.bitcast(at, self.vector.as_pointer())

    def load_first(self) -> Any:
        return self._load(ir.Constant(ir.IntType(64), 0), 0)

    def store_first(self, vector: Any) -> None:
        stored = self.builder.store(vector, self._place(self._start))
        stored.align = 8 if self._double else 4

    def mask_bits(self, mask: Any) -> Any:
        whole = self.builder.bitcast(mask, ir.IntType(self.lanes))
        return self.builder.zext(whole, ir.IntType(32))

    def call(self, name: str, result: Any, *args: Any, **options: Any) -> Any:
        suffix = f"v{self.lanes}{'f64' if self._double else 'f32'}"
        kind = ir.FunctionType(result, [each.type for each in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"{name}.{suffix}")
        return self.builder.call(function, args, **options)

    def sum(self, vector: Any) -> Any:
        start = ir.Constant(self.scalar, -0.0)
        return self.call(
            "llvm.vector.reduce.fadd", self.scalar, start, vector, fastmath=("reassoc",)
        )


def _variable(builder: Any, value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """A variable that a loop changes: functions that emit code to read it and to set it."""
    place = cgutils.alloca_once_value(builder, value)
    return lambda: builder.load(place), lambda new: builder.store(new, place)


def _check(matrix: Any) -> None:
    if not isinstance(matrix, types.Array) or matrix.ndim != 2 or matrix.layout != "C":
        raise TypingError(f"expected a C-contiguous matrix, got {matrix}")


@intrinsic
def top_of(_typing: Any, matrix: Any, row: Any, first: Any, count: Any) -> Any:
    """The maximum of ``count`` vectors of a row from column ``first`` on, and whether it is sane.

    It is sane if no number is NaN or +inf. The maximum ignores NaN.
    """
    _check(matrix)
    places = (types.intp,) * 3
    signature = types.Tuple((matrix.dtype, types.boolean))(matrix, *places)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = _Row(context, builder, matrix, args[0], args[1], args[2])
        best, set_best = _variable(builder, line.all(float("-inf")))
        none = ir.Constant(ir.VectorType(ir.IntType(1), line.lanes), [0] * line.lanes)
        odd, set_odd = _variable(builder, none)
        with line.each(args[3]) as (values,):
            old = best()
            set_best(builder.select(builder.fcmp_ordered(">", values, old), values, old))
            above_all = builder.fcmp_unordered("==", values, line.all(float("inf")))
            set_odd(builder.or_(odd(), above_all))
        top = line.call("llvm.vector.reduce.fmax", line.scalar, best(), fastmath=("nnan",))
        bits = line.mask_bits(odd())
        sane = builder.icmp_unsigned("==", bits, ir.Constant(bits.type, 0))
        return context.make_tuple(builder, signature.return_type, [top, sane])

    return signature, code


@intrinsic
def count_at_least(_typing: Any, matrix: Any, row: Any, count: Any, threshold: Any) -> Any:
    """Counts the numbers >= ``threshold`` in the first ``count`` vectors of a row."""
    _check(matrix)
    signature = types.intp(matrix, types.intp, types.intp, matrix.dtype)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = _Row(context, builder, matrix, args[0], args[1])
        at = line.spread(args[3])
        number, set_number = _variable(builder, ir.Constant(ir.IntType(32), 0))
        count_bits = builder.module.declare_intrinsic("llvm.ctpop", [ir.IntType(32)])
        with line.each(args[2]) as (values,):
            reached = line.mask_bits(builder.fcmp_ordered(">=", values, at))
            set_number(builder.add(number(), builder.call(count_bits, [reached])))
        return builder.zext(number(), ir.IntType(64))

    return signature, code


@intrinsic
def _bits_above(_typing: Any, matrix: Any, row: Any, first: Any, origin: Any, edge: Any) -> Any:
    """One bit per number of a vector: 1 if ``number - origin`` is NaN or above ``edge``."""
    _check(matrix)
    signature = types.uint32(matrix, types.intp, types.intp, matrix.dtype, matrix.dtype)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        line = _Row(context, builder, matrix, *args[:3])
        distance = builder.fsub(line.load_first(), line.spread(args[3]))
        return line.mask_bits(builder.fcmp_unordered(">", distance, line.spread(args[4])))

    return signature, code


@intrinsic
def _first_bit(_typing: Any, bits: Any) -> Any:
    """The position of the lowest bit that is 1."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        place = builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))
        return builder.zext(place, ir.IntType(64))

    return types.int64(types.uint32), code


@njit(nogil=True, forceinline=True)
def pick_above(rows, row, first, stop, origin, edge, values, column, count):
    """Appends each number whose distance to ``origin`` is NaN or above ``edge`` to a list.

    Reads a row from ``first`` to ``stop``. The list has distances in ``values`` and columns in
    ``column``; returns its new length.
    """
    lanes = lanes_of(rows.itemsize)
    rest = first + (stop - first) // lanes * lanes
    for start in range(first, rest, lanes):
        bits = _bits_above(rows, row, start, origin, edge)
        while bits:
            i = start + _first_bit(bits)
            values[count] = rows[row, i] - origin
            column[count] = i
            count += 1
            bits &= bits - np.uint32(1)
    for i in range(rest, stop):
        # Written unconditionally: a branch would often be mispredicted.
        distance = rows[row, i] - origin
        values[count] = distance
        column[count] = i
        count += not distance <= edge
    return count


@intrinsic
def _turn_block(
    _typing: Any, source: Any, row: Any, column: Any, into: Any, to_row: Any, to_column: Any
) -> Any:
    """Transposes a square block of ``lanes_of(itemsize)`` rows from one matrix into another."""
    _check(source)
    _check(into)
    places = types.intp, types.intp
    signature = types.none(source, *places, into, *places)

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        def line(i: int, kind: Any, array: Any, row: Any, column: Any) -> _Row:
            at = builder.add(row, ir.Constant(row.type, i))
            return _Row(context, builder, kind, array, at, column)

        lanes = line(0, source, *args[:3]).lanes
        lines = [line(i, source, *args[:3]).load_first() for i in range(lanes)]
        step = 1
        while step < lanes:
            # Two lines swap the off-diagonal parts of each square of 2 x 2 blocks of size step.
            choices = [
                [lane if not lane & step else lanes + lane - step for lane in range(lanes)],
                [lane + step if not lane & step else lanes + lane for lane in range(lanes)],
            ]
            masks = [ir.Constant(ir.VectorType(ir.IntType(32), lanes), each) for each in choices]
            for i in range(lanes):
                if not i & step:
                    pair = lines[i], lines[i + step]
                    lines[i], lines[i + step] = (
                        builder.shuffle_vector(*pair, mask) for mask in masks
                    )
            step *= 2
        for i, vector in enumerate(lines):
            line(i, into, *args[3:]).store_first(vector)
        return context.get_dummy_value()

    return signature, code


@njit(nogil=True)
def turn(source, row, column, into, to_row, to_column, height, width):
    """Transposes a part of a matrix, ``(height, width)``, into a part of another one."""
    lanes = lanes_of(source.itemsize)
    if height < lanes or width < lanes:
        for j in range(width):
            for i in range(height):
                into[to_row + j, to_column + i] = source[row + i, column + j]
        return
    for top in range(0, height, lanes):
        # The last block is shifted back, so that it is complete.
        i = min(top, height - lanes)
        for left in range(0, width, lanes):
            j = min(left, width - lanes)
            _turn_block(source, row + i, column + j, into, to_row + j, to_column + i)


def _margin_sums(squared: bool) -> Any:
    """Creates an intrinsic that computes two sums over the margins ``max(x - threshold, 0)``.

    It reads the first ``pairs`` pairs of vectors of a row. Each sum has one accumulator per vector
    of a pair, which halves the number of roundings.
    """

    def typed(_typing: Any, matrix: Any, row: Any, pairs: Any, threshold: Any) -> Any:
        _check(matrix)
        dtype = matrix.dtype
        signature = types.UniTuple(dtype, 2)(matrix, types.intp, types.intp, dtype)

        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            line = _Row(context, builder, matrix, args[0], args[1])
            at, zero = line.spread(args[3]), line.all(0.0)
            firsts, seconds = ([_variable(builder, zero) for _ in range(2)] for _ in range(2))
            number, set_number = _variable(builder, ir.Constant(ir.IntType(32), 0))
            count_bits = builder.module.declare_intrinsic("llvm.ctpop", [ir.IntType(32)])
            with line.each(args[2], 2) as pair:
                sums = zip(pair, firsts, seconds, strict=True)
                for values, (first, set_first), (second, set_second) in sums:
                    margin = builder.fsub(values, at)
                    above = builder.fcmp_ordered(">", margin, zero)
                    margin = builder.select(above, margin, zero)
                    if squared:
                        square = builder.fmul(margin, margin, flags=("contract",))
                        set_first(builder.fadd(first(), square, flags=("contract",)))
                        set_second(builder.fadd(second(), margin))
                    else:
                        set_first(builder.fadd(first(), margin))
                        found = builder.call(count_bits, [line.mask_bits(above)])
                        set_number(builder.add(number(), found))
            made = [line.sum(builder.fadd(a(), b())) for (a, _), (b, _) in (firsts, seconds)]
            if not squared:
                made[1] = builder.uitofp(number(), line.scalar)
            return context.make_tuple(builder, signature.return_type, made)

        return signature, code

    return intrinsic(typed)


# The sum of the margins, and the number of non-zero margins, as a float.
margins = _margin_sums(squared=False)
# The sum of the squared margins, and the sum of the margins.
squares = _margin_sums(squared=True)


@njit(nogil=True)
def is_zero(probs, row, first):
    """Whether a block of probabilities is all 0; False for an incomplete block at a row's end."""
    whole = first + BLOCK <= probs.shape[1]
    top, sane = top_of(probs, row, first, BLOCK // lanes_of(probs.itemsize) if whole else 0)
    return whole and sane and top == 0.0


@njit(nogil=True)
def room_for_peaks(rows):
    """Allocates the array ``peaks`` of :func:`find_peaks`."""
    return np.empty((rows.shape[1] + BLOCK - 1) // BLOCK + 1, rows.dtype)


@njit(nogil=True)
def find_peaks(rows, row, peaks):
    """Writes the maximum of each block of a row to ``peaks``, and that of the row to its end.

    Returns 1 for a valid row, 0 if all scores are -inf (masked), -1 if a score is NaN or +inf.
    """
    n = rows.shape[1]
    vectors = BLOCK // lanes_of(rows.itemsize)
    highest = rows.dtype.type(-math.inf)
    sane = True
    for block in range(n // BLOCK):
        peak, fine = top_of(rows, row, block * BLOCK, vectors)
        peaks[block] = peak
        highest = peak if peak > highest else highest
        sane = sane and fine
    if n % BLOCK:
        peak, fine = top_of_rest(rows, row, n - n % BLOCK)
        peaks[n // BLOCK] = peak
        highest = peak if peak > highest else highest
        sane = sane and fine
    peaks[-1] = highest
    if not sane:
        return -1
    return 1 if highest > -math.inf else 0


@njit(nogil=True, forceinline=True)
def top_of_rest(rows, row, first):
    """The maximum of a row from ``first`` on, and whether all scores there are below +inf."""
    n = rows.shape[1]
    lanes = lanes_of(rows.itemsize)
    top, sane = top_of(rows, row, first, (n - first) // lanes)
    for i in range(n - (n - first) % lanes, n):
        score = rows[row, i]
        top = score if score > top else top
        sane = sane and score < math.inf
    return top, sane
