"""InfoNCE: a contrastive loss of matching pairs, with the other keys of the batch as negatives."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

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
from lastlayer._torch import accumulation_dtype, as_numpy, autocast_dtype, values_are_checked
from lastlayer.fused.scores import fits_one_cpu_product
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
# Ranks that match nothing: of a query whose group has no keys, and of a key without a group.
_UNMATCHED, _WITHOUT = -1, -2
# On a CPU: up to this many pairs the host needs more time than the products, and the shortest
# vectors whose squares are precise in float32.
_FEW_PAIRS, _SHORTEST = 1 << 16, 1e-15


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
    r"""InfoNCE: cross entropy of finding the key of each query among all keys of the batch.

    .. math:: L_i = \log \sum_{j \in A_i} e^{s_{ij}} - \frac{1}{|P_i|} \sum_{j \in P_i} s_{ij}
              - \log |P_i|, \qquad s_{ij} = \langle \hat q_i, \hat k_j \rangle / T

    Without groups the only positive of a query, :math:`P_i`, is its own key, and :math:`A_i` are
    all keys. If the batch has a pair twice, each copy is then a negative of the other, and no
    encoder gets below log 2. With ``groups``, other keys and negatives of the query's group are
    false negatives and are left out of :math:`A_i`; with ``same_group="positive"`` they are
    positives instead. The loss is then the divergence of the probabilities from the uniform
    distribution over the positives: its gradient is that of SupCon with the mean outside the
    logarithm, and its minimum is 0 for any number of positives.

    ``symmetric`` is the mean of this loss and the same with queries and keys exchanged. Negatives
    are additional keys only: they are not in the sum over queries.

    The matrix of similarities is never stored: it is computed in chunks of queries, in forward and
    in backward. One pass computes the normalisers of queries and keys. On a GPU products of
    half-precision unit vectors are computed in float16, even for bfloat16 inputs, whose lower
    precision matters at low temperatures.

    With several processes, ``gather=True`` compares each query with the keys of all processes. Each
    process computes the loss of its own queries; gradients go back to the process that a key came
    from. Averaged over processes, as DistributedDataParallel does, gradients of encoders and of the
    temperature are those of one process with the whole batch. The loss returned with "mean" and
    "sum" is that of the whole batch, too.

    Cost: 2nmd operations in forward and 6nmd in backward (less for the last chunk of queries, whose
    similarities are kept), and memory proportional to n + m. With "mean" and "sum" a one-way loss
    takes 6nmd in total, since the forward pass computes the gradients; so does a symmetric loss
    without negatives, groups and ``gather`` if all similarities fit in one chunk. With negatives
    ``(n, m, d)`` or ``in_batch=False`` this does not apply.

    Args:
        query: ``(n, d)``.
        key: ``(n, d)``: key i belongs to query i.
        negatives: additional keys: ``(m, d)`` for all queries, or ``(n, m, d)``, m per query.
        temperature: T, a number, or a 0-dimensional tensor, which may need a gradient.
        symmetric: whether to also find the query of each key.
        in_batch: whether the keys of other queries are negatives; if not, ``negatives`` are
            required.
        groups: integers ``(n,)``, equal for pairs that belong together; or a pair of such tensors,
            for queries and for keys. The own key of a query is always a positive.
        negative_groups: groups of the negatives, ``(m,)`` or ``(n, m)``; by default negatives have
            no group, and none is left out.
        same_group: the role of other keys and negatives in the query's group: "ignore" leaves them
            out, "positive" makes them positives.
        normalize: whether similarities are cosines; if not, they are dot products. A vector of
            zeros stays zero and gets no gradient.
        gather: whether to use keys, groups and negatives of all processes. With True their batch
            sizes may differ, and are exchanged first; "even" promises that all processes have equal
            batch sizes and equally many negatives, which saves the exchange.
        gather_negatives: set to False if all processes have the same negatives, for example from a
            :class:`lastlayer.NegativeQueue` with the keys of all processes.
        process_group: group of ``torch.distributed``; by default all processes.
        reduction: "mean" over queries, "sum" or "none". With several processes "none" gives the
            losses of this process's queries; gradients of a loss computed from these must be summed
            over processes, not averaged.
        chunk_rows: number of queries per chunk, "auto", or "low", which takes smaller chunks and
            keeps none for backward.

    Returns:
        The loss in float32, or in float64 from float64 vectors.

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
    if of is None and reduction != "none" and (loss := _of_few_pairs(batch, reduction)) is not None:
        return loss
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
    # The loss of all processes, with gradients that are right once averaged over processes.
    return total + (summed(total, of.group) / of.processes - total.detach())


class _Batch(NamedTuple):
    """Checked arguments of :func:`info_nce`."""

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
    """Pairs of the queries and the keys shared by all queries; None if there are no such keys."""

    pairs: Pairs | None
    first: int
    """The column of the first query's own key."""
    number: Tensor | None
    """Number of positives of each query; None if it is its own key only."""


def _of_few_pairs(batch: _Batch, reduction: str) -> Tensor | None:
    """A small loss on a CPU by torch's own operations, which take the host half the time.

    None for other losses, and where torch's operations are not exact: for vectors that are zero or
    whose squares are out of range, and for a loss that is not finite.
    """
    query, key, n = batch.query, batch.key, batch.query.shape[0]
    plain = batch.negatives is None and batch.groups is None and batch.in_batch
    if not plain or not 0 < n * n <= _FEW_PAIRS or autocast_dtype(query) is not None:
        return None
    if not fits_one_cpu_product(query, n, batch.chunk_rows):
        return None
    if batch.normalize:
        lengths = [torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (query, key)]
        known = [as_numpy(each.detach()) for each in lengths]
        if not all(each.min() > _SHORTEST and each.max() < 1 / _SHORTEST for each in known):
            return None
        query, key = query / lengths[0], key / lengths[1]
    scores, own = (query @ key.T) * batch.scale, torch.arange(n)
    loss = cross_entropy(scores, own, reduction=reduction)
    if batch.symmetric:
        loss = 0.5 * (loss + cross_entropy(scores.T, own, reduction=reduction))
    return loss if math.isfinite(loss.item()) else None


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
    """Groups for the kernel, and the number of positives of each query, None without any."""
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
    # The own key counts once, even if it is not in the query's group.
    own = query_groups != own_groups if batch.in_batch else torch.ones_like(counts)
    return groups, counts + own


def _ranks(query_groups: Tensor, key_groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int32 ranks, equal for equal groups, and how many keys match each query; no host sync."""
    query_groups, key_groups = query_groups.long(), key_groups.long()
    in_order = key_groups.sort().values
    since = torch.searchsorted(in_order, query_groups)
    until = torch.searchsorted(in_order, query_groups, right=True)
    query = torch.where(until > since, since, _UNMATCHED).int()
    return query, torch.searchsorted(in_order, key_groups).int(), until - since


def _in_one_pass(batch: _Batch, compared: _Compared, of: Shares | None) -> bool:
    """Whether :func:`total_loss` can be used, which computes gradients in the forward pass.

    A symmetric loss needs all similarities of a key in one chunk. It takes two passes with
    negatives and groups, which are treated differently for keys than for queries.
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
    """Adds negatives ``(n, m, d)``. Their scores take less memory than they do, and are stored."""
    negatives = batch.negatives
    if negatives is None:
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
    """The loss of each key of this process, over the queries of all processes."""
    in_groups = batch.positive and batch.groups is not None
    known = [found.column_lse, *([found.column_positive] if in_groups else [])]
    if of is None:
        lse, *pulled = (each[mine] for each in known)
    else:
        # Each process has the sums over its own queries only.
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
    """Dot products over the last dimension, in float32 or float64."""
    wide = accumulation_dtype(query.dtype)
    query, key = query.to(wide), key.to(wide)
    if normalize:
        query, key = _unit(query), _unit(key)
    return (query * key).sum(-1)


def _unit(vectors: Tensor) -> Tensor:
    """Vectors divided by their lengths; a vector of zeros stays zero and gets no gradient.

    Dividing by the largest entry first keeps the squares in range.
    """
    if not vectors.shape[-1]:
        return vectors
    size = vectors.detach().abs().amax(-1, keepdim=True)
    vectors = vectors / torch.where(size == 0, 1.0, size)
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return torch.where(length == 0, 0.0, vectors / torch.where(length == 0, 1.0, length))


def _logsumexp(scores: Tensor) -> Tensor:
    """Over the last dimension; a fully masked row gives -inf, with gradient 0 instead of NaN."""
    if not scores.shape[-1]:
        return scores.sum(-1) - torch.inf
    peak = scores.detach().amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    total = torch.exp(scores - peak).sum(-1)
    some = total > 0
    logs = torch.where(some, torch.log(torch.where(some, total, 1.0)), -torch.inf)
    return logs + peak.squeeze(-1)


def _check_temperature(temperature: Any) -> None:
    """Checks for a number above 0, or a 0-dimensional floating tensor of one."""
    if isinstance(temperature, Tensor):
        if not temperature.is_floating_point():
            raise TypeError(
                f"temperature: expected {NUMBER_OR_TENSOR}, got a tensor of {temperature.dtype}"
            )
        if temperature.dim():
            raise ValueError(
                "temperature: expected a 0-dimensional tensor, one number for all pairs, got "
                f"shape {tuple(temperature.shape)}"
            )
        if not values_are_checked(temperature):
            return
        temperature = temperature.item()
    check_positive("temperature", temperature, NUMBER_OR_TENSOR)


def _check_vectors(query: Any, key: Any, negatives: Any, symmetric: bool, in_batch: bool) -> None:
    """Checks queries and keys of equal shape, and negatives ``(m, d)`` or ``(n, m, d)``."""
    check_scores(query, name="query")
    if query.dim() != 2:
        raise ValueError(f"query: expected shape (n, d), got {tuple(query.shape)}")
    _check_like("key", key, query)
    if key.shape != query.shape:
        raise ValueError(
            f"key: expected the shape of query, {tuple(query.shape)}, key i for query i, got "
            f"{tuple(key.shape)}; give additional keys as negatives"
        )
    if symmetric and not in_batch:
        raise ValueError(
            "symmetric: expected False with in_batch=False, got True; a key would be compared with "
            "no other query"
        )
    if negatives is None:
        if not in_batch:
            raise ValueError(
                "negatives: expected a tensor with in_batch=False, got None; the key of a query "
                "would have no other keys to be compared with"
            )
        return
    _check_like("negatives", negatives, query)
    n, d = query.shape
    fits = negatives.dim() in (2, 3) and negatives.shape[-1] == d
    if not fits or (negatives.dim() == 3 and negatives.shape[0] != n):
        raise ValueError(
            f"negatives: expected shape (m, {d}), shared by all queries, or ({n}, m, {d}), m per "
            f"query, got {tuple(negatives.shape)}"
        )


def _check_like(name: str, vectors: Any, query: Tensor) -> None:
    check_scores(vectors, name=name)
    check_device(name, vectors, query, "query")
    check_dtype(name, vectors, query, "query")


def _pair(groups: Any, query: Tensor) -> tuple[Tensor, Tensor] | None:
    """Groups of queries and of keys, checked."""
    if groups is None:
        return None
    rows = query.shape[:1]
    if not isinstance(groups, (tuple, list)):
        check_groups("groups", groups, rows, query, "pair")
        return groups, groups
    if len(groups) != 2:
        raise ValueError(
            f"groups: expected a tensor, or two (for queries and for keys), got {len(groups)}"
        )
    check_groups("groups[0]", groups[0], rows, query, "query")
    check_groups("groups[1]", groups[1], rows, query, "key")
    return groups[0], groups[1]


def _check_negative_groups(
    negative_groups: Any, negatives: Tensor | None, pair: Any, query: Tensor
) -> None:
    for name, other in (("negatives", negatives), ("groups", pair)):
        if other is None:
            raise ValueError(f"negative_groups: expected None without {name}, got a tensor")
    shape = negatives.shape[:-1]  # type: ignore[union-attr]
    check_groups("negative_groups", negative_groups, shape, query, "negative")


def check_groups(name: str, groups: Any, shape: torch.Size, like: Tensor, each: str) -> None:
    """Checks for integers of the given shape, on the device of ``like``."""
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

    The parameter is ``log_scale`` = log(1/T), so that T stays above 0 and an optimiser step changes
    it by a factor. In training mode the parameter is clamped to ``max_scale`` before each forward
    pass. A clamp inside the loss would instead leave a parameter beyond the bound without a
    gradient.

    Args:
        temperature: T, or its initial value if it is learned.
        learn_temperature: whether ``log_scale`` is a parameter.
        max_scale: the largest 1/T, 100 as in CLIP, or None for no limit; only for a learned T.
        options: other options of :func:`info_nce`: symmetric, in_batch, same_group, normalize,
            gather, gather_negatives, process_group, reduction, chunk_rows.

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
                "temperature: expected a number, got a tensor; use learn_temperature=True to learn "
                "the temperature"
            )
        _check_temperature(temperature)
        _check_options(options)
        if max_scale is not None:
            max_scale = check_positive("max_scale", max_scale)
        if learn_temperature and max_scale is not None and 1.0 / temperature > max_scale * 1.000001:
            raise ValueError(
                f"temperature: expected at least 1/max_scale = {1.0 / max_scale:.6g}, got "
                f"{temperature}; raise max_scale or set it to None"
            )
        self.learn_temperature, self.max_scale, self.options = learn_temperature, max_scale, options
        log_scale = torch.tensor(-math.log(temperature))
        if learn_temperature:
            self.log_scale = torch.nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    @property
    def temperature(self) -> float:
        """The current T; reading it is a host sync."""
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
