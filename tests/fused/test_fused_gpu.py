"""On a GPU: both regimes against float64, memory, CUDA graphs, and no waiting."""

import math
from functools import partial

import pytest
import torch
from unfused import (
    LOSSES,
    cross_entropy,
    distance,
    entmax,
    gradients,
    scores,
    topk_softmax,
    unfused,
)

from lastlayer.fused import (
    linear_cross_entropy,
    linear_entmax_loss,
    linear_statistics,
    linear_topk_softmax_loss,
    rows,
)
from lastlayer.fused.scores import ALIGN_FROM
from waits import no_waits

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
WIDTHS = (64, 100, 256, 300)
V = 50257
with_each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
with_each_width = pytest.mark.parametrize("d", WIDTHS)
with_each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
OPTIONS = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "weights": {"class_weight": True, "row_weight": True, "z_loss": 1e-3},
    "bent": {"softcap": 2.0, "temperature": 0.7},
    "everything": {
        "class_weight": True, "row_weight": True, "label_smoothing": 0.2, "z_loss": 1e-3,
        "softcap": 3.0, "temperature": 1.5,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def _large_problems(monkeypatch):
    """The ways of large problems; tests/fused/test_few_launches.py tests that of small ones."""
    monkeypatch.setattr(rows, "_FEW_SCORES", 0)


def make(n, d, v, dtype, *, bias=True, ignored=0, scale=1.0):
    """Scores of about ``scale``, from numbers that the dtype holds exactly; and in float64."""
    sizes = [(n, d), (v, d)] + ([(v,)] if bias else [])
    factors = [scale, 1 / math.sqrt(d), 1.0]
    rounded = [
        (torch.randn(*size, device="cuda") * factor).to(dtype).requires_grad_()
        for size, factor in zip(sizes, factors, strict=False)
    ]
    doubles = [each.detach().double().requires_grad_() for each in rounded]
    target = torch.randint(v, (n,), device="cuda")
    target[torch.randperm(n, device="cuda")[:ignored]] = -100
    return tuple((hidden, weight, target, *rest) for hidden, weight, *rest in (rounded, doubles))


def filled(options, n, v):
    drawn = {
        name: torch.rand(size, device="cuda", dtype=torch.float64) + 0.1
        for name, size in (("class_weight", v), ("row_weight", n))
        if options.get(name)
    }
    return {**options, **drawn}


def assert_close_to_float64(
    function,
    row_loss,
    problem,
    exact,
    *,
    chunk_rows="auto",
    loss_tolerance=1e-5,
    slack=1.0,
    **options,
):
    dtype = problem[0].dtype
    ours = function(*problem, chunk_rows=chunk_rows, **options)
    truth = unfused(row_loss, *exact, **options)
    assert ours.dtype == torch.float32
    assert abs(ours.sum().item() / truth.sum().item() - 1) < loss_tolerance
    # That of a mean is large enough that float16 can hold the gradients.
    upstream = torch.randn_like(truth) if truth.dim() else 300 * (1 + torch.rand_like(truth))
    made = gradients(ours, problem, upstream.float())
    for mine, true in zip(made, gradients(truth, exact, upstream), strict=True):
        assert mine.dtype == dtype
        assert distance(mine, true) < slack * TOLERANCE[dtype]


@with_each_dtype
@with_each_width
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_cross_entropy(dtype, d, options, reduction):
    n, v = 1023, 3001
    for bias in (False, True):
        problem, exact = make(n, d, v, dtype, bias=bias, ignored=100)
        assert_close_to_float64(
            linear_cross_entropy, cross_entropy, problem, exact, reduction=reduction, slack=1.5,
            **filled(options, n, v),
        )  # fmt: skip


@with_each_dtype
@with_each_width
@pytest.mark.parametrize("chunk_rows", ["auto", "low", 256, 32])
def test_cross_entropy_over_many_classes(dtype, d, chunk_rows):
    problem, exact = make(2048, d, V, dtype)
    assert_close_to_float64(
        linear_cross_entropy, cross_entropy, problem, exact, chunk_rows=chunk_rows, slack=1.2
    )


@with_each_dtype
@pytest.mark.parametrize(("n", "d", "v"), [(1, 64, 1000), (7, 1, 33), (129, 17, 1), (65, 255, 127)])
def test_odd_sizes(dtype, n, d, v):
    problem, exact = make(n, d, v, dtype)
    ours = linear_cross_entropy(*problem)
    truth = unfused(cross_entropy, *exact)
    torch.testing.assert_close(ours.double(), truth, rtol=2e-2, atol=1e-5)
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        scale = true.abs().max().item()
        torch.testing.assert_close(mine.double(), true, rtol=2e-2, atol=1e-2 * scale + 1e-6)


@with_each_dtype
@pytest.mark.parametrize("d", [100, 300])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("scale", [8.0, 1.0, 0.01], ids=["peaked", "middle", "flat"])
def test_entmax(dtype, d, alpha, scale):
    problem, exact = make(512, d, 5003, dtype, bias=False, ignored=50, scale=scale)
    for reduction in ("mean", "none"):
        # Dense gradients follow each score, and carry its rounding too. With scores up to 35,
        # rounding them to bfloat16 changes gradients of sparsemax by 2% in float64 as well.
        assert_close_to_float64(
            linear_entmax_loss, entmax, problem, exact, alpha=alpha, reduction=reduction,
            chunk_rows=200, loss_tolerance=1e-4, slack=8.0 if alpha == 2.0 else 4.0,
        )  # fmt: skip


@with_each_dtype
@pytest.mark.parametrize("k", [1, 5, 600, 10_000])
def test_topk_softmax(dtype, k):
    problem, exact = make(512, 128, 5003, dtype, ignored=50)
    # Which class is the k-th best may turn on a rounded score.
    assert_close_to_float64(
        linear_topk_softmax_loss, topk_softmax, problem, exact, k=k, chunk_rows=200,
        loss_tolerance=1e-3, slack=8.0,
    )  # fmt: skip


@with_each_dtype
@with_each_width
def test_statistics(dtype, d):
    problem, exact = make(700, d, V, dtype, ignored=70)
    known = linear_statistics(*problem, k=5)
    counted = problem[2] != -100
    values = scores(exact[0], exact[1], exact[3]).detach()
    logs = values.log_softmax(-1)
    target = torch.where(counted, problem[2], 0)
    truth = {
        "log_prob": logs.gather(-1, target[:, None])[:, 0],
        "entropy": -(logs.exp() * logs).sum(-1),
        "logsumexp": values.logsumexp(-1),
    }
    for name, each in truth.items():
        difference = (getattr(known, name) - torch.where(counted, each, 0.0)).abs().max()
        assert difference < (1e-4 if dtype == torch.float32 else 2e-2)
    # Rounded scores may tie; the best class has the best score up to that.
    best = values.gather(-1, known.argmax[:, None])[:, 0]
    assert ((values.amax(-1) - best)[counted] < 0.04).all()
    assert not known.argmax[~counted].any()
    rank = (values > values.gather(-1, target[:, None])).sum(-1)
    agree = (known.in_top_k == (rank < 5))[counted].float().mean()
    assert agree > 0.99
    assert not known.in_top_k[~counted].any()


@with_each_width
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("into", [torch.float32, None], ids=["float32", "same"])
def test_weight_grad(d, dtype, into):
    (hidden, weight, target, bias), exact = make(2048, d, 5003, dtype)
    before = torch.randn_like(weight, dtype=into or dtype) * 1e-3
    summed = before.clone()
    linear_cross_entropy(hidden, weight, target, bias, weight_grad=summed).backward()
    of_hidden, of_weight, of_bias = gradients(unfused(cross_entropy, *exact), exact)
    assert weight.grad is None
    assert distance(summed, before.double() + of_weight) < (1e-5 if into else 8e-3)
    assert distance(hidden.grad, of_hidden) < 1.2 * TOLERANCE[dtype]
    assert distance(bias.grad, of_bias) < 1.2 * TOLERANCE[dtype]


@with_each_loss
@with_each_width
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_targets_ignored_and_empty_batches(loss, d, reduction):
    for n in (5, 0):
        problem, _ = make(n, d, 1000, torch.bfloat16, ignored=n)
        value = loss(*problem, reduction=reduction).sum()
        assert value == 0
        for gradient in gradients(value, problem):
            assert not gradient.any()


@pytest.mark.parametrize("d", [64, 256, 512])
@pytest.mark.parametrize("chunk_rows", ["auto", "low"])
def test_classes_that_are_out_of_the_running(d, chunk_rows):
    """Whole tiles of -inf, at either end and between."""
    problem, exact = make(2048, d, 4000, torch.bfloat16)
    with torch.no_grad():
        for bias in (problem[3], exact[3]):
            bias[:600] = bias[1500:2200] = bias[3000:] = -torch.inf
    for target in (problem[2], exact[2]):
        target.copy_(600 + target % 900)
    ours = linear_cross_entropy(*problem, chunk_rows=chunk_rows)
    truth = unfused(cross_entropy, *exact)
    assert abs(ours.item() / truth.item() - 1) < 1e-5
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        assert distance(mine, true) < 1.2 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("d", [64, 512])
def test_gradient_of_the_true_class_near_certainty(d):
    n_classes, dtype = 1000, torch.bfloat16
    wanted = math.log(0.999 * (n_classes - 1) / 0.001)
    for _ in range(5):
        hidden = torch.randn(1, d, device="cuda").to(dtype)
        weight = torch.zeros(n_classes, d, dtype=dtype, device="cuda")
        square = hidden[0].float().square().sum()
        weight[7] = (hidden[0].float() * wanted / square).to(dtype)
        problem = hidden.requires_grad_(), weight.requires_grad_(), torch.tensor([7]).cuda()
        exact = tuple(
            each.detach().double().requires_grad_() if each.is_floating_point() else each
            for each in problem
        )
        made = gradients(linear_cross_entropy(*problem), problem)
        for mine, true in zip(made, gradients(unfused(cross_entropy, *exact), exact), strict=True):
            assert distance(mine, true) < 2 * TOLERANCE[dtype]


@with_each_width
def test_the_same_twice(d):
    """No atomics: not a bit depends on the order of things."""
    problem, _ = make(1023, d, 3001, torch.bfloat16)
    first = [linear_cross_entropy(*problem)]
    first += gradients(first[0], problem)
    again = [linear_cross_entropy(*problem)]
    again += gradients(again[0], problem)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("d", [64, 512])
def test_autocast(d):
    problem, exact = make(1023, d, 3001, torch.bfloat16)
    singles = tuple(
        each.detach().float().requires_grad_() if each.is_floating_point() else each
        for each in problem
    )
    for options in ({}, {"label_smoothing": 0.5}):
        with torch.autocast("cuda", torch.bfloat16):
            ours = linear_cross_entropy(*singles, **options)
        truth = unfused(cross_entropy, *exact, **options)
        assert abs(ours.item() / truth.item() - 1) < 1e-5
        for mine, true in zip(gradients(ours, singles), gradients(truth, exact), strict=True):
            assert mine.dtype == torch.float32
            assert distance(mine, true) < 1.5 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("d", [64, 512])
def test_float16_with_a_loss_scale(d):
    problem, exact = make(4096, d, V, torch.float16)
    ours = linear_cross_entropy(*problem) * 65536.0
    truth = unfused(cross_entropy, *exact) * 65536.0
    for mine, true in zip(gradients(ours, problem), gradients(truth, exact), strict=True):
        assert mine.isfinite().all()
        assert distance(mine, true) < TOLERANCE[torch.float16]


@with_each_loss
@pytest.mark.parametrize("d", [64, 512])
@pytest.mark.parametrize("ignored", [0, 100])
def test_cuda_graphs(loss, d, ignored):
    """Forward and backward are captured, and replayed on other numbers."""
    problem, _ = make(512, d, 3001, torch.bfloat16, ignored=ignored)
    leaves = [each for each in problem if each.requires_grad]

    def step():
        value = loss(*problem)
        # A graph kept alive would tie the leaves to the stream of the capture.
        return value.detach(), torch.autograd.grad(value, leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, made = step()
    with torch.no_grad():
        for each in leaves:
            each.mul_(0.5)
        problem[2].copy_(problem[2].roll(1))
    graph.replay()
    plain, expected = step()
    torch.testing.assert_close(value, plain, rtol=1e-3, atol=1e-4)
    for mine, true in zip(made, expected, strict=True):
        # Lists and dense products round differently.
        assert distance(mine, true) < 2e-2


@pytest.mark.parametrize("d", [64, 512])
def test_statistics_of_ignored_rows_in_a_cuda_graph(d):
    problem, _ = make(64, d, 300, torch.bfloat16, ignored=20)
    with torch.no_grad():
        linear_statistics(*problem)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            known = linear_statistics(*problem)
        graph.replay()
    for each in known[1:]:
        assert not each[problem[2] == -100].any()


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_statistics])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@with_each_width
def test_nothing_waits_where_every_target_counts(function, dtype, d):
    problem, _ = make(512, d, 3001, dtype)
    options = {
        "class_weight": torch.rand(3001, device="cuda"),
        "row_weight": torch.rand(512, device="cuda"),
        "ignore_index": None,
    }
    upstream = torch.ones((), device="cuda")

    def step():
        for extra in ({}, {"label_smoothing": 0.1}):
            result = function(*problem, **options, **extra)
            value = result if function is linear_cross_entropy else result.loss
            torch.autograd.grad(value, [problem[0], problem[1], problem[3]], upstream)

    step()  # compiles
    torch.cuda.synchronize()
    with no_waits():
        step()


@pytest.mark.parametrize(
    ("chunk_rows", "d", "allowed"),
    [("auto", 1024, 1.15e9), ("low", 1024, 0.32e9), ("auto", 128, 0.5e9)],
)
def test_peak_memory(chunk_rows, d, allowed):
    """Beyond the inputs and the gradients."""
    n, v = 16384, 131072
    (hidden, weight, target), _ = make(n, d, v, torch.bfloat16, bias=False)
    results = hidden.nbytes + weight.nbytes
    linear_cross_entropy(hidden[:512], weight, target[:512], chunk_rows=chunk_rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, target, chunk_rows=chunk_rows).backward()
    assert torch.cuda.max_memory_allocated() - before - results < allowed
    # All scores would be 4.3 GB in bfloat16.
    assert allowed < n * v * 2 / 3


@with_each_dtype
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("v", [1, 2, 3, 63, 65, 129, 203, 4099])
@pytest.mark.parametrize("d", [304, 301])
def test_odd_sizes_are_split(dtype, name, v, d, monkeypatch):
    monkeypatch.setitem(ALIGN_FROM, "cuda", 0)
    truths = {
        "entmax": entmax,
        "sparsemax": partial(entmax, alpha=2.0),
        "topk_softmax": partial(topk_softmax, k=5),
    }
    problem, exact = make(129, d, v, dtype)
    found = gradients(300 * LOSSES[name](*problem, chunk_rows=65), problem)
    expected = gradients(300 * unfused(truths.get(name, cross_entropy), *exact), exact)
    for mine, true in zip(found, expected, strict=True):
        if true.norm() > 1e-6:
            # Errors of a few numbers do not average out.
            assert distance(mine, true) < (3 if true.numel() < 16 else 1.5) * TOLERANCE[dtype]
