"""The row loss of top-k softmax: only the k largest scores and the target have a gradient."""

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused._sparse_rows import dense_rows, scores_of_listed, sparse_rows
from lastlayer.fused.engine import Chunk, RowLoss, RowResult

# Beyond this many classes a row, dense products are faster than lists.
WIDEST_LIST = 512
# How many more classes are looked at where scores are rounded: their exact scores then decide.
SLACK = 16


def topk_rows(class_weight: Tensor | None, k: float) -> RowLoss:
    """Sparse gradient with k + 1 entries a row; dense where k is large."""
    k = int(k)

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        if k <= WIDEST_LIST and k < scores.shape[1]:
            rounded = scores.itemsize < 4
            candidates = min(k + SLACK, scores.shape[1]) if rounded else k
            classes = torch.topk(scores, candidates, sorted=False).indices
            own, at_target = scores_of_listed(scores, chunk, classes)
            if rounded:
                own, best = torch.topk(own, k, sorted=False)
                classes = classes.gather(-1, best)
            return sparse_rows(chunk, class_weight, own, at_target, classes, 1.0)
        largest = min(k, scores.shape[1])
        return dense_rows(
            scores, chunk, class_weight, 1.0,
            lambda some: kernels.topk_softmax.forward("auto", some, largest),
        )  # fmt: skip

    return rows
