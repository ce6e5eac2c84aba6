"""What the loss of each row is multiplied by."""

from torch import Tensor

from lastlayer._torch import accumulation_dtype


def row_scale(hidden: Tensor, counts: Tensor | None, reduction: str, factor: float) -> Tensor:
    """What the loss of each row is multiplied by."""
    dtype, n = accumulation_dtype(hidden.dtype), hidden.shape[0]
    if counts is None:
        total = max(1, n) if reduction == "mean" else 1
        return hidden.new_full((n,), factor / total, dtype=dtype)
    scale = counts.to(dtype)
    if reduction == "mean":
        scale = scale / scale.sum().clamp(min=1.0)
    return scale if factor == 1.0 else scale * factor
