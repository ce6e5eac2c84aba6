"""Heads on the parameters of other layers, and back."""

import copy

import pytest
import torch

from lastlayer.heads import EntmaxHead, FullSoftmax, TopKSoftmaxHead

MAKERS = {
    "softmax": (FullSoftmax, {"label_smoothing": 0.1}),
    "entmax": (EntmaxHead, {"alpha": 1.7}),
    "top 3": (TopKSoftmaxHead, {"k": 3}),
}
with_each_head = pytest.mark.parametrize(("cls", "options"), MAKERS.values(), ids=MAKERS)


@with_each_head
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_lends_its_parameters_and_gets_them_back(cls, options, bias):
    linear = torch.nn.Linear(5, 11, bias=bias, dtype=torch.float64)
    head = cls.from_linear(linear, reduction="sum", **options)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert (head.in_features, head.n_classes, head.reduction) == (5, 11, "sum")
    assert head.config().items() >= options.items()
    back = head.to_linear()
    assert back.weight is linear.weight
    assert back.bias is linear.bias
    hidden = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(back(hidden), linear(hidden))
    assert (back.in_features, back.out_features) == (5, 11)


def test_a_step_on_the_head_is_a_step_on_the_layer():
    linear = torch.nn.Linear(5, 11)
    head = FullSoftmax.from_linear(linear)
    before = linear.weight.detach().clone()
    head(torch.randn(4, 5), torch.randint(11, (4,))).backward()
    torch.optim.SGD(head.parameters(), lr=0.1).step()
    assert torch.equal(linear.weight, head.weight)
    assert not torch.equal(linear.weight, before)


@with_each_head
def test_a_tied_embedding_gets_the_gradient_of_both_its_uses(cls, options):
    embedding = torch.nn.Embedding(11, 5, dtype=torch.float64)
    head = cls.from_linear(embedding, **options)
    assert head.weight is embedding.weight
    assert head.bias is None
    words, target = torch.randint(11, (7,)), torch.randint(11, (7,))

    def loss(table, weight):
        untied = cls(5, 11, bias=False, dtype=torch.float64, **options)
        untied.weight = torch.nn.Parameter(weight)
        return untied(torch.tanh(table[words]), target), untied.weight

    head(torch.tanh(embedding(words)), target).backward()
    table = embedding.weight.detach().clone().requires_grad_()
    value, weight = loss(table, embedding.weight.detach().clone())
    value.backward()
    torch.testing.assert_close(embedding.weight.grad, table.grad + weight.grad)


def test_tied_parameters_are_counted_once_and_stay_tied_in_a_copy():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(11, 5)
            self.head = FullSoftmax.from_linear(self.embedding)

    model = Model()
    assert len(list(model.parameters())) == 1
    assert sorted(model.state_dict()) == ["embedding.weight", "head.weight"]
    other = copy.deepcopy(model)
    assert other.head.weight is other.embedding.weight
    assert other.head.weight is not model.head.weight


def test_class_weights_with_a_tied_layer():
    linear = torch.nn.Linear(5, 3)
    weight = torch.tensor([1.0, 2.0, 3.0])
    head = FullSoftmax.from_linear(linear, class_weight=weight)
    assert torch.equal(head.class_weight, weight)
    with pytest.raises(ValueError, match=r"class_weight: expected shape \(3,\)"):
        FullSoftmax.from_linear(linear, class_weight=torch.ones(4))


def test_a_bias_can_be_added_to_a_tied_embedding():
    head = FullSoftmax.from_linear(torch.nn.Embedding(11, 5))
    head.bias = torch.nn.Parameter(torch.zeros(11))
    head(torch.randn(4, 5), torch.randint(11, (4,))).backward()
    assert head.bias.grad is not None
    assert "bias=True" in repr(head)


def test_layers_that_have_nothing_to_share():
    with pytest.raises(
        TypeError, match=r"linear: expected an nn.Linear or nn.Embedding, got Conv1d"
    ):
        FullSoftmax.from_linear(torch.nn.Conv1d(2, 3, 1))
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(5, 3))
    with pytest.raises(TypeError, match="remove_parametrizations"):
        FullSoftmax.from_linear(normed)


def test_fresh_parameters_are_those_of_a_linear_layer():
    head, linear = FullSoftmax(25, 4000), torch.nn.Linear(25, 4000)
    for mine, theirs in zip(head.parameters(), linear.parameters(), strict=True):
        assert mine.abs().max() <= 0.2
        assert abs(mine.std() / theirs.std() - 1) < 0.05
    meta = FullSoftmax(3, 4, device="meta", dtype=torch.bfloat16)
    assert meta.weight.is_meta
    assert meta.bias.dtype == torch.bfloat16
