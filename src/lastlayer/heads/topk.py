"""Top-k softmax over all classes, exact."""

from typing import Any, Unpack

import torch
from torch import Tensor

from lastlayer._checks import check_k
from lastlayer.fused import linear_topk_softmax_loss
from lastlayer.heads._checks import check_hidden
from lastlayer.heads._linear import LinearHead, LinearOptions
from lastlayer.heads._top import COPIES, top_classes


class TopKSoftmax(LinearHead):
    r"""A linear layer with :func:`lastlayer.topk_softmax` and its loss, without the scores.

    .. math:: \log p_c = \theta_c - \log \sum_{j \in \Omega_k} e^{\theta_j}
              \quad (c \in \Omega_k), \qquad \theta = W h + b

    where :math:`\Omega_k` holds the k best classes, the first of equal ones. All others have
    probability 0: their ``log_prob`` is -inf, and ``sample`` never draws them. The loss
    is finite for them all the same: it is the formula above for any target.

    Choose it where a model is fine-tuned on little data and softmax overfits by pushing away
    classes that are out of the running, or where the number of survivors must be known.

    Cost: that of :class:`FullSoftmax`, with a backward pass over k + 1 classes a row; see
    :func:`lastlayer.fused.linear_topk_softmax_loss`.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        k: how many classes are in the running, at least 1; n_classes or more is the softmax.
        bias: whether each class has a bias.
        class_weight: one weight a class for the loss, ``(n_classes,)``; kept as a buffer.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> head = TopKSoftmax(16, 1000, k=10)
        >>> hidden = torch.randn(4, 16)
        >>> (head.log_prob(hidden) > -torch.inf).sum(-1)
        tensor([10, 10, 10, 10])
    """

    _copies = COPIES + 2.0

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        k: int,
        bias: bool = True,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(in_features, n_classes, bias, **options)
        check_k(k)
        self.k = k

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of the targets; see :func:`lastlayer.fused.linear_topk_softmax_loss`."""
        check_hidden(self, hidden)
        options = {**self._loss_options(), "k": self.k}
        return linear_topk_softmax_loss(hidden, self.weight, target, self.bias, **options)

    def _log_probs(self, scores: Tensor) -> Tensor:
        if self.k >= scores.shape[-1]:
            return torch.log_softmax(scores, -1)
        values, classes = top_classes(scores, self.k)
        logs = torch.log_softmax(values, -1)
        broken = logs.isnan().any(-1, keepdim=True)
        nothing = torch.full_like(scores, -torch.inf).masked_fill_(broken, torch.nan)
        return nothing.scatter(-1, classes, logs)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "k": self.k}
