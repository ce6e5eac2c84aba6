"""From a user's arguments to rows, the mask applied and the mapped dimension last; and back."""

import math

from torch import Tensor

from lastlayer._checks import check_dim, check_mask, check_scores


def as_rows(scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """``scores`` with ``dim`` last and -inf where ``mask`` is False."""
    check_scores(scores)
    dim = check_dim(dim, scores)
    if mask is not None:
        check_mask(mask, scores)
        scores = scores.masked_fill(~mask, -math.inf)
    return scores if dim == scores.dim() - 1 else scores.movedim(dim, -1)


def from_rows(rows: Tensor, dim: int) -> Tensor:
    """Rows with their last dimension put back to ``dim``."""
    # A view would cost the host more than it looks, and another one in backward.
    return rows if dim in (-1, rows.dim() - 1) else rows.movedim(-1, dim)
