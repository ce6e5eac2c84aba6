"""The scores of a linear layer: how many are held at a time, and the products around them.

A chunk is some rows of scores with all classes, a slab all rows with some classes, a tile some
spans of some texts. The larger they are, the less often the weight and its gradient are read. One
table has the memory of all engines. The three products of a layer with a loss on it (scores, and
the gradients of hidden and weight) go into memory that is there.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype

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
    ("sampled half", "cuda"): (144_000_000, 36_000_000),
}
# On a CPU a quarter of the weight's own size is allowed as well: less would be slower.
_SHARE_OF_WEIGHT = 4
# Rows of a chunk, and labels of a slab, that suit the tiles of a matrix unit.
_STEP = {"cuda": 128, "cpu": 8}
_LABEL_STEP = {"cuda": 128, "cpu": 16}


def device_kind(tensor: Tensor) -> str:
    """Which entries of the table count: "cpu", or "cuda" for every other device."""
    return "cpu" if tensor.device.type == "cpu" else "cuda"


def budget_bytes(engine: str, chunk: str, tensor: Tensor) -> int:
    """Bytes of scores that "auto" or "low" allow on the device of ``tensor``."""
    return BYTES[engine, device_kind(tensor)][chunk == "low"]


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


def row_chunks(
    rows: Tensor, n_classes: int, chunk_rows: int | str, copies: float
) -> Iterator[slice]:
    """Slices of the rows: at least one, an empty one where there are no rows.

    ``copies`` is how many numbers in the accumulation dtype are held for each row and class.
    """
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
    step = 1 if hidden.device.type == "cpu" else _LABEL_STEP["cuda"]
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
    wide: dict[str, Any] = {}
    if out.dtype != left.dtype:
        if left.device.type == "cuda":
            wide = {"out_dtype": out.dtype}
        else:
            left, right = left.to(out.dtype), right.to(out.dtype)
    if adds:
        return torch.addmm(out, left, right, out=out, **wide)
    return torch.mm(left, right, out=out, **wide)


def set_weight_gradient(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """``gradient.T @ hidden`` into ``total``, which may be wider."""
    if total.dtype == gradient.dtype:
        torch.mm(gradient.t(), hidden, out=total)
    elif gradient.device.type == "cuda":
        torch.mm(gradient.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        add_weight_gradient_(total.zero_(), gradient, hidden)


def add_weight_gradient_(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Adds ``gradient.T @ hidden`` to ``total``, which may be wider."""
    if total.dtype == gradient.dtype:
        torch.addmm(total, gradient.t(), hidden, out=total)
    elif gradient.device.type == "cuda":
        torch.addmm(total, gradient.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        hidden = hidden.to(total.dtype)
        for part in _slices(total.shape[0], gradient.shape[0]):
            some = gradient[:, part].t().to(total.dtype)
            torch.addmm(total[part], some, hidden, out=total[part])


def _slices(count: int, numbers_each: int) -> list[slice]:
    step = max(1, _WIDENED // max(1, numbers_each))
    return [slice(first, first + step) for first in range(0, count, step)]


def wide_scores(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias`` in float32, or in float64 from float64; differentiable."""
    if rows.dtype in (torch.float32, torch.float64):
        return torch.nn.functional.linear(rows, weight, bias)
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
