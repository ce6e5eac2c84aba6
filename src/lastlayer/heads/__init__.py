"""Modules that own the class vectors: from hidden states to a loss, or to classes."""

from lastlayer.heads.base import Head, TopK
from lastlayer.heads.entmax import Entmax
from lastlayer.heads.full_softmax import FullSoftmax
from lastlayer.heads.topk import TopKSoftmax

__all__ = ["Entmax", "FullSoftmax", "Head", "TopK", "TopKSoftmax"]
