"""A softmax over the best classes of a row and its target."""

from typing import Any, Unpack

import torch
from torch import Tensor

from lastlayer.heads._checks import check_count
from lastlayer.heads._compared import Batch, ComparedHead, ComparedOptions
from lastlayer.heads._rows import row_chunks
from lastlayer.heads._sampled_loss import Draws, Rule, SampledProblem
from lastlayer.heads._scores import wide_scores


class PartialSoftmax(ComparedHead):
    r"""A softmax trained over the k best classes and the target: only the outputs that matter.

    .. math:: L = \log \sum_{c \in T_k \cup \{y\}} e^{\theta_c} - \theta_y

    The other classes have next to no probability in a trained model, so that their share of the
    gradient is left out; nothing is corrected for that, and nothing is left to chance. The loss is
    at most the cross entropy, and equals it with k = n_classes. In eval mode it is the exact one.

    Choose it to fine-tune a model whose probabilities are concentrated, where ``sparse=True``
    leaves the optimiser few rows to touch. To train from the start choose
    :class:`SampledSoftmax`: classes that are never among the best are never pushed down.

    Cost: all scores are computed once, to find the best; the gradient looks at rows × k classes.

    Args:
        in_features: how many numbers a hidden state has.
        n_classes: how many classes there are.
        k: how many of the best classes count.
        bias: whether each class has a bias.
        sparse: whether gradients of weight and bias are row-sparse.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> head = PartialSoftmax(16, 1000, k=20, sparse=True)
        >>> hidden, target = torch.randn(8, 16), torch.randint(1000, (8,))
        >>> loss = head(hidden, target)
        >>> bool(loss <= head.eval()(hidden, target))
        True
    """

    def __init__(
        self, in_features: int, n_classes: int, k: int = 100, **options: Unpack[ComparedOptions]
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        check_count("k", k, most=n_classes)
        self.k = k

    def _sampled_loss(self, batch: Batch) -> Tensor:
        best = self._best(batch.hidden)
        if best.shape[0]:
            # Rows that do not count look at classes that another one looks at, and touch no more.
            counts = (batch.target >= 0).any(-1)
            one = best.index_select(0, counts.long().argmax().reshape(1))
            best = torch.where(counts.unsqueeze(-1), best, one)
        nothing = torch.zeros_like(best, dtype=torch.float32)
        return self._reduced(
            batch,
            SampledProblem(
                batch.hidden, self.weight, self.bias, batch.target, Draws(best, nothing), Rule()
            ),
        )

    def _classes_a_step(self) -> int:
        return self.k

    @torch.no_grad()
    def _best(self, rows: Tensor) -> Tensor:
        """Class ids ``(n, k)``; which of equal scores are taken does not change the loss."""
        weight = self.weight.to(rows.dtype)
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        return torch.cat([
            wide_scores(rows[part], weight, bias).topk(self.k, sorted=False).indices
            for part in row_chunks(rows, self.n_classes, self.chunk_rows, 1.0)
        ])  # fmt: skip

    def config(self) -> dict[str, Any]:
        return {**super().config(), "k": self.k}
