"""The InfoNCE loss of each query, from normalisers and positive sums."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer._torch import accumulation_dtype, is_eager
from lastlayer.losses._contrastive import Groups, Similarities, similarities
from lastlayer.losses._contrastive_groups import matches
from lastlayer.losses._contrastive_pass import sizes
from lastlayer.losses._contrastive_total import one_pass_total
from lastlayer.losses._gathered import Shares, gathered, shares


class Batch(NamedTuple):
    """What the user gave, checked."""

    query: Tensor
    key: Tensor
    negatives: Tensor | None
    groups: tuple[Tensor, Tensor] | None
    negative_groups: Tensor | None


class Options(NamedTuple):
    """See :func:`lastlayer.info_nce`."""

    symmetric: bool
    in_batch: bool
    positive: bool
    normalize: bool
    chunk_rows: int | str


def losses_of(
    batch: Batch, scale: Tensor, options: Options, of: Shares | None, gather_negatives: bool
) -> Tensor:
    """One loss a query of this process.

    Args:
        batch: of this process.
        scale: 1/T.
        options: of the loss.
        of: the batches of all processes, where keys are gathered.
        gather_negatives: gather shared negatives as well.
    """
    keys, first, number = _compared(batch, options, of, gather_negatives)
    if keys is not None:
        found = similarities(
            batch.query, keys, scale, groups=number.groups,
            own=first if options.in_batch else keys.shape[0], normalize=options.normalize,
            columns=options.symmetric, products=_products(batch.query),
            chunk_rows=options.chunk_rows,
        )  # fmt: skip
        lse, pulled = found.row_lse, found.row_positive
    if not options.in_batch:
        own = _pair_scores(batch.query, batch.key, options.normalize) * scale
        lse = own if keys is None else torch.logaddexp(lse, own)
        pulled = own if keys is None else pulled + own
    if batch.negatives is not None and batch.negatives.dim() == 3:
        lse, pulled, number = _with_own_negatives(batch, scale, options, lse, pulled, number)
    losses = _loss(lse, pulled, number.rows)
    if not options.symmetric:
        return losses
    n = batch.query.shape[0]
    return 0.5 * (losses + _of_keys(found, pulled, batch, options, of, slice(first, first + n)))


def is_one_pass(batch: Batch, scale: Tensor, options: Options, of: Shares | None) -> bool:
    """Whether the sum of losses is :func:`total_of`, which makes gradients in the forward pass.

    With losses of keys only where all that a key is compared with is held at a time; further
    negatives and groups, which they see otherwise than queries do, are left to the other way.
    """
    leaves = batch.query, batch.key, batch.negatives, scale
    only_pairs = batch.negatives is None and batch.groups is None and of is None
    return (
        options.in_batch
        and (not options.symmetric or (only_pairs and _at_a_time(batch, options)))
        and (batch.negatives is None or batch.negatives.dim() == 2)
        and is_eager(batch.query)
        and torch.is_grad_enabled()
        and any(each is not None and each.requires_grad for each in leaves)
    )


def _at_a_time(batch: Batch, options: Options) -> bool:
    """Whether all queries are one chunk."""
    query, key = batch.query, batch.key
    how = sizes(query, key, _products(query), options.normalize, options.chunk_rows)
    return how.rows >= query.shape[0]


def total_of(
    batch: Batch,
    scale: Tensor,
    options: Options,
    of: Shares | None,
    gather_negatives: bool,
    factor: float,
) -> Tensor:
    """``factor`` times the sum of what :func:`losses_of` gives."""
    keys, first, number = _compared(batch, options, of, gather_negatives)
    n = batch.query.shape[0]
    # float16 has few digits for the 1/n of a mean: it comes in with the gradient from above.
    late = factor if batch.query.dtype == torch.float16 else 1.0
    pull = scale.detach().new_full((n,), -1.0)
    if number.rows is not None:
        pull = pull / number.rows
    keys = batch.key if keys is None else keys
    how = sizes(batch.query, keys, _products(batch.query), options.normalize, options.chunk_rows)
    total = one_pass_total(
        batch.query, keys, scale, pull, factor / late, groups=number.groups, own=first,
        normalize=options.normalize, symmetric=options.symmetric, how=how,
    )  # fmt: skip
    total = total if late == 1.0 else late * total
    return total if number.rows is None else total + factor * pull.neg().log().sum()


def _compared(
    batch: Batch, options: Options, of: Shares | None, gather_negatives: bool
) -> tuple[Tensor | None, int, "_Number"]:
    """Keys that all queries are compared with, the first own one, and what is said of groups."""
    shared = batch.negatives if batch.negatives is not None and batch.negatives.dim() == 2 else None
    shared_groups = None if shared is None else batch.negative_groups
    keys, key_groups = batch.key, None if batch.groups is None else batch.groups[1]
    first = 0
    if of is not None:
        keys, first = gathered(keys, of), of.first
        key_groups = None if key_groups is None else gathered(key_groups, of)
        if shared is not None and gather_negatives:
            every = shares(shared, "even" if of.even else True, of.group)
            shared = gathered(shared, every)
            shared_groups = None if shared_groups is None else gathered(shared_groups, every)
    columns = [keys] if options.in_batch else []
    columns += [] if shared is None else [shared]
    number = _number(batch, options, key_groups, shared, shared_groups)
    if not columns:
        return None, first, number
    return torch.cat(columns) if len(columns) > 1 else columns[0], first, number


class _Number(NamedTuple):
    """Groups for the kernel, and how many positives each query has; None: the own key alone."""

    groups: Groups | None
    rows: Tensor | None


def _number(
    batch: Batch,
    options: Options,
    key_groups: Tensor | None,
    shared: Tensor | None,
    shared_groups: Tensor | None,
) -> _Number:
    if batch.groups is None or key_groups is None:
        return _Number(None, None)
    query_groups, own_groups = batch.groups
    compared = [key_groups] if options.in_batch else []
    compared += [] if shared_groups is None else [shared_groups]
    without = shared.shape[0] if shared is not None and shared_groups is None else 0
    counts = torch.zeros_like(query_groups, dtype=torch.int64)
    groups = None
    if compared:
        joined = torch.cat([each.long() for each in compared])
        found = matches(query_groups, joined, without)
        groups, counts = Groups(found.query, found.key, options.positive), found.counts
    if not options.positive:
        return _Number(groups, None)
    # The own key counts once, whether it is in the query's group or not.
    own = query_groups != own_groups if options.in_batch else torch.ones_like(counts)
    return _Number(groups, counts + own)


def _with_own_negatives(
    batch: Batch, scale: Tensor, options: Options, lse: Tensor, pulled: Tensor, number: _Number
) -> tuple[Tensor, Tensor, _Number]:
    """The negatives that each query has for itself: their scores fit, as they do themselves."""
    negatives = batch.negatives
    if negatives is None or negatives.shape[1] == 0:
        return lse, pulled, number
    scores = _pair_scores(batch.query.unsqueeze(1), negatives, options.normalize) * scale
    if batch.groups is not None and batch.negative_groups is not None:
        same = batch.negative_groups == batch.groups[0].unsqueeze(1)
        if options.positive and number.rows is not None:
            pulled = pulled + torch.where(same, scores, 0.0).sum(1)
            number = number._replace(rows=number.rows + same.sum(1))
        else:
            scores = scores.masked_fill(same, -torch.inf)
    return torch.logaddexp(lse, _logsumexp(scores)), pulled, number


def _of_keys(
    found: Similarities,
    own: Tensor,
    batch: Batch,
    options: Options,
    of: Shares | None,
    mine: slice,
) -> Tensor:
    """The loss of each key of this process, over the queries of all."""
    in_groups = options.positive and batch.groups is not None
    known = [found.column_lse, *([found.column_positive] if in_groups else [])]
    if of is None:
        lse, *pulled = (each[mine] for each in known)
    else:
        # Every process has seen its own queries; the rest of a key's sum is elsewhere.
        one_each = of._replace(counts=(1,) * of.processes)
        parts = torch.stack([each[: of.total] for each in known]).unsqueeze(0)
        parts = gathered(parts, one_each)[:, :, mine]
        lse = torch.logsumexp(parts[:, 0], 0)
        pulled = [parts[:, 1].sum(0)] if in_groups else []
    if not in_groups or batch.groups is None:
        return _loss(lse, own, None)
    query_groups, key_groups = batch.groups
    every = query_groups if of is None else gathered(query_groups, of)
    counts = matches(key_groups, every).counts + (query_groups != key_groups)
    return _loss(lse, pulled[0], counts)


def _loss(lse: Tensor, pulled: Tensor, number: Tensor | None) -> Tensor:
    if number is None:
        return lse - pulled
    number = number.to(lse.dtype)
    return lse - pulled / number - number.log()


def _products(query: Tensor) -> torch.dtype:
    device = query.device.type
    if query.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


def _pair_scores(query: Tensor, key: Tensor, normalize: bool) -> Tensor:
    """Products of pairs over the last dimension, in float32 or float64."""
    wide = accumulation_dtype(query.dtype)
    query, key = query.to(wide), key.to(wide)
    if normalize:
        query, key = (functional.normalize(each, dim=-1) for each in (query, key))
    return (query * key).sum(-1)


def _logsumexp(scores: Tensor) -> Tensor:
    """Over the last dimension; where all is masked -inf with a gradient of 0 instead of NaN."""
    peak = scores.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    total = torch.exp(scores - peak).sum(-1)
    some = total > 0
    return torch.where(some, torch.log(torch.where(some, total, 1.0)), -torch.inf) + peak.squeeze(
        -1
    )
