"""From a user's arguments to rows: the mask applied, the mapped dimension last."""

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
    return scores.movedim(dim, -1)
