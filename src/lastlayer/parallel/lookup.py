"""Lookups of rows in sharded tables: each process fetches a few class vectors from the others.

A step of a sampled head uses few classes, whose vectors take fewer bytes than the hidden states of
all processes. The rows of the batch then stay in place, and the gradients of the vectors are sent
back to the processes that own them.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer._processes import Shards, exchanged
from lastlayer._torch import accumulation_dtype, in_dtype


def looked_up(shards: Shards, rows: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    """``table[rows]`` of each sharded table.

    All processes must call this together. The host waits for the number of rows that each one
    requests.

    Args:
        shards: how rows of the tables are sharded.
        rows: row ids, ascending and unique; each process may request different ones.
        tables: the parts of this process, ``(here, *)``, all of the same dtype.

    Returns:
        One tensor per table, ``(len(rows), *)``. Their gradients are summed over processes.
    """
    made: tuple[Tensor, ...] = _LookedUp.apply(shards, rows, *tables)
    return made


class _LookedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, rows: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        group, processes = shards.group, shards.processes
        bounds = torch.arange(processes + 1, device=rows.device) * max(1, shards.most)
        asked = torch.searchsorted(rows, bounds).diff()
        told = torch.empty_like(asked)
        exchanged(told, asked, group)
        ctx.asked, ctx.told = asked.tolist(), told.tolist()
        ids = rows.new_empty(sum(ctx.told))
        exchanged(ids, rows.contiguous(), group, ctx.told, ctx.asked)
        ctx.group, ctx.shapes = group, [table.shape for table in tables]
        ctx.save_for_backward(ids - shards.first)
        places = ids - shards.first
        widths = [_width(table) for table in tables]
        sent = torch.cat([_flat(table[places]) for table in tables], 1)
        found = sent.new_empty(len(rows), sum(widths))
        exchanged(found, sent.contiguous(), group, ctx.asked, ctx.told)
        parts = found.split(widths, 1)
        return tuple([
            part.reshape(len(rows), *table.shape[1:])
            for part, table in zip(parts, tables, strict=True)
        ])  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        sent = torch.cat([_flat(grad) for grad in grads], 1).contiguous()
        found = sent.new_empty(len(places), sent.shape[1])
        exchanged(found, sent, ctx.group, ctx.told, ctx.asked)
        widths = [_width(grad) for grad in grads]
        made = []
        for part, shape in zip(found.split(widths, 1), ctx.shapes, strict=True):
            # Sum in the wider dtype: several processes may have requested the same row.
            total = part.new_zeros(shape, dtype=accumulation_dtype(part.dtype))
            total.index_add_(0, places, part.reshape(len(part), *shape[1:]).to(total.dtype))
            made.append(in_dtype(total, part.dtype))
        return None, None, *made


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), _width(rows))


def _width(table: Tensor) -> int:
    """Number of entries per row."""
    return int(torch.Size(table.shape[1:]).numel())
