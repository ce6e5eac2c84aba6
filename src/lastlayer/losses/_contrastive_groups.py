"""Groups of queries and keys as small numbers that a kernel can compare, and how many match."""

from typing import NamedTuple

import torch
from torch import Tensor

# What no query and no key has: a query whose group no key is in, and a key without a group.
_UNMATCHED, _WITHOUT = -1, -2


class Matches(NamedTuple):
    """int32 ranks, equal where groups are, and how many keys each query matches."""

    query: Tensor
    key: Tensor
    counts: Tensor


def matches(query_groups: Tensor, key_groups: Tensor, without: int = 0) -> Matches:
    """Ranks of groups among those of the keys, found without waiting for the device.

    Args:
        query_groups: ``(n,)``.
        key_groups: ``(m,)``.
        without: how many keys without a group come after these.
    """
    query_groups, key_groups = query_groups.long(), key_groups.long()
    in_order = key_groups.sort().values
    since = torch.searchsorted(in_order, query_groups)
    until = torch.searchsorted(in_order, query_groups, right=True)
    query = torch.where(until > since, since, _UNMATCHED).int()
    key = torch.searchsorted(in_order, key_groups).int()
    if without:
        key = torch.cat([key, key.new_full((without,), _WITHOUT)])
    return Matches(query, key, until - since)
