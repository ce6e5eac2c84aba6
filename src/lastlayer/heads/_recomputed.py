"""The counter of a step, also where ``torch.utils.checkpoint`` makes its forward pass once more.

A checkpointed function runs again while gradients are made, by when the counter has moved on. It
restores torch's random state for that, so a random number drawn in both passes is the same, and
says which step it is.
"""

from collections import OrderedDict

import torch
from torch import Tensor

# So many forward passes may wait for their gradients.
_MOST = 1024


class Steps:
    """Counters of forward passes that may be made again."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    def is_recomputed(self) -> bool:
        """Whether this forward pass is one that was made before."""
        return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1

    def counter(self, draws: Tensor) -> Tensor:
        """The counter to draw by: ``draws``, or what it was when the pass was made first.

        Raises:
            RuntimeError: in a recomputation of a pass that is not known.
        """
        if torch.compiler.is_compiling():
            return draws
        if self.is_recomputed():
            kept = self._kept.get(_tag())
            if kept is None:
                raise RuntimeError(
                    "this head was called while gradients are made, in a pass whose draws are not "
                    "known; torch.utils.checkpoint has to keep preserve_rng_state=True"
                )
            return kept.to(draws.device)
        if _may_be_made_again():
            self._kept[_tag()] = draws.clone()
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        return draws


def _may_be_made_again() -> bool:
    """A checkpoint hooks what is saved, or records nothing in its first pass."""
    hooks: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or not torch.is_grad_enabled()


def _tag() -> int:
    return int(torch.randint(2**62, (), device="cpu"))
