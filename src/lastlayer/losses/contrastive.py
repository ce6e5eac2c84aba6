"""InfoNCE: the right key among all keys of the batch, for each query."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer._checks import (
    NUMBER_OR_TENSOR,
    check_choice,
    check_chunk,
    check_device,
    check_dtype,
    check_positive,
    check_reduction,
    check_scores,
    check_tensor,
)
from lastlayer._processes import Shares, check_gather, gathered, shares, summed
from lastlayer._torch import accumulation_dtype, values_are_checked
from lastlayer.fused.similarity import (
    Groups,
    Pairs,
    Similarities,
    scale_of,
    similarities,
    total_loss,
)

GroupsOrPair = Tensor | tuple[Tensor, Tensor]
SAME_GROUP = ("ignore", "positive")
# Ranks that no query and no key has: a query whose group no key is in, and a key without a group.
_UNMATCHED, _WITHOUT = -1, -2


def info_nce(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.07,
    symmetric: bool = False,
    in_batch: bool = True,
    groups: GroupsOrPair | None = None,
    negative_groups: Tensor | None = None,
    same_group: str = "ignore",
    normalize: bool = True,
    gather: bool | str = False,
    gather_negatives: bool = True,
    process_group: Any = None,
    reduction: str = "mean",
    chunk_rows: int | str = "auto",
) -> Tensor:
    r"""Cross entropy of each query against its own key, with the other keys as negatives.

    .. math:: L_i = \log \sum_{j \in A_i} e^{s_{ij}} - \frac{1}{|P_i|} \sum_{j \in P_i} s_{ij}
              - \log |P_i|, \qquad s_{ij} = \langle \hat q_i, \hat k_j \rangle / T

    Without groups the positives :math:`P_i` are the own key alone and :math:`A_i` all keys. A pair
    that is in the batch twice is then a negative of itself, and no encoder gets below log 2. With
    ``groups``, other keys and negatives of the query's group are false negatives and are left out
    of :math:`A_i`; with ``same_group="positive"`` they are positives instead. The loss is then the
    divergence of the probabilities from the uniform distribution over the positives: its gradient
    is that of SupCon's average outside the logarithm, and a perfect encoder reaches 0 however many
    positives there are.

    ``symmetric`` is the mean of this and of the same with queries and keys exchanged. Negatives are
    keys only: they are not in the sum over queries.

    Similarities are held for some queries at a time, in the forward and in the backward pass; one
    pass gives the normalisers of queries and keys. Products of unit vectors in half precision are
    made in float16, also for bfloat16, whose fewer bits are felt at low temperatures.

    Across processes, ``gather=True`` takes the keys of all of them. Each computes its own queries'
    part; gradients go back to the process that a key came from. Once averaged, as
    DistributedDataParallel does, gradients of encoders and of the temperature are those of one
    process with the whole batch, and so is the loss that "mean" and "sum" return.

    Cost: 2nmd operations forward and 6nmd backward, less for the last queries, whose similarities
    are kept, and memory that grows with n + m. One-way losses that are reduced take 6nmd in all,
    since the forward pass makes the gradients; so do symmetric ones of pairs alone whose
    similarities can all be held. Negatives of each query's own make an exception.

    Args:
        query: ``(n, d)``.
        key: ``(n, d)``: key i belongs to query i.
        negatives: further keys, ``(m, d)`` for all queries, or ``(n, m, d)``, m for each.
        temperature: T, a number, or a tensor without dimensions that may be learned.
        symmetric: keys look for their query too.
        in_batch: whether the keys of other queries are negatives; without them ``negatives`` are
            needed.
        groups: integers ``(n,)``, the same for pairs that belong together; or one such tensor for
            queries and one for keys. An own key is always a positive.
        negative_groups: groups of the negatives, ``(m,)`` or ``(n, m)``; without them negatives are
            in no group, and none is left out.
        same_group: what keys and negatives of the query's group are, its own key aside: "ignore"
            leaves them out, "positive" makes them positives.
        normalize: similarities are cosines; else products. A vector of zeros stays one and gets no
            gradient.
        gather: False; True takes keys, groups and negatives of all processes, whose batches may
            differ in size, and waits for the sizes; "even" promises batches of one size, and
            negatives of one size, and does not wait.
        gather_negatives: False where all processes have the same negatives, as from a
            :class:`lastlayer.NegativeQueue` that was given the keys of all.
        process_group: of ``torch.distributed``; by default that of all processes.
        reduction: "mean" over queries, "sum" or "none". Across processes "none" gives the losses of
            this process's queries; of what each makes of them gradients are to be summed, not
            averaged.
        chunk_rows: queries whose similarities are held at a time, "auto", or "low", which holds
            fewer, and none from forward to backward.

    Returns:
        The loss in float32, or in float64 from float64.

    Example:
        >>> import torch
        >>> query = torch.eye(3)
        >>> key = torch.eye(3)
        >>> loss = info_nce(query, key, temperature=0.05)
        >>> bool(loss < 1e-6)
        True
        >>> twice = torch.cat([query, query])  # every pair is there twice
        >>> info_nce(twice, twice, temperature=0.05)
        tensor(0.6931)
        >>> groups = torch.tensor([0, 1, 2, 0, 1, 2])
        >>> bool(info_nce(twice, twice, temperature=0.05, groups=groups).abs() < 1e-6)
        True

    Reference:
        van den Oord et al., Representation learning with contrastive predictive coding, 2018,
        arXiv:1807.03748; Khosla et al., Supervised contrastive learning, NeurIPS 2020,
        arXiv:2004.11362; Radford et al., Learning transferable visual models from natural language
        supervision, ICML 2021, arXiv:2103.00020 (symmetric).
    """
    check_reduction(reduction)
    _check_temperature(temperature)
    check_choice("same_group", same_group, SAME_GROUP)
    chunk_rows = check_chunk(chunk_rows)
    check_gather(gather, process_group)
    _check_vectors(query, key, negatives, symmetric, in_batch)
    pair = _pair(groups, query)
    if negative_groups is not None:
        _check_negative_groups(negative_groups, negatives, pair, query)
    of = shares(query, gather, process_group) if gather else None
    batch = _Batch(
        query, key, negatives, pair, negative_groups, scale_of(temperature, query), symmetric,
        in_batch, same_group == "positive", normalize, chunk_rows,
    )  # fmt: skip
    compared = _compared(batch, of, gather_negatives)
    if reduction == "none":
        return _losses(batch, compared, of)
    rows = query.shape[0] if of is None else of.total
    factor = 1.0 / max(1, rows) if reduction == "mean" else 1.0
    if of is not None:
        factor *= of.processes
    if _in_one_pass(batch, compared, of):
        number = compared.number
        pull = None if number is None else -number.to(batch.scale.dtype).reciprocal()
        total = total_loss(compared.pairs, pull, factor, symmetric=symmetric)  # type: ignore[arg-type]
    else:
        total = _losses(batch, compared, of).sum() * factor
    if of is None:
        return total
    # The loss of all processes, whose gradients here are right once they are averaged.
    return total + (summed(total, of.group) / of.processes - total.detach())


class _Batch(NamedTuple):
    """What the user gave, checked."""

    query: Tensor
    key: Tensor
    negatives: Tensor | None
    groups: tuple[Tensor, Tensor] | None
    negative_groups: Tensor | None
    scale: Tensor
    symmetric: bool
    in_batch: bool
    positive: bool
    normalize: bool
    chunk_rows: int | str


class _Compared(NamedTuple):
    """What all queries are compared with; None where each has negatives of its own alone."""

    pairs: Pairs | None
    first: int
    """The column of the first own key."""
    number: Tensor | None
    """How many positives each query has; None: the own key alone."""


def _compared(batch: _Batch, of: Shares | None, gather_negatives: bool) -> _Compared:
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
    columns = [keys] if batch.in_batch else []
    columns += [] if shared is None else [shared]
    groups, number = _matches(batch, key_groups, shared, shared_groups)
    if not columns:
        return _Compared(None, first, number)
    keys = torch.cat(columns) if len(columns) > 1 else columns[0]
    own = first if batch.in_batch else keys.shape[0]
    how = batch.normalize, batch.chunk_rows
    return _Compared(Pairs(batch.query, keys, batch.scale, groups, own, *how), first, number)


def _matches(
    batch: _Batch, key_groups: Tensor | None, shared: Tensor | None, shared_groups: Tensor | None
) -> tuple[Groups | None, Tensor | None]:
    """Groups for the kernel, and how many positives each query has among what is compared."""
    if batch.groups is None or key_groups is None:
        return None, None
    query_groups, own_groups = batch.groups
    compared = [key_groups] if batch.in_batch else []
    compared += [] if shared_groups is None else [shared_groups]
    without = shared.shape[0] if shared is not None and shared_groups is None else 0
    counts = torch.zeros_like(query_groups, dtype=torch.int64)
    groups = None
    if compared:
        joined = torch.cat([each.long() for each in compared])
        query_ranks, key_ranks, counts = _ranks(query_groups, joined)
        if without:
            key_ranks = torch.cat([key_ranks, key_ranks.new_full((without,), _WITHOUT)])
        groups = Groups(query_ranks, key_ranks, batch.positive)
    if not batch.positive:
        return groups, None
    # The own key counts once, whether it is in the query's group or not.
    own = query_groups != own_groups if batch.in_batch else torch.ones_like(counts)
    return groups, counts + own


def _ranks(query_groups: Tensor, key_groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int32 ranks, equal where groups are, and how many keys each query matches; no host sync."""
    query_groups, key_groups = query_groups.long(), key_groups.long()
    in_order = key_groups.sort().values
    since = torch.searchsorted(in_order, query_groups)
    until = torch.searchsorted(in_order, query_groups, right=True)
    query = torch.where(until > since, since, _UNMATCHED).int()
    return query, torch.searchsorted(in_order, key_groups).int(), until - since


def _in_one_pass(batch: _Batch, compared: _Compared, of: Shares | None) -> bool:
    """Whether the sum of losses is :func:`total_loss`, which makes gradients in the forward pass.

    With losses of keys only where all that a key is compared with is held at a time; further
    negatives and groups, which they see otherwise than queries do, take two passes.
    """
    if compared.pairs is None or not batch.in_batch:
        return False
    if batch.negatives is not None and batch.negatives.dim() == 3:
        return False
    if not batch.symmetric:
        return True
    only_pairs = batch.negatives is None and batch.groups is None and of is None
    return only_pairs and compared.pairs.in_one_chunk


def _losses(batch: _Batch, compared: _Compared, of: Shares | None) -> Tensor:
    """One loss per query of this process."""
    pairs, first, number = compared
    if pairs is None:
        lse = pulled = _own_scores(batch)
    else:
        found = similarities(pairs, columns=batch.symmetric)
        lse, pulled = found.row_lse, found.row_positive
        if not batch.in_batch:
            own = _own_scores(batch)
            lse, pulled = torch.logaddexp(lse, own), pulled + own
    if batch.negatives is not None and batch.negatives.dim() == 3:
        lse, pulled, number = _with_own_negatives(batch, lse, pulled, number)
    losses = _loss(lse, pulled, number)
    if pairs is None or not batch.symmetric:
        return losses
    mine = slice(first, first + batch.query.shape[0])
    return 0.5 * (losses + _of_keys(found, pulled, batch, of, mine))


def _own_scores(batch: _Batch) -> Tensor:
    return _pair_scores(batch.query, batch.key, batch.normalize) * batch.scale


def _with_own_negatives(
    batch: _Batch, lse: Tensor, pulled: Tensor, number: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Adds the negatives that each query has for itself: where they fit, so do their scores."""
    negatives = batch.negatives
    if negatives is None or negatives.shape[1] == 0:
        return lse, pulled, number
    scores = _pair_scores(batch.query.unsqueeze(1), negatives, batch.normalize) * batch.scale
    if batch.groups is not None and batch.negative_groups is not None:
        same = batch.negative_groups == batch.groups[0].unsqueeze(1)
        if number is not None:
            pulled = pulled + torch.where(same, scores, 0.0).sum(1)
            number = number + same.sum(1)
        else:
            scores = scores.masked_fill(same, -torch.inf)
    return torch.logaddexp(lse, _logsumexp(scores)), pulled, number


def _of_keys(
    found: Similarities, own: Tensor, batch: _Batch, of: Shares | None, mine: slice
) -> Tensor:
    """The loss of each key of this process, over the queries of all."""
    in_groups = batch.positive and batch.groups is not None
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
    *_, counts = _ranks(key_groups, every)
    return _loss(lse, pulled[0], counts + (query_groups != key_groups))


def _loss(lse: Tensor, pulled: Tensor, number: Tensor | None) -> Tensor:
    if number is None:
        return lse - pulled
    number = number.to(lse.dtype)
    return lse - pulled / number - number.log()


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
    logs = torch.where(some, torch.log(torch.where(some, total, 1.0)), -torch.inf)
    return logs + peak.squeeze(-1)


def _check_temperature(temperature: Any) -> None:
    """A number above 0, or a floating tensor of one such number without dimensions."""
    if isinstance(temperature, Tensor):
        if not temperature.is_floating_point():
            raise TypeError(
                f"temperature: expected {NUMBER_OR_TENSOR}, got a tensor of {temperature.dtype}"
            )
        if temperature.dim():
            raise ValueError(
                "temperature: expected a tensor without dimensions, one number for all pairs, got "
                f"shape {tuple(temperature.shape)}"
            )
        if not values_are_checked(temperature):
            return
        temperature = temperature.item()
    check_positive("temperature", temperature, NUMBER_OR_TENSOR)


def _check_vectors(query: Any, key: Any, negatives: Any, symmetric: bool, in_batch: bool) -> None:
    """Queries and keys of one shape, negatives ``(m, d)`` for all queries or ``(n, m, d)``."""
    check_scores(query, name="query")
    if query.dim() != 2:
        raise ValueError(f"query: expected shape (n, d), got {tuple(query.shape)}")
    _check_like("key", key, query)
    if key.shape != query.shape:
        raise ValueError(
            f"key: expected the shape of query, {tuple(query.shape)}, key i for query i, got "
            f"{tuple(key.shape)}; further keys are negatives"
        )
    if symmetric and not in_batch:
        raise ValueError(
            "symmetric: expected False where in_batch is False, got True; keys have no queries "
            "but their own"
        )
    if negatives is None:
        if not in_batch:
            raise ValueError(
                "negatives: expected some where in_batch is False, got None; there would be "
                "nothing to compare the own key with"
            )
        return
    _check_like("negatives", negatives, query)
    n, d = query.shape
    fits = negatives.dim() in (2, 3) and negatives.shape[-1] == d
    if not fits or (negatives.dim() == 3 and negatives.shape[0] != n):
        raise ValueError(
            f"negatives: expected shape (m, {d}), the same for all queries, or ({n}, m, {d}), own "
            f"ones for each, got {tuple(negatives.shape)}"
        )


def _check_like(name: str, vectors: Any, query: Tensor) -> None:
    check_scores(vectors, name=name)
    check_device(name, vectors, query, "query")
    check_dtype(name, vectors, query, "query")


def _pair(groups: Any, query: Tensor) -> tuple[Tensor, Tensor] | None:
    """Groups of queries and of keys."""
    if groups is None:
        return None
    rows = query.shape[:1]
    if not isinstance(groups, (tuple, list)):
        check_groups("groups", groups, rows, query, "pair")
        return groups, groups
    if len(groups) != 2:
        raise ValueError(
            f"groups: expected a tensor, or one for queries and one for keys, got {len(groups)}"
        )
    check_groups("groups[0]", groups[0], rows, query, "query")
    check_groups("groups[1]", groups[1], rows, query, "key")
    return groups[0], groups[1]


def _check_negative_groups(
    negative_groups: Any, negatives: Tensor | None, pair: Any, query: Tensor
) -> None:
    for name, other in (("negatives", negatives), ("groups", pair)):
        if other is None:
            raise ValueError(
                f"negative_groups: expected None without {name}, got groups of negatives"
            )
    shape = negatives.shape[:-1]  # type: ignore[union-attr]
    check_groups("negative_groups", negative_groups, shape, query, "negative")


def check_groups(name: str, groups: Any, shape: torch.Size, like: Tensor, each: str) -> None:
    """Integers of a shape on the device of ``like``."""
    check_tensor(name, groups)
    if groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool:
        raise TypeError(f"{name}: expected an integer tensor, got {groups.dtype}")
    if groups.shape != shape:
        raise ValueError(
            f"{name}: expected shape {tuple(shape)}, one group per {each}, got "
            f"{tuple(groups.shape)}"
        )
    check_device(name, groups, like, "query" if each != "key" else "keys")


class InfoNCELoss(torch.nn.Module):
    r""":func:`info_nce` as a module, with a temperature that can be learned.

    What is learned is ``log_scale`` = log(1/T), so that the temperature stays above 0 and a step of
    an optimiser changes it by a factor. Before each pass in training it is put back into its
    bounds, where it keeps its gradient: a clamp inside the loss would leave a scale that is beyond
    it without one.

    Args:
        temperature: T, or where it starts.
        learn_temperature: makes ``log_scale`` a parameter.
        max_scale: the largest 1/T, 100 as in CLIP, or None for any; only where T is learned.
        options: as :func:`info_nce` has them: symmetric, in_batch, same_group, normalize, gather,
            gather_negatives, process_group, reduction, chunk_rows.

    Example:
        >>> import torch
        >>> loss = InfoNCELoss(0.07, learn_temperature=True, symmetric=True)
        >>> image, text = torch.randn(8, 16), torch.randn(8, 16)
        >>> loss(image, text).backward()
        >>> loss.log_scale.grad.shape
        torch.Size([])
    """

    log_scale: Tensor

    def __init__(
        self,
        temperature: Any = 0.07,
        *,
        learn_temperature: bool = False,
        max_scale: float | None = 100.0,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(temperature, Tensor):
            raise TypeError(
                "temperature: expected a number, got a tensor; learn_temperature=True learns it"
            )
        _check_temperature(temperature)
        _check_options(options)
        if max_scale is not None:
            max_scale = check_positive("max_scale", max_scale)
        if learn_temperature and max_scale is not None and 1.0 / temperature > max_scale * 1.000001:
            raise ValueError(
                f"temperature: expected at least 1/max_scale = {1.0 / max_scale:.6g}, got "
                f"{temperature}; raise max_scale, or give None"
            )
        self.learn_temperature, self.max_scale, self.options = learn_temperature, max_scale, options
        log_scale = torch.tensor(-math.log(temperature))
        if learn_temperature:
            self.log_scale = torch.nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    @property
    def temperature(self) -> float:
        """T as it is now; reading it waits for the device."""
        return math.exp(-float(self.log_scale.detach()))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        negatives: Tensor | None = None,
        *,
        groups: GroupsOrPair | None = None,
        negative_groups: Tensor | None = None,
    ) -> Tensor:
        """The loss, see :func:`info_nce`."""
        if self.learn_temperature and self.training and self.max_scale is not None:
            with torch.no_grad():
                self.log_scale.clamp_(max=math.log(self.max_scale))
        return info_nce(
            query,
            key,
            negatives,
            temperature=torch.exp(-self.log_scale),
            groups=groups,
            negative_groups=negative_groups,
            **self.options,
        )

    def extra_repr(self) -> str:
        """What it was made with."""
        shown = [f"learn_temperature={self.learn_temperature}", f"max_scale={self.max_scale}"]
        return ", ".join(shown + [f"{name}={value!r}" for name, value in self.options.items()])


def _check_options(options: dict[str, Any]) -> None:
    known = (
        "symmetric", "in_batch", "same_group", "normalize", "gather", "gather_negatives",
        "process_group", "reduction", "chunk_rows",
    )  # fmt: skip
    for name in options:
        if name not in known:
            raise TypeError(f"{name}: expected one of the options {known}")
    check_reduction(options.get("reduction", "mean"))
    check_choice("same_group", options.get("same_group", "ignore"), SAME_GROUP)
    check_chunk(options.get("chunk_rows", "auto"))
