"""The softmax over all classes, exact."""

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from lastlayer.fused import linear_cross_entropy
from lastlayer.fused._options import cross_entropy_options
from lastlayer.heads._checks import check_hidden
from lastlayer.heads._linear import LinearHead, LinearOptions


class FullSoftmax(LinearHead):
    r"""A linear layer with softmax and cross entropy, without the matrix of scores.

    .. math:: \log p_c = \theta_c - \log \sum_j e^{\theta_j},
              \qquad \theta = \mathrm{cap}(W h + b) / T

    Choose it first: it is exact, trains fastest up to some 100,000 classes, and every other head
    is measured against it.

    Cost: a training step three products of rows × in_features × n_classes, everything else one.
    A chunk of scores is held at a time, see :func:`lastlayer.fused.linear_cross_entropy`.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        bias: whether each class has a bias.
        label_smoothing: how much of the target the loss spreads evenly over all classes.
        z_loss: how much the square of the log of the normaliser counts in the loss.
        softcap: c, bends scores into :math:`c \tanh(\theta / c)`; None for none.
        temperature: T, divides the scores, in training as in prediction.
        class_weight: one weight a class for the loss, ``(n_classes,)``; kept as a buffer.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> head = FullSoftmax(16, 1000)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> head(hidden, target).backward()
        >>> head.topk(hidden, 5).classes.shape
        torch.Size([8, 5])
        >>> tied = FullSoftmax.from_linear(torch.nn.Embedding(1000, 16))
    """

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        bias: bool = True,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, n_classes, bias, **options)
        cross_entropy_options(label_smoothing, z_loss, softcap, temperature)
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.softcap, self.temperature = softcap, temperature

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The cross entropy of the targets; see :func:`lastlayer.fused.linear_cross_entropy`."""
        check_hidden(self, hidden)
        options = {**self._loss_options(), **self._softmax_options()}
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **options)

    def _log_probs(self, scores: Tensor) -> Tensor:
        if self.softcap is not None:
            capped = self.softcap * torch.tanh(scores / self.softcap)
            # A cap must not bring back what a bias takes out.
            scores = capped.masked_fill(scores == -math.inf, -math.inf)
        if self.temperature != 1.0:
            scores = scores / self.temperature
        return torch.log_softmax(scores, -1)

    def _softmax_options(self) -> dict[str, Any]:
        return {
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "temperature": self.temperature,
        }

    def config(self) -> dict[str, Any]:
        return {**super().config(), **self._softmax_options()}
