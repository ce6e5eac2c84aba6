"""The input layer on the vectors of an adaptive softmax."""

import copy
import re
import warnings

import pytest
import torch

from lastlayer.heads import AdaptiveSoftmax, Head

N_CLASSES = 40


def raises(kind, *parts):
    return pytest.raises(kind, match=".*".join(map(re.escape, parts)))


def make(**options):
    options = {"cutoffs": [6, 15], "order": torch.randperm(N_CLASSES), **options}
    return AdaptiveSoftmax(12, n_classes=N_CLASSES, **{"dtype": torch.float64, **options})


class Model(torch.nn.Module):
    """Words in, words out."""

    def __init__(self, **options):
        super().__init__()
        self.head = make(**options)
        self.embedding = self.head.embedding()
        self.middle = torch.nn.Linear(12, 12, dtype=self.head.head_weight.dtype)

    def forward(self, words, target):
        return self.head(self.middle(self.embedding(words)), target)


def table(head):
    """The vectors of all classes, by the formula."""
    by_place = [head.head_weight[: head.cutoffs[0]] if len(head.cutoffs) else head.head_weight]
    by_place += [tail @ p for tail, p in zip(head.tails, head.projections, strict=True)]
    by_place = torch.cat(by_place)
    return by_place if head.places is None else by_place[head.places]


@pytest.mark.parametrize("options", [{}, {"order": None}, {"cutoffs": []}, {"cutoffs": [1, 2, 30]}])
def test_vectors_and_gradients_of_the_dense_table(options):
    head = make(**options)
    words = torch.randint(N_CLASSES, (3, 50))
    vectors, expected = head.embedding()(words), table(head)[words]
    assert vectors.shape == (3, 50, 12)
    torch.testing.assert_close(vectors, expected)
    upstream = torch.randn_like(vectors)
    leaves = list(head.parameters())
    for got, wanted in zip(
        torch.autograd.grad(vectors, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_a_vector_is_what_its_class_is_scored_with():
    """The product of a hidden state with it, up to the normaliser of its softmax."""
    head = make()
    hidden = torch.randn(12, dtype=torch.float64)
    log_prob = head.log_prob(hidden)[head.order]
    scores = (head.embedding()(torch.arange(N_CLASSES)) @ hidden)[head.order]
    for first, last in ((0, 6), (6, 15), (15, 40)):
        differences = (log_prob - scores)[first:last]
        torch.testing.assert_close(differences, differences[:1].expand(last - first))


def test_parameters_are_held_once():
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith("embedding") for name in names)
    assert not any(name.startswith("embedding") for name in model.state_dict())
    assert list(model.embedding.parameters()) == []
    assert model.embedding.head is model.head


def test_gradients_of_both_uses_add_up():
    model = Model()
    words, target = torch.randint(N_CLASSES, (30,)), torch.randint(N_CLASSES, (30,))
    model(words, target).backward()
    head = model.head
    leaves = list(head.parameters())
    rows = model.middle(table(head)[words])
    log_prob = head.log_prob(rows)
    expected = torch.autograd.grad(-log_prob.gather(-1, target.unsqueeze(-1)).mean(), leaves)
    for leaf, wanted in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, wanted)


def test_copies_and_loaded_states_stay_tied(tmp_path):
    model, words = Model(), torch.arange(N_CLASSES)
    twin = copy.deepcopy(model)
    assert twin.embedding.head is twin.head
    assert twin.head is not model.head
    other = Model()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.embedding(words), model.embedding(words))
    model.head.save(tmp_path)
    assert torch.equal(Head.load(tmp_path).embedding()(words), model.embedding(words))
    narrow = model.to(torch.float32)
    assert narrow.embedding(words).dtype == torch.float32


def test_a_step_on_the_head_is_seen_by_the_embedding():
    model, words = Model(), torch.arange(N_CLASSES)
    before = model.embedding(words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(words, words.flip(0)).backward()
    optimizer.step()
    after = model.embedding(words)
    assert (after - before).abs().amax(-1).gt(0).all()
    torch.testing.assert_close(after, table(model.head))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    head = make(dtype=dtype)
    words = torch.randint(N_CLASSES, (60,))
    vectors = head.embedding()(words)
    assert vectors.dtype == dtype
    exact = make(order=head.order)
    exact.load_state_dict(head.state_dict())
    torch.testing.assert_close(vectors.double(), table(exact)[words], atol=4e-3, rtol=1e-2)
    vectors.float().sum().backward()
    assert all(each.grad.dtype == dtype for each in head.parameters())


def test_under_autocast_vectors_are_in_the_dtype_of_the_head():
    head, words = make(dtype=torch.float32), torch.arange(N_CLASSES)
    with torch.autocast("cpu", torch.bfloat16):
        vectors = head.embedding()(words)
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors, table(head), atol=4e-3, rtol=1e-2)


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_shapes_without_ids_and_without_dimensions(shape):
    head = make()
    vectors = head.embedding()(torch.zeros(shape, dtype=torch.int64))
    assert vectors.shape == (*shape, 12)
    vectors.sum().backward()
    assert all(each.grad is not None for each in head.parameters())


def test_compiled():
    model = Model()
    words, target = torch.randint(N_CLASSES, (2, 7)), torch.randint(N_CLASSES, (2, 7))
    loss = model(words, target)
    leaves = list(model.parameters())
    expected = torch.autograd.grad(loss, leaves)
    with warnings.catch_warnings(action="ignore"):  # torch's own, while it traces
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(words, target)
    torch.testing.assert_close(compiled, loss)
    for got, wanted in zip(torch.autograd.grad(compiled, leaves), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_what_it_says_of_itself():
    assert repr(make().embedding()) == "AdaptiveEmbedding(40, 12)"


@pytest.mark.parametrize(
    ("classes", "kind", "parts"),
    [
        ([1, 2], TypeError, ("classes: expected a torch.Tensor", "got list")),
        (torch.ones(2), TypeError, ("classes: expected integer class ids", "torch.float32")),
        (torch.tensor([[3, 40]]), ValueError, ("classes:", "0 to 39", "got 40", "(0, 1)")),
        (torch.tensor([-100]), ValueError, ("classes:", "0 to 39", "got -100", "(0,)")),
        (
            torch.zeros(2, dtype=torch.int64, device="meta"),
            ValueError,
            ("classes: expected the device of the head, cpu", "got meta"),
        ),
    ],
)
def test_bad_ids(classes, kind, parts):
    with raises(kind, *parts):
        make().embedding()(classes)
