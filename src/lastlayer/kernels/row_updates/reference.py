"""Row-wise steps in plain torch: defines the truth."""

import math

import torch
from torch import Tensor


def adagrad_(
    weight: Tensor,
    total: Tensor,
    ids: Tensor | None,
    gradient: Tensor,
    lr: float,
    weight_decay: float,
    eps: float,
) -> None:
    """Adagrad with one sum a row: that of the mean squares of its gradients, ``total`` (v,)."""
    ids, gradient = _each_once(ids, gradient.to(total.dtype))
    squares = gradient.square()
    mean = squares.flatten(1).mean(1) if gradient.dim() > 1 else squares
    sums = _taken(total, ids).add_(mean)
    _put(total, ids, sums)
    root = _as_column(sums, gradient).sqrt().add_(eps)
    _move(weight, ids, (gradient / root).mul_(lr), lr * weight_decay)


def adam_(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    row_step: Tensor,
    step: Tensor,
    ids: Tensor | None,
    gradient: Tensor,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    decays: bool,
) -> None:
    """Adam with a clock a row, ``row_step`` (v,) int32, and decoupled weight decay.

    With ``decays`` the clock shows the step of the whole run at which the row was last touched, and
    moments decay for the steps in between; ``step`` () int64 is the one of now. Without, it counts
    the steps of the row itself.
    """
    ids, gradient = _each_once(ids, gradient.to(first.dtype))
    before = _taken(row_step, ids)
    now = step.to(before.dtype).expand_as(before) if decays else before + 1
    missed = (now - before).double()
    kept1, kept2, scale1, scale2 = (
        _as_column(each, gradient).to(first.dtype)
        for each in (
            beta1**missed,
            beta2**missed,
            -torch.expm1(now * math.log(beta1)) if beta1 else torch.ones_like(missed),
            -torch.expm1(now * math.log(beta2)) if beta2 else torch.ones_like(missed),
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
    """Of slots of the same row the first, which the host waits for."""
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
    """One number a row, so that it broadcasts along the row."""
    return numbers.reshape(-1, *(1,) * (gradient.dim() - 1)) if gradient.dim() else numbers
