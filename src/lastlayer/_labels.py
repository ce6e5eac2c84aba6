"""Checks of multi-label targets: dense labels in [0, 1], and lists of positives.

Lists are padded, ``(*batch, m)``, or concatenated with offsets, as in CSR.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import (
    check_device,
    check_floating,
    check_ids,
    check_ignore_index,
    check_mask,
    check_real,
    check_reduction,
    check_scores,
    check_tensor,
)
from lastlayer._torch import as_numpy, values_are_checked

# Beyond this many labels torch, which uses several threads, finds their range faster than numpy.
_FEW_LABELS = 1 << 16


def check_multilabel(scores: Any, target: Any, mask: Any, reduction: Any) -> None:
    """Checks scores, labels in [0, 1] of their shape, a mask that broadcasts, and a reduction."""
    check_scores(scores)
    check_reduction(reduction)
    check_allowed(mask, scores)
    check_tensor("target", target)
    if target.is_complex():
        raise TypeError(f"target: expected bool, integer or floating labels, got {target.dtype}")
    if target.shape != scores.shape:
        raise ValueError(
            f"target: expected one label per score, shape {tuple(scores.shape)}, got "
            f"{tuple(target.shape)}; pass lists of positives to zlpr_loss_from_indices"
        )
    check_device("target", target, scores, "scores")
    check_labels(target, mask)


def check_allowed(mask: Any, scores: Tensor) -> None:
    """Checks for None or a bool mask that broadcasts to the scores, on their device."""
    if mask is not None:
        check_mask(mask, scores)
        check_device("mask", mask, scores, "scores")


def check_labels(target: Tensor, mask: Tensor | None = None) -> None:
    """Checks that the labels of all classes that the mask allows are from 0 to 1."""
    if target.dtype == torch.bool or not target.numel() or not values_are_checked(target):
        return
    if _in_unit_interval(target):
        return
    # A masked class may have any label.
    wrong = ~((target >= 0) & (target <= 1))
    wrong = wrong if mask is None else wrong & mask
    if bool(wrong.any()):
        kind = "in [0, 1]" if target.is_floating_point() else "0 or 1"
        raise ValueError(
            f"target: expected labels {kind}, got {target[wrong].flatten()[0].item()}; exclude "
            "classes with mask="
        )


def _in_unit_interval(values: Tensor) -> bool:
    if values.requires_grad:
        values = values.detach()
    if (
        values.device.type == "cpu"
        and values.numel() <= _FEW_LABELS
        and values.dtype != torch.bfloat16
    ):
        array = as_numpy(values)
        return bool(array.min() >= 0 and array.max() <= 1)
    lowest, highest = values.aminmax()
    return bool((lowest >= 0) & (highest <= 1))


def check_label_smoothing(label_smoothing: Any, name: str = "label_smoothing") -> float:
    """``label_smoothing`` as a float in [0, 0.5): the label of a class that is not positive."""
    return check_real(
        name,
        label_smoothing,
        "0 to below 0.5, the label of a class that is not positive",
        lambda x: 0.0 <= x < 0.5,
    )


def rows_of_mask(mask: Tensor | None, scores: Tensor, n_rows: int) -> Tensor | None:
    """The mask as ``(rows, n)``; expanded without a copy if all rows share it."""
    if mask is None:
        return None
    n = scores.shape[-1]
    if mask.numel() == (mask.shape[-1] if mask.dim() else 1):
        return mask.reshape(1, mask.numel()).expand(n_rows, n)
    return mask.expand(scores.shape).reshape(n_rows, n)


def reduced(losses: Tensor, counts: Tensor | None, reduction: str) -> Tensor:
    """Reduces losses of rows; the mean is over rows where ``counts``, and 0 if there are none."""
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    if counts is None:
        return total / max(1, losses.numel())
    return total / counts.sum().clamp(min=1)


def check_positives(
    positives: Any,
    offsets: Any,
    values: Any,
    batch: Sequence[int],
    n_classes: int,
    ignore_index: Any,
    label_smoothing: Any,
) -> tuple[Tensor, Tensor | None]:
    """Checks lists of positives for rows of shape ``batch``; positives and offsets as int64."""
    check_label_smoothing(label_smoothing)
    ignore_index = check_ignore_index(ignore_index)
    check_tensor("positives", positives)
    if positives.is_floating_point() or positives.dtype == torch.bool:
        raise TypeError(
            f"positives: expected integer class ids, got {positives.dtype}; pass dense labels to a "
            "loss with a target, such as lastlayer.zlpr_loss, and soft labels of listed classes as "
            "values="
        )
    if offsets is not None:
        offsets = _check_offsets(offsets, positives, math.prod(batch))
    elif positives.dim() == 0 or positives.shape[:-1] != tuple(batch):
        expected = "".join(f"{size}, " for size in batch)
        raise ValueError(
            f"positives: expected shape ({expected}m), lists padded with ignore_index, got "
            f"{tuple(positives.shape)}; for concatenated lists pass offsets="
        )
    if values is not None:
        _check_values(values, positives)
    positives = check_ids("positives", positives, None, n_classes, ignore_index)
    return positives, offsets


def _check_offsets(offsets: Any, positives: Tensor, n_rows: int) -> Tensor:
    check_tensor("offsets", offsets)
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise TypeError(f"offsets: expected an integer tensor, got {offsets.dtype}")
    if offsets.shape != (n_rows + 1,):
        raise ValueError(
            f"offsets: expected shape ({n_rows + 1},), the start of the list of each of {n_rows} "
            f"rows and the end of the last, got {tuple(offsets.shape)}"
        )
    if positives.dim() != 1:
        raise ValueError(
            f"positives: expected shape (k,) with offsets, got {tuple(positives.shape)}"
        )
    check_device("offsets", offsets, positives, "positives")
    # Converted first: torch compares few of the unsigned integers.
    whole: Tensor = offsets.long()
    if values_are_checked(whole):
        ends = (int(whole[0]), int(whole[-1]))
        if ends != (0, positives.shape[0]) or bool((whole[1:] < whole[:-1]).any()):
            got = whole.tolist() if len(whole) <= 8 else f"{ends[0]} to {ends[1]}"
            raise ValueError(
                f"offsets: expected to increase from 0 to {positives.shape[0]}, the number of "
                f"positives, got {got}"
            )
    return whole


def _check_values(values: Any, positives: Tensor) -> None:
    check_floating("values", values, "a floating tensor of labels")
    if values.shape != positives.shape:
        raise ValueError(
            f"values: expected the shape of positives, {tuple(positives.shape)}, got "
            f"{tuple(values.shape)}"
        )
    check_device("values", values, positives, "positives")
    if values.numel() and values_are_checked(values) and not _in_unit_interval(values):
        wrong = ~((values >= 0) & (values <= 1))
        raise ValueError(
            f"values: expected labels in [0, 1], got {values[wrong].flatten()[0].item()}"
        )
