"""Gradients of class vectors and biases from the pieces of a sampled loss.

A class may be drawn several times, and be the target of several rows: what belongs to it is added
up in float32, in a fixed order, and rounded once.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from lastlayer.fused._sparse_rows import can_wait
from lastlayer.kernels import touched_rows
from lastlayer.kernels._registry import is_plain

if TYPE_CHECKING:
    from lastlayer.heads._sampled_pass import Pieces

# Sorting half as many bytes takes half the time.
_MOST_NARROW = 2**31 - 1


def class_gradients(
    pieces: "Pieces",
    factor: Tensor,
    hidden: Tensor,
    target: Tensor,
    ids: Tensor,
    shape: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    wanted: tuple[bool, bool],
    sparse: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias, row-sparse or dense.

    Args:
        pieces: what the forward pass left.
        factor: the upstream gradient.
        hidden: ``(n, d)``.
        target: ``(n, p)``, -1 for none.
        ids: ``(m,)`` or ``(n, m)``.
        shape: of the weight.
        dtypes: of weight and bias.
        wanted: whether each has a gradient.
        sparse: row-sparse, where the host may wait for the number of rows.
    """
    if ids.dim() == 1:
        columns, biases, slopes = pieces.draws, pieces.draws_bias, pieces.targets
    else:
        columns = biases = pieces.targets.new_empty(0)
        slopes = torch.cat([pieces.draws, pieces.targets], 1)
        ids, target = torch.cat([ids, target], 1), target[:, :0]
    # The host knows how many classes are touched, or leaves room for as many as there may be.
    on_cpu = hidden.device.type == "cpu"
    counted = is_plain(hidden) and (on_cpu or (sparse and can_wait(hidden)))
    known, order, starts = _groups(ids, target, shape[0], counted)
    to_weight, to_bias = wanted
    sums = touched_rows.forward(
        "auto", columns, biases, slopes, hidden, order, starts, factor, to_weight, to_bias
    )
    made: list[Tensor | None] = []
    for each, dtype, size_of, needed in zip(sums, dtypes, (shape, shape[:1]), wanted, strict=True):
        if not needed or dtype is None:
            made.append(None)
        elif counted and sparse:
            made.append(_row_sparse(known, each.to(dtype), size_of))
        else:
            dense = each.new_zeros(size_of, dtype=dtype)
            # Where room is left over, zeros are added to the last class.
            made.append(dense.index_add_(0, known, each.to(dtype)))
    return made[0], made[1]


def _groups(
    ids: Tensor, target: Tensor, n_classes: int, counted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries by class: the class of each group, the order, and where groups start.

    Where groups are not ``counted`` there is room for one an entry; what is left over is empty.
    """
    entries = torch.cat([ids.flatten(), target.flatten()])
    # A place without a target has a slope of 0, and goes to a class that is touched anyway.
    entries = torch.where(entries < 0, entries[:1].clamp(min=0), entries)
    if n_classes <= _MOST_NARROW:
        entries = entries.int()
    keys, order = torch.sort(entries, stable=True)
    if counted:
        known, counts = torch.unique_consecutive(keys, return_counts=True)
        return known.long(), order, pad(counts.cumsum(0), (1, 0))
    size = keys.shape[0]
    group = pad((keys[1:] != keys[:-1]).cumsum(0), (1, 0))[:size]
    starts = torch.searchsorted(group, torch.arange(size + 1, device=keys.device))
    return keys[starts[:-1].clamp(max=size - 1)].long(), order, starts


def _row_sparse(touched: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(
        touched.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False
    )
