"""One step of training: a body, a head, their optimisers, and clipped gradients."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer.lab.feeding import Batch
from lastlayer.optim import RowAdam


class Stepper:
    """Trains a body and a head together.

    Parameters with row-sparse gradients are stepped by :class:`lastlayer.optim.RowAdam`, which
    touches the rows that have one; all others by torch's fused Adam with the same settings.

    Args:
        body: from inputs to hidden states.
        head: from hidden states and targets to a loss.
        lr: learning rate.
        clip: the norm that all gradients together may have.
    """

    def __init__(self, body: nn.Module, head: nn.Module, lr: float, clip: float) -> None:
        self.body, self.head, self._clip = body, head, clip
        rows = list(_sparse_parameters(body))
        rows += head.parameters() if getattr(head, "sparse", False) else []
        kept = {id(each) for each in rows}
        both = [*body.parameters(), *head.parameters()]
        dense = [each for each in both if id(each) not in kept]
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        if dense:
            self.optimizers["dense"] = torch.optim.Adam(dense, lr=lr, fused=True)
        if rows:
            self.optimizers["rows"] = RowAdam(rows, lr=lr)
        self._parameters = both
        self._context = _context_length(head)

    def step(self, batch: Batch) -> Tensor:
        """One step; the loss before it. Nothing waits for the device."""
        loss = self.loss(batch)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_(self._parameters, self._clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        """The training loss of the head."""
        hidden = self.body(batch.inputs)
        made: Tensor
        if self._context:
            context = words_before(batch.inputs, self._context)
            made = self.head(hidden, batch.target, context=context)
        else:
            made = self.head(hidden, batch.target)
        return made


def clip_(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Scales all gradients so that their norm together is at most ``most``; rows count once."""
    values = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse and not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
        values.append(gradient._values() if gradient.is_sparse else gradient)
    if values:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
        torch._foreach_mul_(values, (most / (norm + 1e-6)).clamp(max=1.0))


def words_before(tokens: Tensor, n: int) -> Tensor:
    """The n last tokens of each place, ``(batch, length, n)``, the nearest last; -1 for none."""
    batch, length = tokens.shape
    padded = torch.cat([tokens.new_full((batch, n - 1), -1), tokens], 1)
    return padded.unfold(1, n, 1).reshape(batch, length, n)


def _context_length(head: nn.Module) -> int:
    """How many tokens the loss of a head wants to see; most want none."""
    sampler: Any = getattr(head, "sampler", None)
    if "context" not in inspect.signature(head.forward).parameters:
        return 0
    return max(0, int(getattr(sampler, "order", 1)) - 1)


def _sparse_parameters(body: nn.Module) -> Iterable[nn.Parameter]:
    for module in body.modules():
        if getattr(module, "sparse", False):
            yield from module.parameters(recurse=False)
