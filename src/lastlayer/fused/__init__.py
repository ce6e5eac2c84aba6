"""Exact losses from hidden states and class vectors, without storing the full score matrix."""

from lastlayer.fused.cross_entropy import Statistics, linear_cross_entropy, linear_statistics
from lastlayer.fused.labels import linear_bce_loss, linear_zlpr_loss
from lastlayer.fused.sparse import linear_entmax_loss, linear_topk_softmax_loss

__all__ = [
    "Statistics",
    "linear_bce_loss",
    "linear_cross_entropy",
    "linear_entmax_loss",
    "linear_statistics",
    "linear_topk_softmax_loss",
    "linear_zlpr_loss",
]
