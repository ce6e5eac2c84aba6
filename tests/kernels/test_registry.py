"""Which implementation runs, and that torch accepts each operation."""

import copy
import importlib

import pytest
import torch
from implementations import place, reference_only

from lastlayer import (
    entmax,
    entmax_loss,
    heads,
    kernels,
    samplers,
    sparsemax,
    sparsemax_loss,
    topk_softmax,
    trees,
)
from lastlayer.kernels import _registry
from lastlayer.testing import check_loss

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def test_what_can_run_here():
    available = kernels.available()
    assert set(available) == set(kernels.IMPLEMENTATIONS)
    assert available["reference"] is None
    assert available["cpu"] is None
    assert (
        available["triton"] is None
        or "triton" in available["triton"]
        or "CUDA" in available["triton"]
    )


@pytest.mark.parametrize("op", ["entmax", "entmax_backward", "entmax_support", "topk_softmax"])
def test_what_auto_takes(op):
    for dtype in FLOATING:
        assert kernels.selected(op, "cpu", dtype) == "cpu"
        assert kernels.selected(op, "mps", dtype) == "reference"
    assert kernels.selected(op, "cuda", torch.float64) == "reference"
    if kernels.available()["triton"] is None:
        assert kernels.selected(op, "cuda", torch.bfloat16) == "triton"
    with pytest.raises(ValueError, match=r"op: expected one of .* got 'softmax'"):
        kernels.selected("softmax", "cpu")


def test_the_reference_is_taken_where_there_is_no_other():
    """An operation may have no CPU implementation, and says so where one is asked for."""
    for op in ("log_uniform_share", "row_factors", "touched_slots_"):
        assert kernels.selected(op, "cpu") == "reference"
    with pytest.raises(ValueError, match=r"'cpu' cannot run log_uniform_share here: it has no CPU"):
        kernels.rng.log_uniform_share("cpu", torch.zeros(2).long(), None, 9, True, True)
    with reference_only():
        assert {kernels.selected(op, "cpu") for op in kernels.operations()} == {"reference"}


@pytest.mark.parametrize("name", kernels.operations())
def test_every_implementation_that_is_named_exists(name):
    operation = _registry._operations[name]
    assert operation.implementation("reference")
    if importlib.util.find_spec("triton"):
        assert operation.implementation("triton")
    try:
        found = operation.implementation("cpu")
    except (AttributeError, ModuleNotFoundError):
        found = None
    assert operation.has_cpu == (found is not None)


def test_an_implementation_is_resolved_once(monkeypatch):
    scores = torch.randn(3, 4)
    kernels.entmax.forward("auto", scores, 2.0, None)
    monkeypatch.setattr(_registry, "selected", lambda *_: pytest.fail("it was chosen again"))
    kernels.entmax.forward("auto", scores, 2.0, None)


D, N = 6, 40
COUNTS = torch.arange(1.0, N + 1)
HEADS = {
    "full": lambda: heads.FullSoftmax(D, N),
    "adaptive": lambda: heads.AdaptiveSoftmax(D, n_classes=N, cutoffs=[10, 20]),
    "binary tree": lambda: heads.HierarchicalSoftmax(D, trees.huffman(COUNTS)),
    "wide tree": lambda: heads.HierarchicalSoftmax(D, trees.balanced(N).collapse(5)),
    "sampled": lambda: heads.SampledSoftmax(D, N, sampler=samplers.Unigram(COUNTS)),
    "sampled sparse": lambda: heads.SampledSoftmax(
        D, N, sampler=samplers.LogUniform(N), sparse=True
    ),
    "partial": lambda: heads.PartialSoftmax(D, N, k=5),
    "partial sparse": lambda: heads.PartialSoftmax(D, N, k=5, sparse=True),
    "importance": lambda: heads.AdaptiveImportanceSampling(D, N, COUNTS),
    "noise": lambda: heads.NoiseContrastive(D, N, sampler=samplers.Unigram(COUNTS)),
    "self-normalized": lambda: heads.SelfNormalized(D, N),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_train_without_numba_and_triton(name):
    """A step by the references alone: the same loss, and the same gradients."""
    head = HEADS[name]()
    hidden, target = torch.randn(12, D), torch.randint(N, (12,))
    context = (torch.randint(N, (12, 1)),) if name == "importance" else ()

    def step(head):
        rows = hidden.clone().requires_grad_()
        head(rows, target, *context).backward()
        made = [rows.grad, *(each.grad for each in head.parameters())]
        return [each.to_dense() if each.is_sparse else each for each in made]

    expected = step(copy.deepcopy(head))
    with reference_only():
        made = step(head)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("loss", "function"), [(sparsemax_loss, sparsemax), (entmax_loss, entmax)])
def test_losses_keep_their_rules_without_numba_and_triton(loss, function, seed):
    """On CUDA float64 takes the references, into whose memory the gradient is written."""
    with reference_only():
        check_loss(loss, function, seed=seed)


@pytest.mark.parametrize("function", [sparsemax, entmax, lambda s, **o: topk_softmax(s, 2, **o)])
def test_a_forced_implementation_that_cannot_run_raises(function):
    with pytest.raises(ValueError, match=r"impl: 'triton' cannot run .* no torch.float64|'triton'"):
        function(torch.zeros(2, 3, dtype=torch.float64), impl="triton")
    with pytest.raises(ValueError, match=r"impl: 'cpu' cannot run .* on 'meta'; use impl='auto'"):
        function(torch.zeros(2, 3, device="meta"), impl="cpu")


def test_every_implementation_that_runs_agrees():
    scores = torch.randn(5, 70)
    running = [name for name, reason in kernels.available().items() if reason is None]
    for function in (
        sparsemax,
        entmax,
        lambda s, **o: entmax(s, 1.2, **o),
        lambda s, **o: topk_softmax(s, 3, **o),
    ):
        expected = function(scores, impl="reference")
        for impl in running:
            made = function(scores.to(place(impl)), impl=impl).cpu()
            assert (made - expected).abs().max() < 2e-6, impl


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_accepts_the_operations(dtype, device):
    scores = torch.randn(3, 4, 9, device=device).to(dtype)
    row_alpha = torch.full((3, 4), 1.3, device=device)
    probs = torch.ops.lastlayer.entmax(scores, 1.5, None)
    transposed = torch.randn(9, 4, device=device).to(dtype).t()
    cases = [
        (torch.ops.lastlayer.entmax, (scores, 1.5, None)),
        (torch.ops.lastlayer.entmax, (transposed, 2.0, None)),
        (torch.ops.lastlayer.entmax, (scores, float("nan"), row_alpha)),
        (torch.ops.lastlayer.entmax_backward, (probs, scores, 1.5, None)),
        (torch.ops.lastlayer.entmax_support, (scores, 1.5, None, 5)),
        (torch.ops.lastlayer.topk_softmax, (scores, 2)),
        (torch.ops.lastlayer.topk_softmax, (transposed, 2)),
        (torch.ops.lastlayer.entmax, (scores[:0], 1.5, None)),
    ]
    for op, arguments in cases:
        torch.library.opcheck(op.default, arguments)
