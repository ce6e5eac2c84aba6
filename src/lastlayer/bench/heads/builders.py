"""What builds trees of many classes: called, and verified by what every tree must be."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer import trees
from lastlayer.bench import memory
from lastlayer.bench.cases import OURS, Method
from lastlayer.bench.heads.problem import SEED, WIDE, zipf
from lastlayer.bench.heads.verdict import HeadVerdict
from lastlayer.trees import Tree

Counts = NDArray[np.float64]
Builder = Callable[[Counts], Tree]
Prepare = Callable[[int], Builder]

# Groups of the taxonomy, and numbers of a vector that is clustered.
GROUPS, NUMBERS = 1000, 64
OVERLAP = 0.3


@dataclass
class Build:
    """One tree from counts in random order; what else it is built from was made before."""

    builder: Builder
    classes: int

    def __call__(self, counts: Tensor) -> Tree:
        """The tree."""
        return self.builder(counts.numpy())

    captured = __call__

    def verify(self, inputs: tuple[Tensor, ...]) -> HeadVerdict:
        """Even choices at every node must give all classes a probability, in sum 1."""
        (counts,) = inputs
        self(counts)
        tree, peak = memory.with_peak(lambda: self(counts), counts.device)
        choices = np.log(tree.arity.astype(np.float64))[tree.path_node]
        log_prob = -np.add.reduceat(choices, tree.path_start[:-1])
        off = abs(float(np.exp(log_prob).sum()) - 1)
        reason = None
        if tree.n_classes != self.classes:
            reason = f"{tree.n_classes} classes"
        elif not off <= 1e-9:
            reason = f"probabilities whose sum is off by {off:.1e}"
        depth = f"{tree.max_depth} deep"
        return HeadVerdict(
            reason=reason,
            settings=depth if tree.is_binary else f"{depth}, up to {tree.max_arity} wide",
            peak_bytes=peak,
        )


def _from_parents(classes: int) -> Builder:
    """A taxonomy of names."""
    groups = min(GROUPS, classes)
    parents = {f"word{i}": f"group{i % groups}" for i in range(classes)}
    parents |= {f"group{i}": "root" for i in range(groups)}
    return lambda _: trees.from_parents(parents)


def _codes(classes: int) -> list[list[int]]:
    tree = trees.huffman(_shuffled(classes))
    chosen, start = tree.path_position.tolist(), tree.path_start.tolist()
    return [chosen[start[c] : start[c + 1]] for c in range(classes)]


def _from_lists(classes: int) -> Builder:
    codes = _codes(classes)
    return lambda _: trees.from_codes(codes)


def _from_strings(classes: int) -> Builder:
    codes = ["".join(map(str, code)) for code in _codes(classes)]
    return lambda _: trees.from_codes(codes)


def _with_paths(_: int) -> Builder:
    def build(counts: Counts) -> Tree:
        tree = trees.huffman(counts)
        _ = tree.path_node
        return tree

    return build


def _saved(classes: int) -> Builder:
    """Written and read again, with a label for each class."""
    labels = [f"word{i}" for i in range(classes)]
    tree = trees.huffman(_shuffled(classes), labels=labels)

    def build(_: Counts) -> Tree:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tree.safetensors")
            tree.save(path)
            return Tree.load(path)

    return build


def _clustered(classes: int, **options: Any) -> Builder:
    vectors = torch.randn(classes, NUMBERS, generator=torch.Generator().manual_seed(SEED))
    return lambda _: trees.cluster(vectors, progress=False, **options)


def _shuffled(classes: int) -> Counts:
    return np.random.default_rng(SEED).permutation(zipf(classes))


BUILDERS: dict[str, Prepare] = {
    "huffman": lambda _: trees.huffman,
    "huffman, arity 16": lambda _: lambda counts: trees.huffman(counts, 16),
    "balanced": lambda _: lambda counts: trees.balanced(len(counts)),
    "two_level": lambda _: trees.two_level,
    f"huffman, collapsed to {WIDE}": lambda _: lambda c: trees.huffman(c).collapse(WIDE),
    "huffman with all paths": _with_paths,
    "from_parents, names": _from_parents,
    "from_codes, strings": _from_strings,
    "from_codes, lists": _from_lists,
    "save and load, with labels": _saved,
}
CLUSTERED: dict[str, Prepare] = {
    "cluster": _clustered,
    f"cluster, overlap {OVERLAP:g}": partial(_clustered, kind="adaptive", overlap=OVERLAP),
}


def methods(builders: dict[str, Prepare], classes: int) -> list[Method]:
    """One for each builder."""

    def method(name: str, prepare: Prepare) -> Method:
        return Method(name, OURS, f"tree, {name}", lambda: Build(prepare(classes), classes))

    return [method(name, prepare) for name, prepare in builders.items()]
