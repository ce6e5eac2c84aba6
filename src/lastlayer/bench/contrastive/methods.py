"""Every way to get InfoNCE with its gradients: ours, torch's, the peers'."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer.bench.cases import OURS, Call, Method
from lastlayer.bench.contrastive.truth import SYMMETRIC
from lastlayer.bench.losses import Step
from lastlayer.bench.peers import attribute
from lastlayer.losses.contrastive import info_nce

MAIN, LOW = "info_nce", "info_nce, low memory"

LossFunction = Callable[[Tensor, Tensor, Tensor], Any]


def step_of(loss_function: LossFunction) -> Call:
    """Forward and backward of a loss on (query, key, temperature), from gradients set to None."""

    def step(query: Tensor, key: Tensor, temperature: Tensor) -> Step:
        leaves = query, key, temperature
        loss = loss_function(*leaves)
        return Step(loss.detach(), torch.autograd.grad(loss, leaves))

    return step


def of(section: str, device: str, *, quick: bool) -> list[Method]:
    """The baseline, ours, then the others."""
    symmetric = section == SYMMETRIC
    function = _both_ways if symmetric else _one_way
    # Held at once: the similarities, and for each direction what its softmax leaves.
    held = 3 if symmetric else 2
    eager = _method("eager", "torch", section, lambda: step_of(function), _scratch(4, 2 * held))
    # One graph for one shape: a break or a general graph would be timed as something it is not.
    compiled = _method(
        "compiled",
        "torch",
        section,
        lambda: step_of(torch.compile(function, fullgraph=True, dynamic=False)),
        _scratch(0, 3),
    )
    ours = [_ours(section, "auto"), _ours(section, "low")]
    peer = (
        _method("ClipLoss", "open-clip-torch", section, _open_clip, _scratch(4, 2 * held))
        if symmetric
        else _method("info_nce", "info-nce-pytorch", section, _info_nce_pytorch, _scratch(4, 4))
    )
    if device == "cpu":
        # Compiling takes longer than all of a quick run.
        return [eager, *ours, *([] if quick else [compiled]), peer]
    return [compiled, *ours, eager, peer]


def _method(
    name: str,
    source: str,
    section: str,
    load: Callable[[], Call],
    scratch: Callable[[tuple[int, ...], int], int],
) -> Method:
    return Method(name, source, section, load, scratch=scratch)


def _ours(section: str, chunk_rows: str) -> Method:
    def load() -> Call:
        symmetric = section == SYMMETRIC
        return step_of(
            lambda q, k, t: info_nce(
                q, k, temperature=t, symmetric=symmetric, chunk_rows=chunk_rows
            )
        )

    low = chunk_rows == "low"
    return Method(LOW if low else MAIN, OURS, section, load, op="info_nce_statistics_", variant=low)


def _scratch(fixed: int, copies: int) -> Callable[[tuple[int, ...], int], int]:
    """Bytes of so many bytes a pair of vectors and so many copies of all similarities."""

    def needed(shape: tuple[int, ...], itemsize: int) -> int:
        pairs, _ = shape
        return pairs * pairs * (fixed + copies * itemsize)

    return needed


def _similarities(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
    return (query @ key.T).float() / temperature


def _one_way(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    scores = _similarities(query, key, temperature)
    return functional.cross_entropy(scores, torch.arange(len(query), device=query.device))


def _both_ways(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    scores = _similarities(query, key, temperature)
    own = torch.arange(len(query), device=query.device)
    return (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2


def _info_nce_pytorch() -> Call:
    install = "pip install info-nce-pytorch"
    function = attribute("info-nce-pytorch", "info_nce", "info_nce", install)
    return step_of(lambda q, k, t: function(q, k, temperature=t))


def _open_clip() -> Call:
    install = "pip install open-clip-torch"
    loss = attribute("open-clip-torch", "open_clip.loss", "ClipLoss", install)()

    def function(query: Tensor, key: Tensor, temperature: Tensor) -> Any:
        query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
        return loss(query, key, 1.0 / temperature.to(query.dtype))

    return step_of(function)
