"""Heads that train against a few classes and are exact in everything else."""

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

__all__ = [
    "AdaptiveImportanceSampling",
    "Audit",
    "Cost",
    "Explanation",
    "GradientError",
    "ImportanceSampling",
    "NegativeSampling",
    "NoiseContrastive",
    "PartialSoftmax",
    "Partition",
    "SampledSoftmax",
    "TargetSampling",
    "in_batch_softmax_loss",
    "target_partitions",
]
