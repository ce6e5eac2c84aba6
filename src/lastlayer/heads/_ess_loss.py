"""The loss of rows that stopped after different numbers of draws."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.fused import linear_cross_entropy
from lastlayer.heads._ess import Stopped
from lastlayer.heads._sampled_loss import Draws, Rule, SampledProblem, sampled_loss

SELF_NORMALISED = Rule(with_target=False, drop_hits=False)


class Options(NamedTuple):
    """How losses are made."""

    reduction: str
    sparse: bool
    chunk_rows: int | str


def loss_of_groups(
    problem: SampledProblem,
    stopped: Stopped,
    draws_of: Callable[[int, Tensor], Draws],
    options: Options,
) -> Tensor:
    """Rows with the same number of blocks together; those that gave up by all classes.

    Args:
        problem: all rows; its draws are not looked at.
        stopped: how many blocks each row used.
        draws_of: the draws of the first b blocks for some rows.
        options: reduction and the like.
    """
    exact = ~stopped.reached
    reduce = "none" if options.reduction == "none" else "sum"
    parts: list[tuple[Tensor, Tensor]] = []
    for used in stopped.blocks[stopped.reached].unique().tolist():
        rows = (stopped.reached & (stopped.blocks == used)).nonzero().squeeze(1)
        if used:
            some = _some_rows(problem, rows)._replace(draws=draws_of(used, rows))
            made = sampled_loss(some, reduce, sparse=options.sparse, chunk_rows=options.chunk_rows)
            parts.append((rows, made.loss))
    if bool(exact.any()):
        rows = exact.nonzero().squeeze(1)
        parts.append((rows, _exact_loss(_some_rows(problem, rows), reduce, options)))
    return _together(problem, parts, options.reduction)


def _some_rows(problem: SampledProblem, rows: Tensor) -> SampledProblem:
    return problem._replace(hidden=problem.hidden[rows], target=problem.target[rows])


def _exact_loss(problem: SampledProblem, reduction: str, options: Options) -> Tensor:
    if options.sparse or problem.target.shape[1] > 1:
        # All classes as if they were drawn: the gradient is row-sparse like that of the others.
        everything = torch.arange(problem.weight.shape[0], device=problem.hidden.device)
        draws = Draws(everything, torch.zeros_like(everything, dtype=torch.float32))
        return sampled_loss(
            problem._replace(draws=draws), reduction, sparse=options.sparse,
            chunk_rows=options.chunk_rows,
        ).loss  # fmt: skip
    return linear_cross_entropy(
        problem.hidden,
        problem.weight.to(problem.hidden.dtype),
        problem.target.squeeze(1),
        None if problem.bias is None else problem.bias.to(problem.hidden.dtype),
        ignore_index=None,
        reduction=reduction,
        chunk_rows=options.chunk_rows,
    )


def _together(
    problem: SampledProblem, parts: list[tuple[Tensor, Tensor]], reduction: str
) -> Tensor:
    hidden = problem.hidden
    dtype = accumulation_dtype(hidden.dtype)
    if reduction == "none":
        losses = hidden.new_zeros(hidden.shape[0], dtype=dtype)
        for rows, loss in parts:
            losses = losses.index_copy(0, rows, loss)
        return _attached(losses, problem, parts)
    total = hidden.new_zeros((), dtype=dtype)
    for _, loss in parts:
        total = total + loss
    if reduction == "mean":
        total = total / (problem.target >= 0).any(-1).sum().clamp(min=1)
    return _attached(total, problem, parts)


def _attached(loss: Tensor, problem: SampledProblem, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Where no row counts, a loss that still has a gradient: 0."""
    if parts or not torch.is_grad_enabled():
        return loss
    empty = problem.hidden[:0].sum() + problem.weight[:0].sum()
    return loss + (empty if problem.bias is None else empty + problem.bias[:0].sum())
