"""From what the classes left of a row to its loss and the gradient of its hidden state."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastlayer.kernels._triton import next_power_of_2, tanh


class Mix(NamedTuple):
    """What the forward pass leaves of each row, for each part that the classes were cut into."""

    lse: Tensor
    """float32 ``(parts, n)``."""
    mean_vector: Tensor
    """float32 ``(parts, n, depth)``, or ``(parts, 0, depth)`` where it is not wanted."""


class Rows(NamedTuple):
    """What is known of each row once all classes have passed."""

    loss: Tensor
    """float32 ``(n,)``."""
    factors: Tensor
    """float32 ``(3, n)``: the logsumexp, and what probabilities and the target count for."""
    gradient: Tensor
    """Of hidden, ``(n, depth)``, or ``(0, depth)`` where there is none."""


def finish_rows(
    mix: Mix,
    weight: Tensor,
    target: Tensor,
    exact: Tensor,
    row_scale: Tensor | None,
    row_weight: Tensor | None,
    keep: float,
    more: Tensor | None,
    z_loss: float,
    softcap: float,
    temperature: float,
    dtype: torch.dtype,
) -> Rows:
    """Losses, row factors and the gradient of hidden from what the classes left.

    Args:
        mix: of all rows; with means where the gradient is wanted.
        weight: the class vectors.
        target: ``(n,)``.
        exact: the plain score of the target, ``(n,)``.
        row_scale: what the gradient of each row is multiplied by, or None.
        row_weight: the weight of each target, or None.
        keep: what is left of a target, 1 unless it is smoothed.
        more: what probabilities count for besides, one number, or None.
        z_loss: the factor of the squared logsumexp.
        softcap: of the scores, or 0.
        temperature: of the scores.
        dtype: of the gradient.
    """
    parts, n = mix.lse.shape
    kept, depth = mix.mean_vector.shape[1:]
    loss = torch.empty_like(exact)
    factors = exact.new_empty(3, n)
    gradient = exact.new_empty(kept, depth, dtype=dtype)
    _finish_row[(n,)](
        mix.lse, mix.mean_vector, weight, target, exact, row_scale, row_weight, more, loss,
        factors, gradient, n, depth, parts, weight.stride(0), keep, z_loss, softcap,
        1.0 / temperature, PARTS=next_power_of_2(parts),
        DEPTH=max(16, next_power_of_2(depth)), CAPPED=softcap != 0.0,
        WEIGHTED=row_weight is not None, MORE=more is not None, SCALED=row_scale is not None,
        MEAN=kept > 0, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return Rows(loss, factors, gradient)


# Rows of a cluster differ from step to step: their number, the parts that it asks for and where
# they begin must not decide which program is compiled.
@triton.jit(
    do_not_specialize=["n", "parts"],
    do_not_specialize_on_alignment=["target", "exact", "row_scale", "row_weight", "more", "loss"],
)
def _finish_row(
    lse, mean, weight, target, exact, row_scale, row_weight, more, loss, factors, gradient, n,
    depth, parts, weight_row, keep, z_loss, softcap, inverse_temperature, PARTS: tl.constexpr,
    DEPTH: tl.constexpr, CAPPED: tl.constexpr, WEIGHTED: tl.constexpr, MORE: tl.constexpr,
    SCALED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    there = part < parts
    logs = tl.load(lse + part * n + row, mask=there, other=-float("inf"))
    peak = tl.max(logs, 0)
    # A bias of -inf may leave a part, or all of them, without a class.
    origin = tl.where(peak == -float("inf"), 0.0, peak)
    total = origin + tl.log(tl.sum(tl.exp(logs - origin), 0))
    at_target = tl.load(exact + row)
    slope = inverse_temperature
    if CAPPED:
        bent = tanh(at_target / softcap)
        at_target = tl.where(at_target == -float("inf"), at_target, bent * softcap)
        slope *= 1.0 - bent * bent
    at_target *= inverse_temperature
    pull = keep
    if WEIGHTED:
        pull *= tl.load(row_weight + row).to(tl.float32)
    # Where nothing can be, no target is met, and nothing is to be moved.
    empty = total == -float("inf")
    row_loss = pull * (total - at_target) + z_loss * total * total
    tl.store(loss + row, tl.where(empty, float("inf"), row_loss))
    push = pull + 2.0 * z_loss * total
    if MORE:
        push += tl.load(more).to(tl.float32)
    push = tl.where(empty, 0.0, push)
    pull = tl.where(empty, 0.0, pull)
    if SCALED:
        scale = tl.load(row_scale + row).to(tl.float32)
        push *= scale
        pull *= scale
    tl.store(factors + row, total)
    tl.store(factors + n + row, push)
    tl.store(factors + 2 * n + row, pull)
    if MEAN:
        step = tl.arange(0, DEPTH)
        inside = step < depth
        share = tl.where(logs == -float("inf"), 0.0, tl.exp(logs - total))
        means = tl.load(
            mean + (part * n + row)[:, None] * depth + step[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        own = weight + tl.load(target + row) * weight_row + step
        own = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        # In float32: the two nearly cancel once a row is learnt.
        moved = tl.sum(means * share[:, None], 0) * push - own * (pull * slope)
        place = gradient + row * depth + step
        tl.store(place, moved.to(gradient.dtype.element_ty), mask=inside)
