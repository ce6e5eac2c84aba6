"""Modules that own the class vectors: from hidden states to a loss, or to classes."""

from lastlayer.heads._audit_gradients import GradientError
from lastlayer.heads._audit_report import Audit
from lastlayer.heads._cutoffs import MatrixCost
from lastlayer.heads._explain import Cost, Explanation
from lastlayer.heads._sampled_in_batch import in_batch_softmax_loss
from lastlayer.heads._sampled_partial import PartialSoftmax
from lastlayer.heads._span_decode import Span
from lastlayer.heads._target_sampling import Partition, TargetSampling, target_partitions
from lastlayer.heads.adaptive import AdaptiveSoftmax, cutoffs_from_counts
from lastlayer.heads.adaptive_embedding import AdaptiveEmbedding
from lastlayer.heads.adaptive_importance_sampling import AdaptiveImportanceSampling
from lastlayer.heads.base import Head, TopK
from lastlayer.heads.char_cnn import CharCNNSoftmax
from lastlayer.heads.differentiated import DifferentiatedSoftmax, bands_from_counts
from lastlayer.heads.global_pointer import GlobalPointer
from lastlayer.heads.hierarchical import HierarchicalSoftmax
from lastlayer.heads.importance_sampling import ImportanceSampling
from lastlayer.heads.linear import EntmaxHead, FullSoftmax, TopKSoftmaxHead
from lastlayer.heads.multi_label import MultiLabel
from lastlayer.heads.negative_sampling import NegativeSampling
from lastlayer.heads.noise_contrastive import NoiseContrastive
from lastlayer.heads.recipes import ClassData, Recipe, registered
from lastlayer.heads.sampled_softmax import SampledSoftmax
from lastlayer.heads.self_normalized import Drift, SelfNormalized

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
