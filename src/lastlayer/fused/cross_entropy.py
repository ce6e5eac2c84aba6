"""Cross entropy from hidden states and class vectors."""

from torch import Tensor

from lastlayer.fused._call import fused_loss
from lastlayer.fused._loss import Loss
from lastlayer.fused._options import cross_entropy_options


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_rows: int | str = "auto",
    weight_grad: Tensor | None = None,
) -> Tensor:
    r"""``cross_entropy(hidden @ weight.T + bias, target)`` without the matrix of scores.

    .. math:: L = \log \sum_j e^{\theta_j} - \theta_y + \lambda (\log \sum_j e^{\theta_j})^2,
              \qquad \theta = \mathrm{cap}(W h + b) / T

    Choose it for any exact softmax over more than a few thousand classes. It holds a chunk of
    scores at a time: about 1 GB on a GPU; on a CPU 48 MB, or a quarter of the weight if that is
    more; about a quarter of that with ``chunk_rows="low"``. On a GPU, in half precision and where
    hidden has 256 numbers or fewer, it holds none at all.

    Cost: three products of n × d × v, as the layer itself with its backward. Gradients are made
    in the forward pass, and only scaled in backward; with ``reduction="none"`` or
    ``weight_grad`` backward makes the scores again, a fourth product.

    On a GPU the host waits once, to leave out ignored rows before any product. Give
    ``ignore_index=None`` where every target counts: then nothing waits.

    Args:
        hidden: ``(*batch, d)``, float16, bfloat16, float32 or float64.
        weight: ``(v, d)``, one row a class, as in ``nn.Linear``; its own dtype under autocast.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        ignore_index: rows with this target are left out; None where there are none.
        reduction: "mean" over the rows that count, by their weights; "sum" or "none".
        label_smoothing: how much of the target is spread evenly over all classes.
        class_weight: one weight a class, ``(v,)``, as in torch: it weighs what a class has of the
            cross entropy, and not ``z_loss``.
        row_weight: one weight a row, ``(*batch)``; no gradient flows to it.
        z_loss: :math:`\lambda`, pulls the normaliser towards 1.
        softcap: c, bends scores into :math:`c \tanh(\theta / c)`.
        temperature: T, divides the scores.
        chunk_rows: rows of scores held at a time, "auto" or "low".
        weight_grad: a tensor of the weight's shape to which backward adds the gradient of the
            weight, which then gets none itself: ``weight.grad``, or a float32 sum of a
            half-precision one. In float32 nothing on the way is rounded to half precision.

    Returns:
        The loss in float32, or in float64 from float64.

    Raises:
        RuntimeError: in a second backward through the same loss, unless it was made with
            ``reduction="none"`` or ``weight_grad``.

    Example:
        >>> import torch
        >>> hidden, weight = torch.zeros(2, 8), torch.zeros(100, 8)
        >>> linear_cross_entropy(hidden, weight, torch.tensor([3, 99]))
        tensor(4.6052)

    Reference:
        Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, ICLR 2025,
        arXiv:2411.09009; Hsu et al., Liger Kernel, 2024, arXiv:2410.10989.
    """
    options = cross_entropy_options(label_smoothing, z_loss, softcap, temperature)
    return fused_loss(
        Loss("cross_entropy", options),
        hidden,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        reduction=reduction,
        class_weight=class_weight,
        row_weight=row_weight,
        weight_grad=weight_grad,
        chunk_rows=chunk_rows,
    )[0]
