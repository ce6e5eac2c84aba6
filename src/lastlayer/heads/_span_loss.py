r"""ZLPR over all spans of a text, without the square of scores.

A row is a text and a type. Its loss is :math:`\log(1 + A) + \log(1 + B)` with :math:`A` the sum of
:math:`e^s` over spans that are not right and :math:`B` that of :math:`e^{-s}` over those that are.
Forward adds both up tile by tile, starting from the 1; backward makes each tile again, and from it
the shares :math:`e^{s}/(1 + A)` and :math:`-e^{-s}/(1 + B)`, which go into the gradients of the
vectors at once. On CUDA :mod:`lastlayer.kernels.span_sums` does all of that without storing a tile,
where vectors are as short as they usually are.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import is_eager
from lastlayer.heads._span_labels import SpanLabels, TileLabels, span_labels
from lastlayer.heads._span_tiles import Tile, not_spans, tile_scores, tiles
from lastlayer.kernels.span_sums import SpanParts

# Wider vectors take more shared memory in the kernels than some devices have.
_WIDEST = 64


def span_losses(parts: SpanParts, target: Tensor, n_types: int, n_spans: int) -> Tensor:
    """The loss of each text and type, ``(texts, types)``.

    Args:
        parts: what scores are made of.
        target: bools ``(texts, types, n, n)``, or what ``listed_cells`` makes.
        n_types: how many types there are.
        n_spans: scores that are held at a time.
    """
    losses: Tensor = _SpanLosses.apply(*parts, target, n_types, n_spans)
    return losses


class _SpanLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        start_bias: Tensor | None,
        end_bias: Tensor | None,
        mask: Tensor | None,
        target: Tensor,
        n_types: int,
        n_spans: int,
    ) -> Tensor:
        operands = query, key, start_bias, end_bias, mask, target
        sums: Callable[..., Tensor] = _log_sums if is_eager(query) else _log_sums_op
        found = sums(*operands, n_types, n_spans)
        ctx.save_for_backward(*operands, found)
        ctx.options = n_types, n_spans
        return found.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "backward: the fused loss of spans has no second derivatives, and "
                "create_graph=True asks for them; use lastlayer.zlpr_loss on what "
                "head.scores(hidden) returns"
            )
        *operands, found = ctx.saved_tensors
        made: Callable[..., list[Tensor]] = _gradients if is_eager(grad) else _gradients_op
        gradients = made(*operands, found, grad.contiguous(), *ctx.options)
        there = (
            None if given is None else each
            for given, each in zip(operands[:4], gradients, strict=True)
        )
        return *there, None, None, None, None


def _log_sums(
    query: Tensor,
    key: Tensor,
    start_bias: Tensor | None,
    end_bias: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
    n_types: int,
    n_spans: int,
) -> Tensor:
    """``log(1 + A)`` and ``log(1 + B)`` of each row, ``(2, texts, types)``."""
    parts = SpanParts(query, key, start_bias, end_bias, mask)
    if _kernels_suit(query):
        # Imported here: Triton is not on every machine.
        from lastlayer.kernels.span_sums import triton as span_sums

        return span_sums.log_sums(parts, target, n_types)
    n_texts, n = query.shape[0], query.shape[2]
    labels = span_labels(target, n_types, n)
    found = query.new_zeros(2, n_texts, n_types)
    below, above = found
    with torch.autocast(query.device.type, enabled=False):
        for tile in tiles(n_texts, n_types, n, n_spans):
            scores, of_tile = _cells(parts, tile, labels)
            right = of_tile.hide(scores)
            for total, added in (
                (below, scores.flatten(-2).logsumexp(-1)),
                (above, of_tile.log_sum(right)),
            ):
                total[tile.texts] = torch.logaddexp(total[tile.texts], added)
    return found


def _gradients(
    query: Tensor,
    key: Tensor,
    start_bias: Tensor | None,
    end_bias: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
    found: Tensor,
    grad: Tensor,
    n_types: int,
    n_spans: int,
) -> list[Tensor]:
    """Of query, key and the biases; empty ones for biases that are not there."""
    parts = SpanParts(query, key, start_bias, end_bias, mask)
    if _kernels_suit(query):
        from lastlayer.kernels.span_sums import triton as span_sums

        given = span_sums.gradients(parts, target, found, grad, n_types)
        return [query.new_empty(0) if each is None else each for each in given]
    n_texts, shared, n = query.shape[0], query.shape[1] < n_types, query.shape[2]
    labels = span_labels(target, n_types, n)
    made = of_query, of_key, of_start, of_end = _zeros((query, key, start_bias, end_bias))
    with torch.autocast(query.device.type, enabled=False):
        for tile in tiles(n_texts, n_types, n, n_spans):
            texts, starts, ends = tile
            scores, of_tile = _cells(parts, tile, labels)
            right = of_tile.hide(scores)
            below, above = found[:, texts]
            scores = scores.sub_(below[..., None, None]).exp_()
            of_tile.pull(scores, right, above)
            scores *= grad[texts, :, None, None]
            if start_bias is not None and end_bias is not None:
                of_start[texts, :, starts] = scores.sum(-1)
                of_end[texts, :, ends] += scores.sum(-2)
            if shared:
                scores = scores.sum(1, keepdim=True)
            of_query[texts, :, starts] = scores @ key[texts, :, ends]
            of_key[texts, :, ends] += scores.mT @ query[texts, :, starts]
    return made


def _kernels_suit(query: Tensor) -> bool:
    """Whether the kernels can take such vectors; before sm_80 there is no tf32."""
    return (
        query.device.type == "cuda"
        and kernels.available()["triton"] is None
        and query.dtype == torch.float32
        and query.shape[-1] <= _WIDEST
        and query.numel() > 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _cells(parts: SpanParts, tile: Tile, labels: SpanLabels) -> tuple[Tensor, TileLabels]:
    """Scores of a tile, one block of memory, -inf where there is no span; and its labels."""
    absent = not_spans(parts, tile)
    scores = tile_scores(parts, tile).contiguous().masked_fill_(absent, -math.inf)
    return scores, labels.of(tile, absent)


def _zeros(given: tuple[Tensor, Tensor, Tensor | None, Tensor | None]) -> list[Tensor]:
    nothing = given[0].new_empty(0)
    return [nothing.clone() if each is None else torch.zeros_like(each) for each in given]


_log_sums_op = torch.library.custom_op("lastlayer::span_log_sums", mutates_args=())(_log_sums)
_gradients_op = torch.library.custom_op("lastlayer::span_gradients", mutates_args=())(_gradients)


@_log_sums_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    start_bias: Tensor | None,
    end_bias: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
    n_types: int,
    n_spans: int,
) -> Tensor:
    return query.new_empty(2, query.shape[0], n_types)


@_gradients_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    start_bias: Tensor | None,
    end_bias: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
    found: Tensor,
    grad: Tensor,
    n_types: int,
    n_spans: int,
) -> list[Tensor]:
    return _zeros((query, key, start_bias, end_bias))
