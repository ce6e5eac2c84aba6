"""Every way to get a loss of many labels with its gradients: ours, torch's, the peers'."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lastlayer.bench.cases import OURS, Call, Method
from lastlayer.bench.losses import Step, scores_held
from lastlayer.bench.multilabel.truth import DENSE_ZLPR, LINEAR_BCE, LINEAR_ZLPR
from lastlayer.bench.peers import attribute
from lastlayer.fused import labels
from lastlayer.losses import zlpr as on_scores

LossFunction = Callable[..., Any]
LOW = ", low memory"
MAIN = {
    LINEAR_ZLPR: "linear_zlpr_loss",
    LINEAR_BCE: "linear_bce_loss",
    DENSE_ZLPR: "zlpr_loss",
}
_OPS = {LINEAR_ZLPR: "zlpr_slab_sums", LINEAR_BCE: "logistic_slab_", DENSE_ZLPR: "zlpr"}


def step_of(loss_function: LossFunction, section: str, *, backward: bool = True) -> Call:
    """A call of the loss, with the gradients of what is not a label."""
    leaves = 1 if section == DENSE_ZLPR else 2

    def forward(*inputs: Tensor) -> Step:
        with torch.no_grad():
            return Step(loss_function(*inputs), ())

    def step(*inputs: Tensor) -> Step:
        loss = loss_function(*inputs)
        return Step(loss.detach(), torch.autograd.grad(loss, inputs[:leaves]))

    return step if backward else forward


def of(section: str, device: str, *, backward: bool) -> list[Method]:
    """The baseline, ours, then the others."""
    function = _TORCHS[section]

    def method(name: str, load: Callable[[], LossFunction], **options: Any) -> Method:
        def loaded() -> Call:
            return step_of(load(), section, backward=backward)

        return Method(name, options.pop("source", "torch"), section, loaded, **options)

    eager = method("eager", lambda: function, scratch=scores_held(20, 2))
    # One graph for one shape: a break or a general graph would be timed as something it is not.
    compiled = method(
        "compiled",
        lambda: torch.compile(function, fullgraph=True, dynamic=False),
        scratch=scores_held(2, 2),
    )
    ours = [method(MAIN[section], lambda: _ours(section), source=OURS, op=_OPS[section])]
    others = []
    if section == DENSE_ZLPR:
        others.append(
            method("multilabel CE", _bert4torch, source="bert4torch", scratch=scores_held(0, 12))
        )
    else:
        low = method(
            f"{MAIN[section]}{LOW}",
            lambda: _ours(section, chunk_classes="low"),
            source=OURS,
            op=_OPS[section],
            variant=True,
        )
        ours.append(low)
    # To compile takes longer than all else on a CPU.
    return [eager, *ours, *others] if device == "cpu" else [compiled, *ours, eager, *others]


def _ours(section: str, **options: Any) -> LossFunction:
    functions: dict[str, LossFunction] = {
        LINEAR_ZLPR: labels.linear_zlpr_loss,
        LINEAR_BCE: labels.linear_bce_loss,
        DENSE_ZLPR: on_scores.zlpr_loss,
    }
    return partial(functions[section], **options)


def _beside_zero(terms: Tensor) -> Tensor:
    """``log(1 + sum e^x)``."""
    return torch.logaddexp(terms.logsumexp(-1), terms.new_zeros(()))


def _linear_zlpr(hidden: Tensor, weight: Tensor, positives: Tensor) -> Tensor:
    scores = functional.linear(hidden, weight).float()
    negatives = scores.scatter(1, positives, -torch.inf)
    return (_beside_zero(negatives) + _beside_zero(-scores.gather(1, positives))).mean()


def _linear_bce(hidden: Tensor, weight: Tensor, positives: Tensor) -> Tensor:
    scores = functional.linear(hidden, weight).float()
    target = torch.zeros_like(scores).scatter(1, positives, 1.0)
    total = functional.binary_cross_entropy_with_logits(scores, target, reduction="sum")
    return total / hidden.shape[0]


def _dense_zlpr(scores: Tensor, target: Tensor) -> Tensor:
    wide = scores.float()
    negatives = wide.masked_fill(target, -torch.inf)
    positives = (-wide).masked_fill(~target, -torch.inf)
    return (_beside_zero(negatives) + _beside_zero(positives)).mean()


def _bert4torch() -> LossFunction:
    name = "MultilabelCategoricalCrossentropy"
    loss = attribute("bert4torch", "bert4torch.losses", name, "pip install bert4torch")()
    return lambda scores, target: loss(scores, target.to(scores.dtype))


_TORCHS: dict[str, LossFunction] = {
    LINEAR_ZLPR: _linear_zlpr,
    LINEAR_BCE: _linear_bce,
    DENSE_ZLPR: _dense_zlpr,
}
