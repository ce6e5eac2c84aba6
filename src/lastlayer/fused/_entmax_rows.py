"""The row loss of entmax: only the support has a gradient."""

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused._sparse_rows import can_wait, dense_rows, lead_of_classes, sparse_rows
from lastlayer.fused.engine import Chunk, RowLoss, RowResult

# Supports up to this size are kept as lists; chunks with a wider one take dense products.
WIDEST_LIST = 128
# Rounded scores are shrunk by this to find the candidates, whose exact scores then decide: who
# belongs to the support only by its exact score is among them.
SLACK = 0.8


def entmax_rows(class_weight: Tensor | None, alpha: float) -> RowLoss:
    """Sparse gradient where the supports of a chunk are small, else dense."""
    flat = False

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        nonlocal flat
        widest = min(WIDEST_LIST, scores.shape[1])
        # After one flat chunk the others are taken to be flat as well.
        if not flat and can_wait(scores):
            rounded = scores.itemsize < 4
            shrink = SLACK if rounded else 1.0
            values, classes, size = kernels.entmax.support(
                "auto", scores, alpha, None, widest, True, shrink
            )
            # The one place where the host waits: which products follow depends on it.
            needed = int(size.max()) if size.numel() else 0
            if needed <= widest:
                values, classes = values[:, :needed], classes[:, :needed].contiguous()
                lead = lead_of_classes(scores, chunk, classes, values != 0, rounded)
                if rounded:
                    values = kernels.entmax.forward("auto", lead, alpha, None)
                return sparse_rows(
                    chunk, class_weight, values, classes, lead, _entropy(values, alpha)
                )
            flat = True
        return dense_rows(
            scores, chunk, class_weight, alpha,
            lambda some: kernels.entmax.forward("auto", some, alpha, None),
        )  # fmt: skip

    return rows


def _entropy(probs: Tensor, alpha: float) -> Tensor:
    logs = torch.log(torch.where(probs > 0, probs, 1.0))
    return -(probs * torch.expm1((alpha - 1.0) * logs)).sum(-1) / (alpha * (alpha - 1.0))
