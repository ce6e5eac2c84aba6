"""Scores and targets to a loss."""

from lastlayer.losses.entmax import EntmaxLoss, SparsemaxLoss, entmax_loss, sparsemax_loss
from lastlayer.losses.fenchel_young import fenchel_young_loss
from lastlayer.losses.nce import nce_loss
from lastlayer.losses.negative_sampling import negative_sampling_loss
from lastlayer.losses.topk import TopKSoftmaxLoss, topk_softmax_loss

__all__ = [
    "EntmaxLoss",
    "SparsemaxLoss",
    "TopKSoftmaxLoss",
    "entmax_loss",
    "fenchel_young_loss",
    "nce_loss",
    "negative_sampling_loss",
    "sparsemax_loss",
    "topk_softmax_loss",
]
