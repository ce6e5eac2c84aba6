"""The RNG counter of each training step, also for steps that checkpointing recomputes."""

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
    """Advances the RNG counter (seed, step) of a head, in place."""
    if in_functorch() and not is_functorch_wrapped(rng_counter):
        # A functorch transform would refuse the write; steps are counted under any transform.
        with without_modes():
            rng_counter[1:].add_(1)
    else:
        rng_counter[1:].add_(1)


@dataclass
class _Pass:
    """The counters of the calls inside a checkpoint, in their order."""

    counters: list[Tensor] = field(default_factory=list)
    backward: int = -1
    """Id of the backward pass that is recomputing the calls."""
    repeated: int = 0


class RngSteps:
    """Provides the RNG counter (seed, step) for each training step of a head.

    A function inside ``torch.utils.checkpoint`` runs again in backward, when the counter has
    advanced. It must draw the same samples as in its first pass, so the counters of such passes are
    kept for as long as the checkpoint lives. Nothing is drawn from torch's generators for that.

    A forward pass under ``torch.no_grad()`` uses the counter of the next step and does not advance
    it, unless it is the first pass of a reentrant checkpoint.
    """

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[object, _Pass] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["RngSteps"], tuple[()]]:
        # A copy has no recorded passes.
        return RngSteps, ()

    def counter(self, rng_counter: Tensor) -> tuple[Tensor, bool]:
        """The counter to use, and whether to advance it after the draws.

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
                "torch.utils.checkpoint, got a call inside a backward pass without a recorded RNG "
                "state; call the head outside of the backward pass"
            )
        known.repeated += 1
        return known.counters[known.repeated - 1]
