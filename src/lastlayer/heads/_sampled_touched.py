"""Gradients of class vectors and biases from the pieces of a sampled loss.

A class may be drawn several times, and be the target of several rows: what belongs to it is added
up in float32, in a fixed order, and rounded once.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from lastlayer._torch import is_eager
from lastlayer.kernels import touched_rows

if TYPE_CHECKING:
    from lastlayer.heads._sampled_pass import Pieces

Dtypes = tuple[torch.dtype, torch.dtype | None]
# Gradients of vectors drawn and of their biases, slopes, and hidden; see touched_rows.
Entries = tuple[Tensor, Tensor, Tensor, Tensor]


def class_gradients(
    pieces: "Pieces",
    factor: Tensor,
    hidden: Tensor,
    shape: torch.Size,
    dtypes: Dtypes,
    wanted: tuple[bool, bool],
    sparse: bool,
    apart: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Of weight and bias, row-sparse or dense.

    Args:
        pieces: what the forward pass left.
        factor: the upstream gradient.
        hidden: ``(n, d)``.
        shape: of the weight.
        dtypes: of weight and bias.
        wanted: whether each has a gradient.
        sparse: row-sparse; where torch.compile traces, gradients are dense all the same.
        apart: whether each row has draws of its own.
    """
    entries = pieces.draws, pieces.draws_bias, pieces.targets, hidden
    if apart:
        nothing = pieces.targets.new_empty(0)
        entries = nothing, nothing, torch.cat([pieces.draws, pieces.targets], 1), hidden
    keys, order = torch.sort(pieces.entries, stable=True)
    make = _grouped if hidden.device.type == "cpu" or not is_eager(hidden) else _slotted
    return make(entries, keys, order, factor, shape, dtypes, wanted, sparse)


def _slotted(
    entries: Entries,
    keys: Tensor,
    order: Tensor,
    factor: Tensor,
    shape: torch.Size,
    dtypes: Dtypes,
    wanted: tuple[bool, bool],
    sparse: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """On a GPU: there is a slot for each entry, so that nothing waits for how many classes."""
    columns, biases, slopes, hidden = entries
    rows = keys.shape[0] if sparse else shape[0]
    shapes = ((rows, *shape[1:]), (rows,))
    fill = keys.new_empty if sparse else keys.new_zeros
    made = [
        fill(each if needed else 0, dtype=dtype or slopes.dtype)
        for each, dtype, needed in zip(shapes, dtypes, wanted, strict=True)
    ]
    known = torch.empty_like(keys, dtype=torch.int64) if sparse else None
    touched_rows.slots_(
        "auto", slopes, hidden, columns, biases, order, keys, factor, *made, known, not sparse
    )
    weight, bias = (each if needed else None for each, needed in zip(made, wanted, strict=True))
    if known is None:
        return weight, bias
    return _row_sparse(known, weight, shape, False), _row_sparse(known, bias, shape[:1], False)


def _grouped(
    entries: Entries,
    keys: Tensor,
    order: Tensor,
    factor: Tensor,
    shape: torch.Size,
    dtypes: Dtypes,
    wanted: tuple[bool, bool],
    sparse: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """On a CPU, where the number of classes is known at once; and while it is traced."""
    columns, biases, slopes, hidden = entries
    counted = is_eager(hidden)
    known, starts = _groups(keys, counted)
    sums = touched_rows.forward(
        "auto", columns, biases, slopes, hidden, order, starts, factor, *wanted
    )
    made: list[Tensor | None] = []
    for each, dtype, size_of, needed in zip(sums, dtypes, (shape, shape[:1]), wanted, strict=True):
        if not needed or dtype is None:
            made.append(None)
        elif counted and sparse:
            made.append(_row_sparse(known, each.to(dtype), size_of, True))
        else:
            dense = each.new_zeros(size_of, dtype=dtype)
            # Where room is left over, zeros are added to the last class.
            made.append(dense.index_add_(0, known, each.to(dtype)))
    return made[0], made[1]


def _groups(keys: Tensor, counted: bool) -> tuple[Tensor, Tensor]:
    """The class of each group, and where groups start.

    Where groups are not ``counted`` there is room for one an entry; what is left over is empty.
    """
    if counted:
        known, counts = torch.unique_consecutive(keys, return_counts=True)
        return known.long(), pad(counts.cumsum(0), (1, 0))
    size = keys.shape[0]
    group = pad((keys[1:] != keys[:-1]).cumsum(0), (1, 0))[:size]
    starts = torch.searchsorted(group, torch.arange(size + 1, device=keys.device))
    return keys[starts[:-1].clamp(max=size - 1)].long(), starts


def _row_sparse(
    touched: Tensor, values: Tensor | None, shape: torch.Size, coalesced: bool
) -> Tensor | None:
    if values is None:
        return None
    return torch.sparse_coo_tensor(
        touched.unsqueeze(0), values, shape, is_coalesced=coalesced, check_invariants=False
    )
