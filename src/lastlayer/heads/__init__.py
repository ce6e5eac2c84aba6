"""Output layers: modules that own the class vectors and compute losses and predictions."""

from lastlayer.heads.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from lastlayer.heads.base import Head, TopK
from lastlayer.heads.char_cnn import CharCNNSoftmax
from lastlayer.heads.differentiated import DifferentiatedSoftmax
from lastlayer.heads.distributed import prepare_ddp
from lastlayer.heads.hierarchical import HierarchicalSoftmax
from lastlayer.heads.layout import MatrixCost, bands_from_counts, cutoffs_from_counts
from lastlayer.heads.linear import EntmaxHead, FullSoftmax, TopKSoftmaxHead
from lastlayer.heads.multi_label import MultiLabel
from lastlayer.heads.recipes import ClassData, Recipe, registered
from lastlayer.heads.sampled.audit import Audit, Cost, Explanation, GradientError
from lastlayer.heads.sampled.importance import AdaptiveImportanceSampling, ImportanceSampling
from lastlayer.heads.sampled.in_batch import in_batch_softmax_loss
from lastlayer.heads.sampled.noise import NegativeSampling, NoiseContrastive
from lastlayer.heads.sampled.partial import (
    PartialSoftmax,
    Partition,
    TargetSampling,
    target_partitions,
)
from lastlayer.heads.sampled.softmax import SampledSoftmax
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
    "prepare_ddp",
    "registered",
    "target_partitions",
]
