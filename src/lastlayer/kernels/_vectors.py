"""Reductions over a row in vectors of 64 bytes, for the CPU kernels.

LLVM does not vectorise a float maximum that respects NaN, and halves the width of what it does
vectorise. Written as vectors, a row of 64 scores is four registers on AVX-512, and a count is a
mask; elsewhere LLVM splits the vectors into those that there are. Arrays are C-contiguous.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

_BYTES = 64


@njit(nogil=True)
def lanes_of(itemsize: int) -> int:
    """How many numbers a vector has; rows to be reduced are padded to a multiple of it."""
    return _BYTES // itemsize


class _Row:
    """A row of a matrix from some column on, as code that loads it vector by vector."""

    def __init__(
        self, context: Any, builder: Any, kind: Any, array: Any, row: Any, first: Any = None
    ) -> None:
        self.builder, self._double = builder, kind.dtype == types.float64
        self.scalar = ir.DoubleType() if self._double else ir.FloatType()
        self.lanes = _BYTES // (8 if self._double else 4)
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
        """A loop over the first vectors of the row, ``step`` of them at a time."""
        with cgutils.for_range(self.builder, count) as loop:
            first = self.builder.mul(loop.index, ir.Constant(loop.index.type, step * self.lanes))
            yield [self._load(first, i * self.lanes) for i in range(step)]

    def _load(self, first: Any, further: int) -> Any:
        at = self.builder.add(first, ir.Constant(first.type, further))
        place = self.builder.gep(self._start, [at])
        loaded = self.builder.load(self.builder.bitcast(place, self.vector.as_pointer()))
        loaded.align = 8 if self._double else 4
        return loaded

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
    """A number that a loop changes: how it is read, and how it is set."""
    place = cgutils.alloca_once_value(builder, value)
    return lambda: builder.load(place), lambda new: builder.store(new, place)


def _check(matrix: Any) -> None:
    if not isinstance(matrix, types.Array) or matrix.ndim != 2 or matrix.layout != "C":
        raise TypingError(f"expected a C-contiguous matrix, got {matrix}")


@intrinsic
def top_of(_typing: Any, matrix: Any, row: Any, first: Any, count: Any) -> Any:
    """The maximum of ``count`` vectors of a row from column ``first`` on; whether it is sane.

    That is where no number is NaN or +inf. The maximum passes over NaN.
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
    """How many numbers of the first ``count`` vectors of a row are no less than ``threshold``."""
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
def margins(_typing: Any, matrix: Any, row: Any, pairs: Any, threshold: Any) -> Any:
    """The sum of ``max(x - threshold, 0)``, and how many are not 0, as a float.

    Of the first ``pairs`` of vectors of a row: of two sums each rounds half as often.
    """
    _check(matrix)
    dtype = matrix.dtype
    signature = types.UniTuple(dtype, 2)(matrix, types.intp, types.intp, dtype)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = _Row(context, builder, matrix, args[0], args[1])
        at, zero = line.spread(args[3]), line.all(0.0)
        totals = [_variable(builder, zero) for _ in range(2)]
        number, set_number = _variable(builder, ir.Constant(ir.IntType(32), 0))
        count_bits = builder.module.declare_intrinsic("llvm.ctpop", [ir.IntType(32)])
        with line.each(args[2], 2) as pair:
            for values, (total, set_total) in zip(pair, totals, strict=True):
                margin = builder.fsub(values, at)
                above = builder.fcmp_ordered(">", margin, zero)
                set_total(builder.fadd(total(), builder.select(above, margin, zero)))
                bits = builder.call(count_bits, [line.mask_bits(above)])
                set_number(builder.add(number(), bits))
        (even, _), (odd, _) = totals
        whole = line.sum(builder.fadd(even(), odd()))
        found = [whole, builder.uitofp(number(), line.scalar)]
        return context.make_tuple(builder, signature.return_type, found)

    return signature, code


@intrinsic
def squares(_typing: Any, matrix: Any, row: Any, pairs: Any, threshold: Any) -> Any:
    """The sums of ``max(x - threshold, 0)`` squared, and of these themselves.

    Of the first ``pairs`` of vectors of a row: of two sums each rounds half as often.
    """
    _check(matrix)
    dtype = matrix.dtype
    signature = types.UniTuple(dtype, 2)(matrix, types.intp, types.intp, dtype)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = _Row(context, builder, matrix, args[0], args[1])
        at, zero = line.spread(args[3]), line.all(0.0)
        totals, plains = ([_variable(builder, zero) for _ in range(2)] for _ in range(2))
        with line.each(args[2], 2) as pair:
            sums = zip(pair, totals, plains, strict=True)
            for values, (total, set_total), (plain, set_plain) in sums:
                margin = builder.fsub(values, at)
                margin = builder.select(builder.fcmp_ordered(">", margin, zero), margin, zero)
                square = builder.fmul(margin, margin, flags=("contract",))
                set_total(builder.fadd(total(), square, flags=("contract",)))
                set_plain(builder.fadd(plain(), margin))
        found = [line.sum(builder.fadd(even(), odd())) for (even, _), (odd, _) in (totals, plains)]
        return context.make_tuple(builder, signature.return_type, found)

    return signature, code
