"""Fused losses of classes that are spread: ``functional_process.py PROCESSES FOLDER``."""

import itertools
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lastlayer import fused
from tests.processes import main

LOSSES = {
    "softmax": (fused.linear_cross_entropy, {}),
    "softmax, all options": (
        fused.linear_cross_entropy,
        {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "temperature": 0.7},
    ),
    "entmax 1.5": (fused.linear_entmax_loss, {"alpha": 1.5}),
    "sparsemax": (fused.linear_entmax_loss, {"alpha": 2.0}),
    "entmax 1.1": (fused.linear_entmax_loss, {"alpha": 1.1}),
    "entmax 3": (fused.linear_entmax_loss, {"alpha": 3.0}),
    "top 3": (fused.linear_topk_softmax_loss, {"k": 3}),
    "top 50": (fused.linear_topk_softmax_loss, {"k": 50}),
}


LABEL_LOSSES = {
    "zlpr": (fused.linear_zlpr_loss, {}),
    "zlpr, smooth": (fused.linear_zlpr_loss, {"label_smoothing": 0.1}),
    "bce": (fused.linear_bce_loss, {}),
}


def problem(n_classes, dtype=torch.float64, n=17, d=6, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(n, d, generator=generator, dtype=torch.float64)
    weight = torch.randn(n_classes, d, generator=generator, dtype=torch.float64)
    bias = torch.randn(n_classes, generator=generator, dtype=torch.float64)
    weights = torch.rand(n_classes, generator=generator, dtype=torch.float64) + 0.5
    target = torch.randint(n_classes, (n,), generator=generator)
    target[::5] = -100
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype), weights.to(dtype), target


def outcome(loss, tensors, grads=None):
    tensors = [each for each in tensors if each is not None]
    made = loss if loss.dim() == 0 else (loss * torch.arange(1.0, 1 + len(loss))).sum()
    return loss.detach(), torch.autograd.grad(made, tensors)


def compare(name, mesh, n_classes, options, **given):
    function, own = (LOSSES | LABEL_LOSSES)[name]
    hidden, weight, bias, weights, target = problem(n_classes, **given)
    if name in LABEL_LOSSES:
        target = torch.stack([target, target.roll(1), target.roll(3)], -1)
    options = dict(options)
    if options.pop("weighted", False):
        options["class_weight"] = weights
    if not options.pop("biased", True):
        bias = None
    whole = [None if x is None else x.clone().requires_grad_() for x in (hidden, weight, bias)]
    expected, grads = outcome(function(*whole[:2], target, whole[2], **own, **options), whole)
    if "class_weight" in options:
        options["class_weight"] = distribute_tensor(weights, mesh, [Shard(0)])
    parts = [hidden.clone().requires_grad_()]
    parts += [
        None if x is None else distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        for x in (weight, bias)
    ]
    found, made = outcome(function(*parts[:2], target, parts[2], **own, **options), parts)
    made = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in made]
    size = max(1.0, float(expected.abs().max()))
    close = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 5e-2}[hidden.dtype]
    assert torch.allclose(found, expected, rtol=close, atol=close * size), (found, expected)
    for one, other in zip(made, grads, strict=True):
        size = max(1.0, float(other.abs().max()))
        assert torch.allclose(one, other, rtol=close, atol=close * size), (one - other).abs().max()


OPTIONS = (
    {},
    {"reduction": "sum", "biased": False},
    {"reduction": "none"},
    {"weighted": True},
    {"weighted": True, "reduction": "none", "chunk_rows": 4},
)
LABEL_OPTIONS = (
    {},
    {"reduction": "sum", "biased": False},
    {"reduction": "none"},
    {"chunk_classes": 4},
)


def process(rank: int, processes: int, folder: Path, *every: str) -> None:
    del folder
    mesh = init_device_mesh("cpu", (processes,), mesh_dim_names=("classes",))
    cases = [
        (name, n_classes, options, scale)
        for name, n_classes in itertools.product(LOSSES, (3, 23, 101))
        for options, scale in itertools.product(OPTIONS, (1.0, 0.01, 20.0))
    ]
    cases += [
        (name, n_classes, options, 1.0)
        for name, n_classes, options in itertools.product(LABEL_LOSSES, (3, 101), LABEL_OPTIONS)
    ]
    # In the same order in all processes; a third of them unless all are asked for.
    for name, n_classes, options, scale in cases if every else cases[:: 3 if processes == 4 else 7]:
        try:
            compare(name, mesh, n_classes, options, scale=scale)
        except Exception as wrong:
            case = rank, name, n_classes, options, scale
            raise AssertionError(f"{case}: {wrong!r}") from wrong
    for name, dtype in itertools.product(LOSSES, (torch.float32, torch.bfloat16)):
        compare(name, mesh, 101, {}, dtype=dtype)
    masked(mesh)


def masked(mesh) -> None:
    """Classes that a bias of -inf masks, a row of nothing else, and a NaN."""
    hidden, weight, bias, _, target = problem(23)
    bias = torch.where(torch.arange(23) % 3 == 0, -torch.inf, bias)
    target = torch.where(target >= 0, 1, target)
    parts = [distribute_tensor(each, mesh, [Shard(0)]) for each in (weight, bias)]
    for function, own in LOSSES.values():
        if own.get("label_smoothing"):
            continue
        options = {"reduction": "none", **own}
        expected = function(hidden, weight, target, bias, **options)
        found = function(hidden, parts[0], target, parts[1], **options)
        torch.testing.assert_close(found, expected)
        nothing = distribute_tensor(torch.full_like(bias, -torch.inf), mesh, [Shard(0)])
        rows = hidden.clone().requires_grad_()
        lost = function(rows, parts[0], target, nothing, **options)
        assert bool((lost[target >= 0] == torch.inf).all())
        lost[target >= 0][0].backward()
        assert bool((rows.grad == 0).all())
        rows = hidden.clone()
        rows[1] = torch.nan
        found = function(rows, parts[0], target, parts[1], **options)
        assert found.isnan().nonzero().flatten().tolist() == [1]


if __name__ == "__main__":
    main(process)
