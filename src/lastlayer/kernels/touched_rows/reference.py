"""Sums of the entries of each class, and row-wise steps, in plain torch: the reference."""

import math

import torch
from torch import Tensor

from lastlayer.kernels._cpu import parts


def forward(
    columns: Tensor, column_biases: Tensor, slopes: Tensor, hidden: Tensor, order: Tensor,
    starts: Tensor, factor: Tensor, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of weight (groups, d) and bias (groups,), times ``factor``; empty if not wanted.

    ``columns`` are ``(c, d)`` with bias gradients ``(c,)``, ``slopes`` ``(n, q)``, both in the
    dtype of the result. ``order``, ``(c + n q,)``, has the entries of group g from ``starts[g]``
    on; entries after the last group are ignored.
    """
    groups, q = starts.shape[0] - 1, max(1, slopes.shape[1])
    c = order.shape[0] - slopes.numel()
    number = torch.arange(int(starts[-1]), device=order.device)
    group = torch.searchsorted(starts, number, right=True) - 1
    weight = slopes.new_zeros((groups, hidden.shape[1]) if to_weight else 0)
    bias = slopes.new_zeros(groups if to_bias else 0)
    flat = slopes.flatten()
    for part in parts((number.shape[0], hidden.shape[1])):
        entry, at = order[: number.shape[0]][part], group[part]
        drawn = entry < c
        own = (entry - c).clamp(min=0)
        if to_weight:
            vectors = flat.new_zeros(entry.shape[0], hidden.shape[1])
            if c:
                vectors[drawn] = columns[entry[drawn]]
            rest = own[~drawn]
            slope = flat[rest].unsqueeze(-1)
            # A row that does not count has slope 0 and may be NaN.
            own_part = torch.where(slope == 0, 0.0, slope * hidden[rest // q].to(flat.dtype))
            vectors[~drawn] = own_part
            weight.index_add_(0, at, vectors)
        if to_bias:
            values = torch.cat([column_biases, flat])
            bias.index_add_(0, at, values[entry])
    return weight.mul_(factor), bias.mul_(factor)


def slots_(
    numbers: Tensor, hidden: Tensor, columns: Tensor, c: int, order: Tensor, keys: Tensor,
    factor: Tensor, weight: Tensor, bias: Tensor, known: Tensor | None, scattered: bool,
) -> None:  # fmt: skip
    """Writes the same sums, each to the first slot of its class, and 0 to its other slots.

    ``numbers``, of any shape with c + n q elements, has the bias gradients of the ``c`` columns
    (not read if no bias is wanted), then all slopes. ``keys`` are the classes of the entries,
    ascending, int32 or int64. Outputs are ``weight`` (c + n q, d) and ``bias`` (c + n q,), in any
    floating dtype, empty if not wanted, and ``known`` int64 (1, c + n q), which gets the keys, or
    None. With ``scattered``, weight (v, d) and bias (v,) have one row per class instead, and rows
    of classes without entries are left unchanged.
    """
    if known is not None:
        known[0] = keys
    number = torch.arange(keys.shape[0] + 1, device=keys.device)
    fresh = torch.ones_like(keys, dtype=torch.bool)
    fresh[1:] = keys[1:] != keys[:-1]
    group = fresh.cumsum(0) - 1
    # Groups that are left over are empty.
    starts = torch.searchsorted(group, number)
    numbers = numbers.flatten()
    slopes = numbers[c:].view(hidden.shape[0], -1) if hidden.shape[0] else numbers[:0].view(0, 1)
    given = columns, numbers[:c], slopes, hidden, order, starts, factor
    sums = forward(*given, weight.dim() == 2, bias.numel() > 0)
    for out, total in zip((weight, bias), sums, strict=True):
        if out.numel():
            # All slots of a class have the same value.
            values = total[group]
            if scattered:
                out.index_copy_(0, keys.long(), values.to(out.dtype))
            else:
                out.copy_(torch.where(fresh.view(-1, *(1,) * (out.dim() - 1)), values, 0.0))


def sort_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Class ids ``(n,)`` in ascending order, int32 or int64, and the index of each, int64.

    Equal ids keep their order. Ids are smaller than the largest integer of their dtype.
    """
    return torch.sort(ids, stable=True)


def group(entries: Tensor, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """``order`` and ``starts`` of :func:`forward`, and the class of each group, ascending.

    ``entries`` has the class of each entry, int64; negative ones come last and are in no group.
    """
    ranked, order = torch.sort(torch.where(entries < 0, n_classes, entries), stable=True)
    known, counts = torch.unique_consecutive(ranked[ranked < n_classes], return_counts=True)
    return order, torch.nn.functional.pad(counts.cumsum(0), (1, 0)), known


def adagrad_(
    weight: Tensor, total: Tensor, ids: Tensor | None, gradient: Tensor, lr: float,
    weight_decay: float, eps: float,
) -> None:  # fmt: skip
    """Adagrad with one sum per row, ``total`` (v,): of the mean squares of its gradients."""
    ids, gradient = _each_once(ids, gradient.to(total.dtype))
    squares = gradient.square()
    mean = squares.flatten(1).mean(1) if gradient.dim() > 1 else squares
    sums = _taken(total, ids).add_(mean)
    _put(total, ids, sums)
    root = _as_column(sums, gradient).sqrt().add_(eps)
    _move(weight, ids, (gradient / root).mul_(lr), lr * weight_decay)


def adam_(
    weight: Tensor, first: Tensor, second: Tensor, row_step: Tensor, step: Tensor,
    ids: Tensor | None, gradient: Tensor, lr: float, weight_decay: float, beta1: float,
    beta2: float, eps: float, decays: bool,
) -> None:  # fmt: skip
    """Adam with a step counter per row, ``row_step`` (v,) int32, and decoupled weight decay.

    With ``decays`` the counter is the global step at which the row was last touched, and moments
    decay for the steps since; ``step`` () int64 is the current global step. Without ``decays`` it
    counts the steps of the row.
    """
    ids, gradient = _each_once(ids, gradient.to(first.dtype))
    before = _taken(row_step, ids)
    now = step.to(before.dtype).expand_as(before) if decays else before + 1
    missed, age = (now - before).double(), now.double()
    kept1, kept2, scale1, scale2 = (
        _as_column(each, gradient).to(first.dtype)
        for each in (
            beta1**missed,
            beta2**missed,
            -torch.expm1(age * math.log(beta1)) if beta1 else torch.ones_like(missed),
            -torch.expm1(age * math.log(beta2)) if beta2 else torch.ones_like(missed),
        )
    )
    mean = _taken(first, ids).mul_(kept1).add_(gradient, alpha=1.0 - beta1)
    square = _taken(second, ids).mul_(kept2).addcmul_(gradient, gradient, value=1.0 - beta2)
    _put(first, ids, mean)
    _put(second, ids, square)
    _put(row_step, ids, now)
    root = (square / scale2).sqrt_().add_(eps)
    _move(weight, ids, (mean / scale1).div_(root).mul_(lr), lr * weight_decay)


def _each_once(ids: Tensor | None, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
    """The first slot of each row; needs a host sync."""
    if ids is None:
        return None, gradient
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = ids[1:] != ids[:-1]
    return ids[first], gradient[first]


def _taken(rows: Tensor, ids: Tensor | None) -> Tensor:
    return rows if ids is None else rows[ids]


def _put(rows: Tensor, ids: Tensor | None, values: Tensor) -> None:
    if ids is None:
        rows.copy_(values)
    else:
        rows[ids] = values.to(rows.dtype)


def _move(weight: Tensor, ids: Tensor | None, way: Tensor, decay: float) -> None:
    rows = _taken(weight, ids).to(way.dtype)
    _put(weight, ids, rows * (1.0 - decay) - way)


def _as_column(numbers: Tensor, gradient: Tensor) -> Tensor:
    """One number per row, so that it broadcasts along the row."""
    return numbers.reshape(-1, *(1,) * (gradient.dim() - 1)) if gradient.dim() else numbers
