"""Structured heads at their edges: second derivatives, autocast, meta, and more classes."""

import pytest
import torch

from lastlayer import heads, optim, trees

WIDE = [lambda: trees.two_level(2500), lambda: trees.balanced(40, 40)]


@pytest.mark.parametrize("make", WIDE)
def test_wide_nodes_refuse_second_derivatives(make):
    head = heads.HierarchicalSoftmax(4, make(), dtype=torch.float64)
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    classes = torch.randint(40, (3,))
    for made in (head(hidden, classes), head.log_prob(hidden, classes.unsqueeze(-1)).sum()):
        with pytest.raises(RuntimeError, match=r"use head\.log_prob\(hidden\)"):
            torch.autograd.grad(made, hidden, create_graph=True)
    (slope,) = torch.autograd.grad(head.log_prob(hidden)[:, 0].sum(), hidden, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), hidden)
    assert second.abs().max() > 0


def test_under_autocast_the_best_are_those_of_a_sort():
    tree = trees.huffman([1 / rank for rank in range(1, 2001)])
    head = heads.HierarchicalSoftmax(64, tree)
    hidden = torch.randn(64, 64).bfloat16()
    target = torch.randint(2000, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        every = head.log_prob(hidden)
        torch.testing.assert_close(head.topk(hidden, 10).values, every.topk(10).values)
        assert (head.topk(hidden, 10).classes == every.topk(10).indices).all()
        loss = head(hidden, target)
    torch.testing.assert_close(loss, -every.gather(1, target.unsqueeze(-1)).mean())


def test_backward_inside_autocast():
    head = heads.HierarchicalSoftmax(8, trees.balanced(40, 40))
    hidden = torch.randn(6, 8, requires_grad=True)
    target = torch.randint(40, (6,))
    with torch.autocast("cpu", torch.bfloat16):
        head(hidden, target).backward()
    found, head.weight.grad = head.weight.grad, None
    head(hidden, target).backward()
    torch.testing.assert_close(found, head.weight.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimiser_of_fewer_classes_makes_no_step(fused):
    head = heads.CharCNNSoftmax(8, ["one", "two", "three"], char_features=4, filters=[(2, 4)])
    optimizer = torch.optim.Adam(head.parameters(), fused=fused)

    def step():
        optimizer.zero_grad()
        head(torch.randn(5, 8), torch.randint(head.n_classes, (5,))).backward()
        optimizer.step()

    step()
    head.add_classes(["four"])
    with pytest.raises(RuntimeError, match="make a new optimizer"):
        step()
    head.add_classes(["five"])
    optimizer = torch.optim.Adam(head.parameters(), fused=fused)
    step()
    step()


@pytest.mark.parametrize(
    "make",
    [
        lambda **given: heads.AdaptiveSoftmax(
            16, cutoffs=[5, 20], n_classes=40, order=torch.arange(39, -1, -1), **given
        ),
        lambda **given: heads.DifferentiatedSoftmax(
            16, [(10, 8), (30, 8)], order=torch.arange(39, -1, -1), **given
        ),
    ],
    ids=["adaptive", "differentiated"],
)
def test_made_on_meta_and_filled_later(make):
    here, later = make(), make(device="meta").to_empty(device="cpu")
    for buffer in later.buffers():
        buffer.fill_(-7)
    later.reset_parameters()
    for one, other in zip(here.buffers(), later.buffers(), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        for one, other in zip(here.parameters(), later.parameters(), strict=True):
            other.copy_(one)
    hidden, classes = torch.randn(3, 16), torch.tensor([2, 7, 30])
    assert torch.equal(here.log_prob(hidden, classes), later.log_prob(hidden, classes))


@pytest.mark.parametrize("spread", [0.0, 3.0, 8.0])
def test_relearned_on_the_same_tree_nothing_changes(spread):
    for tree in (trees.balanced(256), trees.huffman([1.4**-i for i in range(60)])):
        head = heads.HierarchicalSoftmax(4, tree, dtype=torch.float64)
        torch.nn.init.normal_(head.bias, std=spread)
        hidden = torch.randn(5, 4, dtype=torch.float64)
        torch.testing.assert_close(
            head.relearn(tree).log_prob(hidden), head.log_prob(hidden), rtol=1e-6, atol=1e-6
        )


def test_a_reduction_that_is_none_is_told():
    made = [
        heads.AdaptiveSoftmax(8, cutoffs=[5], n_classes=20),
        heads.DifferentiatedSoftmax(8, [(5, 4), (15, 4)]),
        heads.HierarchicalSoftmax(8, trees.balanced(20)),
        heads.HierarchicalSoftmax(8, trees.balanced(40, 40)),
        heads.CharCNNSoftmax(8, ["one", "two", "three"], filters=[(2, 4)]),
        heads.FullSoftmax(8, 20),
        heads.SampledSoftmax(8, 20, n_samples=4),
        heads.ImportanceSampling(8, 20, n_samples=4, target_ess=5.0),
        heads.AdaptiveImportanceSampling(8, 20, [1.0] * 20),
        heads.NoiseContrastive(8, 20, n_samples=4),
        heads.NegativeSampling(8, 20, n_samples=4),
        heads.PartialSoftmax(8, 20, k=3),
        heads.SelfNormalized(8, 20, fraction=0.5),
    ]
    for head in made:
        head.reduction = "average"
        with pytest.raises(ValueError, match="reduction: expected"):
            head(torch.randn(2, 8), torch.tensor([1, 2]))


def test_float64_stays_float64_under_autocast():
    head = heads.CharCNNSoftmax(8, ["one", "two", "three"], filters=[(2, 4)], dtype=torch.float64)
    hidden = torch.randn(4, 8, dtype=torch.float64)
    expected = head.log_prob(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(head.log_prob(hidden), expected)


WORDS = ["play", "plays", "walk", "walks"]


def spelled(**options):
    return heads.CharCNNSoftmax(8, WORDS, filters=((1, 4),), correction=3, **options)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_kept_vectors_are_made_again_after_a_step_of_a_fused_optimiser(kind):
    head = spelled()
    optimizer = kind(head.parameters(), lr=0.1, fused=True)
    head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).backward()
    with torch.no_grad():
        before = head.class_vectors().clone()
        optimizer.step()
        assert not torch.equal(head.class_vectors(), before)
        torch.testing.assert_close(head.class_vectors(), head._made_vectors())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.RowAdagrad(p, lr=0.1),
        lambda p: optim.RowAdam(p, lr=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
    ],
)
def test_an_optimiser_made_after_classes_were_added_makes_steps(make):
    head = spelled()

    def steps(optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            head(torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])).backward()
            optimizer.step()

    old = make(head.parameters())
    steps(old)
    head.add_classes(["new"])
    with pytest.raises(RuntimeError, match="make a new optimizer"):
        steps(old)
    steps(make(head.parameters()))


def test_classes_added_in_inference_mode_can_be_trained():
    head = spelled()
    with torch.inference_mode():
        head.add_classes(["new"])
    head(torch.randn(5, 8), torch.tensor([0, 1, 2, 4, 4])).backward()
    assert head.corrections.grad.shape == (5, 3)


@pytest.mark.parametrize("overlap", [0.3, 0.45])
def test_a_tree_that_overlaps_starts_with_the_probabilities_of_the_layer(overlap):
    linear = torch.nn.Linear(4, 30, dtype=torch.float64)
    tree = trees.cluster(linear.weight.detach(), kind="adaptive", overlap=overlap)
    assert tree.overlaps
    head = heads.HierarchicalSoftmax.from_linear(linear, tree)
    hidden = torch.zeros(1, 4, dtype=torch.float64)
    torch.testing.assert_close(head.log_prob(hidden), linear(hidden).log_softmax(-1))
    slope = torch.func.jacrev(lambda h: linear(h).log_softmax(-1))(hidden[0])
    made = torch.autograd.functional.jacobian(lambda h: head.log_prob(h)[0], hidden)
    torch.testing.assert_close(made[:, 0], slope)


@pytest.mark.parametrize("scale", [0.05, 0.1])
@pytest.mark.parametrize(
    ("of_head", "of_hidden"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)],
)
def test_the_best_of_flat_rows_under_autocast(of_head, of_hidden, scale):
    head = heads.HierarchicalSoftmax(8, trees.balanced(5000), dtype=of_head)
    with torch.no_grad():
        head.weight.mul_(scale)
        head.bias.zero_()
    hidden = torch.randn(20, 8, dtype=of_hidden)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logs = head.log_prob(hidden)
        values, classes = head.topk(hidden, 5)
    expected = logs.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(classes, expected.indices[:, :5])
    assert torch.equal(values, expected.values[:, :5])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda **how: heads.HierarchicalSoftmax(8, trees.balanced(4), **how),
        lambda **how: heads.HierarchicalSoftmax(8, trees.balanced(4).collapse(4), **how),
        spelled,
    ],
)
def test_heads_made_on_meta_take_a_state(make, assign):
    head, other = make(), make(device="meta")
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(head.state_dict(), assign=assign)
    hidden, target = torch.randn(6, 8), torch.randint(4, (6,))
    torch.testing.assert_close(other(hidden, target), head(hidden, target))
    torch.testing.assert_close(other.log_prob(hidden), head.log_prob(hidden))
    assert torch.equal(other.topk(hidden, 2).classes, head.topk(hidden, 2).classes)


def test_a_tree_of_one_class_finds_all_parameters():
    head = heads.HierarchicalSoftmax(3, trees.balanced(1))
    head(torch.randn(2, 3), torch.zeros(2, dtype=torch.int64)).backward()
    assert all(each.grad is not None for each in head.parameters())


def test_widths_and_cutoffs_that_are_none():
    head = heads.AdaptiveSoftmax(4, cutoffs=[1, 2], n_classes=3, div_value=1e200)
    assert [len(each) for each in head.projections] == [4, 4]
    with pytest.raises(TypeError, match="cutoffs: expected whole numbers, got bool at position 0"):
        heads.AdaptiveSoftmax(4, cutoffs=[True], n_classes=3)
