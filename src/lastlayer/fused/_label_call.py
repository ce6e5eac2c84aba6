"""From the arguments of a fused multi-label loss to its result."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_reduction
from lastlayer._labels import check_positives
from lastlayer.fused._checks import check_linear
from lastlayer.fused._label_loss import LabelProblem, linear_label_loss
from lastlayer.fused._listed import GivenLists


def fused_label_loss(
    loss: str,
    hidden: Tensor,
    weight: Tensor,
    positives: Any,
    bias: Tensor | None,
    *,
    offsets: Tensor | None,
    values: Tensor | None,
    smoothing: float,
    ignore_index: int | None,
    reduction: str,
    chunk_classes: int | str,
) -> Tensor:
    """The loss, of the batch's shape where it is not reduced."""
    check_linear(hidden, weight, bias)
    check_reduction(reduction)
    check_chunk_classes(chunk_classes)
    batch = hidden.shape[:-1]
    if isinstance(positives, Tensor) and positives.device != hidden.device:
        raise ValueError(
            f"positives: expected the device of hidden, {hidden.device}, got {positives.device}"
        )
    positives, offsets = check_positives(
        positives, offsets, n_rows=batch.numel(), n_classes=weight.shape[0],
        ignore_index=ignore_index, values=values, label_smoothing=smoothing, batch=tuple(batch),
    )  # fmt: skip
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    rows = hidden.reshape(batch.numel(), hidden.shape[-1])
    # What is no class id is padding anyway.
    padding = -1 if ignore_index is None else ignore_index
    given = GivenLists(positives, offsets, values, padding, float(smoothing))
    problem = LabelProblem(rows, weight, bias, given, chunk_classes)
    result = linear_label_loss(loss, problem, reduction)
    return result.reshape(batch) if reduction == "none" else result


def check_chunk_classes(chunk_classes: Any) -> None:
    """A whole number of at least 1, "auto" or "low"."""
    if isinstance(chunk_classes, str) and chunk_classes in ("auto", "low"):
        return
    if not isinstance(chunk_classes, int) or isinstance(chunk_classes, bool):
        raise TypeError(
            "chunk_classes: expected an int, 'auto' or 'low', got "
            f"{type(chunk_classes).__name__} {chunk_classes!r}"
        )
    if chunk_classes < 1:
        raise ValueError(f"chunk_classes: expected at least 1, got {chunk_classes}")
