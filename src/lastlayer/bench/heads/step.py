"""One training step of a head: called, and verified against float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer.bench import memory
from lastlayer.bench.heads.truth import Losses, truth_of
from lastlayer.bench.heads.verdict import HeadVerdict
from lastlayer.bench.verify import GRADIENT_TOLERANCE, LOSS_TOLERANCE, poison, relative_error


class Gradients(NamedTuple):
    """What one forward and backward pass gives."""

    loss: Tensor
    hidden: Tensor | None
    parameters: list[Tensor | None]


@dataclass
class Step:
    """Forward and backward of a head, from gradients set to None; and perhaps an update.

    Attributes:
        module: takes hidden states and targets to a mean loss, or to a tuple that has it as
            ``loss``, as torch's adaptive softmax does.
        losses: the same in float64.
        classes: how many there are.
        slack: how many times more than usual its gradients may be off.
        settings: see :class:`lastlayer.bench.heads.record.HeadRecord`.
        update: a step of an optimiser, which ends every call but those that are verified.
    """

    module: torch.nn.Module
    losses: Losses
    classes: int
    slack: float = 1.0
    settings: str = ""
    update: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        self._leaves = list(self.module.parameters())

    def __call__(self, hidden: Tensor, target: Tensor) -> Gradients:
        """One step; nobody holds its gradients afterwards but the result."""
        return self._step(hidden, target, self.update)

    def _step(
        self, hidden: Tensor, target: Tensor, update: Callable[[], Any] | None = None
    ) -> Gradients:
        loss = self._loss(hidden, target)
        loss.backward()
        if update is not None:
            update()
        taken = Gradients(loss.detach(), hidden.grad, [leaf.grad for leaf in self._leaves])
        for leaf in (hidden, *self._leaves):
            leaf.grad = None
        return taken

    def captured(self, hidden: Tensor, target: Tensor) -> None:
        """The same for a CUDA graph, on whose stream gradients are not accumulated."""
        leaves = [hidden, *self._leaves]
        made = torch.autograd.grad(self._loss(hidden, target), leaves, allow_unused=True)
        if self.update is not None:
            for leaf, gradient in zip(self._leaves, made[1:], strict=True):
                leaf.grad = gradient
            self.update()
            for leaf in self._leaves:
                leaf.grad = None

    def _loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        made: Any = self.module(hidden, target)
        loss: Tensor = getattr(made, "loss", made)
        return loss

    def verify(self, inputs: tuple[Tensor, ...]) -> HeadVerdict:
        """Compare the loss and all gradients with float64, and measure the memory."""
        hidden, target = inputs
        leaf = hidden.detach().requires_grad_()
        # The first call compiles, and may take memory for it.
        self._step(leaf, target)
        poison(hidden)
        step, peak = memory.with_peak(lambda: self._step(leaf, target), hidden.device)
        truth = truth_of(self.module, self.losses, self.classes, hidden, target)
        loss_error = abs(float(step.loss) - truth.loss) / abs(truth.loss)
        hidden_error = _gradient_error(step.hidden, truth.hidden)
        named = zip(truth.parameters.items(), step.parameters, strict=True)
        errors = {name: _gradient_error(got, exact) for (name, exact), got in named}
        worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
        most = self.slack * GRADIENT_TOLERANCE[hidden.dtype]
        reason = None
        # Written so that NaN never passes.
        if not loss_error <= LOSS_TOLERANCE[hidden.dtype]:
            reason = f"loss off by {loss_error:.1e}"
        elif not errors[worst] <= most:
            reason = f"gradient of {worst} off by {errors[worst]:.1e}"
        elif not hidden_error <= most:
            reason = f"gradient of hidden off by {hidden_error:.1e}"
        return HeadVerdict(
            reason=reason,
            settings=self.settings,
            parameters=sum(each.numel() for each in self._leaves),
            peak_bytes=peak,
            loss_error=loss_error,
            hidden_error=hidden_error,
            weight_error=errors[worst],
        )


def _gradient_error(got: Tensor | None, exact: Tensor) -> float:
    """The relative error in norm; where the truth is 0, so is the error of 0."""
    if got is None:
        return float(torch.linalg.vector_norm(exact) > 0)
    if got.is_sparse:
        # Entries of one row are added up in float64: how an optimiser does it is its own matter.
        entries = got._indices(), got._values().double()
        got = torch.sparse_coo_tensor(*entries, got.shape, check_invariants=False).to_dense()
    rows = got.shape[0] if got.ndim > 1 else 1
    return relative_error(got.reshape(rows, -1), exact.reshape(rows, -1))
