"""Normalisers of all queries and keys, and their gradients, from a few rows of products at a time.

The forward pass makes the products of some queries with all keys, reads off what each row and
each column needs, and forgets them, but for the last. The backward pass begins with these, makes
the others once more, turns them in the same memory into the gradient of the similarities, and
carries that on to queries and keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer.kernels import info_nce

# Bytes of products on CUDA, and rows with which products are fast and adding them to the gradient
# of the keys costs little; with more keys they may take more bytes, up to the third number.
_BYTES, _ROWS, _MOST_BYTES = 190_000_000, 4096, 1_080_000_000
_CPU_BYTES = 16_000_000
_LOW = 4
# Gradients are brought to this size, where float16 is precise and twice two of them fit.
SIZE = 4096.0


class Sizes(NamedTuple):
    """How products are made: in what dtype, held in which one, how many rows at a time."""

    operands: torch.dtype
    scores: torch.dtype
    rows: int


def sizes(
    query: Tensor, key: Tensor, products: torch.dtype, normalize: bool, chunk_rows: int | str
) -> Sizes:
    """Unit vectors go into float16, which is finer than bfloat16 and as fast; so do their products.

    Vectors of any length keep their dtype, and their products are float32.
    """
    operands = products
    if query.device.type == "cpu" and products != torch.float64:
        operands = torch.float32
    elif normalize and products.itemsize < 4:
        operands = torch.float16
    scores = operands if normalize or operands.itemsize >= 4 else torch.float32
    number = scores.itemsize + (0 if scores == operands else operands.itemsize)
    n, m = max(1, query.shape[0]), max(1, key.shape[0])
    return Sizes(operands, scores, min(n, _rows(query, n, m * number, chunk_rows)))


def _rows(query: Tensor, n: int, row_bytes: int, chunk_rows: int | str) -> int:
    if isinstance(chunk_rows, int):
        return chunk_rows
    if query.device.type == "cpu":
        budget, step = _CPU_BYTES, 8
    else:
        budget, step = min(max(_BYTES, _ROWS * row_bytes), _MOST_BYTES), 128
    budget = budget // _LOW if chunk_rows == "low" else budget
    fitting = max(1, budget // row_bytes)
    # Chunks of the same size: a small last one would leave much of the device idle.
    even = -(-n // -(-n // fitting))
    return -(-even // step) * step


def normalisers(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    query_groups: Tensor | None,
    key_groups: Tensor | None,
    positive: bool,
    own: int,
    normalize: bool,
    columns: bool,
    how: Sizes,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What :func:`lastlayer.losses._contrastive.similarities` returns, and the last products."""
    n, m = query.shape[0], key.shape[0]
    wide = scale.dtype
    row_lse, row_positive = (query.new_empty(n, dtype=wide) for _ in range(2))
    column_lse = query.new_full((m if columns else 0,), -torch.inf, dtype=wide)
    pulled = columns and positive and query_groups is not None
    column_positive = query.new_zeros(m if pulled else 0, dtype=wide)
    queries, keys = unit(query, normalize, how.operands), unit(key, normalize, how.operands)
    memory = query.new_empty(how.rows, m, dtype=how.scores)
    for part in _parts(n, how.rows):
        scores = _product(memory[: part.stop - part.start], queries[part], keys.t())
        info_nce.statistics_(
            "auto", scores, scale, own + part.start, _some(query_groups, part), key_groups,
            positive, normalize, row_lse[part], row_positive[part], column_lse, column_positive,
        )  # fmt: skip
    return (row_lse, row_positive, column_lse, column_positive), memory


class Factors(NamedTuple):
    """The normalisers, and gradients by the four results of :func:`normalisers`.

    They are divided by ``size``, such that the largest are about :data:`SIZE`.
    """

    row_lse: Tensor
    column_lse: Tensor
    by_row_lse: Tensor
    by_row_positive: Tensor
    by_column_lse: Tensor
    by_column_positive: Tensor
    size: Tensor | float


def factors_of(row_lse: Tensor, column_lse: Tensor, *upstream: Tensor) -> Factors:
    """From gradients of any size."""
    together = torch.cat(upstream)
    size = together.abs().amax() if together.shape[0] else together.new_ones(())
    size = torch.where(size == 0, 1.0, size) / SIZE
    row, row_positive, column, column_positive = (each / size for each in upstream)
    return Factors(row_lse, column_lse, row, row_positive, column, column_positive, size)


def gradients(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    query_groups: Tensor | None,
    key_groups: Tensor | None,
    positive: bool,
    own: int,
    normalize: bool,
    how: Sizes,
    factors: Factors,
    wanted: tuple[bool, bool],
    kept: Tensor | None,
    row_positive: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Gradients of query and key, where wanted, and of scale.

    ``kept`` are the products that :func:`normalisers` left; they are overwritten. Where
    ``row_positive`` is given, nothing is known of rows yet: it and the normalisers are found here,
    which needs no pass of its own without those of columns, or where all queries are one chunk.
    """
    (n, depth), m = query.shape, key.shape[0]
    wide = scale.dtype
    back = scale * factors.size
    to_query = wanted[0] or not wanted[1]
    keys = unit(key, normalize, how.operands)
    memory = query.new_empty(how.rows, m, dtype=how.scores) if kept is None else kept
    other = None if how.scores == how.operands else torch.empty_like(memory, dtype=how.operands)
    query_gradient = torch.empty_like(query, memory_format=torch.contiguous_format)
    raw = query.new_empty(how.rows, depth, dtype=wide)
    along = query.new_zeros(n if to_query else m, dtype=wide)
    make = query.new_empty if n else query.new_zeros
    total = make(m, depth, dtype=wide) if wanted[1] else None
    # The last first: its products may be there.
    parts = _parts(n, how.rows)[::-1]
    for part in parts:
        count = part.stop - part.start
        rows = unit(query[part], normalize, how.operands)
        scores = memory[:count]
        if kept is None or part is not parts[0]:
            _product(scores, rows, keys.t())
        if row_positive is not None:
            info_nce.statistics_(
                "auto", scores, scale, own + part.start, _some(query_groups, part), key_groups,
                positive, normalize, factors.row_lse[part], row_positive[part],
                factors.column_lse, factors.by_column_positive,
            )  # fmt: skip
        weights = scores if other is None else other[:count]
        info_nce.weights_(
            "auto", scores, scale, own + part.start, _some(query_groups, part), key_groups,
            positive, normalize, factors.row_lse[part], factors.by_row_lse[part],
            factors.by_row_positive[part], factors.column_lse, factors.by_column_lse,
            factors.by_column_positive, weights,
        )  # fmt: skip
        if to_query:
            _product(raw[:count], weights, keys)
            info_nce.row_gradients_(
                "auto", query[part], raw[:count], back, normalize, query_gradient[part], along[part]
            )
        if total is not None:
            add = _product if part is parts[0] else _add_product
            add(total, weights.t(), rows)
    del memory, other, raw, keys
    key_gradient = None
    if total is not None:
        key_gradient = torch.empty_like(key, memory_format=torch.contiguous_format)
        of_keys = along if not to_query else query.new_empty(m, dtype=wide)
        info_nce.row_gradients_("auto", key, total, back, normalize, key_gradient, of_keys)
    # With s = scale <q, k> the sum of all gradients by s, each times <q, k>, is one over queries.
    return query_gradient if wanted[0] else None, key_gradient, along.sum() / scale


def unit(rows: Tensor, normalize: bool, dtype: torch.dtype) -> Tensor:
    """Rows of length 1, or as they are, in ``dtype``."""
    if not normalize and rows.dtype == dtype:
        return rows
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    info_nce.unit_rows_("auto", rows, out, normalize)
    return out


def _parts(n: int, rows: int) -> list[slice]:
    return [slice(first, min(n, first + rows)) for first in range(0, n, rows)]


def _some(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    if out.dtype == left.dtype:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=out.dtype, out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    if total.dtype == left.dtype:
        return torch.addmm(total, left, right, out=total)
    return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
