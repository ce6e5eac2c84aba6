"""Checks of the arrays that a tree is made of."""

import numpy as np

from lastlayer.trees._arrays import MOST_IDS, Integers


def check_children(start: Integers, child: Integers) -> None:
    """Offsets fit, every node has two children or more, and nodes are level by level."""
    if not len(start) or start[0] != 0 or start[-1] != len(child):
        raise ValueError(
            f"child_start: expected offsets from 0 to len(child) = {len(child)}, got "
            f"{'none' if not len(start) else f'{start[0]} to {start[-1]}'}"
        )
    if max(len(start), len(child)) > MOST_IDS:
        raise ValueError(f"child: expected at most {MOST_IDS} children, got {len(child)}")
    few = np.diff(start) < 2
    if few.any():
        v = int(few.argmax())
        raise ValueError(
            f"child_start: expected two children or more for each inner node, got "
            f"{start[v + 1] - start[v]} for node {v}; trees.from_parents contracts such nodes"
        )
    inner = np.flatnonzero(child >= 0)
    nodes = child[inner]
    expected = np.arange(1, len(start) - 1)
    remedy = "trees.from_parents takes nodes in any order"
    if not np.array_equal(nodes, expected):
        if len(nodes) != len(expected):
            raise ValueError(
                f"child: expected the {len(expected)} inner nodes below the root, each once, got "
                f"{len(nodes)}; {remedy}"
            )
        wrong = int((nodes != expected).argmax())
        raise ValueError(
            f"child: expected inner nodes numbered level by level, {expected[wrong]} at position "
            f"{inner[wrong]}, got {nodes[wrong]}; {remedy}"
        )
    owner = np.searchsorted(start, inner, side="right") - 1
    early = owner >= nodes
    if early.any():
        wrong = int(early.argmax())
        raise ValueError(
            f"child: expected parents before their children, got node {nodes[wrong]} below node "
            f"{owner[wrong]}, a cycle; {remedy}"
        )


def check_leaves(child: Integers, overlap: bool) -> int:
    """Every class has a leaf, and one alone unless the tree may overlap."""
    n_classes = max(1, -int(child.min(initial=-1)))
    if not len(child):
        return n_classes
    edges = np.flatnonzero(child < 0)
    if n_classes > len(edges):
        # Also keeps a wild class id from asking for as much memory.
        present = np.unique(~child[edges])
        missing = int((np.append(present, -1) != np.arange(len(present) + 1)).argmax())
        raise ValueError(
            f"child: expected a leaf for each class from 0 to {n_classes - 1}, class {missing} is "
            "missing"
        )
    leaves = np.bincount(~child[edges], minlength=n_classes)
    if not leaves.all():
        raise ValueError(
            f"child: expected a leaf for each class from 0 to {n_classes - 1}, class "
            f"{int(leaves.argmin())} is missing"
        )
    if not overlap and (leaves > 1).any():
        c = int(leaves.argmax())
        first, second = np.flatnonzero(child == ~c)[:2]
        raise ValueError(
            f"child: expected one leaf a class, got class {c} at positions {first} and {second}; "
            "give overlap=True where classes may have several"
        )
    return n_classes
