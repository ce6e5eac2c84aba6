"""The scores of a linear layer: how many are held in memory at a time, and the matrix products.

A chunk holds some rows and all classes, a slab all rows and some classes, a tile some spans of
some texts. The larger they are, the less often the weight and its gradient are read from memory.
:data:`BYTES` has the budgets of all engines. The three products of a layer with a loss (scores,
gradient of hidden, gradient of weight) write into preallocated buffers. :class:`LayerProducts`
computes them such that misaligned sizes are about as fast as aligned ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lastlayer._torch import (
    accumulation_dtype,
    forward_result,
    in_functorch,
    is_eager,
    is_exporting,
)
from lastlayer.kernels import LARGE, empty

# Bytes of scores held at a time, by engine and device: for "auto" and for "low".
BYTES = {
    ("rows", "cuda"): (1_060_000_000, 290_000_000),
    ("rows", "cpu"): (48_000_000, 12_000_000),
    ("labels", "cuda"): (900_000_000, 250_000_000),
    ("labels", "cpu"): (8_000_000, 2_000_000),
    ("similarity", "cuda"): (190_000_000, 47_500_000),
    ("similarity", "cpu"): (16_000_000, 4_000_000),
    ("spans", "cuda"): (1 << 27, 1 << 25),
    ("spans", "cpu"): (1 << 21, 1 << 19),
    ("sampled", "cuda"): (48_000_000, 12_000_000),
    ("sampled", "cpu"): (48_000_000, 12_000_000),
    # Larger chunks in half precision: larger products and fewer launches.
    ("sampled half", "cuda"): (270_000_000, 36_000_000),
}
# On a CPU "auto" may use at least a quarter of the weight's size: less would be slower.
_SHARE_OF_WEIGHT = 4
# Rows per chunk and labels per slab are multiples of these, to match the tiles of matrix units.
_STEP = {"cuda": 128, "cpu": 8}
_LABEL_STEP = {"cuda": 128, "cpu": 16}
# GPU matrix products are up to five times slower if the rows of a matrix are not aligned to 16
# bytes. From this many multiplications on, alignment is worth a few more launches.
ALIGN_FROM = {"cuda": 1 << 33}
_ALIGNED_BYTES = 16
# On a CPU: up to this many scores, chunking and choosing chunks cost more time than they save.
_ONE_PRODUCT_SCORES = 1 << 18
_WIDE = torch.float32, torch.float64
# On a CPU: up to this many scores, torch's binary cross entropy takes less time than a kernel.
FEW_SCORES = 1 << 15
# Numbers of classes are padded to multiples of the first, hidden sizes to multiples of the second.
_BLOCK = 64
_WIDTH_STEP = 8


def device_kind(tensor: Tensor) -> str:
    """The device key of :data:`BYTES`: "cpu", or "cuda" for every other device."""
    return "cpu" if tensor.device.type == "cpu" else "cuda"


def budget_bytes(engine: str, chunk: str, tensor: Tensor) -> int:
    """Bytes of scores that "auto" or "low" allow on the device of ``tensor``."""
    usual, low = BYTES[engine, device_kind(tensor)]
    return low if chunk == "low" else usual


def as_chunk(text: str) -> int | str:
    """Parses a chunk size, which registered operations take as a string."""
    return int(text) if text.isdecimal() else text


def rows_at_a_time(
    chunk_rows: int | str, hidden: Tensor, n_classes: int, copies: float = 1.0
) -> int:
    """Rows per chunk; ``copies`` is the number of buffers of scores that a chunk needs."""
    n = max(1, hidden.shape[0])
    if isinstance(chunk_rows, int):
        return min(n, chunk_rows)
    kind, budget = device_kind(hidden), budget_bytes("rows", chunk_rows, hidden)
    row_bytes = max(1, n_classes) * hidden.element_size() * copies
    if n * row_bytes <= budget:
        return n
    step = _STEP[kind]
    if chunk_rows == "auto" and kind == "cpu":
        weight_bytes = n_classes * hidden.shape[-1] * hidden.element_size()
        budget = max(budget, weight_bytes // _SHARE_OF_WEIGHT)
    fitting = int(budget / row_bytes)
    fitting = fitting // step * step or max(1, fitting)
    # Equal chunks: a small last one would read the whole weight for few rows.
    even = -(-n // -(-n // fitting))
    return min(n, -(-even // step) * step)


def fits_one_cpu_product(rows: Tensor, n_classes: int, chunk_rows: int | str) -> bool:
    """Whether the problem is so small that one CPU product computes all scores; eager mode only."""
    # Checked first: while compiling, the number of rows must not be read.
    if not rows.is_cpu or not is_eager(rows):
        return False
    n = rows.shape[0]
    fits = isinstance(chunk_rows, str) or n <= chunk_rows
    return fits and n * n_classes <= _ONE_PRODUCT_SCORES and rows.dtype in _WIDE


def row_chunks(
    rows: Tensor, n_classes: int, chunk_rows: int | str, copies: float
) -> Iterator[slice]:
    """Slices of the rows; a single empty one if there are no rows.

    ``copies`` is the number of values in the accumulation dtype held per row and class.
    """
    if is_exporting():
        # An exported program has a dynamic number of rows and cannot loop over them.
        yield slice(None)
        return
    size = accumulation_dtype(rows.dtype).itemsize
    step = rows_at_a_time(chunk_rows, rows, n_classes, copies * size / rows.element_size())
    n = rows.shape[0]
    for first in range(0, max(1, n), step):
        yield slice(first, min(n, first + step))


def classes_at_a_time(chunk_classes: int | str, hidden: Tensor, n_classes: int) -> int:
    """Labels per slab."""
    if isinstance(chunk_classes, int):
        return min(n_classes, chunk_classes)
    step = _LABEL_STEP[device_kind(hidden)]
    row_bytes = max(1, hidden.shape[0]) * hidden.element_size()
    fitting = budget_bytes("labels", chunk_classes, hidden) // row_bytes
    return min(n_classes, max(1, fitting // step) * step)


def slab_stride(hidden: Tensor, classes: int) -> int:
    """Row stride of a slab; on a GPU padded to match the tiles of its matrix units."""
    step = _LABEL_STEP["cuda"] if hidden.device.type in ALIGN_FROM else 1
    return -(-classes // step) * step


def spans_at_a_time(chunk_spans: int | str, vectors: Tensor) -> int:
    """Number of scores per tile of spans."""
    if isinstance(chunk_spans, str):
        return budget_bytes("spans", chunk_spans, vectors) // vectors.element_size()
    return chunk_spans


# Elements converted to float32 at a time, where no product returns float32 for half precision.
_WIDENED = 1 << 22


def scores_into(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Writes ``hidden @ weight.T + bias`` to the first rows of ``out``.

    ``out`` may have a wider dtype.
    """
    if out.shape[0] != hidden.shape[0]:
        out = out[: hidden.shape[0]]
    if out.dtype == hidden.dtype:
        if bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(bias, hidden, weight.t(), out=out)
    if out.device.type == "cuda":
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        for part in _slices(weight.shape[0], weight.shape[1]):
            out[:, part] = hidden @ weight[part].to(out.dtype).t()
    return out if bias is None else out.add_(bias)


def part_of(values: Tensor, part: slice) -> Tensor:
    """``values[part]``; skips the indexing, which costs host time, if the part is everything."""
    return values if part.stop - (part.start or 0) == values.shape[0] else values[part]


def multiply(out: Tensor, left: Tensor, right: Tensor, adds: bool = False) -> Tensor:
    """Writes ``left @ right`` to ``out``, or adds it. ``out`` may have a wider dtype."""
    if out.dtype == left.dtype:
        return torch.addmm(out, left, right, out=out) if adds else torch.mm(left, right, out=out)
    if out.device.type == "cuda":
        if adds:
            return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    right = right.to(out.dtype)
    for part in _slices(left.shape[0], left.shape[1]):
        multiply(out[part], left[part].to(out.dtype), right, adds)
    return out


def _slices(count: int, numbers_each: int) -> list[slice]:
    step = max(1, _WIDENED // max(1, numbers_each))
    return [slice(first, first + step) for first in range(0, count, step)]


def missing_columns(weight: Tensor, n_rows: int) -> int:
    """Number of zero columns that align the vectors of a large problem; 0 if none are needed."""
    width = weight.shape[1]
    return -width % _WIDTH_STEP if _are_misaligned((width,), (weight,), n_rows) else 0


def _are_misaligned(sizes: Iterable[int], weights: Sequence[Tensor], n_rows: int) -> bool:
    """Whether the products are large and rows of one of these sizes would be misaligned."""
    first = weights[0]
    least = ALIGN_FROM.get(first.device.type)
    if least is None or n_rows * sum([weight.numel() for weight in weights]) < least:
        return False
    return any(size * first.itemsize % _ALIGNED_BYTES for size in sizes)


def ranges(sizes: Iterable[int]) -> list[slice]:
    """Consecutive slices of the given sizes."""
    return [slice(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


class _Block(NamedTuple):
    """Some classes of a band: their columns in the scores, and their rows in the band's weight."""

    band: int
    columns: slice
    rows: slice


class _Edge(NamedTuple):
    """64 columns with classes of more than one band, or with fewer than 64 classes."""

    columns: slice
    vectors: Tensor
    """``(64, d)`` over the slices of all bands; 0 outside the slice of a class's own band."""
    bias: Tensor | None
    blocks: list[_Block]
    """The classes of each band in it; columns count from the first column of the edge."""


class LayerProducts:
    """The three matrix products of a linear layer, for ``n_rows`` rows in total.

    Usually there is one weight, ``(n_classes, d)``. With several, each has the vectors of one band
    of classes, which are multiplied with one slice of hidden. Bands and slices are concatenated.

    If a band ends at a misaligned column and the products are large, the buffer of scores has
    :attr:`stride` columns, more than there are classes. Each band is then multiplied between its
    first and last multiple of 64 columns; the classes at its edges are multiplied through copies
    of their vectors, padded with zeros to 64. Padding columns hold undefined values;
    :meth:`padded` sets them to zero once the buffer holds a gradient.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, n_rows: int) -> None:
        self.weights, self._bias = weights, bias
        # The weight, if there is one and it needs no padding: the path with the least host time.
        self._single_weight: Tensor | None = None
        self._edges: list[_Edge] = []
        if len(weights) == 1:
            n_classes = self.n_classes = self.stride = weights[0].shape[0]
            if not _are_misaligned((n_classes,), weights, n_rows):
                self._single_weight = weights[0]
                return
        self.n_classes = self.stride = self.columns[-1].stop
        stops = [column.stop for column in self.columns]
        if not _are_misaligned(stops, weights, n_rows):
            self._blocks = [
                _Block(band, column, slice(0, column.stop - column.start))
                for band, column in enumerate(self.columns)
            ]
            return
        self.stride = -(-self.n_classes // _BLOCK) * _BLOCK
        self._blocks = [
            _Block(band, slice(first, last), slice(first - column.start, last - column.start))
            for band, column in enumerate(self.columns)
            if (first := -(-column.start // _BLOCK) * _BLOCK)
            < (last := column.stop // _BLOCK * _BLOCK)
        ]
        firsts = {stop // _BLOCK * _BLOCK for stop in stops if stop % _BLOCK}
        self._edges = [self._edge(first) for first in sorted(firsts)]

    @cached_property
    def columns(self) -> list[slice]:
        """Columns of each band's classes in the scores."""
        return ranges(weight.shape[0] for weight in self.weights)

    @cached_property
    def parts(self) -> list[slice]:
        """Slice of hidden that each band is multiplied with."""
        return ranges(weight.shape[1] for weight in self.weights)

    def _edge(self, first: int) -> _Edge:
        last, blocks = first + _BLOCK, []
        vectors = self.weights[0].new_zeros(_BLOCK, self.parts[-1].stop)
        for band, column in enumerate(self.columns):
            start, stop = max(first, column.start), min(last, column.stop)
            if start < stop:
                rows = slice(start - column.start, stop - column.start)
                block = _Block(band, slice(start - first, stop - first), rows)
                vectors[block.columns, self.parts[band]] = self.weights[band][rows]
                blocks.append(block)
        bias = self._bias
        if bias is not None:
            bias = pad(bias[first:last], (0, max(0, last - self.n_classes)))
        return _Edge(slice(first, last), vectors, bias, blocks)

    def memory(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Allocates a buffer for the scores of ``rows`` rows, ``(rows, stride)``."""
        return empty((rows, self.stride), dtype, self.weights[0].device)

    def scores(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """The scores of all rows, laid out as in a buffer from :meth:`memory`."""
        if self._is_one_product(hidden.shape[0] * self.n_classes, hidden, dtype):
            return linear(hidden, self.weights[0], self._bias)
        memory = self.memory(hidden.shape[0], dtype)
        self.scores_into(memory, hidden)
        return memory

    def _is_one_product(self, size: int, hidden: Tensor, dtype: torch.dtype) -> bool:
        """Whether a plain torch product gives the right dtype, and needs no preallocated buffer."""
        small = hidden.device.type != "cpu" or size * hidden.itemsize < LARGE
        return self._single_weight is not None and dtype == hidden.dtype and small

    def scores_into(self, memory: Tensor, hidden: Tensor) -> Tensor:
        """Computes scores ``(rows, n_classes)`` in the first rows and columns of a buffer."""
        if self._single_weight is not None:
            return scores_into(self.scores_in(memory), hidden, self._single_weight, self._bias)
        memory = part_of(memory, slice(hidden.shape[0]))
        for band, columns, rows in self._blocks:
            scores_into(
                _columns_of(memory, columns), _columns_of(hidden, self.parts[band]),
                part_of(self.weights[band], rows),
                None if self._bias is None else part_of(self._bias, columns),
            )  # fmt: skip
        for edge in self._edges:
            scores_into(memory[:, edge.columns], hidden, edge.vectors, edge.bias)
        return self.scores_in(memory)

    def scores_in(self, memory: Tensor) -> Tensor:
        """View of a buffer without its padding columns."""
        return memory if memory.shape[1] == self.n_classes else memory[:, : self.n_classes]

    def padded(self, memory: Tensor) -> Tensor:
        """A score gradient with zeroed padding, ``(rows, stride)``, for the methods below."""
        if self.stride == self.n_classes:
            return self.scores_in(memory)
        memory[:, self.n_classes : self.stride].zero_()
        return _columns_of(memory, slice(0, self.stride))

    def hidden_gradient(self, out: Tensor | None, padded: Tensor, adds: bool = False) -> Tensor:
        """``gradient @ weight``: a new tensor, or written or added to ``out``."""
        if self._single_weight is not None:
            if out is None:
                return torch.mm(padded, self._single_weight)
            return multiply(out, padded, self._single_weight, adds)
        if out is None:
            out = padded.new_empty(padded.shape[0], self.parts[-1].stop)
        # Edges first: only their small sums are then rounded twice.
        for edge in self._edges:
            multiply(out, padded[:, edge.columns], edge.vectors, adds)
            adds = True
        for band, columns, rows in self._blocks:
            vectors = part_of(self.weights[band], rows)
            some = _columns_of(out, self.parts[band])
            multiply(some, _columns_of(padded, columns), vectors, adds)
        return out

    def new_weight_gradient(self, padded: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """``gradient.T @ hidden`` for one weight."""
        (weight,) = self.weights
        if self._is_one_product(weight.numel(), hidden, dtype):
            return torch.mm(padded.t(), hidden)
        total = empty(weight.shape, dtype, weight.device)
        self.weight_gradient([total], padded, hidden)
        return total

    def weight_gradient(
        self, totals: Sequence[Tensor | None], padded: Tensor, hidden: Tensor, adds: bool = False
    ) -> None:
        """Writes or adds ``gradient.T @ hidden`` to the gradient of each weight.

        ``totals`` may have a wider dtype. None skips a weight.
        """
        if self._single_weight is not None and totals[0] is not None:
            multiply(totals[0], padded.t(), hidden, adds)
            return
        for band, columns, rows in self._blocks:
            total = totals[band]
            if total is not None:
                some = _columns_of(hidden, self.parts[band])
                multiply(part_of(total, rows), _columns_of(padded, columns).t(), some, adds)
        for edge in self._edges:
            dtype = accumulation_dtype(hidden.dtype)
            made = hidden.new_empty(edge.vectors.shape, dtype=dtype)
            multiply(made, padded[:, edge.columns].t(), hidden)
            for band, columns, rows in edge.blocks:
                total, some = totals[band], made[columns, self.parts[band]]
                if total is not None:
                    total[rows].add_(some) if adds else total[rows].copy_(some)


def _columns_of(values: Tensor, columns: slice) -> Tensor:
    """``values[:, columns]``; skips the indexing if these are all columns."""
    return values if columns.stop - columns.start == values.shape[1] else values[:, columns]


def wide_scores(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias`` in float32, or in float64 from float64; differentiable."""
    if rows.dtype in _WIDE:
        return linear(rows, weight, bias)
    if in_functorch():
        return linear(rows.float(), weight.float(), None if bias is None else bias.float())
    scores: Tensor = _WideScores.apply(rows, weight, bias)
    return scores


class _WideScores(torch.autograd.Function):
    """Float32 scores from half-precision operands, without rounding to half precision."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        scores = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        return forward_result(scores_into(scores, rows, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        narrow = grad.to(rows.dtype)
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            narrow @ weight if needs_rows else None,
            narrow.t() @ rows if needs_weight else None,
            grad.sum(0).to(ctx.bias_dtype) if needs_bias else None,
        )
