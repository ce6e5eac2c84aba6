"""InfoNCE from its definition, with all similarities at once, in float64."""

import torch
from torch import Tensor
from torch.nn.functional import normalize as unit


def dense_info_nce(
    query: Tensor,
    key: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float | Tensor = 0.07,
    symmetric: bool = False,
    in_batch: bool = True,
    groups: Tensor | tuple[Tensor, Tensor] | None = None,
    negative_groups: Tensor | None = None,
    same_group: str = "ignore",
    normalize: bool = True,
) -> Tensor:
    """The loss of each query; ``groups`` as the loss takes them."""
    n = len(query)
    query, key = query.double(), key.double()
    negatives = query.new_empty(n, 0, query.shape[1]) if negatives is None else negatives.double()
    if normalize:
        query, key, negatives = (unit(each, dim=-1) for each in (query, key, negatives))
    temperature = temperature.double() if isinstance(temperature, Tensor) else temperature
    negatives = negatives.expand(n, -1, -1)
    further = torch.einsum("nd,nmd->nm", query, negatives) / temperature
    own = torch.eye(n, dtype=torch.bool)
    same = own
    far = torch.zeros(further.shape, dtype=torch.bool)
    if groups is not None:
        of_query, of_key = groups if isinstance(groups, tuple) else (groups, groups)
        same = own | (of_query[:, None] == of_key)
        if negative_groups is not None:
            far = of_query[:, None] == negative_groups
    scores = query @ key.T / temperature
    seen = torch.ones_like(own) if in_batch else own
    rows = _rows(
        torch.cat([scores, further], 1),
        torch.cat([same & seen, far], 1),
        torch.cat([own, torch.zeros_like(far)], 1),
        torch.cat([seen, torch.ones_like(far)], 1),
        same_group,
    )
    if not symmetric:
        return rows
    return (rows + _rows(scores.T, same.T, own, seen, same_group)) / 2


def _rows(scores: Tensor, same: Tensor, own: Tensor, seen: Tensor, same_group: str) -> Tensor:
    if same_group == "ignore":
        seen, same = seen & ~(same & ~own), own
    total = torch.logsumexp(scores.masked_fill(~seen, -torch.inf), 1)
    count = same.sum(1)
    return total - torch.where(same, scores, 0.0).sum(1) / count - torch.log(count.double())
