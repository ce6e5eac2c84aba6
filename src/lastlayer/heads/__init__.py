"""Modules that own the class vectors: from hidden states to a loss, or to classes."""

from lastlayer.heads.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from lastlayer.heads.base import Head, TopK
from lastlayer.heads.char_cnn import CharCNNSoftmax
from lastlayer.heads.differentiated import DifferentiatedSoftmax
from lastlayer.heads.hierarchical import HierarchicalSoftmax
from lastlayer.heads.layout import MatrixCost, bands_from_counts, cutoffs_from_counts
from lastlayer.heads.linear import EntmaxHead, FullSoftmax, TopKSoftmaxHead
from lastlayer.heads.multi_label import MultiLabel
from lastlayer.heads.recipes import ClassData, Recipe, registered
from lastlayer.heads.sampled import (
    AdaptiveImportanceSampling,
    Audit,
    Cost,
    Explanation,
    GradientError,
    ImportanceSampling,
    NegativeSampling,
    NoiseContrastive,
    PartialSoftmax,
    Partition,
    SampledSoftmax,
    TargetSampling,
    in_batch_softmax_loss,
    target_partitions,
)
from lastlayer.heads.self_normalized import Drift, SelfNormalized
from lastlayer.heads.spans import GlobalPointer, Span

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveImportanceSampling",
    "AdaptiveSoftmax",
    "Audit",
    "CharCNNSoftmax",
    "ClassData",
    "Cost",
    "DifferentiatedSoftmax",
    "Drift",
    "EntmaxHead",
    "Explanation",
    "FullSoftmax",
    "GlobalPointer",
    "GradientError",
    "Head",
    "HierarchicalSoftmax",
    "ImportanceSampling",
    "MatrixCost",
    "MultiLabel",
    "NegativeSampling",
    "NoiseContrastive",
    "PartialSoftmax",
    "Partition",
    "Recipe",
    "SampledSoftmax",
    "SelfNormalized",
    "Span",
    "TargetSampling",
    "TopK",
    "TopKSoftmaxHead",
    "bands_from_counts",
    "cutoffs_from_counts",
    "in_batch_softmax_loss",
    "registered",
    "target_partitions",
]
