"""Samplers of negative classes, with the exact log-probability of every draw."""

from lastlayer.samplers.base import Drawn, Sampled, Sampler
from lastlayer.samplers.counters import fork
from lastlayer.samplers.in_batch import InBatch
from lastlayer.samplers.ngram import AdaptiveNGram
from lastlayer.samplers.uniform import LogUniform, Uniform
from lastlayer.samplers.unigram import Unigram

__all__ = [
    "AdaptiveNGram",
    "Drawn",
    "InBatch",
    "LogUniform",
    "Sampled",
    "Sampler",
    "Uniform",
    "Unigram",
    "fork",
]
