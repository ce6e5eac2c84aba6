"""Bad input: errors name the argument, and the class or position."""

import math
import re

import numpy as np
import pytest
import torch

from lastlayer import trees
from lastlayer.trees import Tree

TREE = trees.balanced(4, labels=["a", "b", "c", "d"])


def raises(kind, *parts):
    return pytest.raises(kind, match=".*".join(map(re.escape, parts)))


@pytest.mark.parametrize(
    ("start", "child", "parts"),
    [
        ([], [], ("child_start: expected offsets from 0 to len(child) = 0", "got none")),
        ([0, 3], [~0, ~1], ("child_start:", "= 2", "got 0 to 3")),
        ([1, 2], [~0, ~1], ("child_start:", "got 1 to 2")),
        ([0, 1], [~0], ("at least two children", "got 1 for node 0", "from_parents")),
        ([0, 3, 2], [1, ~0], ("at least two children", "got -1 for node 1")),
        ([0, 2, 4], [2, ~0, ~1, ~2], ("child:", "1 at position 0, got 2")),
        ([0, 2, 4], [~3, ~0, ~1, ~2], ("child: expected each of the 1 inner nodes", "got 0")),
        ([0, 2, 4, 6], [1, ~0, ~1, ~2, 2, ~3], ("node 2 below node 2, a cycle",)),
        ([0, 3], [~0, ~2, ~3], ("from 0 to 3, got none for class 1",)),
        ([0, 3], [~1, ~2, ~1], ("from 0 to 2, got none for class 0",)),
        ([0, 2], [~1, ~(2**40)], ("got none for class 0",)),
        ([0, 3], [~0, ~1, ~0], ("got class 0 at positions 0 and 2", "overlap=True")),
    ],
)
def test_arrays_that_are_no_tree(start, child, parts):
    with raises(ValueError, *parts):
        Tree(start, child)


def test_types_of_arrays():
    with raises(TypeError, "child: expected nodes", "got an array of float64"):
        Tree([0, 2], [0.5, 1.0])
    with raises(TypeError, "child_start: expected offsets", "got int"):
        Tree(3, [~0, ~1])
    with raises(ValueError, "child:", "one dimension, got shape (1, 2)"):
        Tree([0, 2], [[~0, ~1]])
    assert Tree([0, 3], [~0, ~1, ~0], overlap=True).n_paths == 3


@pytest.mark.parametrize(
    ("labels", "kind", "parts"),
    [
        (["a", "b"], ValueError, ("labels: expected one name per class (3), got 2",)),
        (["a", "", "c"], ValueError, ("labels:", "got '' for class 1")),
        (["a", "b", "a"], ValueError, ("labels:", "got 'a' for classes 0 and 2")),
        (["a", "b", 3], TypeError, ("labels: expected a list of str, got int for class 2",)),
        ("abc", TypeError, ("labels: expected a list of str, got str",)),
        (3, TypeError, ("labels: expected a list of str, got int",)),
    ],
)
def test_labels(labels, kind, parts):
    for build in (
        lambda: trees.balanced(3, labels=labels),
        lambda: trees.huffman([1, 2, 3], labels=labels),
        lambda: trees.two_level(3, labels=labels),
        lambda: trees.from_codes(["0", "10", "11"], labels=labels),
        lambda: trees.from_parents([-1, 0, 0, 0], labels=labels),
        lambda: trees.cluster(torch.eye(3), labels=labels),
    ):
        with raises(kind, *parts):
            build()
    with raises(ValueError, "node_labels: expected one name per inner node (1), got 2"):
        Tree([0, 2], [~0, ~1], node_labels=["", ""])


@pytest.mark.parametrize(
    ("counts", "kind", "parts"),
    [
        ([1, -2, 3, 4], ValueError, ("counts:", "got -2 for class 1")),
        ([1, 2, math.nan, 4], ValueError, ("counts:", "got nan for class 2")),
        ([math.inf, 2, 1, 4], ValueError, ("counts:", "got inf for class 0")),
        ([0, 0, 0, 0], ValueError, ("counts: expected at least one above 0, got 4 zeros", "ones")),
        ([1e308] * 4, ValueError, ("counts: expected a finite sum", "divide by the largest")),
        ([[1, 2], [3, 4]], ValueError, ("counts: expected shape", "got (2, 2)")),
        ("abcd", TypeError, ("counts: expected one number per class, got str",)),
        (
            [1, 2, "c", 4],
            TypeError,
            ("counts: expected one number per class, got 'c' at position 2",),
        ),
        ([1, None, 3, 4], TypeError, ("counts: expected one number", "got None at position 1")),
        ({"a": 1}, TypeError, ("counts: expected one number per class, got dict",)),
        (np.array(list("abcd")), TypeError, ("counts: expected one number", "got an array of <U1")),
        ([[1], [2, 3]], TypeError, ("counts: expected one number per class",)),
        (2.5, TypeError, ("counts: expected one number per class, got float",)),
    ],
)
def test_counts(counts, kind, parts):
    for use in (
        trees.huffman,
        trees.two_level,
        TREE.expected_depth,
        TREE.entropy_bound,
        lambda c: TREE.step_cost(c, 3),
        lambda c: TREE.collapse(4, c),
        lambda c: trees.cluster(torch.eye(4), c),
        lambda c: TREE.plot(counts=c),
    ):
        with raises(kind, *parts):
            use(counts)


def test_numbers_of_counts():
    for use in (TREE.expected_depth, lambda c: trees.cluster(torch.eye(4), c)):
        with raises(ValueError, "counts: expected shape (4,), one number per class, got (3,)"):
            use([1, 2, 3])
    expected = "counts: expected one number per class and at least one class, got none"
    for build in (trees.huffman, trees.two_level):
        with raises(ValueError, expected):
            build([])


@pytest.mark.parametrize(
    ("build", "kind", "parts"),
    [
        (lambda: trees.balanced(0), ValueError, ("n: expected at least 1, got 0",)),
        (lambda: trees.balanced(2.0), TypeError, ("n: expected an int, got float",)),
        (lambda: trees.balanced(True), TypeError, ("n: expected an int, got bool",)),
        (lambda: trees.balanced(2**40), ValueError, ("n: expected at most", str(2**40))),
        (lambda: trees.balanced(4, 1), ValueError, ("arity: expected at least 2, got 1",)),
        (lambda: trees.huffman([1, 2], 1), ValueError, ("arity: expected at least 2, got 1",)),
        (lambda: trees.two_level(0), ValueError, ("counts: expected at least 1, got 0",)),
        (lambda: trees.two_level(False), TypeError, ("counts: expected an int, got bool",)),
        (lambda: trees.balanced(3, order=[0, 1]), ValueError, ("order: expected all 3", "got 2")),
        (
            lambda: trees.balanced(3, order=[0, 1, 1]),
            ValueError,
            ("order:", "got class 1 at positions 1 and 2"),
        ),
        (
            lambda: trees.balanced(3, order=[0, 1, 3]),
            ValueError,
            ("order: expected class ids from 0 to 2, got 3 at position 2",),
        ),
        (
            lambda: trees.balanced(5, 4).collapse(3),
            ValueError,
            ("arity: expected at least 4, the max_arity of the tree, got 3",),
        ),
        (lambda: TREE.step_cost(None, 0), ValueError, ("in_features: expected at least 1, got 0",)),
    ],
)
def test_numbers(build, kind, parts):
    with raises(kind, *parts):
        build()


@pytest.mark.parametrize(
    ("c", "kind", "parts"),
    [
        (4, ValueError, ("c: expected a class from 0 to 3, got 4",)),
        (-1, ValueError, ("c: expected a class from 0 to 3, got -1",)),
        ("e", ValueError, ("c: expected a label of the tree, got 'e'",)),
        (1.0, TypeError, ("c: expected a class id or a label, got float",)),
        (True, TypeError, ("c: expected a class id or a label, got bool",)),
    ],
)
def test_classes_that_are_none(c, kind, parts):
    for use in (TREE.code, TREE.codes, TREE.depth):
        with raises(kind, *parts):
            use(c)


def test_a_label_where_there_are_none():
    with raises(ValueError, "c: expected a class id, since the tree has no labels, got 'a'"):
        trees.balanced(3).code("a")


@pytest.mark.parametrize(
    ("parents", "classes", "kind", "parts"),
    [
        ([], None, ValueError, ("parents: expected at least one node",)),
        ([-1, 0, 5], None, ValueError, ("parents:", "from 0 to 2", "got 5 for node 2")),
        ([-1, -2], None, ValueError, ("parents:", "got -2 for node 1")),
        (
            [-1, -1, 0, 1],
            None,
            ValueError,
            ("one root, got 2, including 0 and 1", "common parent"),
        ),
        ([1, 2, 0], None, ValueError, ("got a cycle: ", " → ")),
        ([0], None, ValueError, ("got a cycle: 0 → 0",)),
        ([-1, 0, 0, 4, 3, 3, 4], None, ValueError, ("got a cycle: ", "3 → ", "4")),
        (
            [-1, 0, 0],
            [1],
            ValueError,
            ("classes: expected all nodes without", "got none for node 2"),
        ),
        ([-1, 0, 0], [1, 1], ValueError, ("classes:", "got node 1 for classes 0 and 1")),
        ([-1, 0, 0], [1, 0], ValueError, ("got node 0 for class 1", "add a leaf for the class")),
        (
            [-1, 0, 0],
            [1, 9],
            ValueError,
            ("classes: expected nodes from 0 to 2, got 9 for class 1",),
        ),
        ([-1, 0.5], None, TypeError, ("parents:", "got an array of float64")),
        ("abc", None, TypeError, ("parents:", "got str")),
        ({}, None, ValueError, ("parents: expected at least one node",)),
        ({"a": "b", "b": "a"}, None, ValueError, ("got a cycle: 'a' → 'b' → 'a'",)),
        ({"a": "b", "c": "d"}, None, ValueError, ("one root, got 2, including 'b' and 'd'",)),
        ({"a": "b", "c": 3}, None, TypeError, ("parents: expected names as str", "got int", "'c'")),
        ({"a": "b", None: "b"}, None, TypeError, ("parents:", "{None: 'b'}")),
        ({"a": "b", "": "b"}, None, ValueError, ("parents: expected names, got ''",)),
        ({"a": "b", "c": ""}, None, ValueError, ("parents: expected names, got ''", "'c'")),
        ({"a": "r", "b": "r"}, ["a", "z"], ValueError, ("classes:", "got 'z' for class 1")),
        ({"a": "r", "b": "r"}, ["a", "a"], ValueError, ("classes:", "'a' for classes 0 and 1")),
        ({"a": "r", "b": "r"}, ["a"], ValueError, ("classes:", "got none for node 'b'")),
        ({"a": "r", "b": "r"}, "ab", TypeError, ("classes: expected a list of names, got str",)),
    ],
)
def test_parents(parents, classes, kind, parts):
    with raises(kind, *parts):
        trees.from_parents(parents, classes)


def test_labels_beside_names():
    with raises(ValueError, "labels: expected None if parents are names"):
        trees.from_parents({"a": "r", "b": "r"}, labels=["a", "b"])


def test_a_long_cycle_is_not_told_in_full():
    parents = [-1, 0, 0, *range(4, 1000), 3]
    with raises(ValueError, "got a cycle: ", " → …"):
        trees.from_parents(parents)


@pytest.mark.parametrize(
    ("codes", "kind", "parts"),
    [
        ([], ValueError, ("codes: expected at least one class, got none",)),
        (["0", "01", "1"], ValueError, ("no code that is a prefix", "[0] of class 0", "class 1")),
        (["0", "10", "10"], ValueError, ("got [1, 0] for classes 1 and 2",)),
        (["0", "10"], ValueError, ("got only position 0 below [1], on the path to class 1",)),
        (["0"], ValueError, ("got only position 0 below the root", "class 0")),
        (["0", "2"], ValueError, ("without a gap, got no 1 but 2 below the root", "class 1")),
        ([[0], [10**12]], ValueError, ("without a gap, got no 1 but", "class 1")),
        ([[0], [2**62], [2**62, 1]], ValueError, ("codes:",)),
        ([[0], [-1]], ValueError, ("positions of at least 0, got -1 for class 1 at position 0",)),
        ([[0], []], ValueError, ("at least one position per class, got none for class 1",)),
        (["0", "1x"], ValueError, ("got 'x' for class 1 at position 1",)),
        (["0", "1é"], ValueError, ("got 'é' for class 1 at position 1",)),
        ([[0], [1.5]], ValueError, ("got 1.5 for class 1 at position 0",)),
        ([[0], ["1", 2]], TypeError, ("got int for class 1",)),
        ([[0], 1], TypeError, ("got int for class 1",)),
        ([[0], {1: 2}], TypeError, ("got dict for class 1",)),
        ("01", TypeError, ("codes: expected for each class", "got str")),
        (7, TypeError, ("codes: expected for each class", "got int")),
        (np.array([0, 1]), ValueError, ("(n_classes, longest)", "got int64 of shape (2,)")),
        (np.array([[0.0], [1.0]]), ValueError, ("an integer array", "got float64")),
        (np.array([[0, -1], [-1, 1]]), ValueError, ("-1 only after the end", "for class 1")),
        (np.array([[0], [-2]]), ValueError, ("got -2 for class 1 at position 0",)),
    ],
)
def test_codes(codes, kind, parts):
    with raises(kind, *parts):
        trees.from_codes(codes)


@pytest.mark.parametrize(
    ("vectors", "options", "kind", "parts"),
    [
        (torch.zeros(3), {}, ValueError, ("vectors: expected shape (n_classes, d)", "got (3,)")),
        (torch.zeros(0, 3), {}, ValueError, ("vectors:", "got (0, 3)")),
        (torch.zeros(3, 0), {}, ValueError, ("vectors:", "got (3, 0)")),
        (torch.zeros(3, 2).long(), {}, TypeError, ("vectors: expected floating", "got int64")),
        ("abc", {}, TypeError, ("vectors: expected floating", "got str")),
        ([[0.0], [math.nan]], {}, ValueError, ("vectors:", "got nan for class 1")),
        ([[0.0], [1.0], [-math.inf]], {}, ValueError, ("vectors:", "got -inf for class 2")),
        (torch.eye(3), {"kind": "greedy"}, ValueError, ("kind: expected one of", "got 'greedy'")),
        (torch.eye(3), {"overlap": 0.2}, ValueError, ("overlap: expected 0 with kind='balanced'",)),
        (torch.eye(3), {"overlap": 0.5}, ValueError, ("overlap:", "less than 0.5, got 0.5")),
        (torch.eye(3), {"overlap": -0.1}, ValueError, ("overlap: expected at least 0",)),
        (torch.eye(3), {"overlap": "a"}, TypeError, ("overlap: expected a number, got str",)),
        (torch.eye(3), {"max_paths": 2}, ValueError, ("max_paths: expected at least 3, got 2",)),
        (torch.eye(5), {"max_depth": 2}, ValueError, ("max_depth: expected at least 3, got 2",)),
        (torch.eye(3), {"seed": -1}, ValueError, ("seed: expected at least 0, got -1",)),
    ],
)
def test_vectors(vectors, options, kind, parts):
    with raises(kind, *parts):
        trees.cluster(vectors, **options)


@pytest.mark.parametrize(
    ("words", "options", "kind", "parts"),
    [
        ([], {}, ValueError, ("words: expected at least one word, got none",)),
        (
            ["cat", ""],
            {},
            ValueError,
            ("words: expected a name for each class, got '' for class 1",),
        ),
        (["cat", "cat"], {}, ValueError, ("words:", "got 'cat' for classes 0 and 1")),
        ("cat", {}, TypeError, ("words: expected a list of str, got str",)),
        (3, {}, TypeError, ("words: expected a list of str, got int",)),
        (["cat"], {"counts": [1, 2]}, ValueError, ("counts: expected shape (1,)", "got (2,)")),
        (
            ["cat"],
            {"vectors": torch.eye(2)},
            ValueError,
            ("vectors: expected one vector per word (1)", "got 2"),
        ),
        (["cat"], {"vectors": torch.eye(1), "binary": False}, ValueError, ("vectors:", "binary")),
        (["cat"], {"path": "/no/such"}, FileNotFoundError, ("path:", "/no/such", "no index.noun")),
        (
            ["cat"],
            {"path": "/", "reader": "wn"},
            ValueError,
            ("path: expected None with reader='wn'",),
        ),
        (["cat"], {"reader": "web"}, ValueError, ("reader: expected 'files', 'nltk'", "got 'web'")),
        (["cat"], {"reader": 3}, TypeError, ("reader: expected an object", "got int")),
    ],
)
def test_words(words, options, kind, parts):
    with raises(kind, *parts):
        trees.wordnet(words, **options)


def test_saving_where_no_file_can_be(tmp_path):
    pytest.importorskip("safetensors")
    with raises(FileNotFoundError, "path: expected a file in a folder that exists", "nowhere"):
        TREE.save(tmp_path / "nowhere" / "tree.safetensors")
    with raises(IsADirectoryError, "path: expected a file, got the folder"):
        TREE.save(tmp_path)
    assert not list(tmp_path.iterdir())
