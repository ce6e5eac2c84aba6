"""The frame of heads that train against some of their classes, and are exact in all else."""

from abc import abstractmethod
from typing import Any, NamedTuple, Self, TypedDict

import torch
from torch import Tensor

from lastlayer.fused import linear_cross_entropy
from lastlayer.heads._audited import Audited
from lastlayer.heads._checks import check_hidden
from lastlayer.heads._linear import LinearHead
from lastlayer.heads._sampled_checks import check_targets
from lastlayer.heads._sampled_loss import SampledProblem, sampled_loss


class ComparedOptions(TypedDict, total=False):
    """What all of their constructors take by name; :class:`ComparedHead` has the defaults."""

    bias: bool
    sparse: bool
    ignore_index: int | None
    reduction: str
    chunk_rows: int | str
    device: torch.device | str | None
    dtype: torch.dtype | None


class Batch(NamedTuple):
    """The rows of a training step."""

    hidden: Tensor
    """``(n, in_features)``, in the dtype of autocast where it is on."""
    target: Tensor
    """Class ids ``(n, p)``, negative in places without a target."""
    shape: torch.Size
    """That of a loss a row."""


class ComparedHead(LinearHead, Audited):
    """One vector a class. In training mode a row is compared with some classes, in eval with all.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        bias: whether each class has a bias.
        sparse: whether gradients of weight and bias are row-sparse.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.
    """

    # Whether the loss weighs classes by their scores; one of noise does not.
    weighs_draws = True
    ess: Tensor | None
    """Effective sample size of each row in the last training step, ``(n,)``; None before."""

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        bias: bool = True,
        sparse: bool = False,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        chunk_rows: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            n_classes,
            bias,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk_rows=chunk_rows,
            device=device,
            dtype=dtype,
        )
        self.sparse, self.ess = sparse, None

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """In training mode the loss against some classes; in eval mode the exact cross entropy.

        Args:
            hidden: ``(*batch, in_features)``.
            target: class ids ``(*batch)``, int64. Several targets a row, ``(*batch, p)`` with
                ``ignore_index`` in places that are not used, count with the mean of their
                log-probabilities.
        """
        check_hidden(self, hidden)
        target = check_targets(self, hidden, target)
        if self._takes_all():
            return self._exact_loss(hidden, target)
        return self._sampled_loss(self._batch(hidden, target))

    def _takes_all(self) -> bool:
        """Whether the loss is the exact one."""
        return not self.training

    @abstractmethod
    def _sampled_loss(self, batch: Batch) -> Tensor:
        """The reduced training loss; :meth:`_reduced` makes it from a problem."""

    @abstractmethod
    def _classes_a_step(self) -> int:
        """How many classes a row is compared with."""

    def _batch(self, hidden: Tensor, target: Tensor) -> Batch:
        """Rows, and targets, negative where they are ignored."""
        batch = hidden.shape[:-1]
        ids = target.reshape(batch.numel(), target.shape[-1] if target.dim() == hidden.dim() else 1)
        # A negative one needs no other.
        if self.ignore_index is not None and self.ignore_index >= 0:
            ids = torch.where(ids == self.ignore_index, -1, ids)
        rows = hidden.reshape(batch.numel(), self.in_features)
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
            rows = rows.to(torch.get_autocast_dtype(device))
        return Batch(rows, ids, batch)

    def _reduced(self, batch: Batch, problem: SampledProblem) -> Tensor:
        """The loss of a problem in the shape of the batch; keeps the effective sample sizes."""
        made = sampled_loss(problem, self.reduction, sparse=self.sparse, chunk_rows=self.chunk_rows)
        self.ess = made.ess
        return made.loss.reshape(batch.shape) if self.reduction == "none" else made.loss

    def _exact_loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        options = self._exact_options()
        if target.dim() < hidden.dim():
            return linear_cross_entropy(
                hidden, self.weight, target, self.bias, reduction=self.reduction, **options
            )
        several = hidden.unsqueeze(-2).expand(*target.shape, self.in_features)
        losses = linear_cross_entropy(
            several, self.weight, target, self.bias, reduction="none", **options
        )
        there = torch.ones_like(losses)
        if self.ignore_index is not None:
            there = (target != self.ignore_index).to(losses.dtype)
        of_row = losses.sum(-1) / there.sum(-1).clamp(min=1.0)
        if self.reduction == "none":
            return of_row
        total = of_row.sum()
        if self.reduction == "mean":
            total = total / there.amax(-1).sum().clamp(min=1.0)
        return total

    def _exact_options(self) -> dict[str, Any]:
        """What the fused loss of eval mode takes beside the reduction."""
        return {"ignore_index": self.ignore_index, "chunk_rows": self.chunk_rows}

    def _log_probs(self, scores: Tensor) -> Tensor:
        return torch.log_softmax(scores, -1)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear | torch.nn.Embedding, **options: Any) -> Self:
        if "class_weight" in options:
            raise TypeError(f"class_weight: expected none, since {cls.__name__} has no such option")
        return super().from_linear(linear, **options)

    def config(self) -> dict[str, Any]:
        config = super().config()
        del config["class_weight"]
        return {**config, "sparse": self.sparse}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**config)
