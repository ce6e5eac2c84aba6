"""The sum of losses with its gradients, from products that are made once.

A row's normaliser is known as soon as its products are, and a column's where all products are held
at a time. Where losses are summed, all of them have the same gradient from above, which can be put
in later. So the forward pass makes the gradients, and the backward pass multiplies them by a
number.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.losses._contrastive import Groups, refuse_second_derivatives
from lastlayer.losses._contrastive_pass import SIZE, Factors, Sizes, gradients


def one_pass_total(
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    pull: Tensor,
    factor: float,
    *,
    groups: Groups | None,
    own: int,
    normalize: bool,
    symmetric: bool,
    how: Sizes,
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
        symmetric: instead of a query's normaliser, the mean of that and its own key's; every key
            has a query then, and ``how`` takes all queries at a time.
        how: products are made.
    """
    ranks = (None, None) if groups is None else (groups.query, groups.key)
    positive = groups is not None and groups.positive
    result: Tensor = _Total.apply(
        query, key, scale, pull, *ranks, factor, positive, own, normalize, symmetric, how
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
        factor, *_, symmetric, _ = options
        row_lse, row_positive = torch.empty_like(pull), torch.empty_like(pull)
        column_lse = pull.new_full((key.shape[0] if symmetric else 0,), -torch.inf)
        ctx.options = options
        known = query, key, scale, pull, query_groups, key_groups, row_lse, column_lse
        ctx.save_for_backward(*known)
        ctx.made = _gradients(ctx, known, factor / SIZE, row_positive)
        normaliser = (row_lse + column_lse).mul_(0.5) if symmetric else row_lse
        total: Tensor = torch.addcmul(normaliser, pull, row_positive).sum() * factor
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        made, ctx.made = ctx.made, None
        if made is None:
            # The first backward handed them out; those of another one are made again.
            made = _gradients(ctx, ctx.saved_tensors, grad * (ctx.options[0] / SIZE), None)
        else:
            for each in made[:2]:
                if each is not None and each.numel():
                    kernels.products.scale_("auto", each, grad)
            made = *made[:2], made[2] * grad
        needed = zip(made, ctx.needs_input_grad[:3], strict=True)
        return *(each if needs else None for each, needs in needed), *(None,) * 9


def _gradients(
    ctx: Any, known: tuple[Any, ...], size: Tensor | float, row_positive: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    query, key, scale, pull, query_groups, key_groups, row_lse, column_lse = known
    _, positive, own, normalize, symmetric, how = ctx.options
    push = torch.full_like(pull, 0.5 * SIZE if symmetric else SIZE)
    nothing = pull.new_empty(0)
    factors = Factors(
        row_lse, column_lse, push, pull * SIZE, push if symmetric else nothing, nothing, size
    )
    wanted = bool(ctx.needs_input_grad[0]), bool(ctx.needs_input_grad[1])
    with torch.autocast(query.device.type, enabled=False):
        return gradients(
            query, key, scale, query_groups, key_groups, positive, own, normalize, how, factors,
            wanted, None, row_positive,
        )  # fmt: skip
