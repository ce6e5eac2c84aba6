"""The cross entropy where class vectors are short: scores are made in tiles and never stored."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused.engine import Result, Wanted

# Up to this width making a score again is cheaper than writing it.
WIDEST_HIDDEN = 256


def tiles_suit(
    hidden: Tensor, options: Sequence[float], chunk_rows: int | str, wanted: Wanted
) -> bool:
    """Whether the tiled kernels can take a problem, and are the faster way."""
    smoothing, _, softcap, _ = options
    return (
        # Who gives a number of rows wants chunks.
        isinstance(chunk_rows, str)
        and hidden.dtype in (torch.float16, torch.bfloat16)
        and 0 < hidden.shape[1] <= WIDEST_HIDDEN
        and hidden.shape[0] > 0
        and hidden.device.type == "cuda"
        and kernels.available()["triton"] is None
        and not wanted.precise(hidden)
        # A smoothed loss is a matrix product more, unless the scores are bent.
        and not (smoothing and softcap)
    )


def run_tiles(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    wanted: Wanted,
    options: Sequence[float],
    weight_dtype: torch.dtype,
    in_order: bool = False,
) -> Result:
    """Losses and gradients of all rows; as :func:`lastlayer.fused.engine.run`.

    ``in_order`` says that rows are sorted by their targets, which saves a sort.
    """
    # Imported here: Triton is not on every machine.
    from lastlayer.kernels.linear_softmax.triton import (
        finish_rows,
        gradient_of_classes,
        mix_of_rows,
    )

    smoothing, z_loss, softcap, temperature = options
    hidden, weight = hidden.contiguous(), weight.contiguous()
    n_classes = weight.shape[0]
    place = target.unsqueeze(-1)
    exact = kernels.products.scores("auto", hidden, weight, bias, place).squeeze(-1)
    gradient_wanted = wanted.any and row_scale is not None
    mix = mix_of_rows(hidden, weight, bias, softcap, temperature, wanted.hidden and gradient_wanted)
    spread, weights, more = smoothing / n_classes, None, None
    if smoothing:
        weights = exact.new_ones(n_classes) if class_weight is None else class_weight.float()
        more = spread * weights.sum()
    rows = finish_rows(
        mix, weight, target, exact, row_scale,
        None if class_weight is None else class_weight[target].float(), 1.0 - smoothing, more,
        z_loss, softcap, temperature, torch.float32 if smoothing else hidden.dtype,
    )  # fmt: skip
    loss, hidden_gradient = rows.loss, rows.gradient if wanted.hidden else None
    if weights is not None and more is not None:
        # The sum of all scores is the score of the sum of all class vectors.
        vector = _weighted_sum(weights, weight)
        summed = torch.mv(hidden.float(), vector)
        if bias is not None:
            summed = summed + torch.dot(bias.float(), weights)
        lse = rows.factors[0]
        smoothed = loss + more * lse - summed * (spread / temperature)
        # Where nothing can be, the loss is known, and nothing is to be moved.
        empty = lse == -torch.inf
        loss = torch.where(empty, loss, smoothed)
        row_scale = None if row_scale is None else row_scale.masked_fill(empty, 0.0)
    if not gradient_wanted or row_scale is None:
        return Result(loss, (), None, None, None)

    if hidden_gradient is not None and smoothing:
        hidden_gradient -= torch.outer(row_scale * (spread / temperature), vector)
        hidden_gradient = hidden_gradient.to(hidden.dtype)
    weight_gradient = bias_gradient = None
    if wanted.weight or wanted.bias:
        into = wanted.weight_into
        weight_gradient = torch.empty_like(weight, dtype=weight_dtype) if into is None else into
        if wanted.bias:
            # What is written may be added instead, with what is added to the weight's gradient.
            bias_gradient = loss.new_zeros(n_classes)
        gradient_of_classes(
            hidden, weight, bias, target, rows.factors, softcap, temperature, weight_gradient,
            bias_gradient, into is not None, in_order,
        )  # fmt: skip
        if weights is not None:
            scaled = torch.mv(hidden.float().t(), row_scale) * (-spread / temperature)
            weight_gradient.addr_(weights.to(weight_dtype), scaled.to(weight_dtype))
            if bias_gradient is not None:
                bias_gradient -= weights * (row_scale.sum() * spread / temperature)
    if not wanted.weight:
        weight_gradient = None
    return Result(loss, (), hidden_gradient, weight_gradient, bias_gradient)


def _weighted_sum(weights: Tensor, vectors: Tensor) -> Tensor:
    """``weights @ vectors`` in float32, with a small copy at a time."""
    total = weights.new_zeros(vectors.shape[1])
    for some, of_them in zip(weights.split(1 << 16), vectors.split(1 << 16), strict=True):
        total += some @ of_them.float()
    return total
