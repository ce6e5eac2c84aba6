"""Labels between 0 and 1: smoothing and mixup."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer.losses._multilabel import check_labels
from lastlayer.losses._positives import check_smoothing


class Mixed(NamedTuple):
    """A batch mixed with itself.

    Attributes:
        inputs: as the inputs that were given.
        target: soft labels, or lists of twice the length.
        values: the labels of what is listed; None for a dense target.
        weight: ``(rows,)``, what each row kept of itself.
        partner: ``(rows,)`` int64, the row that it was mixed with.
    """

    inputs: Tensor
    target: Tensor
    values: Tensor | None
    weight: Tensor
    partner: Tensor


def smooth_labels(target: Tensor, smoothing: float) -> Tensor:
    r"""Labels drawn towards 1/2: 0 becomes ``smoothing``, and 1 becomes ``1 - smoothing``.

    .. math:: t \mapsto \varepsilon + (1 - 2 \varepsilon)\, t

    For :func:`lastlayer.zlpr_loss` and :func:`lastlayer.binary_cross_entropy_loss` alike. (Some
    libraries state twice this number for binary labels.) For lists of positives nothing dense is
    needed: ``zlpr_loss_from_indices(…, smoothing=)`` is the same.

    With n classes the smoothed negatives add up: at its optimum ZLPR puts them at
    :math:`s = -\tfrac12 \log((1 - \varepsilon) / \varepsilon)` rather than at :math:`-\infty`,
    and their sum in the second term is about :math:`n \sqrt{\varepsilon}`. Keep :math:`\varepsilon`
    well below the share of positives.

    Args:
        target: bool, integer or floating labels in [0, 1], of any shape.
        smoothing: from 0 to below 1/2.

    Returns:
        Labels in the dtype of the target where it is floating, else in torch's default dtype.

    Example:
        >>> smooth_labels(torch.tensor([0, 1]), 0.1)
        tensor([0.1000, 0.9000])
    """
    _check_tensor("target", target)
    check_labels(target)
    check_smoothing(smoothing)
    if not target.is_floating_point():
        target = target.to(torch.get_default_dtype())
    return smoothing + (1.0 - 2.0 * smoothing) * target


def mixup(
    inputs: Tensor,
    target: Tensor,
    *,
    alpha: float = 0.2,
    generator: torch.Generator | None = None,
) -> Mixed:
    r"""Each row mixed with another of the batch, and their labels alike.

    .. math:: x_i \mapsto \lambda_i x_i + (1 - \lambda_i)\, x_{\pi(i)}, \qquad
              t_i \mapsto \lambda_i t_i + (1 - \lambda_i)\, t_{\pi(i)}, \qquad
              \lambda_i \sim \mathrm{Beta}(\alpha, \alpha)

    with a random permutation :math:`\pi` and one :math:`\lambda` a row.

    Args:
        inputs: ``(rows, …)``, floating.
        target: dense labels ``(rows, …)``: bool, integers 0 and 1, or floating in [0, 1].
        alpha: above 0; small numbers leave most rows nearly as they are.
        generator: what to draw with, on the device of the inputs.

    Returns:
        ``Mixed(inputs, target, values, weight, partner)``; ``target`` is floating, for
        :func:`lastlayer.zlpr_loss` and :func:`lastlayer.binary_cross_entropy_loss`.

    Example:
        >>> mixed = mixup(torch.randn(4, 8), torch.eye(4))
        >>> mixed.target.sum(-1)
        tensor([1., 1., 1., 1.])

    Reference:
        Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018, arXiv:1710.09412.
    """
    _check_rows(inputs, "target", target)
    check_labels(target)
    weight, partner = _draw(inputs, alpha, generator)
    if not target.is_floating_point():
        target = target.to(torch.get_default_dtype())
    return Mixed(
        _between(inputs, weight, partner), _between(target, weight, partner), None, weight, partner
    )


def mixup_from_indices(
    inputs: Tensor,
    positives: Tensor,
    *,
    alpha: float = 0.2,
    ignore_index: int = -100,
    generator: torch.Generator | None = None,
) -> Mixed:
    """:func:`lastlayer.mixup` for padded lists of positives, without a dense target.

    A row's list is followed by that of its partner. A class of both has the label 1, others that of
    the row that they come from. (Lists in CSR have no fixed size after mixing; pad them first.)

    Args:
        inputs: ``(rows, …)``, floating.
        positives: ``(rows, m)`` int64, padded with ``ignore_index``.
        alpha: above 0.
        ignore_index: the id that pads.
        generator: what to draw with, on the device of the inputs.

    Returns:
        ``Mixed(inputs, target, values, weight, partner)`` with lists and values ``(rows, 2m)`` for
        :func:`lastlayer.zlpr_loss_from_indices`.

    Example:
        >>> mixed = mixup_from_indices(torch.randn(4, 8), torch.tensor([[0, 3]] * 4))
        >>> mixed.target[0], mixed.values[0]
        (tensor([   0,    3, -100, -100]), tensor([1., 1., 0., 0.]))
    """
    _check_rows(inputs, "positives", positives)
    if positives.dtype != torch.int64 or positives.dim() != 2:
        raise ValueError(
            "positives: expected int64 lists of shape (rows, m), padded with ignore_index, got "
            f"{positives.dtype} of shape {tuple(positives.shape)}"
        )
    weight, partner = _draw(inputs, alpha, generator)
    other = positives[partner]
    own = weight.unsqueeze(-1).expand_as(positives)
    same = positives.unsqueeze(-1) == other.unsqueeze(-2)
    values = torch.cat([torch.where(same.any(-1), 1.0, own), 1.0 - own], -1)
    other = other.masked_fill(same.any(-2), ignore_index)
    lists = torch.cat([positives, other], -1)
    values = values.masked_fill(lists == ignore_index, 0.0)
    return Mixed(_between(inputs, weight, partner), lists, values, weight, partner)


def _draw(inputs: Tensor, alpha: Any, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise TypeError(f"alpha: expected a number, got {type(alpha).__name__}")
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"alpha: expected a finite number above 0, got {alpha}")
    n_rows, device = inputs.shape[0], inputs.device
    # A Beta is made of two Gammas; in float64 both are 0 for a tiny alpha only.
    gammas = torch._standard_gamma(
        torch.full((2, n_rows), float(alpha), dtype=torch.float64, device=device), generator
    )
    total = gammas.sum(0)
    weight = torch.where(total > 0, gammas[0] / total, 0.5).to(torch.get_default_dtype())
    return weight, torch.randperm(n_rows, device=device, generator=generator)


def _between(rows: Tensor, weight: Tensor, partner: Tensor) -> Tensor:
    share = weight.to(rows.dtype).reshape(-1, *(1,) * (rows.dim() - 1))
    return share * rows + (1.0 - share) * rows[partner]


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def _check_rows(inputs: Any, name: str, target: Any) -> None:
    _check_tensor("inputs", inputs)
    _check_tensor(name, target)
    if not inputs.is_floating_point() or inputs.dim() == 0:
        raise TypeError(
            f"inputs: expected a floating tensor of rows, got {inputs.dtype} of shape "
            f"{tuple(inputs.shape)}; token ids cannot be mixed, their embeddings can"
        )
    if target.dim() == 0 or target.shape[0] != inputs.shape[0]:
        raise ValueError(
            f"{name}: expected {inputs.shape[0]} rows, as many as inputs, got shape "
            f"{tuple(target.shape)}"
        )
