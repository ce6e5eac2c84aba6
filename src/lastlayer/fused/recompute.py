"""Evaluates a function of rows in chunks with bounded memory, and recomputes it in backward.

A weighted sum of its results needs no recomputation: its gradients are computed in forward.

``torch.utils.checkpoint`` would silently recompute with modified parameters. Here they are saved
for backward, so that torch raises if one was changed in place, and their gradients are summed over
chunks in the accumulation dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lastlayer._torch import accumulation_dtype, in_dtype, in_functorch, is_eager, is_exporting

# Called with some rows, their per-row tensors and the shared tensors; returns one value per row.
RowFunction = Callable[..., Tensor]


def in_chunks(
    function: RowFunction,
    rows: Tensor,
    per_row: Sequence[Tensor | None],
    shared: Sequence[Tensor | None],
    chunks: Sequence[slice],
) -> Tensor:
    """``function(rows, *per_row, *shared)``, evaluated in chunks and concatenated.

    Differentiable in ``rows`` and ``shared``, not in ``per_row``. Chunks, at least one, cover the
    rows in order.
    """
    if is_exporting():
        return function(rows, *per_row, *shared)
    learned = any(each is not None and each.requires_grad for each in (rows, *shared))
    # torch.func transforms differentiate the function themselves.
    if not (learned and torch.is_grad_enabled()) or in_functorch():
        return _cat([function(*_part(part, rows, per_row), *shared) for part in chunks])
    if torch.compiler.is_compiling():
        # Changes in place cannot be detected while compiling: plain checkpointing is enough.
        return _cat([
            checkpoint(
                function, *_part(part, rows, per_row), *shared, use_reentrant=False,
                preserve_rng_state=False,
            )
            for part in chunks
        ])  # fmt: skip
    made: Tensor = _InChunks.apply(function, tuple(chunks), len(per_row), rows, *per_row, *shared)
    return made


def weighted_sum_in_chunks(
    function: RowFunction,
    rows: Tensor,
    per_row: Sequence[Tensor | None],
    shared: Sequence[Tensor | None],
    chunks: Sequence[slice],
    weights: Tensor,
) -> Tensor:
    """``(in_chunks(...) * weights).sum()``, with gradients computed in the forward pass.

    Nothing is recomputed in backward, except for second derivatives. A single chunk is left to
    autograd, which takes the host less time.
    """
    if len(chunks) == 1 and is_eager(rows):
        return (function(rows, *per_row, *shared) * weights).sum()
    learned = any(each is not None and each.requires_grad for each in (rows, *shared))
    if not (learned and torch.is_grad_enabled()) or not is_eager(rows):
        made = in_chunks(function, rows, per_row, shared, chunks)
        return (made * weights).sum()
    given = function, tuple(chunks), len(per_row), weights
    total: Tensor = _SumInChunks.apply(*given, rows, *per_row, *shared)
    return total


def _part(part: slice, rows: Tensor, per_row: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [rows[part], *(None if each is None else each[part] for each in per_row)]


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: RowFunction,
        chunks: tuple[slice, ...],
        n_per_row: int,
        rows: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.given = function, chunks, n_per_row
        ctx.save_for_backward(rows, *tensors)
        per_row, shared = tensors[:n_per_row], tensors[n_per_row:]
        return _cat([function(*_part(part, rows, per_row), *shared) for part in chunks])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        function, chunks, n_per_row = ctx.given
        rows, *tensors = ctx.saved_tensors
        per_row, shared = tensors[:n_per_row], tensors[n_per_row:]
        needed = ctx.needs_input_grad[3], *ctx.needs_input_grad[4 + n_per_row :]
        with torch.autocast(rows.device.type, enabled=False):
            if torch.is_grad_enabled():
                gradients = _differentiable(function, chunks, rows, per_row, shared, needed, grad)
            else:
                gradients, _ = _gradients(function, chunks, rows, per_row, shared, needed, grad)
        return None, None, None, gradients[0], *(None,) * n_per_row, *gradients[1:]


class _SumInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: RowFunction,
        chunks: tuple[slice, ...],
        n_per_row: int,
        weights: Tensor,
        rows: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        needed = ctx.needs_input_grad[4], *ctx.needs_input_grad[5 + n_per_row :]
        per_row, shared = tensors[:n_per_row], tensors[n_per_row:]
        gradients, losses = _gradients(function, chunks, rows, per_row, shared, needed, weights)
        ctx.given = function, chunks, n_per_row, needed
        ctx.save_for_backward(weights, rows, *tensors, *gradients)
        return (losses * weights).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        function, chunks, n_per_row, needed = ctx.given
        weights, rows, *tensors = ctx.saved_tensors
        tensors, made = tensors[: -len(needed)], tensors[-len(needed) :]
        if torch.is_grad_enabled():
            given = rows, tensors[:n_per_row], tensors[n_per_row:], needed, weights * grad
            with torch.autocast(rows.device.type, enabled=False):
                made = _differentiable(function, chunks, *given)
        else:
            made = [None if each is None else each * grad.to(each.dtype) for each in made]
        return *(None,) * 4, made[0], *(None,) * n_per_row, *made[1:]


def _differentiable(
    function: RowFunction,
    chunks: Sequence[slice],
    rows: Tensor,
    per_row: Sequence[Tensor | None],
    shared: Sequence[Tensor | None],
    needed: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """As :func:`_gradients`, but differentiable again."""
    made = _cat([function(*_part(part, rows, per_row), *shared) for part in chunks])
    sources: list[Any] = [each for each, need in zip((rows, *shared), needed, strict=True) if need]
    found = iter(torch.autograd.grad(made, sources, grad, create_graph=True))
    return [next(found) if need else None for need in needed]


def _gradients(
    function: RowFunction,
    chunks: Sequence[slice],
    rows: Tensor,
    per_row: Sequence[Tensor | None],
    shared: Sequence[Tensor | None],
    needed: Sequence[bool],
    grad: Tensor,
) -> tuple[list[Tensor | None], Tensor]:
    """Gradients of rows and shared tensors, summed in the accumulation dtype, and the results."""
    sums: list[Tensor | None] = [None] * len(needed)
    of_rows = rows.new_empty(rows.shape) if needed[0] else None
    sources = [
        None if each is None else each.detach().requires_grad_(need)
        for each, need in zip(shared, needed[1:], strict=True)
    ]
    first, results = 0, []
    for part in chunks:
        some = rows[part].detach().requires_grad_(needed[0])
        given = [None if each is None else each[part] for each in per_row]
        with torch.enable_grad():
            made = function(some, *given, *sources)
        results.append(made.detach())
        wanted = [
            each for each, need in zip((some, *sources), needed, strict=True)
            if need and each is not None
        ]  # fmt: skip
        upstream = grad[first : first + made.shape[0]]
        first += made.shape[0]
        if not made.requires_grad:
            continue
        found = iter(torch.autograd.grad(made, wanted, upstream, allow_unused=True))
        for i, need in enumerate(needed):
            gradient = next(found) if need else None
            if gradient is None:
                continue
            if i == 0 and of_rows is not None:
                of_rows[part] = gradient
            elif len(chunks) == 1:
                sums[i] = gradient
            else:
                wide = in_dtype(gradient, accumulation_dtype(gradient.dtype))
                so_far = sums[i]
                sums[i] = wide if so_far is None else so_far + wide
    sums[0] = of_rows
    return [
        None if each is None or source is None else in_dtype(each, source.dtype)
        for each, source in zip(sums, (rows, *shared), strict=True)
    ], _cat(results)
