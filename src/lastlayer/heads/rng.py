"""Which numbers a training step draws with, also where a checkpoint makes it a second time."""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lastlayer._torch import (
    backward_id,
    checkpoint_passes,
    in_backward,
    in_functorch,
    is_functorch_wrapped,
    is_plain_step,
    without_modes,
)


def count_step(rng_counter: Tensor) -> None:
    """Move the counter (seed, step) of a head on, in place."""
    if in_functorch() and not is_functorch_wrapped(rng_counter):
        # A transform would refuse it; draws are counted whatever is done to the loss.
        with without_modes():
            rng_counter[1:].add_(1)
    else:
        rng_counter[1:].add_(1)


@dataclass
class _Pass:
    """The counters of the calls inside a checkpoint, in their order."""

    counters: list[Tensor] = field(default_factory=list)
    backward: int = -1
    """The backward pass in which the calls are being repeated."""
    repeated: int = 0


class RngSteps:
    """Hands out the RNG counter (seed, step) of a head, one step after the other.

    A function inside ``torch.utils.checkpoint`` runs again in backward, when the counter has moved
    on. Its draws must be those of its first pass, so counters of such passes are remembered for as
    long as the checkpoint lives. Nothing is drawn from torch's generators for that.

    A forward pass under ``torch.no_grad()`` uses the counter of the next step and leaves it there,
    unless it is the first pass of a reentrant checkpoint.
    """

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[object, _Pass] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["RngSteps"], tuple[()]]:
        # A copy has no pass that waits for its gradient.
        return RngSteps, ()

    def counter(self, rng_counter: Tensor) -> tuple[Tensor, bool]:
        """The counter to draw by, and whether the step is to be counted once all is drawn.

        Raises:
            RuntimeError: in a backward pass that recomputes no known step.
        """
        recording = torch.is_grad_enabled()
        if torch.compiler.is_compiling():
            return rng_counter, recording
        if is_plain_step():
            return rng_counter, True
        in_gradient = in_backward()
        first, again = checkpoint_passes()
        if in_gradient:
            counter = self._repeated(again).to(rng_counter.device)
        else:
            counter = rng_counter.clone() if first else rng_counter
        for each in first:
            self._passes.setdefault(each, _Pass()).counters.append(counter)
        return counter, not in_gradient and (recording or bool(first))

    def _repeated(self, again: list[object]) -> Tensor:
        known = next((self._passes[each] for each in again if each in self._passes), None)
        backward = backward_id()
        if known is not None and known.backward != backward:
            known.backward, known.repeated = backward, 0
        if known is None or known.repeated >= len(known.counters):
            raise RuntimeError(
                "forward: expected a call in training, or its recomputation by "
                "torch.utils.checkpoint, got one inside a backward pass whose draws are not known; "
                "call the head outside of the backward pass"
            )
        known.repeated += 1
        return known.counters[known.repeated - 1]
