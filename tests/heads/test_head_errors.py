"""Bad input to heads, beyond what check_head asks of all of them."""

import math
import re

import pytest
import torch

import lastlayer
from lastlayer import heads, samplers, trees
from lastlayer.heads import EntmaxHead, FullSoftmax, TopKSoftmaxHead

HIDDEN = torch.zeros(2, 3)


def raises(kind, *parts):
    return pytest.raises(kind, match=".*".join(map(re.escape, parts)))


@pytest.mark.parametrize(
    ("make", "kind", "parts"),
    [
        (lambda: FullSoftmax(0, 4), ValueError, ("in_features: expected at least 1", "got 0")),
        (lambda: FullSoftmax(3, 0), ValueError, ("n_classes: expected at least 1", "got 0")),
        (lambda: FullSoftmax(3.0, 4), TypeError, ("in_features: expected an int", "got float")),
        (lambda: FullSoftmax(3, True), TypeError, ("n_classes: expected an int", "got bool")),
        (lambda: FullSoftmax(3, 4, reduction="avg"), ValueError, ("reduction:", "got 'avg'")),
        (lambda: FullSoftmax(3, 4, ignore_index=0.5), TypeError, ("ignore_index:", "got float")),
        (lambda: FullSoftmax(3, 4, chunk_rows=0), ValueError, ("chunk_rows:", "got 0")),
        (lambda: FullSoftmax(3, 4, softcap=0), ValueError, ("softcap:", "got 0")),
        (lambda: FullSoftmax(3, 4, temperature=-1), ValueError, ("temperature:", "got -1")),
        (lambda: FullSoftmax(3, 4, label_smoothing=2), ValueError, ("label_smoothing:", "got 2")),
        (lambda: FullSoftmax(3, 4, z_loss="a"), TypeError, ("z_loss:", "got str")),
        (
            lambda: FullSoftmax(3, 4, class_weight=torch.ones(3)),
            ValueError,
            ("class_weight: expected shape (4,)", "got (3,)"),
        ),
        (lambda: EntmaxHead(3, 4, 0.5), ValueError, ("alpha: expected at least 1", "got 0.5")),
        (
            lambda: EntmaxHead(3, 4, torch.tensor(1.5)),
            TypeError,
            ("alpha:", "torch.Tensor", "learned"),
        ),
        (lambda: TopKSoftmaxHead(3, 4, 0), ValueError, ("k: expected at least 1", "got 0")),
        (lambda: TopKSoftmaxHead(3, 4, 2.0), TypeError, ("k: expected an int", "got float")),
    ],
)
def test_constructors(make, kind, parts):
    with raises(kind, *parts):
        make()


def test_hidden_of_another_dtype_is_told_the_way_out():
    head = FullSoftmax(3, 4)
    parts = ("hidden: expected the dtype of the head, torch.float32", "torch.float64", "autocast")
    for call in (head.log_prob, head.sample, lambda h: head.topk(h, 1)):
        with raises(TypeError, *parts):
            call(HIDDEN.double())
    with raises(TypeError, *parts):
        head(HIDDEN.double(), torch.tensor([0, 1]))


def test_hidden_on_another_device():
    head = FullSoftmax(3, 4, device="meta")
    with raises(ValueError, "hidden: expected the device of the head, meta", "got cpu", ".to("):
        head.log_prob(HIDDEN)


def test_classes_of_another_shape():
    head, hidden = FullSoftmax(3, 4), torch.zeros(2, 5, 3)
    for wrong in (torch.zeros(3), torch.tensor(1), torch.zeros(2, 4), torch.zeros(1, 5, 2)):
        parts = ("classes: expected shape (2, 5), one class id per row, or (2, 5, k)",)
        with raises(ValueError, *parts, f"got {tuple(wrong.shape)}"):
            head.log_prob(hidden, wrong.long())
    assert head.log_prob(hidden, torch.zeros(2, 5, dtype=torch.int32)).shape == (2, 5)
    assert head.log_prob(hidden[0, 0], torch.tensor(2)).shape == ()


def test_the_first_class_out_of_range_is_named():
    classes = torch.tensor([[0, 1], [3, 4]])
    with raises(ValueError, "classes: expected class ids from 0 to 3", "got 4 at position (1, 1)"):
        FullSoftmax(3, 4).log_prob(HIDDEN, classes)


def test_generators():
    head = FullSoftmax(3, 4)
    with raises(TypeError, "generator: expected a torch.Generator, got int"):
        head.sample(HIDDEN, generator=3)


@pytest.mark.parametrize(
    "head", [FullSoftmax(3, 4), EntmaxHead(3, 4), TopKSoftmaxHead(3, 4, 2)], ids=repr
)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_without_probabilities_cannot_be_drawn_from(head, wrong):
    hidden = torch.zeros(2, 2, 3)
    hidden[1, 0, 1] = wrong
    with raises(ValueError, "hidden: expected rows with valid probabilities", "position (1, 0)"):
        head.sample(hidden)


@pytest.mark.gpu
def test_values_on_a_gpu_are_checked_inside_debug():
    head = FullSoftmax(3, 4, device="cuda")
    hidden = torch.full((2, 3), math.nan, device="cuda")
    assert head.sample(hidden).tolist() == [[-1], [-1]]
    with lastlayer.debug(), raises(ValueError, "hidden: expected rows with valid probabilities"):
        head.sample(hidden)
    with raises(ValueError, "generator: expected one on the device of hidden", "got one on cpu"):
        head.sample(hidden, generator=torch.Generator())


def test_a_reduction_that_is_none_is_told():
    made = [
        heads.AdaptiveSoftmax(8, cutoffs=[5], n_classes=20),
        heads.DifferentiatedSoftmax(8, [(5, 4), (15, 4)]),
        heads.HierarchicalSoftmax(8, trees.balanced(20)),
        heads.HierarchicalSoftmax(8, trees.balanced(40, 40)),
        heads.CharCNNSoftmax(8, ["one", "two", "three"], filters=[(2, 4)]),
        heads.FullSoftmax(8, 20),
        heads.SampledSoftmax(8, 20, samplers.Uniform(20), n_samples=4),
        heads.ImportanceSampling(8, 20, samplers.Uniform(20), 4, target_ess=5.0),
        heads.AdaptiveImportanceSampling(8, 20, [1.0] * 20),
        heads.NoiseContrastive(8, 20, samplers.Uniform(20), 4),
        heads.NegativeSampling(8, 20, samplers.Uniform(20), 4),
        heads.PartialSoftmax(8, 20, k=3),
        heads.SelfNormalized(8, 20, fraction=0.5),
    ]
    for head in made:
        head.reduction = "average"
        with pytest.raises(ValueError, match="reduction: expected"):
            head(torch.randn(2, 8), torch.tensor([1, 2]))
