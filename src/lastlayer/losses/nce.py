"""Noise contrastive estimation on scores."""

import math
from typing import Any

import torch
from torch import Tensor

from lastlayer.losses._logistic import (
    check_pairs,
    check_positive_mask,
    check_spread,
    logistic_loss,
    wide,
)


def nce_loss(
    positive: Tensor,
    negative: Tensor,
    positive_log_q: Tensor,
    negative_log_q: Tensor,
    *,
    log_z: float | Tensor = 0.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Tell the class that was observed from k that were drawn as noise.

    .. math:: L = -\log \sigma(a_y) - \sum_{j=1}^{k} \log \sigma(-a_{d_j}), \qquad
              a_c = s_c - \log Z - \log k\,q(c)

    :math:`\sigma(a_c)` is the probability that c is data, where one observation comes with k draws
    of noise and the model says :math:`p(c) = e^{s_c} / Z`. No sum over all classes is taken; Z is a
    number that is given, or a parameter. As k grows the gradient becomes that of maximum
    likelihood, and for every k the loss is least where the model is the distribution of the data,
    normaliser included: :math:`s_c - \log Z = \log p_\text{data}(c)`.

    Draw noise with replacement from q and leave it as it is: a draw that happens to be the target
    counts like any other, and a class that is drawn twice counts twice. With hits removed, or with
    duplicates merged, the noise is no longer that of q, and the optimum moves.

    Choose it for models whose scores should be log-probabilities as they are, so that a class can
    be scored alone. For training by samples as such,
    :class:`lastlayer.heads.SampledSoftmax` learns faster.

    A row with p positives counts like p rows with one each that share their noise, divided by p.
    (Labels of 1/p in place of that weight would move the optimum.)

    Cost: O(p + n) a row, in plain torch operations that can be differentiated twice.

    Args:
        positive: scores of what was observed, ``(*batch)`` or ``(*batch, p)``.
        negative: scores of k draws, ``(*batch, k)``; a batch dimension may have size 1 where rows
            share their negatives and the scores of them.
        positive_log_q: log q of the positives, of their shape or one that broadcasts to it.
        negative_log_q: log q of the draws, likewise: ``(k,)`` where all rows have the same.
        log_z: log Z; a number, or a tensor that broadcasts to ``(*batch)``, to which a gradient
            flows.
        mask: bool of the shape of ``positive``, True for positives that count; a row without any
            has loss 0.
        reduction: "mean" over the rows with a positive, "sum" or "none".

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> import torch
        >>> scores, log_q = torch.zeros(5), torch.full((5,), 0.1).log()
        >>> nce_loss(scores[:1], scores[1:].expand(1, 4), log_q[:1], log_q[1:])
        tensor(5.3475)

    Reference:
        Gutmann and Hyvärinen, Noise-contrastive estimation, AISTATS 2010; Mnih and Teh, A fast and
        simple algorithm for training neural probabilistic language models, ICML 2012,
        arXiv:1206.6426.
    """
    check_pairs(positive, negative)
    check_spread("positive_log_q", positive_log_q, positive)
    rows = positive.shape[: negative.dim() - 1]
    check_spread("negative_log_q", negative_log_q, _sized(negative, rows))
    if mask is not None:
        check_positive_mask(mask, positive)
    of_row = _log_z(log_z, positive, rows)
    log_k = math.log(max(1, negative.shape[-1]))
    found, drawn = wide(positive), wide(negative)
    found = found - positive_log_q.to(found.dtype) - log_k
    drawn = drawn - negative_log_q.to(drawn.dtype) - log_k
    if of_row is not None:
        found = found - (of_row if found.dim() == len(rows) else of_row.unsqueeze(-1))
        drawn = drawn - of_row.unsqueeze(-1)
    return logistic_loss(found, drawn, mask, reduction)


def _sized(negative: Tensor, rows: torch.Size) -> Tensor:
    return negative.expand(*rows, negative.shape[-1])


def _log_z(log_z: Any, positive: Tensor, rows: torch.Size) -> Tensor | None:
    """One number a row, or None for 0."""
    if isinstance(log_z, Tensor):
        at_rows = positive if positive.dim() == len(rows) else positive[..., 0]
        check_spread("log_z", log_z, at_rows)
        return wide(log_z).expand(rows)
    if isinstance(log_z, bool) or not isinstance(log_z, (int, float)):
        raise TypeError(f"log_z: expected a number or a tensor, got {type(log_z).__name__}")
    if not math.isfinite(log_z):
        raise ValueError(f"log_z: expected a finite number, got {log_z}")
    return wide(positive).new_full(rows, float(log_z)) if log_z else None
