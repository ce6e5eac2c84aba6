"""Peaks and levels of blocks of classes, and the k best, in plain torch: defines the truth."""

import torch
from torch import Tensor


def peaks_and_levels_(
    hidden: Tensor, weight: Tensor, peaks: Tensor, levels: Tensor, classes: int
) -> None:
    """For each row and block the largest score, and the log of the sum of their exponentials.

    A block has ``classes`` classes, the last one what is left; NaN where the row has a NaN.
    """
    scores = (hidden.double() @ weight.double().t()).split(classes, -1)
    for block, some in enumerate(scores):
        peaks[:, block] = some.amax(-1)
        levels[:, block] = torch.logsumexp(some, -1)


def largest(values: Tensor, ids: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row and their ids; NaN first, the lower id where equal."""
    if ids is None:
        ids = torch.arange(values.shape[1], device=values.device).expand(values.shape)
    by_id = ids.sort(dim=-1, stable=True)
    values = values.gather(-1, by_id.indices)
    # Of a NaN, +inf and -0 there is one kind each, so that ids decide.
    keys = (values + 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = keys.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return values.gather(-1, best), by_id.values.gather(-1, best)
