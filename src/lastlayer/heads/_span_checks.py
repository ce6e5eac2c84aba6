"""Checks of what a head over spans is given."""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_scores
from lastlayer._torch import values_are_checked


def check_head_size(head_size: int, rope: bool) -> None:
    """Rotary positions turn pairs of numbers."""
    if rope and head_size % 2:
        raise ValueError(
            f"head_size: expected an even number, as rotary positions turn pairs, got {head_size}; "
            f"take {head_size + 1}, or rope=False"
        )


def check_padding_type(ignore_index: Any) -> None:
    """An int that is no type."""
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index: expected an int, got {type(ignore_index).__name__}")
    if ignore_index >= 0:
        raise ValueError(
            f"ignore_index: expected a negative number, which is no type, got {ignore_index}"
        )


def check_tokens(hidden: Any, in_features: int, parameter: Tensor) -> None:
    """Hidden states of at least one token a text, where and as the parameters are."""
    check_scores(hidden, name="hidden")
    if hidden.dim() < 2 or hidden.shape[-1] != in_features:
        raise ValueError(
            f"hidden: expected shape (*batch, n, {in_features}), one state a token and in_features "
            f"of the head last, got {tuple(hidden.shape)}"
        )
    if hidden.shape[-2] == 0:
        raise ValueError(
            f"hidden: expected at least one token a text, got shape {tuple(hidden.shape)}"
        )
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


def check_token_mask(mask: Any, hidden: Tensor) -> None:
    """One bool a token, or None."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"mask: expected a bool tensor with True for tokens, got {got}; convert with "
            "mask.bool()"
        )
    if mask.shape != hidden.shape[:-1]:
        raise ValueError(
            f"mask: expected shape {tuple(hidden.shape[:-1])}, one bool a token, got "
            f"{tuple(mask.shape)}"
        )
    _check_device("mask", mask, hidden)


def check_spans(target: Any, hidden: Tensor, n_types: int, ignore_index: int) -> None:
    """Bools for all spans, or lists of them. ``hidden`` is checked already."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a torch.Tensor, got {type(target).__name__}")
    batch, n = tuple(hidden.shape[:-2]), hidden.shape[-2]
    if target.dtype == torch.bool:
        _check_dense(target, (*batch, n_types, n, n))
    elif target.dtype == torch.int64:
        _check_listed(target, batch, n, n_types, ignore_index)
    else:
        raise TypeError(
            "target: expected torch.int64 lists of spans, or torch.bool with one label a span, got "
            f"{target.dtype}; convert with target.long() or target.bool()"
        )
    _check_device("target", target, hidden)


def _check_dense(target: Tensor, shape: tuple[int, ...]) -> None:
    if target.shape != shape:
        raise ValueError(
            f"target: expected shape {shape}, a bool for each type, start and end, got "
            f"{tuple(target.shape)}; lists of spans are torch.int64"
        )
    if values_are_checked(target):
        wrong = target.tril(-1).nonzero()
        if len(wrong):
            *_, kind, start, end = wrong[0].tolist()
            raise ValueError(_backward(kind, start, end))


def _check_listed(
    target: Tensor, batch: tuple[int, ...], n: int, n_types: int, ignore_index: int
) -> None:
    if target.dim() < 2 or target.shape[-1] != 3 or tuple(target.shape[:-2]) != batch:
        expected = "(" + "".join(f"{size}, " for size in batch) + "m, 3)"
        raise ValueError(
            f"target: expected shape {expected}, lists of (type, start, end) padded with "
            f"ignore_index, got {tuple(target.shape)}; one label a span is torch.bool"
        )
    if not values_are_checked(target):
        return
    spans = target[target[..., 0] != ignore_index]
    kind, start, end = spans.unbind(-1)
    for name, value, most in (("types", kind, n_types), ("starts", start, n), ("ends", end, n)):
        wrong = (value < 0) | (value >= most)
        if bool(wrong.any()):
            raise ValueError(
                f"target: expected {name} from 0 to {most - 1}, or the type ignore_index="
                f"{ignore_index} for padding, got (type, start, end) = "
                f"{tuple(spans[wrong][0].tolist())}"
            )
    wrong = end < start
    if bool(wrong.any()):
        raise ValueError(_backward(*spans[wrong][0].tolist()))


def _backward(kind: int, start: int, end: int) -> str:
    return (
        "target: expected spans that end where they start or later (the end is inclusive), got "
        f"(type, start, end) = ({kind}, {start}, {end})"
    )


def _check_device(name: str, given: Tensor, hidden: Tensor) -> None:
    if given.device != hidden.device:
        raise ValueError(
            f"{name}: expected the device of hidden, {hidden.device}, got {given.device}"
        )


def check_threshold(threshold: Any) -> None:
    """A number; -inf leaves nothing out."""
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"threshold: expected a number, got {type(threshold).__name__}")
    if math.isnan(threshold):
        raise ValueError("threshold: expected a number, got nan")
