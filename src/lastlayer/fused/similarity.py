"""The engine of contrastive losses: similarities of all pairs, some queries at a time.

It multiplies a chunk of queries with all keys, and computes the logsumexp (normaliser) of each row
and each column. A row's normaliser is known after its chunk, a column's only after all chunks. So
there are two ways:

* One pass: if losses are summed, and column normalisers are not needed or all queries fit in one
  chunk, the forward pass also computes the gradients.
* Two passes: forward saves the normalisers. Backward recomputes the products, starting with the
  last chunk, which may have been kept, and overwrites them with their gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lastlayer._torch import (
    accumulation_dtype,
    autocast_dtype,
    graph_is_kept,
    is_eager,
    saves_tensors_through_hooks,
    without_autocast,
)
from lastlayer.fused.function import Call, Engine, Operands, Result, fused_loss
from lastlayer.fused.scores import (
    LayerProducts,
    as_chunk,
    budget_bytes,
    device_kind,
    missing_columns,
    part_of,
)
from lastlayer.kernels import info_nce

# On CUDA chunks of this many queries make fast products and few additions to the keys' gradient.
# With many keys such chunks may exceed the budget, up to the second number of bytes.
_ROWS, _MOST_BYTES = 4096, 1_080_000_000
# Gradients of similarities are scaled so that the largest possible ones have about this magnitude:
# most others are then normal numbers in float16, and sums of several do not overflow.
_SIZE = 4096.0


class Groups(NamedTuple):
    """int32 group ids of queries and keys, and the role of keys in a query's group."""

    query: Tensor
    key: Tensor
    positive: bool
    """Whether keys in the query's group are positives; if False, they are left out."""


class Pairs(NamedTuple):
    """Queries and the keys they are compared with, checked."""

    query: Tensor
    """``(n, d)``."""
    key: Tensor
    """``(m, d)``."""
    scale: Tensor
    """1/T, a scalar tensor in the accumulation dtype."""
    groups: Groups | None
    own: int
    """Column of the first query's own key; those of the next queries follow. m if none has one."""
    normalize: bool
    """Whether rows are normalized to length 1."""
    chunk_rows: int | str
    """Queries at a time, "auto" or "low"."""

    @property
    def in_one_chunk(self) -> bool:
        """Whether all products fit in one chunk."""
        how = _sizes(self.query, self.key, _products(self.query), self.normalize, self.chunk_rows)
        return how.rows >= self.query.shape[0]


class Similarities(NamedTuple):
    """Statistics of each query and of each key over all pairs.

    ``row_lse`` is the logsumexp of a query's similarities, ``row_positive`` the sum of those to its
    positives; ``column_lse`` and ``column_positive`` are the same for keys. The columns' are empty
    if not wanted; ``column_positive`` is also empty without groups of positives.
    """

    row_lse: Tensor
    row_positive: Tensor
    column_lse: Tensor
    column_positive: Tensor


def similarities(pairs: Pairs, *, columns: bool) -> Similarities:
    """Differentiable statistics of ``scale * <query, key>``; those of keys if ``columns``."""
    (joined,) = _call(pairs, None, columns, 1.0, "none")
    n, m = pairs.query.shape[0], pairs.key.shape[0] if columns else 0
    pulled = m if pairs.groups is not None and pairs.groups.positive else 0
    return Similarities(*joined.split([n, n, m, pulled]))


def total_loss(pairs: Pairs, pull: Tensor | None, factor: float, *, symmetric: bool) -> Tensor:
    """``factor`` times the sum over queries of normaliser + pull * positive sum - log(-1 / pull).

    ``pull`` is ``(n,)``, minus one over the number of positives; None for -1. ``symmetric`` uses
    the mean of a query's normaliser and its own key's; it requires one query per key, and all
    products in one chunk.
    """
    return _call(pairs, pull, symmetric, factor, "sum")[0]


def _call(
    pairs: Pairs, pull: Tensor | None, columns: bool, factor: float, reduction: str
) -> tuple[Tensor, ...]:
    query, key, scale, groups, own, normalize, chunk_rows = pairs
    query_groups, key_groups, positive = groups or (None, None, False)
    products = str(_products(query)).removeprefix("torch.")
    options = positive, own, normalize, columns, products, factor, str(chunk_rows)
    return fused_loss(
        _ENGINE, (query, key, scale, pull, query_groups, key_groups), options, reduction
    )


def _products(query: Tensor) -> torch.dtype:
    """The dtype of the products, before :func:`_sizes` adapts it."""
    return autocast_dtype(query) or query.dtype


class _SimilarityEngine(Engine):
    """Operands: query, key, scale; pull, group ids of queries and of keys.

    With "none" the loss is the concatenation of :class:`Similarities`, and the pieces are the
    normalisers and the products of the last chunk, which backward gets after the operands. With
    "sum" it is :func:`total_loss`.
    """

    name = "info_nce"
    schema = (
        "bool positive, SymInt own, bool normalize, bool columns, str products, float factor, "
        "str chunk_rows"
    )
    n_constants = 3
    what = "info_nce"
    instead = "torch.nn.functional.cross_entropy on query @ key.T"

    def invoke(self, call: Call) -> Result:
        first_of_two = call.upstream is None and call.reduction == "none" and any(call.wanted)
        if first_of_two and is_eager(call.operands[0]):
            return self._normalise(call, keep=not saves_tensors_through_hooks())
        return super().invoke(call)

    def compute(self, call: Call) -> Result:
        operands, options, reduction, wanted, upstream = call
        if upstream is not None:
            return self._differentiate(call, upstream)
        if reduction == "none":
            return self._normalise(call, keep=False)
        query, key, scale, pull, *_ = operands
        columns, factor = options[3], options[5]
        problem = _Problem.of(operands, options)
        made: tuple[Tensor | None, ...] = (None, None, None)
        size = None
        with without_autocast(query):
            if any(wanted):
                row_lse, row_positive = scale.new_empty(2, query.shape[0]).unbind()
                column_lse = scale.new_full((key.shape[0] if columns else 0,), -torch.inf)
                # In float16 the 1/n of a mean may underflow: it is applied in backward.
                if query.dtype == torch.float16:
                    size = scale.new_full((), factor)
                push = torch.full_like(row_lse, 0.5 * _SIZE if columns else _SIZE)
                pulled = torch.full_like(row_lse, -_SIZE) if pull is None else pull * _SIZE
                none = scale.new_empty(0)
                factors = _Factors(
                    row_lse, column_lse, push, pulled, push if columns else none, none,
                    (1.0 if size is not None else factor) / _SIZE,
                )  # fmt: skip
                made = _gradients(problem, factors, wanted, None, row_positive)
            else:
                known, _ = _normalisers(problem, columns)
                row_lse, row_positive, column_lse, _ = known
            normaliser = (row_lse + column_lse).mul_(0.5) if columns else row_lse
            if pull is None:
                total = (normaliser - row_positive).sum()
            else:
                total = torch.addcmul(normaliser, pull, row_positive).add_(pull.neg().log_()).sum()
        return Result(total.mul_(factor), made, (), size)

    def _normalise(self, call: Call, keep: bool) -> Result:
        operands, options = call[:2]
        with without_autocast(operands[0]):
            known, products = _normalisers(_Problem.of(operands, options), options[3])
        if not keep or options[6] == "low":
            products = None
        return Result(torch.cat(known), (known[0], known[2], products))

    def _differentiate(self, call: Call, upstream: Tensor) -> Result:
        """Gradients from the upstream gradient and the saved normalisers and products."""
        operands, options, _, wanted, _ = call
        query, key, scale, *_ = operands
        n, m = query.shape[0], key.shape[0] if options[3] else 0
        left = iter(operands[6:])
        row_lse, column_lse = (next(left) if size else scale.new_empty(0) for size in (n, m))
        products = next(left, None)
        size = upstream.abs().amax() if upstream.shape[0] else upstream.new_ones(())
        size = torch.where(size == 0, 1.0, size) / _SIZE
        by_row, by_row_positive, by_column, by_column_positive = (upstream / size).split(
            [n, n, m, upstream.shape[0] - 2 * n - m]
        )
        factors = _Factors(
            row_lse, column_lse, by_row, by_row_positive, by_column, by_column_positive, size
        )
        if products is not None and graph_is_kept():
            # The next backward pass needs them too.
            products = None
        with without_autocast(query):
            problem = _Problem.of(operands, options)
            made = _gradients(problem, factors, wanted, products, None)
        return Result(upstream.new_empty(0), made)

    def fake(self, call: Call) -> Result:
        operands, options, reduction, wanted, upstream = call
        query, key, scale, _, query_groups, *_ = operands
        positive, columns = options[0], options[3]
        if upstream is not None or reduction != "none":
            pieces = [
                each.new_empty(each.shape) if needed else None
                for each, needed in zip((query, key, scale), wanted, strict=True)
            ]
            if upstream is not None:
                return Result(upstream.new_empty(0), pieces)
            size = None
            if query.dtype == torch.float16 and any(wanted):
                size = scale.new_empty(())
            return Result(scale.new_empty(()), pieces, (), size)
        n, m = query.shape[0], key.shape[0] if columns else 0
        pulled = m if positive and query_groups is not None else 0
        pieces = [scale.new_empty(n), scale.new_empty(m), None]
        return Result(scale.new_empty(n + n + m + pulled), pieces)


_ENGINE = _SimilarityEngine()


class _Sizes(NamedTuple):
    """dtype of the operands of the products, dtype of their results, and rows per chunk."""

    operands: torch.dtype
    scores: torch.dtype
    rows: int


def _sizes(
    query: Tensor, key: Tensor, products: torch.dtype, normalize: bool, chunk_rows: int | str
) -> _Sizes:
    """Chooses dtypes and rows per chunk.

    In half precision, unit vectors and their products use float16, which is more precise than
    bfloat16 and as fast. Unnormalized vectors keep their dtype, and their products are float32.
    """
    operands = products
    if query.device.type == "cpu" and products != torch.float64:
        operands = torch.float32
    elif normalize and products.itemsize < 4:
        operands = torch.float16
    scores = operands if normalize or operands.itemsize >= 4 else torch.float32
    number = scores.itemsize + (0 if scores == operands else operands.itemsize)
    n, m = max(1, query.shape[0]), max(1, key.shape[0])
    if isinstance(chunk_rows, int):
        return _Sizes(operands, scores, min(n, chunk_rows))
    row_bytes = m * number
    budget, step = budget_bytes("similarity", chunk_rows, query), 8
    if device_kind(query) == "cuda":
        part = 4 if chunk_rows == "low" else 1
        budget, step = min(max(budget, _ROWS // part * row_bytes), _MOST_BYTES // part), 128
    fitting = max(1, budget // row_bytes)
    # Equal chunks: a small last one would not fill the device.
    even = -(-n // -(-n // fitting))
    return _Sizes(operands, scores, min(n, -(-even // step) * step))


class _Problem(NamedTuple):
    """Inputs of both passes; ``how`` has dtypes and chunk size."""

    query: Tensor
    key: Tensor
    scale: Tensor
    query_groups: Tensor | None
    key_groups: Tensor | None
    positive: bool
    own: int
    normalize: bool
    how: _Sizes
    depth: int
    """Size of the vectors before they are padded to an aligned size."""

    @classmethod
    def of(cls, operands: Operands, options: Sequence[Any]) -> "_Problem":
        query, key, scale, _, query_groups, key_groups, *_ = operands
        positive, own, normalize, _, products, _, chunk_rows = options
        how = _sizes(query, key, getattr(torch, products), normalize, as_chunk(chunk_rows))
        depth = key.shape[1]
        if more := missing_columns(key, query.shape[0]):
            query, key = pad(query, (0, more)), pad(key, (0, more))
        return cls(
            query, key, scale, query_groups, key_groups, positive, own, normalize, how, depth
        )

    def parts(self) -> list[slice]:
        n, rows = self.query.shape[0], self.how.rows
        return [slice(first, min(n, first + rows)) for first in range(0, n, rows)]

    def arguments(self, part: slice) -> tuple[Any, ...]:
        """The arguments of the kernels besides the products of a chunk."""
        groups = None if self.query_groups is None else part_of(self.query_groups, part)
        return (
            self.scale, self.own + part.start, groups, self.key_groups, self.positive,
            self.normalize,
        )  # fmt: skip

    def unit(self, rows: Tensor) -> Tensor:
        """Rows, normalized if asked for, in the dtype of the products."""
        if not self.normalize and rows.dtype == self.how.operands:
            return rows
        out = torch.empty(rows.shape, dtype=self.how.operands, device=rows.device)
        info_nce.unit_rows_("auto", rows, out, self.normalize)
        return out

    def layer(self) -> LayerProducts:
        """Products with all keys."""
        return LayerProducts([self.unit(self.key)], None, self.query.shape[0])


def _normalisers(problem: _Problem, columns: bool) -> tuple[list[Tensor], Tensor | None]:
    """The fields of :class:`Similarities`, and the products of the last chunk."""
    query, wide = problem.query, problem.scale.dtype
    n, m = query.shape[0], problem.key.shape[0]
    row_lse, row_positive = (query.new_empty(n, dtype=wide) for _ in range(2))
    column_lse = query.new_full((m if columns else 0,), -torch.inf, dtype=wide)
    pulled = columns and problem.positive and problem.query_groups is not None
    column_positive = query.new_zeros(m if pulled else 0, dtype=wide)
    queries, layer = problem.unit(query), problem.layer()
    memory = layer.memory(problem.how.rows, problem.how.scores)
    for part in problem.parts():
        here = slice(part.stop - part.start)
        scores = layer.scores_into(part_of(memory, here), part_of(queries, part))
        info_nce.statistics_(
            "auto", scores, *problem.arguments(part), part_of(row_lse, part),
            part_of(row_positive, part), column_lse, column_positive,
        )  # fmt: skip
    return [row_lse, row_positive, column_lse, column_positive], memory


class _Factors(NamedTuple):
    """The normalisers, and the upstream gradients of the fields of :class:`Similarities`.

    The gradients are divided by ``size``, so that the largest are about :data:`_SIZE`.
    """

    row_lse: Tensor
    column_lse: Tensor
    by_row_lse: Tensor
    by_row_positive: Tensor
    by_column_lse: Tensor
    by_column_positive: Tensor
    size: Tensor | float


def _gradients(
    problem: _Problem,
    factors: _Factors,
    wanted: Sequence[bool],
    kept: Tensor | None,
    row_positive: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of query, key and scale, where wanted.

    ``kept`` are the products that :func:`_normalisers` returned; they are overwritten. If
    ``row_positive`` is given, it and the normalisers are computed here as well. That needs no
    separate pass if columns are not needed or all queries are in one chunk.
    """
    query, key, scale, how, normalize = (
        problem.query, problem.key, problem.scale, problem.how, problem.normalize
    )  # fmt: skip
    (n, depth), m = query.shape, key.shape[0]
    wide = scale.dtype
    back = scale * factors.size
    # The gradient of the scale is computed from that of queries or keys.
    to_query, to_key = wanted[0] or not wanted[1], wanted[1]
    layer = problem.layer()
    memory = layer.memory(how.rows, how.scores) if kept is None else kept
    other = None if how.scores == how.operands else layer.memory(how.rows, how.operands)
    query_gradient = torch.empty_like(query, memory_format=torch.contiguous_format)
    raw = query.new_empty(how.rows, depth, dtype=wide)
    make = query.new_empty if n else query.new_zeros
    along = make(n if to_query else m, dtype=wide)
    total = make(m, depth, dtype=wide) if to_key else None
    # Starts with the last chunk: its products may have been kept.
    parts = problem.parts()[::-1]
    for part in parts:
        here, some = slice(part.stop - part.start), part_of(query, part)
        rows = problem.unit(some)
        held = part_of(memory, here)
        scores = layer.scores_in(held)
        if kept is None or part is not parts[0]:
            layer.scores_into(held, rows)
        arguments, row_lse = problem.arguments(part), part_of(factors.row_lse, part)
        if row_positive is not None:
            info_nce.statistics_(
                "auto", scores, *arguments, row_lse, part_of(row_positive, part),
                factors.column_lse, factors.by_column_positive,
            )  # fmt: skip
        held = held if other is None else part_of(other, here)
        info_nce.weights_(
            "auto", scores, *arguments, row_lse, part_of(factors.by_row_lse, part),
            part_of(factors.by_row_positive, part), factors.column_lse, factors.by_column_lse,
            factors.by_column_positive, layer.scores_in(held),
        )  # fmt: skip
        weights = layer.padded(held)
        if to_query:
            product = layer.hidden_gradient(part_of(raw, here), weights)
            info_nce.row_gradients_(
                "auto", some, product, back, normalize, part_of(query_gradient, part),
                part_of(along, part),
            )  # fmt: skip
        if total is not None:
            layer.weight_gradient([total], weights, rows, adds=part is not parts[0])
    del memory, other, raw, layer
    key_gradient = None
    if total is not None:
        key_gradient = torch.empty_like(key, memory_format=torch.contiguous_format)
        of_keys = along if not to_query else query.new_empty(m, dtype=wide)
        info_nce.row_gradients_("auto", key, total, back, normalize, key_gradient, of_keys)
    # With s = scale <q, k>, the gradient of the scale is the sum of <q, k> dL/ds over all pairs.
    to_scale = along.sum() / scale if wanted[2] else None
    if problem.depth != depth:
        query_gradient = query_gradient[:, : problem.depth].contiguous()
        if key_gradient is not None:
            key_gradient = key_gradient[:, : problem.depth].contiguous()
    return query_gradient if wanted[0] else None, key_gradient, to_scale


def scale_of(temperature: float | Tensor, query: Tensor) -> Tensor:
    """1/T as a scalar tensor, as in :class:`Pairs`."""
    wide = accumulation_dtype(query.dtype)
    if isinstance(temperature, Tensor):
        return temperature.to(query.device, wide).reciprocal()
    return torch.full((), 1.0 / temperature, dtype=wide, device=query.device)
