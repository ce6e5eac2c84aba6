"""Attention with entmax weights, on CUDA: output and gradients without the matrix of weights.

Elsewhere rows of it are made in chunks, see :mod:`lastlayer.attention.functional`. README.md has
the derivation. Queries are ``(batch, heads, n, d)``, keys and values ``(batch, key heads, m, ·)``;
head ``h`` reads key head ``h // (heads // key heads)``.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


class Problem(NamedTuple):
    """What attention is computed of.

    Attributes:
        query: ``(batch, heads, n, d)``.
        key: ``(batch, key heads, m, d)``.
        value: ``(batch, key heads, m, d of values)``.
        head_alpha: ``(batch, heads)``, or None where ``alpha`` counts.
        mask: broadcast to ``(batch, heads, n, m)``: bool with True for allowed, or what is added to
            the scores; or None.
        seed: of dropout, int64 with one entry; None without dropout.
        first: of each query the first key of its sequence, int32 ``(n,)``; None for 0.
        stop: one past the last; None for ``m``.
        place: the key that stands where the query does; None for the query's own number and
            ``offset``.
        alpha: NaN where ``head_alpha`` counts.
        scale: of the scores.
        left: how many keys before its place a query sees, -1 for all.
        right: how many after it, -1 for all.
        offset: added to the number of a query.
        dropout: the probability that a weight is dropped.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    head_alpha: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    first: Tensor | None
    stop: Tensor | None
    place: Tensor | None
    alpha: float
    scale: float
    left: int
    right: int
    offset: int
    dropout: float


class Kept(NamedTuple):
    """What backward goes on from.

    Attributes:
        mixed: values averaged by the slopes of the weights, float32 ``(batch, heads, n, ·)``.
        numbers: four per row, ``(4, batch, heads, n)``: the largest score, the unknown of the row,
            the correction of its last step, and the factor of its weights.
        blocks: which blocks of keys a block of queries has weights in, uint8.
    """

    mixed: Tensor
    numbers: Tensor
    blocks: Tensor


def allowed(problem: Problem, rows: slice, keys: slice) -> Tensor | None:
    """Which keys some queries may look at by their places alone; None for all.

    ``(rows, keys)``.
    """
    p, device = problem, problem.query.device
    if p.left < 0 and p.right < 0 and p.first is None:
        return None
    row = torch.arange(rows.start, rows.stop, device=device)
    column = torch.arange(keys.start, keys.stop, device=device)
    place = row + p.offset if p.place is None else p.place[rows]
    ahead = column - place.unsqueeze(-1)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if p.left >= 0:
        seen &= ahead >= -p.left
    if p.right >= 0:
        seen &= ahead <= p.right
    if p.first is not None and p.stop is not None:
        seen &= (column >= p.first[rows].unsqueeze(-1)) & (column < p.stop[rows].unsqueeze(-1))
    return seen


def scores(problem: Problem, rows: slice, keys: slice) -> Tensor:
    """Of some queries and keys, -inf where a query may not look: ``(batch, heads, rows, keys)``."""
    p = problem
    dtype = accumulation_dtype(p.query.dtype)
    batch, heads = p.query.shape[:2]
    key = p.key[:, :, keys].to(dtype)
    n, group = rows.stop - rows.start, heads // max(1, key.shape[1])
    query = p.query[:, :, rows].to(dtype).reshape(batch, key.shape[1], group * n, key.shape[-1])
    made = (query @ key.transpose(-1, -2)).mul_(p.scale).view(batch, heads, n, key.shape[2])
    seen = allowed(p, rows, keys)
    if p.mask is not None:
        part = p.mask[:, :, rows, keys]
        if part.dtype == torch.bool:
            seen = part if seen is None else seen & part
        else:
            made += part
    return made if seen is None else made.masked_fill_(~seen, -math.inf)
