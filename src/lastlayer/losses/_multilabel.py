"""What the multi-label losses share: checks of labels, rows, and which of them count."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_mask, check_reduction, check_scores
from lastlayer._torch import accumulation_dtype, values_are_checked


def check_multilabel(scores: Any, target: Any, mask: Any, reduction: Any) -> None:
    """Scores, labels of their shape in [0, 1], a mask that broadcasts to them, a reduction."""
    check_scores(scores)
    check_reduction(reduction)
    check_allowed(mask, scores)
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a torch.Tensor, got {type(target).__name__}")
    if target.is_complex():
        raise TypeError(f"target: expected bool, integer or floating labels, got {target.dtype}")
    if target.shape != scores.shape:
        raise ValueError(
            f"target: expected one label a score, shape {tuple(scores.shape)}, got "
            f"{tuple(target.shape)}; lists of positives go to the loss that takes indices"
        )
    if target.device != scores.device:
        raise ValueError(
            f"target: expected the device of scores, {scores.device}, got {target.device}"
        )
    check_labels(target, mask)


def check_allowed(mask: Any, scores: Tensor) -> None:
    """A bool mask that broadcasts to the scores and is where they are, or None."""
    if mask is None:
        return
    check_mask(mask, scores)
    if mask.device != scores.device:
        raise ValueError(f"mask: expected the device of scores, {scores.device}, got {mask.device}")


def check_labels(target: Tensor, mask: Tensor | None = None) -> None:
    """Labels from 0 to 1, wherever the mask does not leave them out."""
    if target.dtype == torch.bool or not target.numel() or not values_are_checked(target):
        return
    lowest, highest = (bound.item() for bound in target.detach().aminmax())
    if lowest >= 0 and highest <= 1:
        return
    # A class that does not count may have any label.
    wrong = ~((target >= 0) & (target <= 1))
    wrong = wrong if mask is None else wrong & mask
    if bool(wrong.any()):
        kind = "in [0, 1]" if target.is_floating_point() else "0 or 1"
        raise ValueError(
            f"target: expected labels {kind}, got {target[wrong].flatten()[0].item()}; classes "
            "that do not count are left out by mask= of the loss"
        )


def wide_dtype(scores: Tensor) -> torch.dtype:
    """The dtype of losses."""
    return accumulation_dtype(scores.dtype)


def rows_of_mask(mask: Tensor | None, scores: Tensor, n_rows: int) -> Tensor | None:
    """The mask as ``(rows, n)``; expanded where all rows share it, not copied."""
    if mask is None:
        return None
    n = scores.shape[-1]
    if mask.numel() == (mask.shape[-1] if mask.dim() else 1):
        return mask.reshape(1, mask.numel()).expand(n_rows, n)
    return mask.expand(scores.shape).reshape(n_rows, n)


def reduced(losses: Tensor, counts: Tensor | None, reduction: str) -> Tensor:
    """Losses of rows to one number; the mean is over rows that count, and 0 where none does."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    if counts is None:
        return total / max(1, losses.numel())
    return total / counts.sum().clamp(min=1)
