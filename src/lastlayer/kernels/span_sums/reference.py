"""Sums over all spans in plain torch, with all scores stored: the reference."""

import torch
from torch import Tensor

from lastlayer.kernels.span_sums import SpanParts


def log_sums(parts: SpanParts, target: Tensor, n_types: int) -> Tensor:
    """``log(1 + A)`` and ``log(1 + B)`` of README.md per text and type, ``(2, texts, types)``."""
    scores, wrong, right = _cells(parts, target, n_types)
    sums = [
        torch.where(cells, values, -torch.inf).flatten(-2).logsumexp(-1)
        for cells, values in ((wrong, scores), (right, -scores))
    ]
    return torch.logaddexp(torch.stack(sums), torch.zeros_like(sums[0]))


def gradients(
    parts: SpanParts, target: Tensor, found: Tensor, grad: Tensor, n_types: int
) -> list[Tensor | None]:
    """Gradients of query, key and biases; ``found`` is the result of :func:`log_sums`."""
    scores, wrong, right = _cells(parts, target, n_types)
    below, above = found[..., None, None]
    weights = torch.where(wrong, (scores - below).exp(), 0.0)
    weights = torch.where(right, -(-scores - above).exp(), weights) * grad[..., None, None]
    of_query, of_key = weights @ parts.key, weights.mT @ parts.query
    if parts.query.shape[1] < n_types:
        of_query, of_key = of_query.sum(1, keepdim=True), of_key.sum(1, keepdim=True)
    if parts.start_bias is None:
        return [of_query, of_key, None, None]
    return [of_query, of_key, weights.sum(-1), weights.sum(-2)]


def _cells(parts: SpanParts, target: Tensor, n_types: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, and masks of wrong and right spans."""
    query, key, start_bias, end_bias, mask = parts
    n_texts, _, n, _ = query.shape
    scores = (query @ key.mT).expand(n_texts, n_types, n, n)
    if start_bias is not None and end_bias is not None:
        scores = scores + start_bias.unsqueeze(-1) + end_bias.unsqueeze(-2)
    there = torch.ones(n, n, dtype=torch.bool, device=query.device).triu().expand_as(scores)
    if mask is not None:
        there = there & mask[:, None, :, None] & mask[:, None, None, :]
    if target.dtype != torch.bool:
        # Padding goes to one extra cell, which is cut off.
        cells = target.new_zeros(n_texts, n_types * n * n + 1, dtype=torch.bool)
        cells.scatter_(1, torch.where(target < 0, cells.shape[1] - 1, target), value=True)
        target = cells[:, :-1].view(n_texts, n_types, n, n)
    return scores, there & ~target, there & target
