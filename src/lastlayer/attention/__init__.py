"""Sparse attention: entmax in place of softmax, so that most weights are exactly zero."""

from lastlayer.attention.functional import (
    AttentionWeights,
    attention_weights,
    sparse_attention,
)
from lastlayer.attention.modules import AttentionPooling, SparseMultiheadAttention
from lastlayer.attention.plot import plot_attention

__all__ = [
    "AttentionPooling",
    "AttentionWeights",
    "SparseMultiheadAttention",
    "attention_weights",
    "plot_attention",
    "sparse_attention",
]
