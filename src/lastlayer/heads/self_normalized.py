"""A softmax whose normaliser learns to be 1."""

import math
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.fused import linear_cross_entropy
from lastlayer.heads._checks import check_hidden, check_target
from lastlayer.heads._linear import LinearHead, LinearOptions
from lastlayer.heads._log_z import Drift, chosen_scores, drift_of, log_normalizer
from lastlayer.heads._recomputed import Steps
from lastlayer.heads._sampled_checks import check_positive, check_seed
from lastlayer.heads._target_scores import target_scores
from lastlayer.kernels.rng import words


class SelfNormalized(LinearHead):
    r"""A full softmax that is taught to need no normaliser.

    .. math:: L = \log Z - s_y + \alpha \log^2 Z, \qquad Z = \sum_c e^{s_c}

    The last term keeps Z near 1, so that after training a score is a log-probability,
    :meth:`unnormalized_log_prob`, at the cost of one class instead of all. :meth:`drift` says
    how far log Z is from 0, which is the error made. ``log_prob``, ``topk``, ``sample`` and the
    loss in eval mode, the cross entropy, are exact.

    With ``fraction`` :math:`\gamma < 1` a step takes the sum over all classes for that share of its
    rows alone (infrequent normalisation):

    .. math:: L = -s_y + \frac{1_S}{\gamma}\,(\log Z + \alpha \log^2 Z)

    where S are rows that are drawn anew in every step. On average it is the loss above, with the
    same optimum; its gradient is noisier, and a step costs :math:`\gamma` of the full one. (Without
    the plain :math:`\log Z` the penalty alone would have to hold the scores down, and log Z would
    settle at :math:`1 / 2\alpha` instead of 0.)

    Choose it to score single classes fast after training, where a full softmax can be afforded in
    training. :class:`NoiseContrastive` gets there without one.

    Cost: a training step three products of :math:`\gamma` × rows × in_features × n_classes.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        bias: whether each class has a bias.
        alpha: :math:`\alpha`. A larger one brings log Z closer to 0, at the expense of likelihood.
        fraction: :math:`\gamma`, the share of rows that are normalised in a step, above 0 and at
            most 1; rounded up to whole rows.
        seed: of the rows drawn.
        class_weight: one weight a class for the loss, ``(n_classes,)``; kept as a buffer.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> head = SelfNormalized(16, 1000, fraction=0.25)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> head(hidden, target).backward()
        >>> head.unnormalized_log_prob(hidden, target.unsqueeze(-1)).shape
        torch.Size([8, 1])
        >>> head.drift(hidden).mean > 5  # near log 1000: nothing has been learned yet
        True

    Reference:
        Devlin et al., Fast and Robust Neural Network Joint Models for Statistical Machine
        Translation, ACL 2014; Andreas and Klein, When and why are log-linear models
        self-normalizing?, NAACL 2015; Chen, Grangier and Auli, Strategies for Training Large
        Vocabulary Neural Language Models, ACL 2016, arXiv:1512.04906.
    """

    draws: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        bias: bool = True,
        *,
        alpha: float = 0.1,
        fraction: float = 1.0,
        seed: int = 0,
        **options: Unpack[LinearOptions],
    ) -> None:
        check_positive("alpha", alpha)
        check_positive("fraction", fraction)
        if fraction > 1.0:
            raise ValueError(f"fraction: expected a share of the rows, at most 1, got {fraction}")
        check_seed(seed)
        super().__init__(in_features, n_classes, bias, **options)
        self.alpha, self.fraction = float(alpha), float(fraction)
        device = None if self.weight.device.type == "meta" else self.weight.device
        # Seed and step: a resumed run draws the rows that the first one would have drawn.
        self.register_buffer("draws", torch.tensor([seed, 0], device=device))
        self._steps = Steps()

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """In training mode the loss above; in eval mode the exact cross entropy."""
        check_hidden(self, hidden)
        options = self._loss_options()
        if self.training and self.fraction < 1.0:
            return self._infrequent(hidden, check_target(self, hidden, target))
        if self.training and self.class_weight is not None:
            return self._weighted(hidden, check_target(self, hidden, target))
        alpha = self.alpha if self.training else 0.0
        return linear_cross_entropy(hidden, self.weight, target, self.bias, z_loss=alpha, **options)

    def _weighted(self, hidden: Tensor, target: Tensor) -> Tensor:
        """With the weight of a class on all of the loss: the fused one's leaves log² Z without."""
        row_weight = self._row_weight(target, accumulation_dtype(hidden.dtype))
        return linear_cross_entropy(
            hidden, self.weight, target, self.bias, row_weight=row_weight, z_loss=self.alpha,
            ignore_index=self.ignore_index, chunk_rows=self.chunk_rows,
            reduction="none" if self.reduction == "none" else "sum",
        )  # fmt: skip

    def _infrequent(self, hidden: Tensor, target: Tensor) -> Tensor:
        rows, weight, bias = self._operands(hidden)
        ids = target.reshape(-1)
        row_weight = self._row_weight(ids, accumulation_dtype(rows.dtype))
        present = torch.where(row_weight == 0, 0, ids)
        chosen = self._chosen(ids)
        times = ids.shape[0] / max(1, chosen.shape[0])
        # The loss on chosen rows has -s_y as well, with all of its factor.
        factor = torch.full_like(row_weight, -1.0).index_fill_(0, chosen, times - 1.0)
        scores = target_scores(rows, self.weight, self.bias, present, row_weight * factor)
        reduced = self.reduction != "none"
        losses = linear_cross_entropy(
            rows[chosen], weight, ids[chosen], bias, row_weight=row_weight[chosen] * times,
            ignore_index=self.ignore_index, reduction="sum" if reduced else "none",
            z_loss=self.alpha, chunk_rows=self.chunk_rows,
        )  # fmt: skip
        if reduced:
            return losses + scores.sum()
        return scores.index_add(0, chosen, losses).reshape(target.shape)

    def _row_weight(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """What the loss of each row counts in the result."""
        counts = torch.ones_like(ids, dtype=torch.bool)
        if self.ignore_index is not None:
            counts = ids != self.ignore_index
        weight = counts.to(dtype)
        if self.class_weight is not None:
            weight = weight * self.class_weight.to(dtype)[torch.where(counts, ids, 0)]
        if self.reduction != "mean":
            return weight
        total = weight.sum()
        return weight / torch.where(total == 0, 1.0, total)

    def _chosen(self, ids: Tensor) -> Tensor:
        """Rows in even distances from a random start: each is among them equally often."""
        n = ids.shape[0]
        size = math.ceil(self.fraction * n)
        word: Tensor = words("auto", self._steps.counter(self.draws).clone(), 1)[0, 0]
        if not self._steps.is_recomputed():
            self.draws[1:].add_(1)
        start = word.double() * 2.0**-32
        places = (torch.arange(size, device=ids.device) + start) * (n / max(1, size))
        return places.long().clamp(max=max(0, n - 1))

    def unnormalized_log_prob(self, hidden: Tensor, classes: Tensor) -> Tensor:
        """The scores of chosen classes: their log-probabilities where log Z is 0.

        It looks at no other class. No gradient is recorded.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids, int64: ``(*batch, k)``, or ``(k,)`` for every row.

        Returns:
            ``(*batch, k)``, float32, or float64 from float64.
        """
        return chosen_scores(self, hidden, classes)

    def drift(self, hidden: Tensor) -> Drift:
        """How far log Z of these rows is from 0.

        It takes a product with all classes, and waits for the device.

        Args:
            hidden: ``(*batch, in_features)``.
        """
        return drift_of(log_normalizer(self, hidden))

    def _log_probs(self, scores: Tensor) -> Tensor:
        return torch.log_softmax(scores, -1)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        """A head on the very parameters of a layer: a step on one is a step on both."""
        head = super().from_linear(linear, **options)
        head.draws = head.draws.to(linear.weight.device)
        return head

    def config(self) -> dict[str, Any]:
        # The seed is part of the state.
        return {**super().config(), "alpha": self.alpha, "fraction": self.fraction}
