"""The k largest of each row, equal ones in the order of their classes.

``torch.topk`` leaves open which of equal scores it takes, and in which order.
"""

import torch
from torch import Tensor

from lastlayer._torch import values_are_checked

# Numbers held for each number of the input, itself included. Keys and what they are made of take
# six times its memory, so they are made for a few rows at a time.
COPIES = 4.0
_PARTS = 4


def top_classes(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and classes ``(rows, k)`` of scores ``(rows, n)``, the largest first.

    The values have a gradient. A NaN comes first, as it does for torch.
    """
    known = scores.detach()
    # To look for ties a GPU would have to wait, and its arithmetic is cheap; while a compiler
    # traces there are none to be seen.
    on_cpu = known.device.type == "cpu" and values_are_checked(known)
    find = _unless_tied if on_cpu else _in_order
    classes = find(known, k)
    return scores.gather(-1, classes), classes


def _unless_tied(scores: Tensor, k: int) -> Tensor:
    """By ``torch.topk`` in rows where the next score is lower than the k-th."""
    n = scores.shape[-1]
    values, classes = scores.topk(min(k + 1, n))
    kept = classes[:, :k].sort(-1).values
    order = scores.gather(-1, kept).sort(dim=-1, descending=True, stable=True).indices
    kept = kept.gather(-1, order)
    if k < n:
        tied = ~(values[:, k - 1] > values[:, k])
        if bool(tied.any()):
            kept[tied] = _in_order(scores[tied], k)
    return kept


def _in_order(scores: Tensor, k: int) -> Tensor:
    if scores.dtype == torch.float64:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    parts = scores.split(max(1, -(-scores.shape[0] // _PARTS)))
    keys = torch.cat([_unique_keys(part).topk(k).values for part in parts])
    return keys.bitwise_not_().bitwise_and_(0xFFFFFFFF)


def _unique_keys(scores: Tensor) -> Tensor:
    """Integers of the order of float32 scores above, and the complement of the class below."""
    inf = torch.inf
    # A NaN of either sign goes to the top; + 0.0 makes -0.0 equal to 0.0.
    bits = scores.nan_to_num(nan=inf, posinf=inf, neginf=-inf).add_(0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    classes = torch.arange(scores.shape[-1], device=scores.device)
    return (bits.long() << 32).add_(classes.bitwise_not_().bitwise_and_(0xFFFFFFFF))
