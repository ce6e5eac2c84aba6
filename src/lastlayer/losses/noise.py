"""Noise contrastive estimation and negative sampling, as losses of scores."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._checks import broadcasts, check_real, check_reduction, check_scores, check_tensor
from lastlayer._labels import reduced
from lastlayer._torch import accumulation_dtype, in_dtype


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
    r"""Noise contrastive estimation: classify the observed class against k noise samples.

    .. math:: L = -\log \sigma(a_y) - \sum_{j=1}^{k} \log \sigma(-a_{d_j}), \qquad
              a_c = s_c - \log Z - \log k\,q(c)

    :math:`\sigma(a_c)` is the probability that c is data rather than noise, with k noise samples
    per observation and the model :math:`p(c) = e^{s_c} / Z`. There is no sum over all classes; Z is
    a constant or a parameter. As k grows the gradient becomes that of maximum likelihood. For every
    k the loss is minimal if the model is the distribution of the data, normaliser included:
    :math:`s_c - \log Z = \log p_\text{data}(c)`.

    Draw noise from q with replacement, and do not filter it: a sample that is the target counts
    like any other, and a class drawn twice counts twice. Removing hits or merging duplicates
    changes the distribution of the noise, and so the optimum.

    Choose it for models whose scores should be normalised log-probabilities, so that a class can be
    scored without the others. If you only want cheaper training,
    :class:`lastlayer.heads.SampledSoftmax` learns faster.

    The loss of a row with p positives is the mean over p rows with one positive each and the same
    noise. (Labels of 1/p instead would change the optimum.)

    Cost: O(p + k) per row, in plain torch operations that can be differentiated twice.

    Args:
        positive: scores of the observed classes, ``(*batch)`` or ``(*batch, p)``.
        negative: scores of k noise samples, ``(*batch, k)``; a batch dimension may have size 1 if
            rows share their negatives and the scores of them.
        positive_log_q: log q of the positives, of a shape that broadcasts to theirs.
        negative_log_q: log q of the negatives, likewise: ``(k,)`` if all rows share them.
        log_z: log Z: a number, or a tensor that broadcasts to ``(*batch)`` and may need a gradient.
        mask: bool of the shape of ``positive``; False masks a positive out. A row without positives
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
    _check_pairs(positive, negative, mask, reduction)
    rows = positive.shape[: negative.dim() - 1]
    _check_broadcasts("positive_log_q", positive_log_q, positive.shape)
    _check_broadcasts("negative_log_q", negative_log_q, (*rows, negative.shape[-1]))
    of_row = _log_z(log_z, positive, rows)
    log_k = math.log(max(1, negative.shape[-1]))
    found, drawn = _wide(positive), _wide(negative)
    found = found - positive_log_q.to(found.dtype) - log_k
    drawn = drawn - negative_log_q.to(drawn.dtype) - log_k
    if of_row is not None:
        found = found - (of_row if found.dim() == len(rows) else of_row.unsqueeze(-1))
        drawn = drawn - of_row.unsqueeze(-1)
    return _logistic_loss(found, drawn, mask, reduction)


def negative_sampling_loss(
    positive: Tensor, negative: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    r"""Negative sampling: raise the score of the observed class, lower those of k samples.

    .. math:: L = -\log \sigma(s_y) - \sum_{j=1}^{k} \log \sigma(-s_{d_j})

    It is :func:`lastlayer.nce_loss` without the term :math:`\log k\,q(c)`, and so does not estimate
    a log-likelihood. It is minimal for :math:`s_c = \log p_\text{data}(c) - \log k\,q(c)`; if q are
    the frequencies of the classes this is the pointwise mutual information minus log k. Scores rank
    classes by how much more frequent they are than under q; probabilities are the softmax of
    :math:`s_c + \log q(c)`, see :class:`lastlayer.heads.NegativeSampling`.

    Choose it to learn vectors, of words or items, rather than probabilities.

    Cost: O(p + k) per row, in plain torch operations that can be differentiated twice.

    Args:
        positive: scores of the observed classes, ``(*batch)`` or ``(*batch, p)``; the loss of a row
            is the mean over its positives.
        negative: scores of k samples, ``(*batch, k)``; a batch dimension may have size 1 if rows
            share their negatives and the scores of them. A score of -inf masks a sample out.
        mask: bool of the shape of ``positive``; False masks a positive out. A row without positives
            has loss 0.
        reduction: "mean" over the rows with a positive, "sum" or "none".

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> import torch
        >>> negative_sampling_loss(torch.zeros(2), torch.zeros(2, 5))
        tensor(4.1589)

    Reference:
        Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality,
        NeurIPS 2013, arXiv:1310.4546; Levy and Goldberg, Neural Word Embedding as Implicit Matrix
        Factorization, NeurIPS 2014 (its optimum).
    """
    _check_pairs(positive, negative, mask, reduction)
    return _logistic_loss(_wide(positive), _wide(negative), mask, reduction)


def _log_z(log_z: Any, positive: Tensor, rows: torch.Size) -> Tensor | None:
    """log Z as one number per row, or None for 0."""
    if isinstance(log_z, Tensor):
        _check_broadcasts("log_z", log_z, rows)
        return _wide(log_z).expand(rows)
    number = check_real("log_z", log_z, kind="a number or a tensor")
    return _wide(positive).new_full(rows, number) if number else None


def _check_pairs(positive: Any, negative: Any, mask: Any, reduction: Any) -> None:
    """Checks the shapes of positive and negative scores, and the mask of positives."""
    check_reduction(reduction)
    check_scores(positive, name="positive", at_least_1d=False)
    check_scores(negative, name="negative")
    rows = negative.dim() - 1
    batch = positive.shape[:rows]
    shared = negative.shape[:-1]
    fits = positive.dim() in (rows, rows + 1) and all(
        have in (1, wanted) for have, wanted in zip(shared, batch, strict=True)
    )
    if not fits:
        raise ValueError(
            "negative: expected shape (*batch, k) for positive of shape (*batch) or (*batch, p), "
            "with sizes of 1 if rows share their negatives, got "
            f"{tuple(negative.shape)} for {tuple(positive.shape)}"
        )
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: expected a bool tensor with True for positives, got {got}")
    if mask.shape != positive.shape:
        raise ValueError(
            f"mask: expected the shape of positive, {tuple(positive.shape)}, got "
            f"{tuple(mask.shape)}"
        )


def _check_broadcasts(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Checks that a tensor broadcasts to a shape."""
    check_tensor(name, value)
    if not broadcasts(value.shape, shape):
        raise ValueError(
            f"{name}: expected a shape that broadcasts to {tuple(shape)}, got {tuple(value.shape)}"
        )


def _logistic_loss(
    positive: Tensor, negative: Tensor, mask: Tensor | None, reduction: str
) -> Tensor:
    """The mean of -log σ over the positives of a row, plus the sum of -log(1 - σ) over negatives.

    A row without unmasked positives has loss 0.
    """
    if positive.dim() < negative.dim():
        if mask is None:
            # One positive in each row: nothing is masked or averaged.
            return -reduced(logsigmoid(positive) + logsigmoid(-negative).sum(-1), None, reduction)
        positive, mask = positive.unsqueeze(-1), mask.unsqueeze(-1)
    if mask is None:
        mask = torch.ones_like(positive, dtype=torch.bool)
    counts = mask.any(-1)
    # Masked scores are replaced first: a NaN would reach the gradients as 0 · NaN.
    found = -logsigmoid(torch.where(mask, positive, 0.0))
    number = mask.sum(-1).clamp(min=1)
    pulled = torch.where(mask, found, 0.0).sum(-1) / number
    pushed = -logsigmoid(-torch.where(counts.unsqueeze(-1), negative, -torch.inf)).sum(-1)
    return reduced(pulled + pushed, counts, reduction)


def _wide(scores: Tensor) -> Tensor:
    """Scores in float32, or in float64 for float64."""
    return in_dtype(scores, accumulation_dtype(scores.dtype))
