"""The softmax of a batch over its own items, for two-tower models."""

import torch
from torch import Tensor

from lastlayer._checks import check_chunk_rows, check_reduction, check_scores
from lastlayer._torch import accumulation_dtype, values_are_checked
from lastlayer.heads._sampled_checks import check_choice, check_positive
from lastlayer.heads._sampled_loss import Draws, Rule, SampledProblem, sampled_loss

CORRECTIONS = ("exact", "classic", "none")


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
    check_chunk_rows(chunk_rows)
    _check_pairs(query, key)
    n, m = query.shape[0], key.shape[0]
    dtype = accumulation_dtype(query.dtype)
    if correction == "none":
        log_prob = query.new_zeros(m, dtype=dtype)
    else:
        log_prob = _checked_per_key("log_q", log_q, key).detach().to(dtype)
        _check_log_probs(log_prob)
    place = torch.arange(m, device=key.device)
    names = place
    if ids is not None:
        names = _checked_per_key("ids", ids, key)
    device = query.device.type
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query = query.to(torch.get_autocast_dtype(device))
    problem = SampledProblem(
        query,
        key,
        None,
        place[:n, None],
        Draws(place, log_prob),
        Rule(average=correction == "exact"),
        labels=(names, names[:n, None]),
        temperature=temperature,
    )
    if correction == "exact":
        # Rounding may have left a probability above 1.
        certain = log_prob[:n].clamp(max=0.0)
        problem = problem._replace(shift=torch.log(-torch.expm1(certain)))
    elif correction == "classic":
        problem = problem._replace(target_log_expected=log_prob[:n, None])
    return sampled_loss(problem, reduction, chunk_rows=chunk_rows).loss


def _check_pairs(query: Tensor, key: Tensor) -> None:
    check_scores(query, name="query")
    check_scores(key, name="key")
    if query.dim() != 2:
        raise ValueError(f"query: expected shape (n, d), got {tuple(query.shape)}")
    n, d = query.shape
    if key.dim() != 2 or key.shape[1] != d or key.shape[0] < n:
        raise ValueError(
            f"key: expected shape (m, {d}) with m of at least {n}, one key a query first, got "
            f"{tuple(key.shape)}"
        )
    if query.device != key.device:
        raise ValueError(f"key: expected the device of query, {query.device}, got {key.device}")
    if query.dtype != key.dtype and not torch.is_autocast_enabled(query.device.type):
        raise TypeError(f"key: expected the dtype of query, {query.dtype}, got {key.dtype}")


def _check_log_probs(log_q: Tensor) -> None:
    """What a probability above 0 has; looked at where that does not wait for a device."""
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


def _checked_per_key(name: str, given: Tensor | None, key: Tensor) -> Tensor:
    if given is None:
        raise ValueError(
            f"{name}: expected one log-probability a key, got None; InBatch(n_items) counts items "
            'and gives them, and correction="none" does without'
        )
    if not isinstance(given, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(given).__name__}")
    fits = given.dtype == torch.int64 if name == "ids" else given.is_floating_point()
    if not fits:
        kind = "torch.int64" if name == "ids" else "a floating dtype"
        raise TypeError(f"{name}: expected {kind}, got {given.dtype}")
    if given.shape != key.shape[:1]:
        raise ValueError(
            f"{name}: expected shape {tuple(key.shape[:1])}, one number a key, got "
            f"{tuple(given.shape)}"
        )
    if given.device != key.device:
        raise ValueError(f"{name}: expected the device of key, {key.device}, got {given.device}")
    return given
