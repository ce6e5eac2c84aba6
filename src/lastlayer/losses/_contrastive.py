"""Normalisers of similarities as one differentiable operation."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import is_eager
from lastlayer.losses._contrastive_pass import factors_of, gradients, normalisers, sizes


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


class Groups(NamedTuple):
    """int32 ranks, the same for equal groups, and what to do with keys of a query's group."""

    query: Tensor
    key: Tensor
    positive: bool


def similarities(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    *,
    groups: Groups | None,
    own: int,
    normalize: bool,
    columns: bool,
    products: torch.dtype,
    chunk_rows: int | str,
) -> Similarities:
    """Normalisers of ``scale * <query, key>``, with gradients, and never all pairs at a time.

    Args:
        query: ``(n, d)``.
        key: ``(m, d)``.
        scale: without dimensions, float32, or float64 for float64.
        groups: of queries and keys.
        own: the column of the first query's own key, the next one's follow; m if there are none.
        normalize: rows are brought to length 1.
        columns: the keys' are wanted too.
        products: the dtype in which products are made.
        chunk_rows: queries at a time, "auto" or "low".
    """
    ranks = (None, None) if groups is None else (groups.query, groups.key)
    positive = groups is not None and groups.positive
    found = _Similarities.apply(
        query, key, scale, *ranks, positive, own, normalize, columns, products, str(chunk_rows)
    )
    return Similarities(*found)


def refuse_second_derivatives() -> None:
    """Called where a backward pass begins."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "backward: info_nce has no second derivatives, and create_graph=True asks for them; "
            "use torch.nn.functional.cross_entropy on query @ key.T"
        )


class _Similarities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        scale: Tensor,
        query_groups: Tensor | None,
        key_groups: Tensor | None,
        positive: bool,
        own: int,
        normalize: bool,
        columns: bool,
        products: torch.dtype,
        chunk_rows: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem: Any = query, key, scale, query_groups, key_groups
        ctx.options = positive, own, normalize, products, chunk_rows
        options: Any = positive, own, normalize, columns, products, chunk_rows
        # Not among the saved tensors: the backward pass writes over it, and can do without.
        ctx.kept = None
        if is_eager(query):
            found, last = _find(*problem, *options)
            if any(ctx.needs_input_grad[:3]) and chunk_rows != "low":
                ctx.kept = last
        else:
            found = _forward(*problem, *options)
        ctx.save_for_backward(*problem, found[0], found[2])
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        *problem, row_lse, column_lse = ctx.saved_tensors
        wanted = [bool(each) for each in ctx.needs_input_grad[:2]]
        given: Any = *problem, row_lse, column_lse, *upstream, *ctx.options, wanted
        plain = is_eager(problem[0])
        if plain:
            given, ctx.kept = (*given, ctx.kept), None
        differentiate: Any = _differentiate if plain else _backward
        made = differentiate(*given)
        needed = zip(made, ctx.needs_input_grad[:3], strict=True)
        return *(each if needs else None for each, needs in needed), *(None,) * 8


def _find(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    query_groups: Tensor | None,
    key_groups: Tensor | None,
    positive: bool,
    own: int,
    normalize: bool,
    columns: bool,
    products: torch.dtype,
    chunk_rows: str,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    how = sizes(query, key, products, normalize, _rows(chunk_rows))
    with torch.autocast(query.device.type, enabled=False):
        return normalisers(
            query, key, scale, query_groups, key_groups, positive, own, normalize, columns, how
        )


# What torch.compile sees of it; called without it where nothing is traced, at less cost.
_forward = torch.library.custom_op(
    "lastlayer::info_nce",
    lambda *given: _find(*given)[0],
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor scale, Tensor? query_groups, Tensor? key_groups, "
    "bool positive, SymInt own, bool normalize, bool columns, ScalarType products, str chunk_rows) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


@_forward.register_fake
def _(
    query: Tensor, key: Tensor, scale: Tensor, query_groups: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, positive, _, _, columns, *_ = rest
    n, m = query.shape[0], key.shape[0] if columns else 0
    pulled = m if positive and query_groups is not None else 0
    made = [query.new_empty(each, dtype=scale.dtype) for each in (n, n, m, pulled)]
    return made[0], made[1], made[2], made[3]


def _differentiate(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    query_groups: Tensor | None,
    key_groups: Tensor | None,
    row_lse: Tensor,
    column_lse: Tensor,
    by_row_lse: Tensor,
    by_row_positive: Tensor,
    by_column_lse: Tensor,
    by_column_positive: Tensor,
    positive: bool,
    own: int,
    normalize: bool,
    products: torch.dtype,
    chunk_rows: str,
    wanted: list[bool],
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    how = sizes(query, key, products, normalize, _rows(chunk_rows))
    factors = factors_of(
        row_lse, column_lse, by_row_lse, by_row_positive, by_column_lse, by_column_positive
    )
    with torch.autocast(query.device.type, enabled=False):
        to_query, to_key, to_scale = gradients(
            query, key, scale, query_groups, key_groups, positive, own, normalize, how, factors,
            (wanted[0], wanted[1]), kept,
        )  # fmt: skip
    nothing = [query.new_empty(0) if each is None else each for each in (to_query, to_key)]
    return nothing[0], nothing[1], to_scale


_backward = torch.library.custom_op("lastlayer::info_nce_backward", _differentiate, mutates_args=())


@_backward.register_fake
def _(query: Tensor, key: Tensor, scale: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, wanted = rest
    made = [
        query.new_empty(each.shape if needed else 0, dtype=each.dtype)
        for each, needed in zip((query, key), wanted, strict=True)
    ]
    return made[0], made[1], torch.empty_like(scale)


def _rows(chunk_rows: str) -> int | str:
    return int(chunk_rows) if chunk_rows.isdecimal() else chunk_rows
