"""Trees with classes as leaves, and functions that build them."""

from lastlayer.trees.balanced import balanced
from lastlayer.trees.cluster import cluster
from lastlayer.trees.from_codes import from_codes
from lastlayer.trees.from_parents import from_parents
from lastlayer.trees.huffman import huffman
from lastlayer.trees.tree import EntropyBound, Tree
from lastlayer.trees.two_level import two_level
from lastlayer.trees.wordnet import WordNetReader, wordnet

__all__ = [
    "EntropyBound",
    "Tree",
    "WordNetReader",
    "balanced",
    "cluster",
    "from_codes",
    "from_parents",
    "huffman",
    "two_level",
    "wordnet",
]
