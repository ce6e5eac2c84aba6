"""In-batch negatives: the targets of the other rows of a batch."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import as_counts, check_positive, check_share
from lastlayer._torch import as_numpy
from lastlayer.kernels import rng
from lastlayer.samplers.base import Sampler


class InBatch(Sampler):
    """In-batch negatives, with probabilities from the counts of targets: q(c) ∝ count(c) + prior.

    For two-tower models, where the item vectors of the other rows are negatives at no extra cost.
    Frequent items are negatives more often; their log-probability corrects for that. Counts are
    given, or learned during training: ``update(target)`` adds the targets of a batch.

    Args:
        n_classes: number of classes.
        counts: initial counts, one number per class, at least 0; zeros by default.
        prior: added to every count, so that every class has a probability; more than 0.
        decay: factor of older counts in each update; 1 keeps them. Below 1 an update takes
            O(n_classes) time.

    Example:
        >>> import torch
        >>> from lastlayer import samplers
        >>> sampler = samplers.InBatch(4, prior=1.0)
        >>> target = torch.tensor([2, 2, 0, 2])
        >>> sampler.update(target)
        >>> sampler.log_prob(target).exp()
        tensor([0.5000, 0.5000, 0.2500, 0.5000])
    """

    needs_context = True
    seen: Tensor

    def __init__(
        self, n_classes: int, *, counts: Any = None, prior: float = 1.0, decay: float = 1.0
    ) -> None:
        super().__init__(n_classes)
        self.prior = check_positive("prior", prior)
        self.decay = check_share("decay", decay)
        seen = torch.zeros(self.n_classes, dtype=torch.float64, device="cpu")
        if counts is not None:
            seen = torch.from_numpy(as_counts(counts, self.n_classes, kinds="iuf"))
        # float64 bits stored as integers, which module.float() or module.bfloat16() do not convert.
        self.register_buffer("seen", seen.view(torch.int64))
        self.register_buffer("total", seen.sum().view(torch.int64))

    @torch.no_grad()
    def update(self, target: Tensor) -> None:
        """Add the targets of a batch to the counts.

        Args:
            target: class ids of any shape.
        """
        target = self._check_ids("target", target)
        seen, total = self.seen.view(torch.float64), self.get_buffer("total").view(torch.float64)
        if self.decay < 1.0:
            seen.mul_(self.decay)
            total.mul_(self.decay)
        seen.index_add_(0, target.flatten(), seen.new_ones(target.numel()))
        total.add_(target.numel())

    def _draw(self, n: int, rng_counter: Tensor, context: Tensor | None) -> Tensor:
        if context is None:
            raise ValueError("context: expected the targets of the batch to draw from, got None")
        return context[rng.integers("auto", rng_counter, n, len(context))]

    def _check_context(self, context: Any) -> Tensor | None:
        if context is None:
            return None
        targets = self._check_ids("context", context)
        if targets.dim() != 1 or not len(targets):
            raise ValueError(
                "context: expected the targets of the batch, shape (rows,) with at least one, "
                f"got {tuple(targets.shape)}"
            )
        return targets

    def _log_prob(self, ids: Tensor, _context: Tensor | None) -> Tensor:
        total = self.get_buffer("total").view(torch.float64) + self.prior * self.n_classes
        return ((self.seen.view(torch.float64)[ids] + self.prior) / total).log()

    def config(self) -> dict[str, Any]:
        seen = as_numpy(self.seen.view(torch.float64).cpu())
        return {**self._saved_config(), "counts": seen if seen.any() else None}

    def _saved_config(self) -> dict[str, Any]:
        return {"n_classes": self.n_classes, "prior": self.prior, "decay": self.decay}
