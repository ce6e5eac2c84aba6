"""The scores of a linear layer: how many are held at a time, and the products around them.

A chunk is some rows of scores with all classes, a slab all rows with some classes, a tile some
spans of some texts. The larger they are, the less often the weight and its gradient are read. One
table has the memory of all engines. The three products of a layer with a loss on it (scores, and
the gradients of hidden and weight) go into memory that is there; :class:`LayerProducts` makes
them such that odd sizes cost no more than their neighbours.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from lastlayer._torch import accumulation_dtype, in_functorch, is_eager, is_exporting
from lastlayer.kernels import LARGE, empty

# Bytes of scores held at a time, by engine and device: those of "auto", and of "low".
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
    # In half precision chunks are larger, so that products are, and launches few.
    ("sampled half", "cuda"): (270_000_000, 36_000_000),
}
# On a CPU a quarter of the weight's own size is allowed as well: less would be slower.
_SHARE_OF_WEIGHT = 4
# Rows of a chunk, and labels of a slab, that suit the tiles of a matrix unit.
_STEP = {"cuda": 128, "cpu": 8}
_LABEL_STEP = {"cuda": 128, "cpu": 16}
# A GPU's products are up to five times slower where rows of a matrix start at no multiple of 16
# bytes. From so many multiplications on, by device, that is worth a few more launches.
ALIGN_FROM = {"cuda": 1 << 33}
_ALIGNED_BYTES = 16
# On a CPU: so few scores that chunks, and what decides about them, cost more than they save.
_FEW = 1 << 18
_WIDE = torch.float32, torch.float64
# Classes of a block, and numbers of a vector, that are padded together.
_BLOCK = 64
_WIDTH_STEP = 8


def device_kind(tensor: Tensor) -> str:
    """Which entries of the table count: "cpu", or "cuda" for every other device."""
    return "cpu" if tensor.device.type == "cpu" else "cuda"


def budget_bytes(engine: str, chunk: str, tensor: Tensor) -> int:
    """Bytes of scores that "auto" or "low" allow on the device of ``tensor``."""
    usual, low = BYTES[engine, device_kind(tensor)]
    return low if chunk == "low" else usual


def as_chunk(text: str) -> int | str:
    """A chunk size as it was before an operation took it as a string."""
    return int(text) if text.isdecimal() else text


def rows_at_a_time(
    chunk_rows: int | str, hidden: Tensor, n_classes: int, copies: float = 1.0
) -> int:
    """Rows of a chunk; ``copies`` is how many times its scores are held in memory."""
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
    # Chunks of the same size: a small last one would pay for the whole weight again.
    even = -(-n // -(-n // fitting))
    return min(n, -(-even // step) * step)


def are_few(rows: Tensor, n_classes: int, chunk_rows: int | str) -> bool:
    """Whether torch makes the scores of all rows by one product: on a CPU, in plain eager code."""
    # First: a compiler must not ask how many rows there are.
    if not rows.is_cpu or not is_eager(rows):
        return False
    n = rows.shape[0]
    fits = isinstance(chunk_rows, str) or n <= chunk_rows
    return fits and n * n_classes <= _FEW and rows.dtype in _WIDE


def row_chunks(
    rows: Tensor, n_classes: int, chunk_rows: int | str, copies: float
) -> Iterator[slice]:
    """Slices of the rows: at least one, an empty one where there are no rows.

    ``copies`` is how many numbers in the accumulation dtype are held for each row and class.
    """
    if is_exporting():
        # A program for any number of rows cannot have a loop over them.
        yield slice(None)
        return
    size = accumulation_dtype(rows.dtype).itemsize
    step = rows_at_a_time(chunk_rows, rows, n_classes, copies * size / rows.element_size())
    n = rows.shape[0]
    for first in range(0, max(1, n), step):
        yield slice(first, min(n, first + step))


def classes_at_a_time(chunk_classes: int | str, hidden: Tensor, n_classes: int) -> int:
    """Labels of a slab."""
    if isinstance(chunk_classes, int):
        return min(n_classes, chunk_classes)
    step = _LABEL_STEP[device_kind(hidden)]
    row_bytes = max(1, hidden.shape[0]) * hidden.element_size()
    fitting = budget_bytes("labels", chunk_classes, hidden) // row_bytes
    return min(n_classes, max(1, fitting // step) * step)


def slab_stride(hidden: Tensor, classes: int) -> int:
    """How far apart the rows of a slab are in memory: on a GPU as suits its matrix units."""
    step = _LABEL_STEP["cuda"] if hidden.device.type in ALIGN_FROM else 1
    return -(-classes // step) * step


def spans_at_a_time(chunk_spans: int | str, vectors: Tensor) -> int:
    """Scores of a tile of spans."""
    if isinstance(chunk_spans, str):
        return budget_bytes("spans", chunk_spans, vectors) // vectors.element_size()
    return chunk_spans


# Numbers that are widened at a time where no product gives float32 from half precision.
_WIDENED = 1 << 22


def scores_into(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``hidden @ weight.T + bias`` into the first rows of ``out``, which may be wider."""
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
    """``values[part]``, which costs host time even where it is all of them."""
    return values if part.stop - (part.start or 0) == values.shape[0] else values[part]


def multiply(out: Tensor, left: Tensor, right: Tensor, adds: bool = False) -> Tensor:
    """``left @ right`` into ``out``, which may be wider, or added to it."""
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
    """By how many zeros vectors of an odd size are made longer where many rows meet them."""
    width = weight.shape[1]
    return -width % _WIDTH_STEP if _are_odd((width,), (weight,), n_rows) else 0


def _are_odd(sizes: Iterable[int], weights: Sequence[Tensor], n_rows: int) -> bool:
    """Whether rows of such sizes slow down the products of a layer, and these are large."""
    first = weights[0]
    least = ALIGN_FROM.get(first.device.type)
    if least is None or n_rows * sum([weight.numel() for weight in weights]) < least:
        return False
    return any(size * first.itemsize % _ALIGNED_BYTES for size in sizes)


def _ranges(sizes: Iterable[int]) -> list[slice]:
    """Where parts of such sizes are, one after the other."""
    return [slice(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]


class _Block(NamedTuple):
    """Some classes of a band: their columns among the scores, and their rows in its weight."""

    band: int
    columns: slice
    rows: slice


class _Edge(NamedTuple):
    """64 columns with classes of more than one band, or with fewer than 64 classes."""

    columns: slice
    vectors: Tensor
    """``(64, d)``, with the slices of all bands; 0 where a class has no number."""
    bias: Tensor | None
    blocks: list[_Block]
    """What the bands have of it; columns are counted from its first one."""


class LayerProducts:
    """Class vectors and biases, and their three products with ``n_rows`` rows in all.

    Mostly there is one weight, ``(n_classes, d)``. With more, each has the vectors of a band of
    classes, which meet a slice of hidden; classes and slices stand side by side.

    Where the size of a band is odd and the products are large, the memory of scores has
    :attr:`stride` columns, more than there are classes. Each band is then multiplied from its first
    to its last multiple of 64 columns, and the few classes around with copies of their vectors,
    padded by 0 to 64. Columns of no class may hold anything; :meth:`padded` clears them once scores
    have become a gradient.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, n_rows: int) -> None:
        self.weights, self._bias = weights, bias
        # Nothing but the products themselves, for little host time.
        self._plain: Tensor | None = None
        self._edges: list[_Edge] = []
        if len(weights) == 1:
            n_classes = self.n_classes = self.stride = weights[0].shape[0]
            if not _are_odd((n_classes,), weights, n_rows):
                self._plain = weights[0]
                return
        self.n_classes = self.stride = self.columns[-1].stop
        stops = [column.stop for column in self.columns]
        if not _are_odd(stops, weights, n_rows):
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
        """Of the classes of each band."""
        return _ranges(weight.shape[0] for weight in self.weights)

    @cached_property
    def parts(self) -> list[slice]:
        """Of hidden, as each band sees it."""
        return _ranges(weight.shape[1] for weight in self.weights)

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
        """For the scores of so many rows, ``(rows, stride)``."""
        return empty((rows, self.stride), dtype, self.weights[0].device)

    def scores(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """The scores of all rows, as :meth:`memory` for them would hold them."""
        if self._is_one_product(hidden.shape[0] * self.n_classes, hidden, dtype):
            return linear(hidden, self.weights[0], self._bias)
        memory = self.memory(hidden.shape[0], dtype)
        self.scores_into(memory, hidden)
        return memory

    def _is_one_product(self, size: int, hidden: Tensor, dtype: torch.dtype) -> bool:
        """Whether torch's product has the result as it should be, without memory made before."""
        small = hidden.device.type != "cpu" or size * hidden.itemsize < LARGE
        return self._plain is not None and dtype == hidden.dtype and small

    def scores_into(self, memory: Tensor, hidden: Tensor) -> Tensor:
        """The scores ``(rows, n_classes)``, in the first rows and columns of a memory."""
        if self._plain is not None:
            return scores_into(self.scores_in(memory), hidden, self._plain, self._bias)
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
        """The columns of classes."""
        return memory if memory.shape[1] == self.n_classes else memory[:, : self.n_classes]

    def padded(self, memory: Tensor) -> Tensor:
        """A gradient of scores as the next two take it, ``(rows, stride)``: 0 where padded."""
        if self.stride == self.n_classes:
            return self.scores_in(memory)
        memory[:, self.n_classes : self.stride].zero_()
        return _columns_of(memory, slice(0, self.stride))

    def hidden_gradient(self, out: Tensor | None, padded: Tensor, adds: bool = False) -> Tensor:
        """``gradient @ weight``: new, or into ``out``, which may be wider, or added to it."""
        if self._plain is not None:
            if out is None:
                return torch.mm(padded, self._plain)
            return multiply(out, padded, self._plain, adds)
        if out is None:
            out = padded.new_empty(padded.shape[0], self.parts[-1].stop)
        # Edges first: what is rounded twice is small.
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
        """``gradient.T @ hidden`` into those of the weights, which may be wider, or added to them.

        None is one that is not wanted, of several.
        """
        if self._plain is not None and totals[0] is not None:
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
    """``values[:, columns]``, which costs host time even where it is all of them."""
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
    """Keeps what rounding scores to half precision would lose."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        scores = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        return scores_into(scores, rows, weight, bias)

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
