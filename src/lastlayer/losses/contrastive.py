"""InfoNCE: the right key among all keys of the batch, for each query."""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_chunk_rows, check_reduction
from lastlayer._torch import accumulation_dtype
from lastlayer.losses import _contrastive_checks as checks
from lastlayer.losses._contrastive_terms import Batch, Options, is_one_pass, losses_of, total_of
from lastlayer.losses._gathered import Shares, check_gather, shares, summed

GroupsOrPair = Tensor | tuple[Tensor, Tensor]


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
    same_group: str = "positive",
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
    ``groups``, keys of the query's group are positives too, or are left out of :math:`A_i`. The
    loss is the divergence of the probabilities from the uniform distribution over the positives:
    its gradient is that of SupCon's average outside the logarithm, and a perfect encoder reaches 0
    however many positives there are.

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
    are kept, and a memory that grows with n + m. Where losses are reduced, and no query has
    negatives of its own, the forward pass makes the gradients, and 6nmd are all: of one-way losses,
    and of symmetric ones of pairs alone whose similarities can all be held.

    Args:
        query: ``(n, d)``.
        key: ``(n, d)``: key i belongs to query i.
        negatives: further keys, ``(m, d)`` for all queries, or ``(n, m, d)``, m for each.
        temperature: T, a number, or a tensor without dimensions that may be learnt.
        symmetric: keys look for their query too.
        in_batch: whether the keys of other queries are negatives; without them ``negatives`` are
            needed.
        groups: integers ``(n,)``, the same for pairs that belong together; or one such tensor for
            queries and one for keys. An own key is always a positive.
        negative_groups: groups of the negatives, ``(m,)`` or ``(n, m)``; without them negatives are
            in no group.
        same_group: "positive", or "ignore": keys of the query's group but its own are left out.
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
    checks.check_temperature(temperature)
    checks.check_same_group(same_group)
    check_chunk_rows(chunk_rows)
    checks.check_vectors(query, key)
    check_gather(gather, process_group)
    if negatives is not None:
        checks.check_negatives(negatives, query)
    elif not in_batch:
        raise ValueError(
            "negatives: expected some where in_batch is False, got None; there would be nothing "
            "to compare the own key with"
        )
    if symmetric and not in_batch:
        raise ValueError(
            "symmetric: expected False where in_batch is False, got True; keys have no queries "
            "but their own"
        )
    pair = _pair(groups, query)
    if negative_groups is not None:
        _check_negative_groups(negative_groups, negatives, pair, query)
    of = shares(query, gather, process_group) if gather else None
    batch, scale = Batch(query, key, negatives, pair, negative_groups), _scale(temperature, query)
    options = Options(symmetric, in_batch, same_group == "positive", normalize, chunk_rows)
    if reduction == "none":
        return losses_of(batch, scale, options, of, gather_negatives)
    rows = query.shape[0] if of is None else of.total
    factor = 1.0 / max(1, rows) if reduction == "mean" else 1.0
    if of is not None:
        factor *= of.processes
    if is_one_pass(batch, scale, options, of):
        total = total_of(batch, scale, options, of, gather_negatives, factor)
    else:
        total = losses_of(batch, scale, options, of, gather_negatives).sum() * factor
    return total if of is None else _over_processes(total, of)


def _over_processes(mine: Tensor, of: Shares) -> Tensor:
    """The reduced loss of all, whose gradients here are right once they are averaged."""
    return mine + (summed(mine, of) / of.processes - mine.detach())


def _scale(temperature: float | Tensor, query: Tensor) -> Tensor:
    wide = accumulation_dtype(query.dtype)
    if isinstance(temperature, Tensor):
        return temperature.to(query.device, wide).reciprocal()
    return torch.full((), 1.0 / temperature, dtype=wide, device=query.device)


def _pair(groups: Any, query: Tensor) -> tuple[Tensor, Tensor] | None:
    if groups is None:
        return None
    rows = query.shape[:1]
    if not isinstance(groups, (tuple, list)):
        checks.check_groups("groups", groups, rows, query.device, "pair")
        return groups, groups
    if len(groups) != 2:
        raise ValueError(
            f"groups: expected a tensor, or one for queries and one for keys, got {len(groups)}"
        )
    checks.check_groups("groups[0]", groups[0], rows, query.device, "query")
    checks.check_groups("groups[1]", groups[1], rows, query.device, "key")
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
    checks.check_groups("negative_groups", negative_groups, shape, query.device, "negative")


class InfoNCELoss(torch.nn.Module):
    r"""InfoNCE with a temperature that can be learnt.

    What is learnt is ``log_scale`` = log(1/T), so that the temperature stays above 0 and a step of
    an optimiser changes it by a factor. Before each pass in training it is put back into its
    bounds, where it keeps its gradient: a clamp inside the loss would leave a scale that is beyond
    it without one.

    Args:
        temperature: T, or where it starts.
        learn_temperature: makes ``log_scale`` a parameter.
        max_scale: the largest 1/T, 100 as in CLIP, or None for any; only where T is learnt.
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
        temperature: float = 0.07,
        *,
        learn_temperature: bool = False,
        max_scale: float | None = 100.0,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.check_number(temperature)
        self._check_options(options)
        checks.check_max_scale(max_scale)
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

    @staticmethod
    def _check_options(options: dict[str, Any]) -> None:
        known = (
            "symmetric", "in_batch", "same_group", "normalize", "gather", "gather_negatives",
            "process_group", "reduction", "chunk_rows",
        )  # fmt: skip
        for name in options:
            if name not in known:
                raise TypeError(f"{name}: expected one of the options {known}")
        check_reduction(options.get("reduction", "mean"))
        checks.check_same_group(options.get("same_group", "positive"))
        check_chunk_rows(options.get("chunk_rows", "auto"))
