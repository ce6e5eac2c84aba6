"""The sum of one-way losses with its gradients, from products that are made once.

A row's normaliser is known as soon as its products are, and where losses are summed all rows have
the same gradient from above, which can be put in later. So the forward pass makes the gradients,
and the backward pass multiplies them by a number.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.losses._contrastive import Groups, refuse_second_derivatives
from lastlayer.losses._contrastive_pass import Upstream, gradients, sizes


def one_way_total(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    pull: Tensor,
    factor: float,
    *,
    groups: Groups | None,
    own: int,
    normalize: bool,
    products: torch.dtype,
    chunk_rows: int | str,
) -> Tensor:
    """``factor`` times the sum over queries of the normaliser and ``pull`` times the positive sum.

    Args:
        query: ``(n, d)``.
        key: ``(m, d)``.
        scale: without dimensions, float32, or float64 for float64.
        pull: ``(n,)``, without a gradient.
        factor: what gradients are made with; float16 asks for one that leaves them near 1.
        groups: of queries and keys.
        own: the column of the first query's own key.
        normalize: rows are brought to length 1.
        products: the dtype in which products are made.
        chunk_rows: queries at a time, "auto" or "low".
    """
    ranks = (None, None) if groups is None else (groups.query, groups.key)
    positive = groups is not None and groups.positive
    how = sizes(query, key, products, normalize, chunk_rows)
    result: Tensor = _Total.apply(
        query, key, scale, pull, *ranks, factor, positive, own, normalize, how
    )
    return result


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        scale: Tensor,
        pull: Tensor,
        query_groups: Tensor | None,
        key_groups: Tensor | None,
        *options: Any,
    ) -> Tensor:
        factor = options[0]
        row_lse, row_positive = torch.empty_like(pull), torch.empty_like(pull)
        ctx.options = options
        known = query, key, scale, pull, query_groups, key_groups, row_lse
        ctx.save_for_backward(*known)
        ctx.made = _gradients(ctx, known, torch.full_like(pull, factor), row_positive)
        total: Tensor = factor * (row_lse + pull * row_positive).sum()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        made, ctx.made = ctx.made, None
        if made is None:
            # The first backward handed them out; those of another one are made again.
            known = ctx.saved_tensors
            push = (grad * ctx.options[0]).expand(known[-1].shape)
            made = _gradients(ctx, known, push, None)
        else:
            for each in made[:2]:
                if each is not None and each.numel():
                    kernels.scale.forward_("auto", each, grad)
            made = *made[:2], made[2] * grad
        needed = zip(made, ctx.needs_input_grad[:3], strict=True)
        return *(each if needs else None for each, needs in needed), *(None,) * 8


def _gradients(
    ctx: Any, known: tuple[Any, ...], push: Tensor, row_positive: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    query, key, scale, pull, query_groups, key_groups, row_lse = known
    _, positive, own, normalize, how = ctx.options
    nothing = pull.new_empty(0)
    upstream = Upstream(row_lse, nothing, push, pull * push, nothing, nothing)
    wanted = bool(ctx.needs_input_grad[0]), bool(ctx.needs_input_grad[1])
    with torch.autocast(query.device.type, enabled=False):
        return gradients(
            query, key, scale, query_groups, key_groups, positive, own, normalize, how, upstream,
            wanted, None, row_positive,
        )  # fmt: skip
