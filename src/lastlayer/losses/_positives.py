"""One form for the lists of positives that people have: padded rows, or CSR."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer._torch import values_are_checked


class Positives(NamedTuple):
    """The positives of all rows, one after the other; row by row, ascending within a row.

    It has as many entries as the input had, so that nothing waits for a device. Those that do not
    count (padding, and all but the first of duplicates) come last in their row.

    Attributes:
        classes: ``(k,)`` int64; -1 where an entry does not count.
        rows: ``(k,)`` int64, ascending: the row of each entry, also of those that do not count.
        valid: ``(k,)`` bool, ``classes >= 0``.
        starts: ``(n_rows + 1,)`` int64: row r has the entries from ``starts[r]`` to below
            ``starts[r + 1]``; of these the first ``counts[r]`` count.
        counts: ``(n_rows,)`` int64: how many different positives a row has.
        values: ``(k,)``, of any floating dtype: the label of each entry, 0 where it does not count.
            None where all that count are 1.
    """

    classes: Tensor
    rows: Tensor
    valid: Tensor
    starts: Tensor
    counts: Tensor
    values: Tensor | None


def positive_lists(
    positives: Any,
    offsets: Any = None,
    *,
    n_rows: int,
    n_classes: int,
    ignore_index: int = -100,
    values: Any = None,
    smoothing: float = 0.0,
    batch: tuple[int, ...] | None = None,
) -> Positives:
    """Checks lists of positives, and brings them into the one form.

    Without ``values`` each listed class has the label ``1 - smoothing``; all others have
    ``smoothing``. Of duplicates the one that is listed first counts. Where values cannot be checked
    (on a GPU, outside of :func:`lastlayer.debug`) ids out of range count as padding.

    Cost: two sorts of k numbers; no host wait, a graph that compiles, and vmap.

    Args:
        positives: ``(*batch, m)`` int64, padded with ``ignore_index``; or ``(k,)`` with offsets.
        offsets: ``(n_rows + 1,)`` int64, from 0 to k: row r lists
            ``positives[offsets[r] : offsets[r + 1]]``. Such lists may be padded too.
        n_rows: how many rows the scores have.
        n_classes: how many classes there are.
        ignore_index: the id that pads.
        values: the labels of what is listed, in [0, 1] and of the shape of ``positives``; the
            gradient flows through.
        smoothing: the label of each class that is not listed.
        batch: the exact batch dimensions of padded lists; ``(n_rows,)`` or any shape of as many
            rows where it is None.
    """
    check_positives(
        positives,
        offsets,
        n_rows=n_rows,
        n_classes=n_classes,
        ignore_index=ignore_index,
        values=values,
        smoothing=smoothing,
        batch=batch,
    )
    device = positives.device
    flat = positives.reshape(-1)
    if offsets is None:
        m = positives.shape[-1]
        starts = torch.arange(n_rows + 1, device=device) * m
        rows = torch.arange(n_rows, device=device).unsqueeze(-1).expand(n_rows, m).reshape(-1)
        within = torch.ones_like(flat, dtype=torch.bool)
    else:
        starts = offsets
        place = torch.arange(flat.shape[0], device=device)
        rows = torch.searchsorted(offsets, place, right=True) - 1
        within = (rows >= 0) & (rows < n_rows)
        rows = rows.clamp(0, max(0, n_rows - 1))
    listed = (flat != ignore_index) & within & (flat >= 0) & (flat < n_classes)

    # Sorted by row and class, with what does not count behind the last class. Each row keeps as
    # many entries as it had, so that `rows` stays as it is.
    first_key = rows * (n_classes + 1)
    key, order = torch.sort(first_key + torch.where(listed, flat, n_classes), stable=True)
    repeated = (key == key.roll(1)) & (torch.arange(key.shape[0], device=device) > 0)
    key, again = torch.sort(torch.where(repeated, first_key + n_classes, key), stable=True)
    found = key - first_key
    valid = found < n_classes
    so_far = torch.nn.functional.pad(valid.long().cumsum(0), (1, 0))
    return Positives(
        classes=torch.where(valid, found, -1),
        rows=rows,
        valid=valid,
        starts=starts,
        counts=so_far[starts[1:]] - so_far[starts[:-1]],
        values=_labels(values, valid, order[again], smoothing),
    )


def check_positives(
    positives: Any,
    offsets: Any = None,
    *,
    n_rows: int,
    n_classes: int,
    ignore_index: Any = -100,
    values: Any = None,
    smoothing: Any = 0.0,
    batch: tuple[int, ...] | None = None,
) -> None:
    """The checks of :func:`positive_lists` alone."""
    check_smoothing(smoothing)
    _check_ignore_index(ignore_index)
    _check_lists(positives, offsets, n_rows, batch)
    if values is not None:
        _check_values(values, positives)
    _check_range(positives.reshape(-1), n_classes, ignore_index)


def check_smoothing(smoothing: Any) -> None:
    """A number from 0 to below 1/2."""
    if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)):
        raise TypeError(f"smoothing: expected a number, got {type(smoothing).__name__}")
    if not 0.0 <= smoothing < 0.5:
        raise ValueError(
            f"smoothing: expected 0 to below 0.5, the label of a class that is not positive, "
            f"got {smoothing}"
        )


def _labels(values: Tensor | None, valid: Tensor, order: Tensor, smoothing: float) -> Tensor | None:
    if values is not None:
        return torch.where(valid, values.reshape(-1)[order], 0.0)
    if smoothing == 0.0:
        return None
    return valid.double() * (1.0 - smoothing)


def _check_ignore_index(ignore_index: Any) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index: expected an int, got {type(ignore_index).__name__}")


def _check_lists(positives: Any, offsets: Any, n_rows: int, batch: tuple[int, ...] | None) -> None:
    if not isinstance(positives, Tensor):
        raise TypeError(f"positives: expected a torch.Tensor, got {type(positives).__name__}")
    if positives.dtype != torch.int64:
        raise TypeError(
            f"positives: expected torch.int64 class ids, got {positives.dtype}; convert with "
            "positives.long(), or give 0/1 targets to the loss that takes them"
        )
    if offsets is not None:
        _check_offsets(offsets, positives, n_rows)
        return
    if batch is None:
        fits = positives.dim() > 0 and positives.shape[:-1].numel() == n_rows
        expected = f"(*batch, m) with {n_rows} rows"
    else:
        fits = positives.dim() > 0 and tuple(positives.shape[:-1]) == tuple(batch)
        expected = "(" + "".join(f"{size}, " for size in batch) + "m)"
    if not fits:
        raise ValueError(
            f"positives: expected shape {expected}, lists padded with ignore_index, got "
            f"{tuple(positives.shape)}; lists of several lengths in one take offsets="
        )


def _check_offsets(offsets: Any, positives: Tensor, n_rows: int) -> None:
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64:
        got = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"offsets: expected an int64 tensor, got {got}")
    if offsets.shape != (n_rows + 1,):
        raise ValueError(
            f"offsets: expected shape ({n_rows + 1},), where the list of each of {n_rows} rows "
            f"starts and where the last ends, got {tuple(offsets.shape)}"
        )
    if positives.dim() != 1:
        raise ValueError(
            f"positives: expected shape (k,) with offsets, got {tuple(positives.shape)}"
        )
    if offsets.device != positives.device:
        raise ValueError(
            f"offsets: expected the device of positives, {positives.device}, got {offsets.device}"
        )
    if not values_are_checked(offsets):
        return
    ends = (int(offsets[0]), int(offsets[-1]))
    if ends != (0, positives.shape[0]) or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"offsets: expected to rise from 0 to {positives.shape[0]}, the number of positives, "
            f"got {offsets.tolist() if len(offsets) <= 8 else f'{ends[0]} to {ends[1]}'}"
        )


def _check_values(values: Any, positives: Tensor) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"values: expected a floating tensor of labels, got {got}")
    if values.shape != positives.shape:
        raise ValueError(
            f"values: expected the shape of positives, {tuple(positives.shape)}, got "
            f"{tuple(values.shape)}"
        )
    if values.device != positives.device:
        raise ValueError(
            f"values: expected the device of positives, {positives.device}, got {values.device}"
        )
    if values_are_checked(values):
        wrong = ~((values >= 0) & (values <= 1))
        if bool(wrong.any()):
            raise ValueError(
                f"values: expected labels in [0, 1], got {values[wrong].flatten()[0].item()}"
            )


def _check_range(flat: Tensor, n_classes: int, ignore_index: int) -> None:
    if not values_are_checked(flat):
        return
    wrong = (flat != ignore_index) & ((flat < 0) | (flat >= n_classes))
    if bool(wrong.any()):
        raise ValueError(
            f"positives: expected class ids from 0 to {n_classes - 1}, or ignore_index="
            f"{ignore_index} for padding, got {flat[wrong][0].item()}"
        )
