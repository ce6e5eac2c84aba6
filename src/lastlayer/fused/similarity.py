"""The engine of contrastive losses: similarities of all pairs, some queries at a time.

Products of some queries with all keys are made, and what each row and each column needs is read
off. A row's normaliser is known as soon as its products are, and a column's once all rows were
seen. So there are two ways:

* In one pass: where losses are summed, and columns are not needed or all products are held at a
  time, the forward pass makes the gradients as well.
* In two: forward keeps the normalisers. Backward makes the products once more, beginning with the
  last ones, which may still be there, and turns them in the same memory into their gradient.
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

# On CUDA products of this many queries are fast, and adding them to the gradient of the keys costs
# little: with many keys they may take more bytes than the budget, up to the second number.
_ROWS, _MOST_BYTES = 4096, 1_080_000_000
# Gradients are brought to this size, where float16 is precise and twice two of them fit.
_SIZE = 4096.0


class Groups(NamedTuple):
    """int32 ranks, the same for equal groups, and what to do with keys of a query's group."""

    query: Tensor
    key: Tensor
    positive: bool
    """Whether they are positives, else they are left out."""


class Pairs(NamedTuple):
    """Queries and the keys they are compared with, checked."""

    query: Tensor
    """``(n, d)``."""
    key: Tensor
    """``(m, d)``."""
    scale: Tensor
    """1/T, without dimensions, in the accumulation dtype."""
    groups: Groups | None
    own: int
    """Column of the first query's own key, the next ones follow; m where there are none."""
    normalize: bool
    """Whether rows are brought to length 1."""
    chunk_rows: int | str
    """Queries at a time, "auto" or "low"."""

    @property
    def in_one_chunk(self) -> bool:
        """Whether all products are held at a time."""
        how = _sizes(self.query, self.key, _products(self.query), self.normalize, self.chunk_rows)
        return how.rows >= self.query.shape[0]


class Similarities(NamedTuple):
    """What is known of each query and of each key once all pairs were seen.

    ``row_lse`` is the logsumexp of a query's similarities, ``row_positive`` the sum of those to its
    positives; ``column_lse`` and ``column_positive`` are the same of keys. Where they are not
    wanted they are empty; without groups that are positives ``column_positive`` is.
    """

    row_lse: Tensor
    row_positive: Tensor
    column_lse: Tensor
    column_positive: Tensor


def similarities(pairs: Pairs, *, columns: bool) -> Similarities:
    """Normalisers of ``scale * <query, key>``, with gradients; those of keys only if asked for."""
    (joined,) = _call(pairs, None, columns, 1.0, "none")
    n, m = pairs.query.shape[0], pairs.key.shape[0] if columns else 0
    pulled = m if pairs.groups is not None and pairs.groups.positive else 0
    return Similarities(*joined.split([n, n, m, pulled]))


def total_loss(pairs: Pairs, pull: Tensor | None, factor: float, *, symmetric: bool) -> Tensor:
    """``factor`` times the sum over queries of normaliser + pull * positive sum - log(-1 / pull).

    ``pull`` is ``(n,)``, minus one over the number of positives, None for -1. ``symmetric`` takes
    the mean of a query's normaliser and its own key's; every key has a query then, and all products
    are held at a time.
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
    """The dtype in which products are made."""
    return autocast_dtype(query) or query.dtype


class _SimilarityEngine(Engine):
    """Operands: query, key, scale; pull, ranks of the groups of queries and of keys.

    With "none" the loss is all of :class:`Similarities` in one vector, and the pieces are the
    normalisers and the last products, which backward gets behind the operands; with "sum" it is
    :func:`total_loss`.
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
                # float16 has few digits for the 1/n of a mean: it comes with the upstream gradient.
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
        """Gradients from those of the normalisers, which follow the operands, with the products."""
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
    """How products are made: in what dtype, held in which one, how many rows at a time."""

    operands: torch.dtype
    scores: torch.dtype
    rows: int


def _sizes(
    query: Tensor, key: Tensor, products: torch.dtype, normalize: bool, chunk_rows: int | str
) -> _Sizes:
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
    if isinstance(chunk_rows, int):
        return _Sizes(operands, scores, min(n, chunk_rows))
    row_bytes = m * number
    budget, step = budget_bytes("similarity", chunk_rows, query), 8
    if device_kind(query) == "cuda":
        part = 4 if chunk_rows == "low" else 1
        budget, step = min(max(budget, _ROWS // part * row_bytes), _MOST_BYTES // part), 128
    fitting = max(1, budget // row_bytes)
    # Chunks of the same size: a small last one would leave much of the device idle.
    even = -(-n // -(-n // fitting))
    return _Sizes(operands, scores, min(n, -(-even // step) * step))


class _Problem(NamedTuple):
    """What both passes work on; ``how`` products are made."""

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
    """Of the vectors, which are longer where that is an odd number."""

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
        """What the kernels are given beside the products of some queries."""
        groups = None if self.query_groups is None else part_of(self.query_groups, part)
        return (
            self.scale, self.own + part.start, groups, self.key_groups, self.positive,
            self.normalize,
        )  # fmt: skip

    def unit(self, rows: Tensor) -> Tensor:
        """Rows of length 1, or as they are, in the dtype of the products."""
        if not self.normalize and rows.dtype == self.how.operands:
            return rows
        out = torch.empty(rows.shape, dtype=self.how.operands, device=rows.device)
        info_nce.unit_rows_("auto", rows, out, self.normalize)
        return out

    def layer(self) -> LayerProducts:
        """Products with all keys."""
        return LayerProducts([self.unit(self.key)], None, self.query.shape[0])


def _normalisers(problem: _Problem, columns: bool) -> tuple[list[Tensor], Tensor | None]:
    """The four of :class:`Similarities`, and the last products."""
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
    """The normalisers, and gradients by the four of :class:`Similarities`.

    They are divided by ``size``, such that the largest are about :data:`_SIZE`.
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

    ``kept`` are the products that :func:`_normalisers` left; they are overwritten. Where
    ``row_positive`` is given, nothing is known of rows yet: it and the normalisers are found here,
    which needs no pass of its own without those of columns, or where all queries are one chunk.
    """
    query, key, scale, how, normalize = (
        problem.query, problem.key, problem.scale, problem.how, problem.normalize
    )  # fmt: skip
    (n, depth), m = query.shape, key.shape[0]
    wide = scale.dtype
    back = scale * factors.size
    # That of the scale is read off the gradient of queries or keys.
    to_query, to_key = wanted[0] or not wanted[1], wanted[1]
    layer = problem.layer()
    memory = layer.memory(how.rows, how.scores) if kept is None else kept
    other = None if how.scores == how.operands else layer.memory(how.rows, how.operands)
    query_gradient = torch.empty_like(query, memory_format=torch.contiguous_format)
    raw = query.new_empty(how.rows, depth, dtype=wide)
    make = query.new_empty if n else query.new_zeros
    along = make(n if to_query else m, dtype=wide)
    total = make(m, depth, dtype=wide) if to_key else None
    # The last first: its products may be there.
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
    # With s = scale <q, k> the sum of all gradients by s, each times <q, k>, is one over queries.
    to_scale = along.sum() / scale if wanted[2] else None
    if problem.depth != depth:
        query_gradient = query_gradient[:, : problem.depth].contiguous()
        if key_gradient is not None:
            key_gradient = key_gradient[:, : problem.depth].contiguous()
    return query_gradient if wanted[0] else None, key_gradient, to_scale


def scale_of(temperature: float | Tensor, query: Tensor) -> Tensor:
    """1/T as :class:`Pairs` has it."""
    wide = accumulation_dtype(query.dtype)
    if isinstance(temperature, Tensor):
        return temperature.to(query.device, wide).reciprocal()
    return torch.full((), 1.0 / temperature, dtype=wide, device=query.device)
