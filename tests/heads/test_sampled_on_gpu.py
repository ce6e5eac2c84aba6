"""Training steps of sampled heads on a GPU: sparse gradients of fixed size, graphs, no waits."""

import pytest
import torch

from lastlayer import samplers
from lastlayer.heads import ImportanceSampling, NegativeSampling, NoiseContrastive, SampledSoftmax
from lastlayer.optim import RowAdagrad, RowAdam
from lastlayer.testing import check_head
from waits import no_waits

pytestmark = pytest.mark.gpu

V, D, N, M = 400, 40, 70, 90
COUNTS = 1.0 / torch.arange(1, V + 1)
HEADS = {
    "exact": lambda **o: SampledSoftmax(D, V, samplers.Unigram(COUNTS), M, **o),
    "classic": lambda **o: SampledSoftmax(
        D, V, samplers.LogUniform(V), M, correction="classic", head_classes=20, **o
    ),
    "uniform": lambda **o: SampledSoftmax(D, V, samplers.Uniform(V), M, temperature=0.5, **o),
    "unique": lambda **o: SampledSoftmax(D, V, samplers.Unigram(COUNTS), M, unique=True, **o),
    "importance": lambda **o: ImportanceSampling(D, V, samplers.Unigram(COUNTS), M, **o),
    "noise": lambda **o: NoiseContrastive(D, V, samplers.Unigram(COUNTS), M, log_z="learned", **o),
    "negative": lambda **o: NegativeSampling(D, V, samplers.Unigram(COUNTS), M, **o),
}
OPTIMIZERS = {
    "adagrad": lambda params: RowAdagrad(params, lr=0.1),
    "skip": lambda params: RowAdam(params, lr=0.01),
    "decay": lambda params: RowAdam(params, lr=0.01, missed="decay"),
}
every_head = pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


CONTRACT = {
    "sampled softmax": (SampledSoftmax, {}),
    "sampled softmax, sparse": (SampledSoftmax, {"sparse": True}),
    "importance, sparse": (ImportanceSampling, {"sparse": True}),
    "noise, sparse": (NoiseContrastive, {"sparse": True, "log_z": "learned"}),
}


@pytest.mark.parametrize("name", CONTRACT)
def test_contract(name, seed):
    kind, options = CONTRACT[name]
    check_head(
        lambda: kind(7, 23, samplers.Unigram(range(1, 24)), 10, **options), loss_is_nll=False,
        compile=False if options else "aot_eager", draws=2000, device="cuda", seed=seed,
    )  # fmt: skip


def batch(dtype=torch.float32, p=None):
    hidden = torch.randn(N, D, device="cuda").to(dtype)
    # Zipf's law: some classes are the target of many rows.
    target = (V ** torch.rand(N, *([] if p is None else [p]), device="cuda")).long() - 1
    target[::9] = -100
    if p is not None:
        target[1::4, -1] = -100
    # What a row without a target holds comes into nothing.
    hidden[0] = torch.nan
    return hidden.requires_grad_(), target


def on_a_cpu(make, head, **options):
    """The same head in float64, with dense gradients."""
    other = make(dtype=torch.float64, **options)
    other.load_state_dict({name: each.cpu() for name, each in head.state_dict().items()})
    return other


def gradients(head, hidden, target):
    loss = head(hidden, target)
    made = torch.autograd.grad(loss.sum(), [hidden, *head.parameters()])
    return loss, *made


def assert_agrees(made, truth, tolerance):
    for one, other in zip(made, truth, strict=True):
        error = one.detach().to_dense().cpu().double() - other.detach()
        assert float(error.norm()) <= tolerance * float(other.detach().norm())


@every_head
@pytest.mark.parametrize("p", [None, 3])
@pytest.mark.parametrize(("sparse", "reduction"), [(True, "mean"), (False, "none")])
def test_gradients_are_those_of_a_cpu(make, p, sparse, reduction):
    head = make(device="cuda", sparse=sparse, reduction=reduction)
    hidden, target = batch(p=p)
    other = on_a_cpu(make, head, reduction=reduction)
    wide = hidden.detach().cpu().double().requires_grad_()
    truth = gradients(other, wide, target.cpu())
    made = gradients(head, hidden, target)
    assert torch.equal(made[1][0], torch.zeros_like(made[1][0]))
    # The gradient of log Z is a small difference of large sums.
    assert_agrees(made, truth, 1e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)], ids=str
)
@pytest.mark.parametrize("name", ["exact", "importance", "negative"])
def test_in_half_precision_the_gradient_takes_the_place_of_the_scores(name, dtype, tolerance):
    make = HEADS[name]
    # In chunks, and scaled as for mixed precision, where float16 has to hold it.
    head = make(device="cuda", dtype=dtype, sparse=True, chunk_rows=32)
    hidden, target = batch(dtype)
    other = on_a_cpu(make, head)
    wide = hidden.detach().cpu().double().requires_grad_()
    leaves = [hidden, *head.parameters()], [wide, *other.parameters()]
    losses = head(hidden, target), other(wide, target.cpu())
    made, truth = (
        torch.autograd.grad(loss * 1024.0, each) for loss, each in zip(losses, leaves, strict=True)
    )
    assert_agrees(made, truth, tolerance)
    torch.testing.assert_close(losses[0].cpu().double(), losses[1], rtol=tolerance, atol=tolerance)


def test_a_sparse_gradient_has_a_slot_for_each_draw_and_target():
    head = HEADS["exact"](device="cuda", sparse=True)
    hidden, target = batch()
    head(hidden, target).backward()
    for parameter in (head.weight, head.bias):
        gradient = parameter.grad
        assert not gradient.is_coalesced()
        ids, values = gradient._indices()[0], gradient._values()
        assert ids.shape == (M + N,)
        assert torch.equal(ids, ids.sort().values)
        again = ids[1:] == ids[:-1]
        assert bool(again.any())
        assert not values[1:][again].any()
        torch.testing.assert_close(gradient.coalesce().to_dense(), gradient.to_dense())
    # Weight and bias share their ids, which an optimiser sorts once.
    shared = [each.grad._indices().data_ptr() for each in (head.weight, head.bias)]
    assert shared[0] == shared[1]


@every_optimizer
@every_head
def test_a_step_waits_for_nothing(make, optimizer):
    head = make(device="cuda", sparse=True)
    hidden, target = batch()
    optimise = optimizer(head.parameters())

    def step():
        head.zero_grad(set_to_none=True)
        head(hidden, target).backward()
        optimise.step()

    step()
    with no_waits():
        step()


@every_optimizer
@pytest.mark.parametrize("name", ["exact", "uniform", "noise"])
def test_a_captured_step_draws_anew_and_trains(name, optimizer):
    head = HEADS[name](device="cuda", sparse=True)
    other = HEADS[name](device="cuda", sparse=True)
    other.load_state_dict(head.state_dict())
    hidden, target = batch()
    hidden = hidden.detach()
    optimisers = optimizer(head.parameters()), optimizer(other.parameters())

    def step(head, optimise):
        head.zero_grad(set_to_none=True)
        loss = head(hidden, target)
        loss.backward()
        optimise.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(head, optimisers[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(head, optimisers[0])
    losses = []
    for _ in range(4):
        graph.replay()
        losses.append(float(loss.detach()))
    expected = [float(step(other, optimisers[1]).detach()) for _ in range(7)][3:]
    assert head.rng_counter.tolist() == other.rng_counter.tolist() == [0, 7]
    assert len(set(losses)) == 4
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for one, two in zip(head.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@every_head
def test_the_same_step_gives_the_same_gradient_to_the_bit(make):
    head = make(device="cuda", sparse=True)
    hidden, target = batch()
    state = {name: each.clone() for name, each in head.state_dict().items()}
    made = []
    for _ in range(2):
        head.load_state_dict(state)
        made.append(gradients(head, hidden, target))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.detach().to_dense(), other.detach().to_dense())


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD]
)
def test_optimisers_of_torch_take_the_gradient(optimizer):
    make = HEADS["exact"]
    head = make(device="cuda", sparse=True)
    hidden, target = batch()
    other = on_a_cpu(make, head, sparse=True)
    for each, rows, ids in (
        (head, hidden, target),
        (other, hidden.detach().cpu().double(), target.cpu()),
    ):
        optimise = optimizer(list(each.parameters()), lr=0.1)
        each(rows, ids).backward()
        with torch.sparse.check_sparse_tensor_invariants():
            optimise.step()
    # Where a gradient is nearly 0 Adam divides it by itself.
    different = (head.weight.detach().cpu().double() - other.weight.detach()).abs() > 1e-4
    assert float(different.double().mean()) < 1e-3


@every_head
@pytest.mark.parametrize("n", [0, 3])
def test_without_a_row_that_counts_gradients_are_0(make, n):
    head = make(device="cuda", sparse=True)
    hidden = torch.full((n, D), torch.nan, device="cuda", requires_grad=True)
    target = torch.full((n,), -100, device="cuda")
    loss, *made = gradients(head, hidden, target)
    assert float(loss.detach()) == 0.0
    for each in made:
        assert not each.to_dense().any()
