"""What the loss modules share: the options that every loss of a map takes."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_reduction


class MapLoss(torch.nn.Module):
    """Holds class weights, the ignored class id and the reduction."""

    weight: Tensor | None

    def __init__(
        self,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_reduction(reduction)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction = ignore_index, reduction

    def options(self) -> dict[str, Any]:
        return {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
        }

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"
