"""Base class of the losses that are modules."""

import torch

from lastlayer._checks import check_reduction


class LossModule(torch.nn.Module):
    """A loss with a reduction, which the constructor checks."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        check_reduction(reduction)
        self.reduction = reduction

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"
