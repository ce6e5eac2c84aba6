"""Products with chosen classes in plain torch: the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._cpu import parts


def scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor) -> Tensor:
    """Scores (n, k) of ``classes`` (n, k) from ``hidden`` (n, d) and ``weight`` (v, d).

    Accumulated in float32, or in float64 for float64. A class of -1 is padding: its score is 0.
    """
    dtype = accumulation_dtype(hidden.dtype)
    made = torch.empty(classes.shape, dtype=dtype, device=hidden.device)
    for part in parts((hidden.shape[0], classes.shape[1] * hidden.shape[1])):
        vectors = weight[classes[part].clamp_min(0)].to(dtype)
        made[part] = torch.einsum("nd,nkd->nk", hidden[part].to(dtype), vectors)
    if bias is not None:
        made += bias.to(dtype)[classes.clamp_min(0)]
    return made.masked_fill_(classes < 0, 0.0)


def to_hidden(values: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    """``sum_k values[i, k] * weight[classes[i, k]]`` for each row i, in the dtype of weight."""
    dtype = accumulation_dtype(weight.dtype)
    out = weight.new_empty(values.shape[0], weight.shape[1])
    for part in parts((values.shape[0], values.shape[1] * weight.shape[1])):
        vectors = weight[classes[part]].to(dtype)
        out[part] = torch.einsum("nk,nkd->nd", values[part].to(dtype), vectors).to(out.dtype)
    return out


def add_to_weight_(
    values: Tensor, classes: Tensor, hidden: Tensor, weight_gradient: Tensor
) -> None:
    """Adds ``values[i, k] * hidden[i]`` to row ``classes[i, k]`` of ``weight_gradient``."""
    dtype = accumulation_dtype(hidden.dtype)
    sums = weight_gradient.to(dtype, copy=True)
    for part in parts((values.shape[0], values.shape[1] * hidden.shape[1])):
        product = values[part].to(dtype).unsqueeze(-1) * hidden[part].to(dtype).unsqueeze(1)
        sums.index_add_(0, classes[part].flatten(), product.flatten(0, 1))
    weight_gradient.copy_(sums)


def scale_(values: Tensor, others: Sequence[Tensor], factor: Tensor) -> None:
    """``values *= factor``, and the same for ``others``; ``factor`` is a scalar tensor."""
    for each in (values, *others):
        each.mul_(factor)


def weighted_mean(losses: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weighted mean of ``losses`` (n,) and 1 over the sum of the weights, scalar tensors.

    ``weights`` (n,) are bool or floating, None for 1. A loss of weight 0 adds 0 even if it is inf
    or NaN. If the weights sum to 0 both results are 0.
    """
    if weights is None:
        part = 1.0 / losses.shape[0] if losses.shape[0] else 0.0
        return losses.sum() * part, losses.new_full((), part)
    size = weights.sum(dtype=losses.dtype)
    share = torch.where(size == 0, 0.0, size.reciprocal())
    return torch.where(weights == 0, 0.0, losses * weights).sum() * share, share


def row_factors(
    target: Tensor, hidden: Tensor, row_weight: Tensor | None, ignore_index: int, mean: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masks ignored rows; returns targets, hidden, weights and factors of all rows.

    An ignored row gets target 0, hidden state 0 and weight 0. Others have the weight of
    ``row_weight``, or 1 if it is None. With ``mean`` the factors are the weights divided by their
    sum, otherwise the weights.
    """
    counts = target != ignore_index
    weight = counts.to(torch.float32) if row_weight is None else row_weight.masked_fill(~counts, 0)
    size = weight.sum() if mean else weight.new_ones(())
    factor = weight / torch.where(size == 0, 1.0, size)
    hidden = hidden.masked_fill(~counts.unsqueeze(-1), 0.0)
    return torch.where(counts, target, 0), hidden, weight, factor
