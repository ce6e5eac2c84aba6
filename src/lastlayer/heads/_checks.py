"""Checks of what a head is given."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lastlayer._checks import check_reduction, check_scores, checked_ids
from lastlayer.fused._checks import check_class_ids

if TYPE_CHECKING:
    from lastlayer.heads.base import Head


def check_count(name: str, value: Any, *, most: int | None = None) -> None:
    """A whole number from 1 to ``most``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name}: expected at least 1, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name}: expected at most {most}, the head's n_classes, got {value}")


def check_ignore_index(ignore_index: Any) -> None:
    """An int, or None."""
    if ignore_index is None:
        return
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(
            "ignore_index: expected an int, or None where every target counts, got "
            f"{type(ignore_index).__name__}"
        )


def check_hidden(head: "Head", hidden: Any) -> None:
    """Hidden states of the head's width, on its device and in its dtype."""
    check_scores(hidden, name="hidden")
    if hidden.shape[-1] != head.in_features:
        raise ValueError(
            f"hidden: expected shape (*batch, {head.in_features}), in_features of the head last, "
            f"got {tuple(hidden.shape)}"
        )
    parameter = next(head.parameters())
    if hidden.device != parameter.device:
        raise ValueError(
            f"hidden: expected the device of the head, {parameter.device}, got {hidden.device}; "
            "move one of them with .to(device)"
        )
    if hidden.dtype != parameter.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise TypeError(
            f"hidden: expected the dtype of the head, {parameter.dtype}, got {hidden.dtype}; "
            "convert one of them, or use torch.autocast"
        )


def check_target(head: "Head", hidden: Tensor, target: Any) -> Tensor:
    """One class id a row, or the ignored one. ``hidden`` is checked already.

    The reduction as well, which may be changed at any time. What is returned is to be used: in
    compiled code its values are checked when that runs.
    """
    check_reduction(head.reduction)
    check_class_ids(target, hidden)
    return checked_ids("target", target, head.n_classes, head.ignore_index)


def check_classes(head: "Head", hidden: Tensor, classes: Any) -> Tensor:
    """Chosen classes as one list a row, ``(rows, k)``. ``hidden`` is checked already."""
    if not isinstance(classes, Tensor):
        raise TypeError(f"classes: expected a torch.Tensor, got {type(classes).__name__}")
    if classes.dtype != torch.int64:
        raise TypeError(
            f"classes: expected torch.int64 class ids, got {classes.dtype}; convert with "
            "classes.long()"
        )
    batch = hidden.shape[:-1]
    if classes.dim() != 1 and (classes.dim() == 0 or classes.shape[:-1] != batch):
        expected = ", ".join([*map(str, batch), "k"])
        raise ValueError(
            f"classes: expected shape ({expected}) for hidden of shape {tuple(hidden.shape)}, or "
            f"(k,) for every row, got {tuple(classes.shape)}; for one class a row use "
            "classes.unsqueeze(-1)"
        )
    if classes.device != hidden.device:
        raise ValueError(
            f"classes: expected the device of hidden, {hidden.device}, got {classes.device}"
        )
    classes = checked_ids("classes", classes, head.n_classes)
    k = classes.shape[-1]
    lists: Tensor = classes.expand(*batch, k).reshape(batch.numel(), k)
    return lists


def check_generator(generator: Any, hidden: Tensor) -> None:
    """A generator on the device of hidden, or None."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator, got {type(generator).__name__}")
    if generator.device.type != hidden.device.type:
        raise ValueError(
            f"generator: expected one on the device of hidden, {hidden.device}, got one on "
            f"{generator.device}; make it with torch.Generator({hidden.device.type!r})"
        )
