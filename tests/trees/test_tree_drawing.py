"""Trees as text and as pictures."""

import re
import sys

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from random_trees import random_trees, zipf

from lastlayer import trees

FAMILY = {"cat": "mammal", "dog": "mammal", "trout": "fish", "mammal": "animal", "fish": "animal"}


def axes():
    figure = Figure(figsize=(5, 4))
    FigureCanvasAgg(figure)
    return figure.subplots()


def drawn(ax):
    ax.figure.canvas.draw()
    return [each.get_text() for each in ax.texts]


def test_text_shows_the_whole_of_a_small_tree():
    tree = trees.from_parents({**FAMILY, "salmon": "fish"})
    assert str(tree) == tree.text() == (
        "4 classes, 3 inner nodes, up to 2 children, up to 2 deep\n"
        "animal\n"
        "├─ mammal\n"
        "│  ├─ cat\n"
        "│  └─ dog\n"
        "└─ fish\n"
        "   ├─ trout\n"
        "   └─ salmon"
    )  # fmt: skip


@given(st.booleans().flatmap(random_trees))
def test_text_names_every_leaf_that_fits(tree):
    lines = tree.text(max_nodes=200).splitlines()
    assert len(lines) == 1 + tree.n_inner + tree.n_paths
    ids = [int(found) for line in lines[1:] for found in re.findall(r"\d+$", line)]
    assert sorted(ids) == sorted(tree.path_class)


@given(st.integers(3, 60), st.integers(2, 40), st.integers(50, 3000))
def test_text_of_a_large_tree_is_short_and_counts_every_class_once(max_nodes, arity, n):
    lines = trees.balanced(n, arity).text(max_nodes).splitlines()
    assert len(lines) <= max(max_nodes, 6) + 1
    total = 0
    for line in lines[1:]:
        number = re.search(r"([\d,]+) (classes|more$)", line)
        if number:
            total += int(number[1].replace(",", ""))
        elif re.search(r"\d$", line):
            total += 1
    assert total == n


def test_text_of_an_overlapping_tree_counts_leaves():
    tree = trees.from_codes([["00", "10"], "01", "11"])
    assert tree.text().startswith("3 classes with 4 leaves, ")
    many = trees.cluster(np.arange(400.0)[:, None], kind="adaptive", overlap=0.3)
    assert re.search(r"… [\d,]+ leaves", many.text(10))


def test_long_names_are_cut():
    tree = trees.balanced(2, labels=["a" * 100, "b"])
    assert max(map(len, tree.text().splitlines()[1:])) < 40


def test_a_plot_names_leaves_and_inner_nodes():
    ax = axes()
    assert trees.from_parents({**FAMILY, "salmon": "fish"}).plot(ax) is ax
    names = ["animal", "mammal", "cat", "dog", "fish", "trout", "salmon"]
    assert drawn(ax) == names
    assert ax.get_title("left").startswith("4 classes")


@pytest.mark.parametrize("n", [1, 2, 30, 100_000])
def test_a_plot_of_any_size_stays_readable(n):
    ax = axes()
    tree = trees.huffman(zipf(n))
    tree.plot(ax, max_nodes=30, counts=zipf(n))
    texts = drawn(ax)
    assert 1 <= len(texts) <= 30
    if n > 30:
        rest = [int(text.split()[0].replace(",", "")) for text in texts if "classes" in text]
        assert sum(rest) + len(texts) - len(rest) == n


def test_lines_are_as_thick_as_they_are_frequent():
    ax = axes()
    trees.huffman([90, 9, 1]).plot(ax, counts=[90, 9, 1])
    (lines,) = ax.collections
    widths = lines.get_linewidths()
    assert max(widths) == pytest.approx(6.8)
    assert min(widths) == pytest.approx(0.57)


def test_a_plot_without_axes_makes_a_figure_as_high_as_it_needs():
    import matplotlib.pyplot as plt

    with mpl.rc_context({"backend": "agg"}):
        plt.switch_backend("agg")
        small, large = trees.balanced(4).plot(), trees.balanced(40).plot(max_nodes=100)
        assert small.figure.get_figheight() < large.figure.get_figheight()
        plt.close(small.figure)
        plt.close(large.figure)


def test_without_matplotlib_the_way_out_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=re.escape('pip install "lastlayer[lab]"')):
        trees.balanced(3).plot()


def test_room_for_three():
    with pytest.raises(ValueError, match="max_nodes: expected at least 3, got 2"):
        trees.balanced(3).text(2)
    with pytest.raises(ValueError, match="max_nodes: expected at least 3, got 0"):
        trees.balanced(3).plot(max_nodes=0)
