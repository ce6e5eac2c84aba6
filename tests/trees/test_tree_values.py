"""The value object: arrays, codes, equality, copies and files."""

import copy
import itertools
import json
import pickle
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import (
    all_codes,
    breadth_of_codes,
    code_lists,
    follow,
    left_to_right,
    random_trees,
    zipf,
)

from lastlayer import trees
from lastlayer.trees import Tree

EITHER = st.booleans().flatmap(random_trees)


@given(EITHER)
def test_codes_are_complete_and_none_begins_another(tree):
    codes = all_codes(tree)
    assert sum(breadth_of_codes(codes)) == 1
    for one, two in itertools.permutations(codes, 2):
        assert one != two[: len(one)]


@given(random_trees())
def test_every_class_has_one_leaf(tree):
    leaves = ~tree.child[tree.child < 0] if tree.n_inner else np.zeros(1)
    assert sorted(leaves) == list(range(tree.n_classes))
    assert tree.n_paths == tree.n_classes
    assert not tree.overlaps


@given(EITHER)
def test_nodes_are_level_by_level(tree):
    depths = tree.node_depth
    assert (np.diff(depths) >= 0).all()
    assert (tree.parent[1:] < np.arange(1, tree.n_inner)).all()
    assert (tree.arity >= 2).all()
    assert len(tree.child) == tree.n_inner + tree.n_paths - 1
    for v in range(1, tree.n_inner):
        above = tree.parent[v]
        assert tree.child[tree.child_start[above] + tree.position[v]] == v
        assert depths[v] == depths[above] + 1


@given(EITHER)
def test_paths_are_the_codes(tree):
    assert (np.diff(tree.path_class) >= 0).all()
    assert len(tree.path_class) == tree.n_paths
    for c in range(tree.n_classes):
        paths = range(tree.class_start[c], tree.class_start[c + 1])
        assert (tree.path_class[paths.start : paths.stop] == c).all()
        for path, code in zip(paths, tree.codes(c), strict=True):
            part = slice(tree.path_start[path], tree.path_start[path + 1])
            assert tree.path_position[part].tolist() == code
            assert (tree.path_node[part].tolist(), c) == follow(tree, code)
        assert tree.depth(c) == max(map(len, tree.codes(c)))
    assert tree.max_depth == max(map(len, all_codes(tree)))


@given(EITHER, st.integers(0, 2**32 - 1))
def test_probabilities_sum_to_one_over_the_classes(tree, seed):
    scores = np.random.default_rng(seed).normal(size=max(1, len(tree.child)))
    totals = np.zeros(tree.n_classes)
    for path, c in enumerate(tree.path_class):
        part = slice(tree.path_start[path], tree.path_start[path + 1])
        share = 1.0
        for node, position in zip(tree.path_node[part], tree.path_position[part], strict=True):
            odds = np.exp(scores[tree.child_start[node] : tree.child_start[node + 1]])
            share *= odds[position] / odds.sum()
        totals[c] += share
    assert abs(totals.sum() - 1) < 1e-12
    assert (totals > 0).all()


@given(code_lists() | code_lists(overlap=True))
def test_from_codes_gives_back_the_codes(codes):
    tree = trees.from_codes(codes)
    # Leaves are counted level by level, so that short codes come first.
    assert [sorted(each) for each in codes] == [sorted(tree.codes(c)) for c in range(len(codes))]
    assert trees.from_codes([tree.codes(c) for c in range(tree.n_classes)]) == tree
    if not tree.overlaps:
        assert [tree.code(c) for c in range(tree.n_classes)] == [code for (code,) in codes]


@given(random_trees(least=2))
def test_codes_in_all_their_forms(tree):
    codes = [tree.code(c) for c in range(tree.n_classes)]
    rows = np.full((len(codes), tree.max_depth), -1)
    for row, code in zip(rows, codes, strict=True):
        row[: len(code)] = code
    texts = ["".join(map(str, code)) for code in codes]
    mixed = [
        text if c % 2 else code for c, (text, code) in enumerate(zip(texts, codes, strict=True))
    ]
    for form in (codes, tuple(map(tuple, codes)), texts, mixed, rows, torch.tensor(rows)):
        assert trees.from_codes(form) == tree


def test_codes_with_many_children():
    codes = [[0, c] for c in range(700)] + [[1]]
    tree = trees.from_codes(codes)
    assert tree.max_arity == 700
    assert tree.code(699) == [0, 699]


@given(random_trees())
def test_from_parents_gives_back_the_tree(tree):
    # Numbers level by level with the leaves among them, as siblings are sorted by number.
    number, waiting = {}, [0 if tree.n_inner else ~0]
    parents = [-1]
    for at in waiting:
        number[at] = len(number)
        if at >= 0:
            children = tree.child[tree.child_start[at] : tree.child_start[at + 1]].tolist()
            waiting.extend(children)
            parents.extend([number[at]] * len(children))
    classes = [number[~c] for c in range(tree.n_classes)]
    assert trees.from_parents(parents, classes) == tree
    assert trees.from_parents(torch.tensor(parents), np.array(classes)) == tree

    names = {f"n{v}": None if above < 0 else f"n{above}" for v, above in enumerate(parents)}
    named = trees.from_parents(names, [f"n{v}" for v in classes])
    assert named.labels == tuple(f"n{v}" for v in classes)
    assert named.node_labels == tuple(f"n{number[v]}" for v in range(tree.n_inner))
    assert (named.child == tree.child).all()
    assert (named.child_start == tree.child_start).all()


def test_a_root_that_is_only_a_parent_and_classes_as_they_are_listed():
    tree = trees.from_parents(
        {"cat": "mammal", "trout": "animal", "mammal": "animal", "dog": "mammal"}
    )
    assert tree.labels == ("cat", "trout", "dog")
    assert tree.node_labels == ("animal", "mammal")
    assert [tree.code(each) for each in tree.labels] == [[1, 0], [0], [1, 1]]


def test_nodes_with_one_child_are_contracted():
    names = {"b": "a", "c": "b", "d": "b", "e": "d", "f": "e", "g": "e", "h": "g"}
    tree = trees.from_parents({"a": None, **names})
    assert tree.labels == ("c", "f", "h")
    assert tree.node_labels == ("b", "e")
    assert trees.from_parents([-1, 0, 1]) == trees.balanced(1)


def test_a_tree_of_one_class():
    tree = trees.balanced(1)
    assert (tree.n_classes, tree.n_inner, tree.n_paths, tree.max_depth) == (1, 0, 1, 0)
    assert tree.code(0) == []
    assert tree.path_start.tolist() == [0, 0]
    assert tree.expected_depth([3]) == 0
    assert tree.entropy_bound([3]) == (0, 0)
    assert tree.step_cost([3], 8) == 0
    assert tree == trees.huffman([2.0]) == trees.two_level(1) == trees.from_codes([[]])
    assert tree == trees.cluster(torch.zeros(1, 3)) == tree.collapse(4)
    assert "1 class" in tree.text()


def test_a_chain_as_deep_as_it_has_classes():
    n = 3000
    parents = [-1, *(v for v in range(0, 2 * n - 2, 2) for _ in range(2))]
    tree = trees.from_parents(parents)
    assert tree.max_depth == n - 1
    assert tree.path_start[-1] == (n - 1) * (n + 2) // 2
    assert tree.collapse(n).max_depth == 1
    assert "classes" in tree.text(max_nodes=1500)


def test_paths_beyond_memory_are_refused(monkeypatch):
    monkeypatch.setattr("lastlayer.trees.tree._MOST_PATH_ENTRIES", 10)
    tree = trees.balanced(8)
    assert tree.max_depth == 3
    assert tree.code(7) == [1, 1, 1]
    with pytest.raises(ValueError, match=r"expected at most 10 nodes, got 24 .*collapse"):
        _ = tree.path_node


@given(EITHER, st.integers(2, 40), st.booleans())
def test_collapse_keeps_classes_and_order_and_makes_nothing_deeper(tree, arity, counted):
    arity = max(arity, tree.max_arity, 2)
    counts = zipf(tree.n_classes) if counted else None
    shallow = tree.collapse(arity, counts)
    assert left_to_right(shallow) == left_to_right(tree)
    assert shallow.max_arity <= arity
    assert (shallow.class_depth <= tree.class_depth).all()
    assert shallow.n_inner <= tree.n_inner
    # Whatever could still be taken in would be too wide.
    for v in range(1, shallow.n_inner):
        assert shallow.arity[shallow.parent[v]] + shallow.arity[v] - 1 > arity


@given(random_trees(least=2))
def test_collapse_to_the_full_width_is_flat(tree):
    flat = tree.collapse(tree.n_classes)
    assert flat.max_depth == 1
    assert (~flat.child).tolist() == left_to_right(tree)


def test_collapse_of_a_balanced_tree_takes_whole_levels():
    assert trees.balanced(4096).collapse(16) == trees.balanced(4096, 16)


def test_collapse_by_counts_shortens_what_is_frequent():
    tree = trees.balanced(64)
    counts = np.ones(64)
    counts[40] = 1000
    assert tree.collapse(8, counts).depth(40) == 1
    assert tree.collapse(8).depth(40) == 2
    assert tree.collapse(8, counts).expected_depth(counts) < tree.collapse(8).expected_depth(counts)


def test_collapse_keeps_names():
    tree = trees.from_parents(
        {"a": "r", "b": "r", "c": "a", "d": "a", "e": "b", "f": "b", "g": "f"}
    )
    shallow = tree.collapse(3)
    assert shallow.labels == tree.labels
    assert set(shallow.node_labels) <= set(tree.node_labels)
    assert shallow.node_labels[0] == "r"


@given(EITHER, st.integers(0, 2**32 - 1))
def test_measures_are_what_they_say(tree, seed):
    counts = np.random.default_rng(seed).integers(0, 9, tree.n_classes)
    counts[seed % tree.n_classes] += 1
    shares = counts / counts.sum()
    depths = [tree.depth(c) for c in range(tree.n_classes)]
    assert tree.expected_depth(counts) == pytest.approx(shares @ depths)
    assert tree.expected_depth() == pytest.approx(np.mean(depths))
    costs = []
    for c in range(tree.n_classes):
        met = {node for code in tree.codes(c) for node in follow(tree, code)[0]}
        costs.append(sum(1 if tree.arity[v] == 2 else int(tree.arity[v]) for v in met))
    assert tree.step_cost(counts, 7) == pytest.approx(7 * (shares @ costs))
    some = shares[shares > 0]
    bits, steps = tree.entropy_bound(counts)
    assert bits == pytest.approx(max(0.0, -(some @ np.log2(some))))
    if not tree.overlaps:
        assert tree.expected_depth(counts) >= steps - 1e-9
    if tree.is_binary:
        assert steps == bits


def test_a_flat_tree_costs_what_a_flat_layer_does():
    flat = trees.balanced(50, arity=50)
    assert flat.step_cost(None, 16) == 50 * 16


def test_counts_of_any_kind_are_the_same():
    tree = trees.balanced(4)
    forms = [1, 2, 3, 4], (1, 2, 3, 4), np.array([1.0, 2, 3, 4]), torch.tensor([1, 2, 3, 4])
    forms += torch.tensor([1, 2, 3, 4]).bfloat16(), torch.arange(1.0, 5.0, requires_grad=True)
    assert len({tree.step_cost(counts, 3) for counts in forms}) == 1
    assert len({trees.huffman(counts) for counts in forms}) == 1


def test_a_class_is_found_by_its_label():
    tree = trees.balanced(3, labels=["a", "b", "c"])
    assert tree.code("c") == tree.code(2) == tree.code(np.int64(2)) == [1]
    assert tree.depth("a") == 2


@given(EITHER)
def test_equal_trees_are_equal(tree):
    again = Tree(tree.child_start, tree.child, overlap=tree.overlaps)
    assert tree == again
    assert hash(tree) == hash(again)
    named = Tree(
        tree.child_start, tree.child, list(map(str, range(tree.n_classes))), overlap=tree.overlaps
    )
    assert tree != named
    assert tree != 3


def test_nothing_can_be_changed():
    tree = trees.balanced(5)
    with pytest.raises(AttributeError, match="a Tree cannot be changed"):
        tree.labels = ("a",)
    for name in ("child", "child_start", "parent", "path_node", "path_position", "class_depth"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(tree, name)[0] = 1
    assert copy.deepcopy(tree) is tree
    assert copy.copy(tree) is tree


def test_what_was_passed_is_copied():
    child = np.array([~0, ~1])
    tree = Tree([0, 2], child)
    child[0] = ~1
    assert tree.child.tolist() == [~0, ~1]


@given(tree=EITHER, named=st.booleans())
def test_save_and_load(tmp_path, tree, named):
    if named:
        labels = [f"ὄνομα {c} \0 " for c in range(tree.n_classes)]
        nodes = [""] * tree.n_inner
        tree = Tree(tree.child_start, tree.child, labels, nodes, overlap=tree.overlaps)
    path = tmp_path / "tree.safetensors"
    tree.save(path)
    assert Tree.load(str(path)) == tree


def test_files_that_are_no_trees(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "tree.safetensors"
    with pytest.raises(FileNotFoundError, match=re.escape(f"got {path}")):
        Tree.load(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"path: expected a file that Tree\.save wrote"):
        Tree.load(path)
    save_file({"child": np.zeros(2)}, path)
    with pytest.raises(ValueError, match="path: expected a tree of version 1"):
        Tree.load(path)
    kind = {"format": "lastlayer.tree", "version": "1", "overlap": "false"}
    save_file({"child": np.zeros(2)}, path, kind)
    with pytest.raises(ValueError, match=r"path: expected the arrays .* without \['child_start'\]"):
        Tree.load(path)
    save_file({"child": np.array([~0, ~0]), "child_start": np.array([0, 2])}, path, kind)
    with pytest.raises(ValueError, match=f"{path}.*expected one leaf per class, got class 0"):
        Tree.load(path)


def test_truncated_and_altered_files_are_refused_by_name(tmp_path):
    path = tmp_path / "tree.safetensors"
    tree = trees.huffman([5, 4, 3, 2, 1], labels=list("abcde"))
    tree.save(path)
    data = path.read_bytes()
    for length in (0, 5, 40, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            Tree.load(path)
    # A label, and two classes that change places: a tree all the same, but another one.
    names = data.replace(b'"e"', b'"f"')
    first, second = (np.int32(~c).tobytes() for c in (0, 1))
    arrays = data.replace(first, b"????").replace(second, first).replace(b"????", second)
    for altered in (names, arrays):
        assert altered != data
        path.write_bytes(altered)
        with pytest.raises(ValueError, match=re.escape(f"got {path}, which was altered")):
            Tree.load(path)
    path.write_bytes(data)
    assert Tree.load(path) == tree


def test_the_digest_is_of_the_nodes_alone():
    tree = trees.huffman([5, 4, 3])
    assert tree.digest == trees.huffman([5, 4, 3], labels=list("abc")).digest
    assert tree.digest != trees.huffman([3, 4, 5]).digest


@given(tree=EITHER)
def test_leaves_from_left_to_right(tree):
    codes = [code for c in range(tree.n_classes) for code in tree.codes(c)]
    assert tree.leaf_rank.tolist() == [sorted(codes).index(code) for code in codes]


@given(tree=EITHER)
def test_sums_below_are_over_leaves(tree):
    values = np.arange(1.0, tree.n_classes + 1)
    expected = np.zeros(tree.n_inner)
    for path, c in enumerate(tree.path_class):
        expected[tree.path_node[tree.path_start[path] : tree.path_start[path + 1]]] += values[c]
    np.testing.assert_allclose(tree.sums_below(values), expected)


def test_a_file_holds_no_pickle(tmp_path):
    path = tmp_path / "tree.safetensors"
    trees.balanced(3, labels=["a", "b", "c"]).save(path)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["labels"]["dtype"] == "U8"
    assert b'["a", "b", "c"]' in data


def test_without_safetensors_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=re.escape('pip install "lastlayer[save]"')):
        trees.balanced(3).save(tmp_path / "tree.safetensors")


def test_a_pickled_tree_is_as_fixed_as_the_first():
    tree = trees.huffman([5, 4, 3, 2, 1], labels=list("abcde"))
    hash(tree)
    other = pickle.loads(pickle.dumps(tree))
    assert other == tree
    assert hash(other) == hash(tree)
    assert "_hash" not in pickle.loads(pickle.dumps(tree)).__dict__
    assert not other.child.flags.writeable
    assert not other.child_start.flags.writeable
    overlapping = trees.from_codes([["00", "10"], "01", "11"])
    assert pickle.loads(pickle.dumps(overlapping)) == overlapping
    with pytest.raises(AttributeError, match="child: a Tree cannot be changed"):
        del other.child
