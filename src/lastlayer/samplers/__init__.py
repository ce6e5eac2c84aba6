"""Proposals to draw negatives from: each records exactly the probability that it draws with."""

from lastlayer.samplers._counters import fork
from lastlayer.samplers._drawn import Drawn, Sampled
from lastlayer.samplers.base import Sampler
from lastlayer.samplers.in_batch import InBatch
from lastlayer.samplers.log_uniform import LogUniform
from lastlayer.samplers.ngram import AdaptiveNGram
from lastlayer.samplers.uniform import Uniform
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
