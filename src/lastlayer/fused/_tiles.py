"""The cross entropy where class vectors are short: scores are made in tiles and never stored."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused._shaping import shaped
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
) -> Result:
    """Losses and gradients of all rows; as :func:`lastlayer.fused.engine.run`."""
    # Imported here: Triton is not on every machine.
    from lastlayer.kernels.linear_softmax.triton import gradient_of_classes, mix_of_rows

    smoothing, z_loss, softcap, temperature = options
    hidden, weight = hidden.contiguous(), weight.contiguous()
    n_classes = weight.shape[0]
    place = target.unsqueeze(-1)
    exact = kernels.class_scores.forward("auto", hidden, weight, bias, place).squeeze(-1)
    at_target, slope = shaped(exact, softcap, temperature)

    gradient_wanted = wanted.any and row_scale is not None
    lse, mean = mix_of_rows(
        hidden, weight, bias, softcap, temperature, wanted.hidden and gradient_wanted
    )
    pull = torch.full_like(lse, 1.0 - smoothing)
    if class_weight is not None:
        pull = pull * class_weight[target]
    loss = pull * (lse - at_target) + z_loss * lse.square()
    push = pull + 2.0 * z_loss * lse
    spread, weights = smoothing / n_classes, None
    if smoothing:
        weights = lse.new_ones(n_classes) if class_weight is None else class_weight.float()
        # The sum of all scores is the score of the sum of all class vectors.
        vector = _weighted_sum(weights, weight)
        summed = torch.mv(hidden.float(), vector)
        if bias is not None:
            summed = summed + torch.dot(bias.float(), weights)
        loss = loss + spread * (weights.sum() * lse - summed / temperature)
        push = push + spread * weights.sum()
    if not gradient_wanted or row_scale is None:
        return Result(loss, (), None, None, None)

    push, pull = push * row_scale, pull * row_scale
    hidden_gradient = weight_gradient = bias_gradient = None
    if wanted.hidden:
        # In float32: the two nearly cancel once a row is learnt.
        true = weight[target].float() * (pull * slope).unsqueeze(-1)
        hidden_gradient = mean * push.unsqueeze(-1) - true
        if smoothing:
            hidden_gradient -= torch.outer(row_scale * (spread / temperature), vector)
        hidden_gradient = hidden_gradient.to(hidden.dtype)
    if wanted.weight or wanted.bias:
        into = wanted.weight_into
        weight_gradient = torch.empty_like(weight, dtype=weight_dtype) if into is None else into
        if wanted.bias:
            # What is written may be added instead, with what is added to the weight's gradient.
            bias_gradient = lse.new_zeros(n_classes)
        gradient_of_classes(
            hidden, weight, bias, target, lse, push, pull, softcap, temperature,
            weight_gradient, bias_gradient, into is not None,
        )  # fmt: skip
        if smoothing and weights is not None:
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
