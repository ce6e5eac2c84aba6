"""The softmax of a batch over its own items, for two-tower models."""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lastlayer._checks import (
    check_choice,
    check_chunk,
    check_device,
    check_dtype,
    check_positive,
    check_reduction,
    check_scores,
    check_tensor,
)
from lastlayer._torch import (
    accumulation_dtype,
    autocast_dtype,
    in_autocast_dtype,
    in_dtype,
    values_are_checked,
)
from lastlayer.fused.sampled import Rule, sampled_loss
from lastlayer.fused.scores import fits_one_cpu_product
from lastlayer.heads.sampled.softmax import CORRECTIONS


def in_batch_softmax_loss(
    query: Tensor,
    key: Tensor,
    log_q: Tensor | None = None,
    *,
    ids: Tensor | None = None,
    correction: str = "exact",
    temperature: float = 1.0,
    reduction: str = "mean",
    chunk_rows: int | str = "auto",
) -> Tensor:
    r"""Cross entropy of each query against its own key, with the other keys as negatives.

    .. math:: L_i = \log\Bigl(e^{\theta_{ii}} + \sum_{j \ne i} e^{\theta_{ij} - \log w_{ij}}\Bigr)
              - \theta_{ii}, \qquad w_{ij} = \frac{m_i\,q_j}{1 - q_i},
              \qquad \theta_{ij} = \langle u_i, v_j \rangle / T

    A popular item is in many batches, and would be pushed down as often; its log-probability under
    the proposal makes up for that. :class:`lastlayer.samplers.InBatch` counts items while training
    and gives it. The own key is there with certainty and not corrected; :math:`m_i` is the number
    of keys that are not the own item.

    Scores are held for a chunk of rows at a time. Gradients are made in the forward pass.

    Args:
        query: ``(n, d)``.
        key: ``(m, d)`` with m ≥ n: key i belongs to query i; those from n on are negatives only,
            such as keys of other processes.
        log_q: log-probability of each key's item, ``(m,)``; needed unless ``correction="none"``.
        ids: item of each key, int64 ``(m,)``: keys of the own item are left out. Without it all
            keys count as different items.
        correction: "exact" as above; "classic" takes log(m q) from all scores, the own one too;
            "none" corrects nothing.
        temperature: T, divides the scores, before the correction.
        reduction: "mean", "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".

    Returns:
        The loss in float32, or in float64 from float64.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> items = samplers.InBatch(1000)
        >>> ids = torch.randint(1000, (32,))
        >>> items.update(ids)
        >>> query, key = torch.randn(32, 8), torch.randn(32, 8)
        >>> loss = in_batch_softmax_loss(query, key, items.log_prob(ids), ids=ids)

    Reference:
        Yi et al., Sampling-bias-corrected neural modeling for large corpus item recommendations,
        RecSys 2019; Khrylchenko et al., Correcting the LogQ correction, 2025, arXiv:2507.09331.
    """
    check_choice("correction", correction, CORRECTIONS)
    check_positive("temperature", temperature)
    check_reduction(reduction)
    check_chunk(chunk_rows)
    _check_pairs(query, key)
    (n, m), dtype = (query.shape[0], key.shape[0]), accumulation_dtype(query.dtype)
    if correction == "none":
        log_prob = query.new_zeros(m, dtype=dtype)
    else:
        log_prob = in_dtype(_check_per_key("log_q", log_q, key).detach(), dtype)
        _check_log_probs(log_prob)
    place = torch.arange(m, device=key.device)
    names = place if ids is None else _check_per_key("ids", ids, key)
    in_torch = reduction != "none" and n > 0 and autocast_dtype(query) is None
    if in_torch and fits_one_cpu_product(query, m, chunk_rows):
        scores = query @ key.T if temperature == 1.0 else (query @ key.T) / temperature
        scores = _corrected(scores, log_prob, names if ids is not None else None, correction)
        loss = cross_entropy(scores, place[:n], reduction=reduction)
        # torch's loss is NaN where a score is not finite.
        if math.isfinite(loss.item()):
            return loss
    shift = less = None
    if correction == "exact":
        # Rounding may have left a probability above 1.
        shift = torch.log(-torch.expm1(log_prob[:n].clamp(max=0.0)))
    elif correction == "classic":
        less = log_prob[:n, None]
    loss, _ = sampled_loss(
        in_autocast_dtype(query), key, None, place[:n, None], place, log_prob,
        Rule(average=correction == "exact"), reduction=reduction, target_log_expected=less,
        shift=shift, labels=(names, names[:n, None]), temperature=temperature,
        chunk_rows=chunk_rows,
    )  # fmt: skip
    return loss


def _corrected(scores: Tensor, log_prob: Tensor, ids: Tensor | None, correction: str) -> Tensor:
    """Scores ``(n, m)`` of a small problem, corrected; -inf for other keys of the own item."""
    n, m = scores.shape
    again = None if ids is None else (ids[:n, None] == ids).fill_diagonal_(False)
    if correction == "classic":
        scores = scores - log_prob
    elif correction == "exact":
        # As the general case: a probability may be above 1 by rounding.
        rest = torch.log(-torch.expm1(log_prob[:n, None].clamp(max=0.0)))
        # Of how many other items there is a key.
        log_others: Tensor | float = math.log(max(1, m - 1))
        if again is not None:
            left_out = again.sum(1, keepdim=True, dtype=rest.dtype)
            log_others = (m - 1 - left_out).clamp_(min=1.0).log_()
        scores = scores + (rest - log_others - log_prob).fill_diagonal_(0.0)
    return scores if again is None else scores.masked_fill(again, -torch.inf)


def _check_pairs(query: Tensor, key: Tensor) -> None:
    check_scores(query, name="query")
    check_scores(key, name="key")
    if query.dim() != 2:
        raise ValueError(f"query: expected shape (n, d), got {tuple(query.shape)}")
    n, d = query.shape
    if key.dim() != 2 or key.shape[1] != d or key.shape[0] < n:
        raise ValueError(
            f"key: expected shape (m, {d}) with m of at least {n}, one key per query first, got "
            f"{tuple(key.shape)}"
        )
    check_device("key", key, query, "query")
    check_dtype("key", key, query, "query")


def _check_log_probs(log_q: Tensor) -> None:
    """Logarithms of probabilities above 0; checked where that does not wait for a device."""
    if not values_are_checked(log_q):
        return
    # Rounding may leave a probability of 1 a little above it.
    wrong = ((log_q > 1e-6) | ~log_q.isfinite()).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            "log_q: expected logarithms of probabilities, finite and at most 0, got "
            f"{float(log_q[place]):g} at position {place}"
        )


def _check_per_key(name: str, given: Tensor | None, key: Tensor) -> Tensor:
    if given is None:
        raise ValueError(
            f"{name}: expected one log-probability per key, got None; InBatch(n_items) counts "
            'items and gives them, and correction="none" does without'
        )
    check_tensor(name, given)
    fits = given.dtype == torch.int64 if name == "ids" else given.is_floating_point()
    if not fits:
        kind = "torch.int64" if name == "ids" else "a floating dtype"
        raise TypeError(f"{name}: expected {kind}, got {given.dtype}")
    if given.shape != key.shape[:1]:
        raise ValueError(
            f"{name}: expected shape {tuple(key.shape[:1])}, one number per key, got "
            f"{tuple(given.shape)}"
        )
    check_device(name, given, key, "key")
    return given
