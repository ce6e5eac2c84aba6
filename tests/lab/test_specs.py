"""Specs of heads: the head's own constructor, what the data fills in, and clear mistakes."""

import gc

import numpy as np
import pytest
import torch

from lastlayer import heads
from lastlayer.heads.multi_label import MultiLabel
from lastlayer.heads.recipes import ClassData
from lastlayer.lab.errors import SpecError
from lastlayer.lab.inspect import for_labels, for_text
from lastlayer.lab.specs import catalogue, defaults_for, parse_spec, parse_specs

WIDTH, CLASSES = 16, 60


@pytest.fixture(scope="module")
def needs() -> ClassData:
    counts = (1000 / np.arange(1, CLASSES + 1)).astype(np.int64)
    return ClassData(WIDTH, counts, [f"word{i}" for i in range(CLASSES)], seed=3)


@pytest.mark.parametrize("name", catalogue())
def test_every_family_can_be_built_from_its_name(needs, name):
    family = catalogue()[name]
    head = parse_spec(name, task=family.tasks[0]).build(needs)
    if "pairs" in family.tasks:
        assert head(torch.randn(4, 2, WIDTH), torch.arange(4)).isfinite()
        return
    assert isinstance(head, heads.Head)
    assert (head.in_features, head.n_classes) == (WIDTH, CLASSES)
    assert family.recipe.about
    target = torch.randint(CLASSES, (4,) if "lm" in family.tasks else (4, 2))
    assert head(torch.randn(4, WIDTH), target).isfinite()


def test_the_seed_of_the_run_is_that_of_the_draws(needs):
    assert parse_spec("sampled").build(needs).rng_counter.tolist() == [3, 0]
    assert parse_spec("sampled").build(needs.with_seed(5)).rng_counter.tolist() == [5, 0]


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("full:bias=false", lambda h: h.bias is None),
        ("full:softcap=none,temperature=2", lambda h: (h.softcap, h.temperature) == (None, 2.0)),
        ("entmax:alpha=1.3", lambda h: h.alpha == 1.3),
        ("sparsemax", lambda h: h.alpha == 2.0),
        ("topk:k=7", lambda h: h.k == 7),
        ("adaptive:cutoffs=10,30", lambda h: h.cutoffs.tolist() == [10, 30]),
        ("hierarchical:tree=balanced", lambda h: h.tree.max_depth == 6),
        ("hierarchical:tree=two_level", lambda h: h.tree.max_depth == 2),
        ("hierarchical:arity=8", lambda h: h.tree.max_arity == 8),
        ("hierarchical:sparse=false", lambda h: not h.sparse),
        ("hierarchical", lambda h: h.sparse),
        ("differentiated:bands=20x12,40x4", lambda h: [*h.bands[1]] == [40, 4]),
        ("char_cnn:filters=1x4,2x8", lambda h: [*h.filters[1]] == [2, 8]),
        ("sampled:sampler=uniform,n_samples=9", lambda h: h.n_samples == 9),
        ("negative:power=0.5", lambda h: h.sampler.power == 0.5),
        ("negative", lambda h: h.sampler.power == 0.75),
        ("sampled", lambda h: h.n_samples == CLASSES // 4),
        ("lastlayer.heads:FullSoftmax:bias=no", lambda h: h.bias is None),
    ],
)  # fmt: skip
def test_arguments_are_those_of_the_constructor(needs, text, check):
    assert check(parse_spec(text).build(needs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ful", r"no head 'ful'; did you mean full\?; there are adaptive, .*mymodule:MyHead"),
        ("full:bia=1", r"no argument 'bia'; did you mean bias\?; full takes bias=true\|false, "),
        (
            "full:in_features=3",
            r"in_features is set from the data .*; leave it out; full takes bias",
        ),
        ("char_cnn:filters=3", r"filters: expected INTxINT,…, got .3."),
        ("full:bias=perhaps", r"bias: expected true\|false, got 'perhaps'"),
        ("adaptive:cutoffs=a", r"cutoffs: expected none\|int,int,…, got 'a'"),
        ("entmax:1.5", r"expected name=value after 'entmax:', got '1.5'; entmax takes alpha=float"),
        ("entmax:alpha=1,alpha=2", r"expected alpha once, got it twice"),
        ("hierarchical:tree=oak", r"tree: expected huffman\|balanced\|two_level, got 'oak'"),
        ("no_such_module:Head", r"cannot import no_such_module"),
        ("lastlayer.heads:FulSoftmax", r"did you mean FullSoftmax\?"),
        ("lastlayer.heads:TopK", r"expected a class that derives from lastlayer.heads.Head"),
        ("zlpr", r"expected a head for --task lm, got one for multilabel"),
    ],
)
def test_mistakes_name_what_is_valid(text, message):
    with pytest.raises(SpecError, match=rf"^--head {text}: .*{message}"):
        parse_spec(text)


def test_a_value_that_the_constructor_refuses_names_the_spec(needs):
    with pytest.raises(SpecError, match=r"^--head entmax:alpha=0.5: alpha: "):
        parse_spec("entmax:alpha=0.5").build(needs)


def test_the_same_head_twice_is_refused():
    with pytest.raises(SpecError, match="expected different heads"):
        parse_specs(["entmax:alpha=1.5", "entmax:alpha=1.50"])


def test_names_of_folders_differ():
    specs = parse_specs(["full", "full:bias=false", "full:bias=true"])
    assert len({spec.slug for spec in specs}) == 3
    assert all(set(spec.slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-._") for spec in specs)


@pytest.mark.parametrize("task", ["lm", "multilabel"])
def test_the_selection_can_be_built(needs, task):
    specs = parse_specs([], task=task)
    assert [spec.text for spec in specs] == defaults_for(task)
    assert len(specs) >= (8 if task == "lm" else 3)


def test_what_inspect_suggests_can_be_compared():
    text = for_text(60_000, {
        "effective_classes": 900.0, "half": 50, "seen_once": 0.4, "huffman_bits": 10.5,
        "cutoffs": (500, 5000), "adaptive_savings": 9.0, "hidden": 256,
    })  # fmt: skip
    facts = {"cardinality": 2.0, "density": 0.004, "imbalance": 50.0, "most": 9}
    labels = for_labels(500, facts)
    for task, suggested in (("lm", list(text)), ("multilabel", list(labels))):
        assert suggested
        for each in suggested:
            parse_spec(each.head, task=task)


def test_multilabel_losses_are_those_of_the_head(needs):
    made = [parse_spec(name, task="multilabel").build(needs) for name in defaults_for("multilabel")]
    assert {type(head) for head in made} == {MultiLabel}
    assert len({head.loss for head in made}) == len(made)


def test_a_head_of_ones_own_registers_itself(needs):
    """Its file is the one place: the lab finds the recipe in the class."""

    class Mine(heads.FullSoftmax):
        recipes = (
            heads.Recipe(
                "mine",
                "with a temperature",
                fixed={"temperature": 2.0},
                compared=("mine",),
                rank=999,
            ),
        )

    try:
        assert "mine" in heads.registered()
        head = parse_spec("mine:bias=false").build(needs)
        assert type(head) is Mine
        assert (head.temperature, head.bias) == (2.0, None)
        assert defaults_for("lm")[-1] == "mine"
        # A class that derives from it without recipes of its own adds none.
        assert len([each for each, _ in heads.registered().values() if issubclass(each, Mine)]) == 1
    finally:
        del Mine, head
        gc.collect()
    assert "mine" not in heads.registered()
