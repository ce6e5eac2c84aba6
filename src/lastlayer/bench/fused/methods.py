"""Every way to get a loss on a linear layer with its two gradients: ours, torch's, the peers'."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer import fused, losses
from lastlayer.bench.cases import OURS, Call, Method
from lastlayer.bench.fused.truth import CROSS_ENTROPY
from lastlayer.bench.losses import Step, scores_held
from lastlayer.bench.maps.cases import TOPK, K
from lastlayer.bench.peers import PeerMissing, attribute

LossFunction = Callable[[Tensor, Tensor, Tensor], Any]
# Rows of a chunk where torch.compile is called on chunks.
CHUNK_ROWS = 2048


def step_of(loss_function: LossFunction) -> Call:
    """Forward and backward of a loss on (hidden, weight, target), from gradients set to None."""

    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Step:
        hidden.grad = weight.grad = None
        loss = loss_function(hidden, weight, target)
        loss.backward()
        return _taken(loss, hidden, weight)

    return step


def _taken(loss: Tensor, hidden: Tensor, weight: Tensor, total: Tensor | None = None) -> Step:
    """The gradients, which the leaves then hold no more; ``total`` is the weight's, if given."""
    of_hidden, of_weight = hidden.grad, weight.grad if total is None else total
    hidden.grad = weight.grad = None
    if of_hidden is None or of_weight is None:
        raise RuntimeError(f"no gradient of {'hidden' if of_hidden is None else 'weight'}")
    return Step(loss.detach(), (of_hidden, of_weight))


def ours(computes: str, name: str = "", **options: Any) -> Method:
    """One of our fused losses; with a name and options, a variant of it."""
    known: dict[str, tuple[Callable[..., Tensor], str, dict[str, Any]]] = {
        CROSS_ENTROPY: (fused.linear_cross_entropy, "softmax_rows_", {}),
        "sparsemax": (fused.linear_entmax_loss, "entmax", {"alpha": 2.0}),
        "entmax 1.5": (fused.linear_entmax_loss, "entmax", {"alpha": 1.5}),
        TOPK: (fused.linear_topk_softmax_loss, "topk_softmax", {"k": K}),
    }
    function, op, fixed = known[computes]

    def load() -> Call:
        return step_of(lambda h, w, y: function(h, w, y, **fixed, **options))

    return Method(name or computes, OURS, computes, load, op=op, variant=bool(name))


def _into_float32(hidden: Tensor, weight: Tensor, target: Tensor) -> Step:
    hidden.grad = weight.grad = None
    total = torch.zeros_like(weight, dtype=torch.float32)
    loss = fused.linear_cross_entropy(hidden, weight, target, weight_grad=total)
    loss.backward()
    return _taken(loss, hidden, weight, total)


def unfused(computes: str) -> Method:
    """Our loss on scores that are stored."""
    on_scores: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sparsemax": losses.sparsemax_loss,
        "entmax 1.5": losses.entmax_loss,
        TOPK: lambda scores, target: losses.topk_softmax_loss(scores, target, K),
    }
    function = on_scores[computes]

    def load() -> Call:
        return step_of(lambda h, w, y: function(functional.linear(h, w), y))

    return Method(
        f"{computes}, stored scores", OURS, computes, load, variant=True, scratch=scores_held(8, 4)
    )


def _cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), target)


def _compiled() -> Call:
    # One graph for one shape: a break or a general graph would be timed as something it is not.
    return step_of(torch.compile(_product_and_loss, fullgraph=True, dynamic=False))


def _product_and_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).float(), target)


def _summed_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).float(), target, reduction="sum")


def _compiled_on_chunks() -> Call:
    compiled = torch.compile(_summed_loss, fullgraph=True, dynamic=False)

    def step(hidden: Tensor, weight: Tensor, target: Tensor) -> Step:
        hidden.grad = weight.grad = None
        rows = hidden.shape[0]
        total, gradients = torch.zeros((), device=hidden.device), []
        chunks = zip(hidden.detach().split(CHUNK_ROWS), target.split(CHUNK_ROWS), strict=True)
        for some, their_target in chunks:
            leaf = some.requires_grad_()
            loss = compiled(leaf, weight, their_target) / rows
            loss.backward()
            total += loss.detach()
            gradients.append(leaf.grad)
        hidden.grad = torch.cat(gradients)
        return _taken(total, hidden, weight)

    return step


def _torch_fused() -> Call:
    function = getattr(functional, "linear_cross_entropy", None)
    if function is None:
        raise PeerMissing("torch linear_cross_entropy", f"not in torch {torch.__version__}")
    options = torch.nn.LinearCrossEntropyOptions()
    return step_of(lambda h, w, y: function(h, w, y, options=options))


def _liger() -> Call:
    name = "LigerFusedLinearCrossEntropyLoss"
    loss = attribute("liger-kernel", "liger_kernel.transformers", name)()
    return step_of(lambda h, w, y: loss(w, h, y))


def _cce() -> Call:
    return step_of(attribute("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy"))


def _quack() -> Call:
    install = "pip install quack-kernels"
    module, name = "quack.linear_cross_entropy", "chunked_linear_cross_entropy"
    return step_of(attribute("quack-kernels", module, name, install))


MAIN = ours(CROSS_ENTROPY)
LOW = ours(CROSS_ENTROPY, "cross_entropy, low memory", chunk_rows="low")
FLOAT32_SUM = Method(
    "cross_entropy, float32 sum",
    OURS,
    CROSS_ENTROPY,
    lambda: _into_float32,
    op="softmax_rows_",
    variant=True,
)
EAGER = Method(
    "eager", "torch", CROSS_ENTROPY, lambda: step_of(_cross_entropy), scratch=scores_held(12, 1)
)
COMPILED = Method("compiled", "torch", CROSS_ENTROPY, _compiled, scratch=scores_held(0, 2))
ON_CHUNKS = Method(
    f"compiled, {CHUNK_ROWS}-row chunks", "torch", CROSS_ENTROPY, _compiled_on_chunks
)
TORCH_FUSED = Method("linear_cross_entropy", "torch", CROSS_ENTROPY, _torch_fused)
LIGER = Method("fused linear CE", "liger-kernel", CROSS_ENTROPY, _liger)
CCE = Method("linear CE", "cut-cross-entropy", CROSS_ENTROPY, _cce)
QUACK = Method("chunked linear CE", "quack-kernels", CROSS_ENTROPY, _quack)
SPARSE = ("sparsemax", "entmax 1.5", TOPK)
