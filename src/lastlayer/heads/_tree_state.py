"""What a head keeps of its tree, on disk and in its state."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lastlayer.trees import Tree

_FILE = "tree.safetensors"


def check_tree(tree: Any) -> None:
    """A tree."""
    if not isinstance(tree, Tree):
        raise TypeError(
            f"tree: expected a lastlayer.trees.Tree, got {type(tree).__name__}; trees.balanced(n) "
            "or trees.huffman(counts) make one"
        )


def tree_digest(tree: Tree) -> int:
    """A number that tells trees apart, whatever their labels."""
    made = hashlib.blake2b(digest_size=8)
    for array in (tree.child_start, tree.child):
        made.update(np.ascontiguousarray(array, "<i8").tobytes())
    return int.from_bytes(made.digest(), "little", signed=True)


def check_digest(digest: Any, tree: Tree) -> None:
    """That a state, whose digest this is, was made with the tree."""
    if isinstance(digest, Tensor) and not digest.is_meta and int(digest) != tree_digest(tree):
        raise ValueError(
            "state_dict: expected the state of a head with the same tree, got that of another "
            f"one; make the head with the tree it was trained with, not with {tree!r}"
        )


def save_tree(tree: Tree, folder: Path) -> None:
    """Beside the state of a head, which JSON could not hold it with."""
    tree.save(folder / _FILE)


def load_tree(folder: Path) -> Tree:
    """What :func:`save_tree` wrote."""
    return Tree.load(folder / _FILE)
