"""The negative sampling of word2vec on scores."""

from torch import Tensor

from lastlayer.losses._logistic import check_pairs, check_positive_mask, logistic_loss, wide


def negative_sampling_loss(
    positive: Tensor,
    negative: Tensor,
    *,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Raise the score of what was observed, and lower those of k draws.

    .. math:: L = -\log \sigma(s_y) - \sum_{j=1}^{k} \log \sigma(-s_{d_j})

    It is :func:`lastlayer.nce_loss` without its :math:`\log k\,q(c)`, and so no estimate of a
    log-likelihood: it is least where :math:`s_c = \log p_\text{data}(c) - \log k\,q(c)`, which is
    the pointwise mutual information less log k where q are the frequencies of the classes. Scores
    rank classes by how much more frequent they are than under q; probabilities are the softmax of
    :math:`s_c + \log q(c)`, see :class:`lastlayer.heads.NegativeSampling`.

    Choose it to learn vectors, of words or of items, rather than probabilities.

    Cost: O(p + n) a row, in plain torch operations that can be differentiated twice.

    Args:
        positive: scores of what was observed, ``(*batch)`` or ``(*batch, p)``; the loss of a row is
            the mean over its positives.
        negative: scores of k draws, ``(*batch, k)``; a batch dimension may have size 1 where rows
            share their negatives and the scores of them. A score of -inf leaves a draw out.
        mask: bool of the shape of ``positive``, True for positives that count; a row without any
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
    check_pairs(positive, negative)
    if mask is not None:
        check_positive_mask(mask, positive)
    return logistic_loss(wide(positive), wide(negative), mask, reduction)
