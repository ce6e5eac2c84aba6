"""A tree from the hypernyms of WordNet."""

from collections.abc import Hashable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lastlayer._checks import as_counts
from lastlayer.trees._arrays import (
    Integers,
    Offsets,
    Reals,
    as_labels,
    check_count,
    offsets,
    ranges,
)
from lastlayer.trees._wordnet_readers import DictionaryFiles, Nltk, Wn, find_files
from lastlayer.trees.balanced import balanced
from lastlayer.trees.cluster import Growth, as_vectors, grow
from lastlayer.trees.from_parents import arranged
from lastlayer.trees.huffman import huffman
from lastlayer.trees.tree import Tree

_UNKNOWN = "(not in WordNet)"
_HARDLY = 1e-9


@runtime_checkable
class WordNetReader(Protocol):
    """Interface of a reader of WordNet, or of another taxonomy of word senses."""

    def sense(self, word: str) -> Hashable | None:
        """The synset of a word; None if the word is unknown."""

    def above(self, synset: Any) -> Hashable | None:
        """The parent of a synset; None at the top."""

    def name(self, synset: Any) -> str:
        """The name of a synset in pictures."""

    def area(self, synset: Any) -> str:
        """The area of a synset without a parent, such as "verb.motion"."""


def wordnet(
    words: Sequence[str],
    counts: Any = None,
    *,
    vectors: Any = None,
    binary: bool = True,
    path: str | Path | None = None,
    reader: str | WordNetReader | None = None,
    seed: int = 0,
) -> Tree:
    """A tree of words by meaning: the hypernyms of WordNet.

    - **Words with several senses** take the most frequent one. WordNet sorts senses by their
      frequency in tagged text. Of the first senses of all parts of speech, of the word and of its
      base forms ("saw", "see"), the most frequent is taken; of equally frequent ones that of the
      unchanged word; then nouns before verbs, adjectives and adverbs.
    - **The parent of a sense** is its first hypernym, up to the root of the nouns. (nltk sorts
      hypernyms, so its first one may differ.) Verbs have many roots, which are grouped by
      lexicographer file, such as "verb.motion". A satellite adjective is below the adjective that
      it is similar to. Cycles of hypernyms are cut.
    - **A word that is a hypernym of others**, such as "dog" of "poodle", is a leaf next to them.
      Words with the same sense are leaves below a common node.
    - **Words that WordNet lacks** form a separate subtree below the root: a Huffman tree of their
      counts, or a balanced tree if there are no counts.
    - **A node with one child** is contracted. With ``binary``, a node with more than two gets a
      small binary tree over them: by clustering if ``vectors`` are given, otherwise Huffman's.

    Args:
        words: the classes, unique words. Case does not matter; spaces and underscores are
            equivalent.
        counts: one number per word.
        vectors: ``(n_words, d)``, floating. Children of a node are clustered by the mean vector of
            the words below each.
        binary: whether all nodes get two children; if False they have as many as in WordNet.
        path: the folder with WordNet's dictionary files, ``index.noun`` and so on.
        reader: "files" for the dictionary files, "nltk" or "wn" for these packages, or an object
            with the methods of :class:`WordNetReader`. By default the dictionary files in ``path``,
            in the environment variable WNSEARCHDIR, in ``dict`` below WNHOME, or in
            /usr/share/wordnet; if there are none, the package nltk, or else wn.
        seed: random seed of the clustering.

    Returns:
        A tree with the words as labels; inner nodes are named after the first word of their synset.

    Reference:
        Frederic Morin and Yoshua Bengio, Hierarchical probabilistic neural network language
        model, 2005.
    """
    labels = as_labels(words, len(words) if hasattr(words, "__len__") else -1, name="words")
    if not labels:
        raise ValueError("words: expected at least one word, got none")
    n = len(labels)
    weights = None if counts is None else as_counts(counts, n)
    seed = check_count("seed", seed, least=0)
    x = None if vectors is None else as_vectors("vectors", vectors, normalize=False)
    if x is not None and len(x) != n:
        raise ValueError(f"vectors: expected one vector per word ({n}), got {len(x)}")
    if x is not None and not binary:
        raise ValueError("vectors: expected None with binary=False, got vectors; give binary=True")
    parents, names, leaves = _gathered(labels, weights, _reader(reader, path))
    start, child, origin, _ = arranged(parents, leaves, lambda v: names[v])
    called = [names[v] for v in origin]
    if binary and len(child):
        plain = Tree(start, child)
        mass, means = _of_children(plain, np.ones(n) if weights is None else weights, x)
        start, child, was = _make_binary(start, child, mass, means, seed)
        called = [called[v] if v >= 0 else "" for v in was]
    return Tree(start, child, labels, called)


def _reader(reader: str | WordNetReader | None, path: str | Path | None) -> WordNetReader:
    if path is not None and reader not in (None, "files"):
        raise ValueError(f"path: expected None with reader={reader!r}, got {path}")
    if isinstance(reader, str) and reader not in ("files", "nltk", "wn"):
        raise ValueError(f"reader: expected 'files', 'nltk', 'wn' or a reader, got {reader!r}")
    if reader in (None, "files"):
        folder = find_files(path)
        if folder is not None:
            return DictionaryFiles(folder)
        if reader is None and find_spec("nltk") is not None:
            return Nltk()
        if reader is None and find_spec("wn") is not None:
            return Wn()
        raise FileNotFoundError(
            "path: expected WordNet's dictionary files, got no path, and neither the usual folders "
            "nor the packages nltk and wn were found; install Debian's wordnet-base, or give path="
        )
    if isinstance(reader, str):
        return Nltk() if reader == "nltk" else Wn()
    if not isinstance(reader, WordNetReader):
        raise TypeError(
            "reader: expected an object with the methods sense, above, name and area, got "
            f"{type(reader).__name__}"
        )
    return reader


class _Gathering:
    """Collects nodes with their parents and names."""

    def __init__(self) -> None:
        self.parents, self.names = [-1], [""]
        self.known: dict[Hashable, int] = {}

    def add(self, parent: int, name: str) -> int:
        self.parents.append(parent)
        self.names.append(name)
        return len(self.names) - 1

    def area(self, area: str) -> int:
        """The node of an area such as "verb.motion", below the node of "verb"."""
        node = 0
        whole, dot, _ = area.partition(".")
        for name in (whole, area) if dot else (whole,):
            key = ("area", name)
            if key not in self.known:
                self.known[key] = self.add(node, name)
            node = self.known[key]
        return node

    def synset(self, synset: Hashable, reader: WordNetReader) -> int:
        """The node of a synset; its ancestors are added first."""
        chain, met = [], set()
        above: Hashable | None = synset
        while above is not None and ("synset", above) not in self.known and above not in met:
            chain.append(above)
            met.add(above)
            above = reader.above(above)
        # A synset that was visited before is its own ancestor: the cycle is cut there.
        if above is None or above in met:
            node = self.area(reader.area(chain[-1]))
        else:
            node = self.known["synset", above]
        for each in reversed(chain):
            node = self.known["synset", each] = self.add(node, reader.name(each))
        return node


def _gathered(
    words: tuple[str, ...], counts: Reals | None, reader: WordNetReader
) -> tuple[Integers, list[str], Integers]:
    """The parent and the name of each node, and the node of each word."""
    nodes = _Gathering()
    leaves = np.empty(len(words), np.int64)
    unknown = []
    for c, word in enumerate(words):
        synset = reader.sense(word)
        if synset is None:
            unknown.append(c)
        else:
            leaves[c] = nodes.add(nodes.synset(synset, reader), word)
    if unknown:
        some = None if counts is None else counts[unknown]
        # If all counts are 0 they are ignored.
        tree = balanced(len(unknown)) if some is None or not some.any() else huffman(some)
        inner = [nodes.add(0, _UNKNOWN)]
        for parent in tree.parent[1:].tolist():
            inner.append(nodes.add(inner[parent], ""))
        last = tree.path_node[tree.path_start[1:] - 1].tolist() if tree.n_inner else [0]
        for c, node in zip(unknown, last, strict=True):
            leaves[c] = nodes.add(inner[node], words[c])
    return np.array(nodes.parents), nodes.names, leaves


def _of_children(
    tree: Tree, weights: Reals, vectors: NDArray[np.float32] | None
) -> tuple[Reals, NDArray[np.float32] | None]:
    """The total weight and the mean vector of the classes below each entry of ``tree.child``."""

    def below(per_class: Reals) -> Reals:
        # Inner nodes, then classes in reverse, since ~c indexes class c from the end.
        return np.concatenate([tree.sums_below(per_class), per_class[::-1]])[tree.child]

    if vectors is None:
        return below(weights), None
    # With a tiny weight, words with a count of 0 have a mean too, and hardly change that of others.
    some = weights + _HARDLY * weights.max()
    means = np.stack([below(some * column) for column in vectors.T], 1) / below(some)[:, None]
    return below(weights), means.astype(np.float32)


def _make_binary(
    start: Offsets, child: Integers, mass: Reals, vectors: NDArray[np.float32] | None, seed: int
) -> tuple[Offsets, Integers, Integers]:
    """A small binary tree over the children of each wide node, by mass or by vectors.

    Returns the new ``start`` and ``child``, level by level, and the old id of each node, -1 for a
    node that is new.
    """
    from lastlayer.trees import _loops

    wide = np.flatnonzero(np.diff(start) > 2)
    sizes = start[wide + 1] - start[wide]
    edges = ranges(start[wide], sizes)
    if vectors is None:
        forest, roots = _loops.huffman_of_groups(mass[edges], offsets(sizes))
    else:
        levels = 3 * int(sizes.max(initial=2)).bit_length()
        how = Growth(False, 0.0, len(edges), levels, seed)
        _, forest = grow(vectors[edges], mass[edges], offsets(sizes), how, lambda _: None)
        roots = np.arange(len(wide))
    n = len(start) - 1
    # Each wide node gets the root of its small tree as its only child, and is then contracted.
    forest = np.where(forest >= 0, forest + n, child[edges[~np.minimum(forest, -1)]])
    narrow = np.diff(start) <= 2
    below = np.where(narrow, np.diff(start), 1)
    new_child = np.empty(int(below.sum()), np.int64)
    new_start = offsets(np.concatenate([below, np.full(len(forest) // 2, 2)]))
    new_child[ranges(new_start[:n][narrow], below[narrow])] = child[
        ranges(start[:-1][narrow], below[narrow])
    ]
    new_child[new_start[:n][~narrow]] = roots + n
    was = np.concatenate([np.arange(n), np.full(len(forest) // 2, -1)])
    was[n + roots] = wide
    start, child, origin, _ = _loops.breadth_first(
        new_start, np.concatenate([new_child, forest]), 0
    )
    return start, child, was[origin]
