"""The row loss of top-k softmax: only the k largest scores and the target have a gradient."""

import math

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused._sparse_rows import dense_rows, lead_of_classes, sparse_rows
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
            lead = lead_of_classes(scores, chunk, classes, None, rounded)
            if rounded:
                lead, best = torch.topk(lead, k, sorted=False)
                classes = classes.gather(-1, best)
            # Nothing but -inf has no softmax, and no probability.
            empty = lead.amax(-1, keepdim=True) == -math.inf
            logs = torch.log_softmax(lead.masked_fill(empty, 0.0), -1)
            probs = torch.exp(logs).masked_fill(empty, 0.0)
            entropy = -torch.where(probs == 0, 0.0, probs * logs).sum(-1)
            return sparse_rows(chunk, class_weight, probs, classes, lead, entropy)
        largest = min(k, scores.shape[1])
        return dense_rows(
            scores, chunk, class_weight, 1.0,
            lambda some: kernels.topk_softmax.forward("auto", some, largest),
        )  # fmt: skip

    return rows
