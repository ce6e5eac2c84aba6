"""Sparse replacements of softmax: maps from scores (logits) to probabilities."""

from lastlayer.maps.entmax import Entmax, entmax
from lastlayer.maps.sparsemax import Sparsemax, sparsemax
from lastlayer.maps.support import Support, entmax_support
from lastlayer.maps.topk import TopKSoftmax, topk_softmax

__all__ = [
    "Entmax",
    "Sparsemax",
    "Support",
    "TopKSoftmax",
    "entmax",
    "entmax_support",
    "sparsemax",
    "topk_softmax",
]
