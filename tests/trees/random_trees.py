"""Trees drawn by hypothesis, and what can be said of a tree from its codes alone."""

from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from lastlayer import trees


def grown(leaves, max_arity, chance):
    """Codes ``[(class, code), …]`` of a random tree over the leaves, from left to right."""
    if len(leaves) == 1:
        return [(leaves[0], [])]
    arity = chance.randint(2, min(max_arity, len(leaves)))
    cuts = sorted(chance.sample(range(1, len(leaves)), arity - 1))
    parts = [leaves[a:b] for a, b in zip([0, *cuts], [*cuts, len(leaves)], strict=True)]
    return [
        (c, [position, *code])
        for position, part in enumerate(parts)
        for c, code in grown(part, max_arity, chance)
    ]


@st.composite
def code_lists(draw, overlap=False, least=1, most=24):
    """For each class all of its codes, in the order of their leaves."""
    n = draw(st.integers(least, most))
    chance = draw(st.randoms(use_true_random=False))
    leaves = list(range(n))
    if overlap:
        leaves += [chance.randrange(n) for _ in range(chance.randint(1, n))]
    chance.shuffle(leaves)
    codes = [[] for _ in range(n)]
    for c, code in grown(leaves, draw(st.integers(2, 6)), chance):
        codes[c].append(code)
    return codes


def random_trees(overlap=False, least=1):
    return code_lists(overlap, least).map(trees.from_codes)


def all_codes(tree):
    return [code for c in range(tree.n_classes) for code in tree.codes(c)]


def follow(tree, code):
    """The nodes on the way, and the class where the code ends."""
    at, nodes = 0, []
    for position in code:
        nodes.append(at)
        children = tree.child[tree.child_start[at] : tree.child_start[at + 1]]
        at = int(children[position])
        assert at > 0 or position == code[-1]
    return nodes, ~at if code else 0


def breadth_of_codes(codes):
    """The shares of a unit that leaves get where every node deals its own out evenly."""
    arity = {}
    for code in codes:
        for level, position in enumerate(code):
            prefix = tuple(code[:level])
            arity[prefix] = max(arity.get(prefix, 0), position + 1)
    shares = []
    for code in codes:
        share = Fraction(1)
        for level in range(len(code)):
            share /= arity[tuple(code[:level])]
        shares.append(share)
    return shares


def left_to_right(tree):
    """The classes of all leaves."""
    found, waiting = [], [0 if tree.n_inner else -1]
    while waiting:
        at = waiting.pop()
        if at < 0:
            found.append(~at)
        else:
            children = tree.child[tree.child_start[at] : tree.child_start[at + 1]]
            waiting.extend(children[::-1].tolist())
    return found


def zipf(n, chance=None):
    counts = np.floor(1e6 / np.arange(1, n + 1))
    return counts if chance is None else chance.permutation(counts)
