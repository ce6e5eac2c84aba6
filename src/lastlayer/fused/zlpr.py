"""The multi-label loss ZLPR from hidden states and label vectors."""

from torch import Tensor

from lastlayer.fused._label_call import fused_label_loss


def linear_zlpr_loss(
    hidden: Tensor,
    weight: Tensor,
    positives: Tensor,
    bias: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    values: Tensor | None = None,
    smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_classes: int | str = "auto",
) -> Tensor:
    r"""``zlpr_loss_from_indices(hidden @ weight.T + bias, positives)`` without the scores.

    .. math:: L = \log\Bigl(1 + \sum_j (1 - t_j)\, e^{s_j}\Bigr)
                + \log\Bigl(1 + \sum_j t_j\, e^{-s_j}\Bigr), \qquad s = W h + b

    Choose it for a multi-label layer of more than a few thousand labels. It holds the scores of
    all rows for a slab of labels at a time: 0.9 GB on a GPU, 8 MB on a CPU, and about a quarter of
    that with ``chunk_classes="low"``. No dense target is made. The gradient of the weight is added
    up in float32 and rounded once.

    Cost: between three and four products of n × d × v, since every score is needed twice, and only
    what the memory holds is not made again. Gradients are made in the forward pass, and only
    scaled in backward; with ``reduction="none"`` they are made in backward. Nothing waits for the
    GPU.

    Args:
        hidden: ``(*batch, d)``, float16, bfloat16, float32 or float64.
        weight: ``(v, d)``, one row a label, as in ``nn.Linear``; its own dtype under autocast.
        positives: the labels of each row that are on, int64: ``(*batch, m)``, padded with
            ``ignore_index``; or all of them in a row, ``(k,)``, with ``offsets``. Duplicates count
            once, and a list may be empty.
        bias: ``(v,)``; -inf takes a label out of both sums.
        offsets: ``(n + 1,)`` int64: row i lists ``positives[offsets[i] : offsets[i + 1]]``.
        values: how far each listed label is on, in [0, 1] and of the shape of ``positives``;
            ``1 - smoothing`` where it is None. No gradient flows to it.
        smoothing: how far every other label is on, from 0 to below 1/2.
        ignore_index: the id that pads.
        reduction: "mean" over the rows, "sum" or "none".
        chunk_classes: labels of a slab, "auto" or "low".

    Returns:
        The loss in float32, or in float64 from float64.

    Raises:
        RuntimeError: in a second backward through the same loss, unless it was made with
            ``reduction="none"``.

    Example:
        >>> import torch
        >>> hidden, weight = torch.zeros(2, 8), torch.zeros(100, 8)
        >>> positives = torch.tensor([[3, 99], [5, -100]])
        >>> linear_zlpr_loss(hidden, weight, positives, reduction="none")
        tensor([5.6937, 5.2983])

    Reference:
        Su et al., ZLPR: A Novel Loss for Multi-label Classification, 2022, arXiv:2208.02955.
    """
    return fused_label_loss(
        "zlpr",
        hidden,
        weight,
        positives,
        bias,
        offsets=offsets,
        values=values,
        smoothing=smoothing,
        ignore_index=ignore_index,
        reduction=reduction,
        chunk_classes=chunk_classes,
    )
