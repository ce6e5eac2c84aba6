"""Modules that own the class vectors: from hidden states to a loss, or to classes."""

from lastlayer.heads._cutoffs import MatrixCost
from lastlayer.heads.adaptive import AdaptiveSoftmax, cutoffs_from_counts
from lastlayer.heads.adaptive_embedding import AdaptiveEmbedding
from lastlayer.heads.base import Head, TopK
from lastlayer.heads.char_cnn import CharCNNSoftmax
from lastlayer.heads.differentiated import DifferentiatedSoftmax, bands_from_counts
from lastlayer.heads.entmax import Entmax
from lastlayer.heads.full_softmax import FullSoftmax
from lastlayer.heads.hierarchical import HierarchicalSoftmax
from lastlayer.heads.topk import TopKSoftmax

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveSoftmax",
    "CharCNNSoftmax",
    "DifferentiatedSoftmax",
    "Entmax",
    "FullSoftmax",
    "Head",
    "HierarchicalSoftmax",
    "MatrixCost",
    "TopK",
    "TopKSoftmax",
    "bands_from_counts",
    "cutoffs_from_counts",
]
