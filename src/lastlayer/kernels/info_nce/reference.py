"""InfoNCE in plain torch, with temporaries of the size of the scores: the reference for tests."""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype


def unit_rows_(rows: Tensor, out: Tensor, normalize: bool) -> None:
    """Writes ``rows`` to ``out``, normalised to length 1 if ``normalize``; zeros stay zeros."""
    wide = rows.to(accumulation_dtype(rows.dtype))
    out.copy_(wide * _inverse_length(wide) if normalize else wide)


def row_gradients_(
    rows: Tensor, gradient: Tensor, factor: Tensor, normalize: bool, out: Tensor, along: Tensor
) -> None:
    """Converts ``factor * gradient`` of unit rows to the gradient of ``rows``, in ``out``.

    ``along`` receives the dot product of each unit row with its ``factor * gradient``, from which
    the gradient of the scale follows.
    """
    wide, gradient = rows.to(along.dtype), gradient.to(along.dtype) * factor
    if not normalize:
        along.copy_((wide * gradient).sum(-1))
        out.copy_(gradient)
        return
    inverse = _inverse_length(wide)
    unit = wide * inverse
    along.copy_((unit * gradient).sum(-1))
    out.copy_((gradient - unit * along.unsqueeze(-1)) * inverse)


def statistics_(
    scores: Tensor, scale: Tensor, own: int, query_groups: Tensor | None, key_groups: Tensor | None,
    positive: bool, bounded: bool,  # noqa: ARG001 - a reference has no short cut
    row_lse: Tensor, row_positive: Tensor, column_lse: Tensor, column_positive: Tensor,
) -> None:  # fmt: skip
    """Computes the normaliser and the sum of positive similarities of each row and column.

    Column statistics are accumulated over chunks of rows; empty tensors mean that they are not
    wanted.
    """
    values = scores.to(row_lse.dtype) * scale
    mine, same = _masks(values, own, query_groups, key_groups)
    hit = mine if same is None or not positive else mine | same
    if same is not None and not positive:
        values = values.masked_fill(same & ~mine, -torch.inf)
    row_lse.copy_(torch.logsumexp(values, 1))
    pulled = torch.where(hit, values, 0.0)
    row_positive.copy_(pulled.sum(1))
    if column_lse.shape[0]:
        column_lse.copy_(torch.logaddexp(column_lse, torch.logsumexp(values, 0)))
    if column_positive.shape[0]:
        column_positive.add_(pulled.sum(0))


def weights_(
    scores: Tensor, scale: Tensor, own: int, query_groups: Tensor | None, key_groups: Tensor | None,
    positive: bool, bounded: bool,  # noqa: ARG001 - a reference has no short cut
    row_lse: Tensor, row_push: Tensor, row_pull: Tensor, column_lse: Tensor, column_push: Tensor,
    column_pull: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Writes the gradient of the similarities to ``out``, which may be ``scores``.

    ``scores`` may be overwritten in any case. Pushes are the gradients of the normalisers, and
    pulls the gradients of the sums of positives.
    """
    values = scores.to(row_lse.dtype) * scale
    mine, same = _masks(values, own, query_groups, key_groups)
    hit = mine if same is None or not positive else mine | same
    result = torch.exp(values - row_lse.unsqueeze(1)) * row_push.unsqueeze(1)
    pull = row_pull.unsqueeze(1)
    if column_lse.shape[0]:
        result += torch.exp(values - column_lse) * column_push
    if column_pull.shape[0]:
        pull = pull + column_pull
    result += torch.where(hit, pull, 0.0)
    if same is not None and not positive:
        result = torch.where(same & ~mine, 0.0, result)
    out.copy_(result)


def _masks(
    values: Tensor, own: int, query_groups: Tensor | None, key_groups: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Masks of each row's own key, and of equal groups."""
    n, m = values.shape
    row = torch.arange(own, own + n, device=values.device)
    mine = row.unsqueeze(1) == torch.arange(m, device=values.device)
    if query_groups is None or key_groups is None:
        return mine, None
    return mine, query_groups.unsqueeze(1) == key_groups


def _inverse_length(wide: Tensor) -> Tensor:
    """1 over the length of each row; 0 for a row of zeros.

    Rows are divided by their largest entry first, since squares may overflow or underflow.
    """
    size = wide.abs().amax(-1, keepdim=True) if wide.shape[-1] else wide.new_zeros(len(wide), 1)
    safe = torch.where(size > 0, size, 1.0)
    length = torch.linalg.vector_norm(wide / safe, dim=-1, keepdim=True)
    return torch.where(size == 0, 0.0, 1.0 / (safe * length))
