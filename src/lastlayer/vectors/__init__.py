"""Word vectors (word2vec): skip-gram and CBOW, with three training objectives."""

from lastlayer.vectors.corpus import Corpus, encode
from lastlayer.vectors.table import Vectors
from lastlayer.vectors.training import train

__all__ = ["Corpus", "Vectors", "encode", "train"]
