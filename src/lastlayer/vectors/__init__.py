"""Word vectors: skip-gram and CBOW with negative sampling, trees and the sampled softmax."""

from lastlayer.vectors.corpus import Corpus, encode
from lastlayer.vectors.table import Vectors
from lastlayer.vectors.training import train

__all__ = ["Corpus", "Vectors", "encode", "train"]
