"""Checks of what a sampled head is given."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lastlayer.heads._checks import check_target
from lastlayer.samplers import Sampler

if TYPE_CHECKING:
    from lastlayer.heads.base import Head


def check_sampler(sampler: Any, n_classes: int) -> None:
    """A sampler of the head's classes that needs no context."""
    if not isinstance(sampler, Sampler):
        raise TypeError(
            "sampler: expected one of lastlayer.samplers, such as Unigram(counts), got "
            f"{type(sampler).__name__}"
        )
    if sampler.n_classes != n_classes:
        raise ValueError(
            f"sampler: expected one of {n_classes} classes, as the head has, got one of "
            f"{sampler.n_classes}"
        )
    if sampler.needs_context:
        raise ValueError(
            f"sampler: expected one without context, got {type(sampler).__name__}; "
            "AdaptiveNGram is for AdaptiveImportanceSampling, and InBatch for "
            "in_batch_softmax_loss"
        )


def check_seed(seed: Any) -> None:
    """An int of 64 bits."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed: expected an int, got {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: expected an integer of 64 bits, got {seed}")


def check_targets(head: "Head", hidden: Tensor, target: Any) -> Tensor:
    """As :func:`check_target`, or several class ids a row in a last dimension."""
    if isinstance(target, Tensor) and target.dim() == hidden.dim() and target.shape[-1:] != (0,):
        # Seen as one row a target, so that shapes are compared and positions named.
        hidden = hidden[..., :1].expand(*hidden.shape[:-1], target.shape[-1]).unsqueeze(-1)
    return check_target(head, hidden, target)


def check_adaptive_sampler(sampler: Sampler, n_classes: int) -> None:
    """As many counts as the head has classes."""
    if sampler.n_classes != n_classes:
        raise ValueError(
            f"counts: expected shape ({n_classes},), one number a class of the head, got "
            f"({sampler.n_classes},)"
        )


def check_context(hidden: Tensor, context: Any, order: int) -> None:
    """The words before each row; what they may be the sampler checks."""
    if not isinstance(context, Tensor):
        raise TypeError(f"context: expected a torch.Tensor, got {type(context).__name__}")
    expected = (*hidden.shape[:-1], order - 1)
    if context.shape != expected:
        raise ValueError(
            f"context: expected shape {expected}, the words before for order {order}, the nearest "
            f"one last, got {tuple(context.shape)}"
        )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")


def as_class_ids(name: str, ids: Any, n_classes: int) -> Tensor:
    """Different class ids, ascending."""
    try:
        given = torch.as_tensor(ids)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected class ids, got {type(ids).__name__}") from error
    if given.dtype not in (torch.int64, torch.int32) or given.dim() != 1 or not len(given):
        raise TypeError(
            f"{name}: expected class ids, int64 (n,) with at least one, got {given.dtype} of shape "
            f"{tuple(given.shape)}"
        )
    found = given.long().sort().values
    if int(found[0]) < 0 or int(found[-1]) >= n_classes:
        wrong = int(found[0]) if int(found[0]) < 0 else int(found[-1])
        raise ValueError(f"{name}: expected class ids from 0 to {n_classes - 1}, got {wrong}")
    again = found[1:][found[1:] == found[:-1]]
    if len(again):
        raise ValueError(f"{name}: expected each class once, got class {int(again[0])} again")
    return found
