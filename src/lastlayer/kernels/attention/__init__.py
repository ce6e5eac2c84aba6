"""Attention with entmax weights on CUDA, which never stores the matrix of weights.

On other devices its rows are computed in chunks, see :mod:`lastlayer.attention.functional`.
README.md has the derivation. Queries are ``(batch, heads, n, d)``, keys and values ``(batch, key
heads, m, ·)``; head ``h`` reads key head ``h // (heads // key heads)``.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype, in_dtype, in_functorch


class Problem(NamedTuple):
    """Inputs and options of attention.

    Attributes:
        query: ``(batch, heads, n, d)``.
        key: ``(batch, key heads, m, d)``.
        value: ``(batch, key heads, m, d of values)``.
        head_alpha: the alpha of each head, ``(batch, heads)``; None if ``alpha`` applies to all.
        mask: expanded to ``(batch, heads, n, m)``: bool with True for allowed, or floats that are
            added to the scores; or None.
        seed: of dropout, int64 with one entry; None without dropout.
        first: the first key of each query's sequence, int32 ``(n,)``; None for 0.
        stop: one past the last key of each query's sequence; None for ``m``.
        place: the key at the position of each query; None for its index plus ``offset``.
        alpha: the alpha of all heads; NaN if ``head_alpha`` is given.
        scale: factor of the scores.
        left: number of keys before its position that a query sees, -1 for all.
        right: number of keys after its position that a query sees, -1 for all.
        offset: added to the index of a query to get its position.
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
    """What forward saves for backward.

    Attributes:
        mixed: values averaged with the slopes of the weights, ``(batch, heads, n, ·)``, in the
            dtype of the queries, or float32 if alpha may exceed 2.
        numbers: float32 ``(k, batch, heads, n)``. For alpha 1.5 and 2 the threshold of each row;
            otherwise its largest score, its unknown, the correction of its last step, and the
            factor of its weights.
        blocks: in which blocks of keys each block of queries has non-zero weights, uint8.
    """

    mixed: Tensor
    numbers: Tensor
    blocks: Tensor


def part_of(tensor: Tensor, part: slice) -> Tensor:
    """Some rows or keys of ``(batch, heads, length, ·)``; even a whole slice costs host time."""
    whole = part.start == 0 and part.stop == tensor.shape[2]
    return tensor if whole else tensor[:, :, part]


def hidden(problem: Problem, rows: slice, keys: slice) -> Tensor | None:
    """Which keys queries do not see according to positions, without ``mask``; None for none.

    The result is bool of shape ``(rows, keys)``.
    """
    p, device = problem, problem.query.device
    if p.left < 0 and p.right < 0 and p.first is None:
        return None
    if p.place is None:
        shape, first = (rows.stop - rows.start, keys.stop - keys.start), rows.start - keys.start
        ones = torch.ones(shape, dtype=torch.bool, device=device)
        # The key at the position of the first query.
        first += p.offset
        if p.left < 0:
            return ones.triu_(first + p.right + 1)
        before = ones.tril(first - p.left - 1)
        return before if p.right < 0 else before.logical_or_(ones.triu_(first + p.right + 1))
    column = torch.arange(keys.start, keys.stop, device=device)
    ahead = column - p.place[rows].unsqueeze(-1)
    out = torch.zeros_like(ahead, dtype=torch.bool)
    if p.left >= 0:
        out |= ahead < -p.left
    if p.right >= 0:
        out |= ahead > p.right
    if p.first is not None and p.stop is not None:
        out |= (column < p.first[rows].unsqueeze(-1)) | (column >= p.stop[rows].unsqueeze(-1))
    return out


def scores(problem: Problem, rows: slice, keys: slice) -> Tensor:
    """Scores of some queries and keys, -inf if masked: ``(batch, heads, rows, keys)``."""
    p = problem
    dtype = accumulation_dtype(p.query.dtype)
    key = in_dtype(part_of(p.key, keys), dtype)
    query = in_dtype(part_of(p.query, rows), dtype) * p.scale
    made = (grouped(query, key.shape[1]) @ key.transpose(-1, -2)).view(
        *query.shape[:3], key.shape[2]
    )
    unseen = hidden(p, rows, keys)
    if p.mask is not None:
        part = p.mask[:, :, rows, keys]
        if part.dtype == torch.bool:
            unseen = ~part if unseen is None else unseen | ~part
        else:
            made = made + part.to(dtype) if in_functorch() else made.add_(part)
    if unseen is None:
        return made
    # vmap allows nothing in place if only the mask is batched.
    fill = made.masked_fill if in_functorch() else made.masked_fill_
    return fill(unseen, -math.inf)


def grouped(tensor: Tensor, key_heads: int) -> Tensor:
    """Concatenates the rows of all heads that share a key head."""
    batch, heads, n, size = tensor.shape
    if heads == key_heads:
        return tensor
    return tensor.reshape(batch, key_heads, heads // max(1, key_heads) * n, size)
