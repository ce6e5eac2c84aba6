"""The logistic loss of many labels, binary cross entropy, from hidden states and label vectors."""

from torch import Tensor

from lastlayer.fused._label_call import fused_label_loss


def linear_bce_loss(
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
    r"""The binary cross entropy of ``hidden @ weight.T + bias``, without the scores.

    .. math:: L = \sum_j \log(1 + e^{s_j}) - t_j s_j, \qquad s = W h + b

    The loss of a row is the sum over its labels. Choose it where each label is a question of its
    own and its probability :math:`\sigma(s)` matters; where few of many labels are on,
    :func:`linear_zlpr_loss` keeps the balance between them. It holds the scores of all rows for a
    slab of labels at a time: 0.9 GB on a GPU, 8 MB on a CPU, and about a quarter of that with
    ``chunk_classes="low"``. No dense target is made. The gradient of the weight is added up in
    float32 and rounded once.

    Cost: three products of n × d × v: labels do not depend on each other, so one walk over them
    is enough. Gradients are made in the forward pass, and only scaled in backward; with
    ``reduction="none"`` backward makes the scores again, a fourth product. Nothing waits for the
    GPU.

    Args:
        hidden: ``(*batch, d)``, float16, bfloat16, float32 or float64.
        weight: ``(v, d)``, one row a label, as in ``nn.Linear``; its own dtype under autocast.
        positives: the labels of each row that are on, int64: ``(*batch, m)``, padded with
            ``ignore_index``; or all of them in a row, ``(k,)``, with ``offsets``. Duplicates count
            once, and a list may be empty.
        bias: ``(v,)``; -inf takes a label out.
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
        >>> linear_bce_loss(hidden, weight, torch.tensor([[3, 99], [5, -100]]))
        tensor(69.3147)
    """
    return fused_label_loss(
        "logistic",
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
