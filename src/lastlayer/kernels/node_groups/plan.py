"""Which rows are at which node, and the tiles of each group, without a word from the host.

All sizes depend on values that only the device knows. What is bounded by numbers of the tree gets
that much memory and that many programs; those beyond the end have nothing to do.
"""

import torch
from torch import Tensor

from lastlayer.kernels._triton import cdiv
from lastlayer.kernels.node_groups._plan_triton import (
    list_tiles,
    mark_first,
    measure_groups,
    start_groups,
)
from lastlayer.kernels.node_groups.sizes import (
    CHILDREN,
    ROWS,
    Plan,
    TreeSizes,
    most_groups,
    most_tiles,
)

# Numbers that a program of the plan has.
_BLOCK = 256


def make_plan(node: Tensor, row_start: Tensor, sizes: TreeSizes, n: int) -> Plan:
    """For the node of each entry, ``(m,)``, int32; ``n_inner`` where none is asked for.

    ``row_start`` is the first row of the weight of each node, and their end; n is how many rows
    of hidden states the entries are of.
    """
    m, n_groups = node.shape[0], most_groups(node.shape[0], sizes)
    by_node, entry = torch.sort(node, stable=True)
    fresh = torch.empty_like(by_node)
    mark_first[(cdiv(m, _BLOCK),)](by_node, fresh, m, BLOCK=_BLOCK, enable_fp_fusion=True)
    group = torch.cumsum(fresh, 0, dtype=torch.int32)
    start = torch.empty(n_groups, dtype=torch.int32, device=node.device)
    start_groups[(cdiv(m, _BLOCK),)](group, start, m, BLOCK=_BLOCK, enable_fp_fusion=True)
    groups, amounts = torch.empty(
        2, 5, n_groups, dtype=torch.int64, device=node.device
    ).unbind()  # fmt: skip
    measure_groups[(cdiv(n_groups, _BLOCK),)](
        by_node, group, start, row_start, groups, amounts, m, n_groups, sizes.n_inner, ROWS=ROWS,
        CHILDREN=CHILDREN, BLOCK=_BLOCK, enable_fp_fusion=True,
    )  # fmt: skip
    ends = amounts.cumsum(1)
    most = most_tiles(m, n, sizes)
    tiles = torch.empty(sum(most), dtype=torch.int32, device=node.device)
    list_tiles[(cdiv(max(most), _BLOCK), 3)](
        ends, tiles, n_groups, most[0], most[1], most[2], SEARCH=n_groups.bit_length(),
        BLOCK=_BLOCK, enable_fp_fusion=True,
    )  # fmt: skip
    return Plan(entry, group, groups, ends, *tiles.split(most))
