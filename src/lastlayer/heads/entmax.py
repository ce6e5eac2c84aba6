"""entmax over all classes, exact."""

from typing import Any, Unpack

import torch
from torch import Tensor

from lastlayer._checks import check_alpha
from lastlayer.fused import linear_entmax_loss
from lastlayer.heads._checks import check_hidden
from lastlayer.heads._linear import LinearHead, LinearOptions
from lastlayer.maps.entmax import entmax


class Entmax(LinearHead):
    r"""A linear layer with :func:`lastlayer.entmax` and its loss, without the matrix of scores.

    .. math:: p_c = \bigl[(\alpha - 1)\,\theta_c - \tau\bigr]_+^{1/(\alpha - 1)},
              \qquad \theta = W h + b

    alpha = 2 is sparsemax, alpha = 1 softmax. Most classes have probability 0: their
    ``log_prob`` is -inf, and ``sample`` never draws them. The loss is that of entmax, not
    minus the log-probability of the target, so it is finite for a class of probability 0.

    Choose it where a short list of classes that may come is worth more than a likelihood for
    every class: translation, morphology, generation without a cut-off.

    Cost: that of :class:`FullSoftmax`, less once the supports are small; see
    :func:`lastlayer.fused.linear_entmax_loss`.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        alpha: a number of at least 1.
        bias: whether each class has a bias.
        class_weight: one weight a class for the loss, ``(n_classes,)``; kept as a buffer.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> linear = torch.nn.Linear(1, 3, bias=False)
        >>> _ = linear.weight.data.copy_(torch.tensor([[2.0], [1.5], [0.0]]))
        >>> head = Entmax.from_linear(linear, alpha=2.0)
        >>> head.log_prob(torch.ones(1)).exp()
        tensor([0.7500, 0.2500, 0.0000], grad_fn=<ExpBackward0>)
    """

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        alpha: float = 1.5,
        bias: bool = True,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, n_classes, bias, **options)
        _check_number(alpha)
        self.alpha = alpha

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The entmax loss of the targets; see :func:`lastlayer.fused.linear_entmax_loss`."""
        check_hidden(self, hidden)
        options = {**self._loss_options(), "alpha": self.alpha}
        return linear_entmax_loss(hidden, self.weight, target, self.bias, **options)

    def _log_probs(self, scores: Tensor) -> Tensor:
        if self.alpha == 1.0:
            return torch.log_softmax(scores, -1)
        probs = entmax(scores, self.alpha)
        outside = probs == 0
        # The log of 1 in their place: that of 0 would make their gradient NaN.
        return probs.masked_fill(outside, 1.0).log().masked_fill(outside, -torch.inf)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "alpha": self.alpha}


def _check_number(alpha: Any) -> None:
    if isinstance(alpha, Tensor):
        raise TypeError(
            "alpha: expected a number, got a torch.Tensor; a learned alpha works with "
            "lastlayer.entmax_loss on scores"
        )
    check_alpha(alpha)
