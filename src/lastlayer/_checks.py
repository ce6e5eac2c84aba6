"""Checks of what a user passes. Each error names the argument, what was expected and what came."""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer._torch import values_are_checked

REDUCTIONS = ("mean", "sum", "none")
# What the kernels take: torch counts float8 as floating too, but has hardly an operation for it.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_scores(scores: Any, *, name: str = "scores", at_least_1d: bool = True) -> None:
    """A tensor of one of the dtypes, with at least one dimension."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(
            f"{name}: expected a floating dtype, got {scores.dtype}; convert with {name}.float()"
        )
    if scores.dtype not in DTYPES:
        raise TypeError(
            f"{name}: expected torch.float16, torch.bfloat16, torch.float32 or torch.float64, got "
            f"{scores.dtype}; convert with {name}.float()"
        )
    if at_least_1d and scores.dim() == 0:
        raise ValueError(f"{name}: expected at least one dimension, got a 0-dimensional tensor")


def check_dim(dim: Any, scores: Tensor) -> int:
    """``dim`` counted from the front."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim: expected an int, got {type(dim).__name__}")
    rank = scores.dim()
    if not -rank <= dim < rank:
        raise ValueError(
            f"dim: expected {-rank} to {rank - 1} for scores of shape {tuple(scores.shape)}, "
            f"got {dim}"
        )
    return dim % rank


def check_mask(mask: Any, scores: Tensor) -> None:
    """A bool tensor that broadcasts to the shape of the scores."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: expected a bool tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask: expected dtype torch.bool with True for allowed, got {mask.dtype}; "
            "convert with mask.bool()"
        )
    try:
        fits = torch.broadcast_shapes(mask.shape, scores.shape) == scores.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"mask: expected a shape that broadcasts to that of scores {tuple(scores.shape)}, "
            f"got {tuple(mask.shape)}"
        )


def check_k(k: Any) -> None:
    """A whole number of at least 1."""
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"k: expected an int, got {type(k).__name__}")
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}; a k of n or more is the full softmax")


def check_alpha(alpha: Any) -> None:
    """A number, or a floating tensor, of at least 1."""
    expected = "expected at least 1 (1 is softmax, 1.5 and 2 are sparse)"
    if isinstance(alpha, Tensor):
        if not alpha.is_floating_point():
            raise TypeError(
                f"alpha: expected a number or a floating tensor, got a tensor of {alpha.dtype}"
            )
        if values_are_checked(alpha):
            wrong = ~((alpha >= 1.0) & torch.isfinite(alpha))
            if bool(wrong.any()):
                raise ValueError(
                    f"alpha: {expected}, got {alpha[wrong].flatten()[0].item()} among its values; "
                    "Entmax(learn_alpha=True) learns an alpha that stays above 1"
                )
        return
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise TypeError(
            f"alpha: expected a number or a floating tensor, got {type(alpha).__name__}"
        )
    if not 1.0 <= alpha < math.inf:
        raise ValueError(f"alpha: {expected}, got {alpha}")


def check_alpha_shape(alpha: Tensor, scores: Tensor, dim: int) -> None:
    """One alpha a row: broadcasts to the scores with size 1 at ``dim``."""
    rows = list(scores.shape)
    rows[dim] = 1
    try:
        fits = list(torch.broadcast_shapes(alpha.shape, rows)) == rows
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"alpha: expected a shape that broadcasts to {tuple(rows)}, one alpha a row of scores "
            f"{tuple(scores.shape)} along dim {dim}, got {tuple(alpha.shape)}"
        )


def check_reduction(reduction: Any) -> None:
    """One of the three ways to reduce."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {REDUCTIONS}, got {reduction!r}")


def check_max_support(max_support: Any) -> None:
    """A whole number of at least 1."""
    if not isinstance(max_support, int) or isinstance(max_support, bool):
        raise TypeError(f"max_support: expected an int, got {type(max_support).__name__}")
    if max_support < 1:
        raise ValueError(f"max_support: expected at least 1, got {max_support}")


def check_chunk_rows(chunk_rows: Any) -> None:
    """A whole number of at least 1, "auto" or "low"."""
    if chunk_rows in ("auto", "low") and isinstance(chunk_rows, str):
        return
    if not isinstance(chunk_rows, int) or isinstance(chunk_rows, bool):
        raise TypeError(
            f"chunk_rows: expected an int, 'auto' or 'low', got {type(chunk_rows).__name__} "
            f"{chunk_rows!r}"
        )
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")


def check_class_weight(weight: Any, scores: Tensor, *, name: str = "weight") -> None:
    """One floating weight a class."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{name}: expected a floating tensor with one weight a class, got {got}")
    n = scores.shape[-1]
    if weight.shape != (n,):
        raise ValueError(
            f"{name}: expected shape ({n},), one weight a class, got {tuple(weight.shape)}"
        )


def check_id_range(name: str, ids: Tensor, n_classes: int, ignore_index: int | None = None) -> None:
    """Class ids below ``n_classes``, or the ignored one, where values are checked."""
    if not values_are_checked(ids):
        return
    wrong = (ids < 0) | (ids >= n_classes)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        allowed = "" if ignore_index is None else f", or ignore_index={ignore_index}"
        raise ValueError(
            f"{name}: expected class ids from 0 to {n_classes - 1}{allowed}, got "
            f"{ids[first].item()} at position {first}"
        )


def checked_ids(name: str, ids: Tensor, n_classes: int, ignore_index: int | None = None) -> Tensor:
    """``ids``, after :func:`check_id_range`: in compiled code on a CPU it comes when that runs.

    Kernels on a CPU trust their ids, and a wrong one would be read or written out of bounds.
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        if ids.device.type != "cpu":
            return ids
        checked: Tensor = _checked_ids(ids, name, n_classes, ignore_index)
        return checked
    check_id_range(name, ids, n_classes, ignore_index)
    return ids


@torch.library.custom_op("lastlayer::checked_ids", mutates_args=())
def _checked_ids(ids: Tensor, name: str, n_classes: int, ignore_index: int | None) -> Tensor:
    check_id_range(name, ids, n_classes, ignore_index)
    # What an operation returns may not be what it was given.
    return ids.clone()


@_checked_ids.register_fake
def _(ids: Tensor, name: str, n_classes: int, ignore_index: int | None) -> Tensor:  # noqa: ARG001
    return torch.empty_like(ids)


def check_target(target: Any, scores: Tensor, ignore_index: int) -> bool:
    """Class ids or distributions; True where they are class ids."""
    batch, n = scores.shape[:-1], scores.shape[-1]
    if not isinstance(target, Tensor):
        raise TypeError(f"target: expected a torch.Tensor, got {type(target).__name__}")
    if target.is_floating_point():
        _check_distributions(target, scores)
        return False
    if target.dtype != torch.int64:
        raise TypeError(
            "target: expected torch.int64 class ids or floating distributions, "
            f"got {target.dtype}; convert ids with target.long()"
        )
    if target.shape != batch:
        raise ValueError(
            f"target: expected class ids of shape {tuple(batch)} for scores of shape "
            f"{tuple(scores.shape)}, got {tuple(target.shape)}"
        )
    if values_are_checked(target):
        wrong = ((target < 0) | (target >= n)) & (target != ignore_index)
        if bool(wrong.any()):
            raise ValueError(
                f"target: expected class ids from 0 to {n - 1}, or ignore_index={ignore_index}, "
                f"got {target[wrong].flatten()[0].item()}"
            )
    return True


def _check_distributions(target: Tensor, scores: Tensor) -> None:
    if target.shape != scores.shape:
        raise ValueError(
            f"target: expected distributions of the shape of scores {tuple(scores.shape)}, "
            f"got {tuple(target.shape)}; class ids must be torch.int64"
        )
    if not values_are_checked(target) or target.numel() == 0:
        return
    lowest = target.min().item()
    if not lowest >= 0.0:
        raise ValueError(f"target: expected distributions with no negative entry, got {lowest}")
    totals = target.double().sum(-1)
    # Half-precision distributions that were normalised in that precision are accepted.
    tolerance = 1e-4 if target.dtype in (torch.float32, torch.float64) else 2e-2
    furthest = totals.flatten()[(totals - 1.0).abs().argmax()].item()
    if not abs(furthest - 1.0) <= tolerance:
        raise ValueError(
            f"target: expected distributions that sum to 1 within {tolerance}, got a sum of "
            f"{furthest:.6g}; divide by target.sum(-1, keepdim=True)"
        )
