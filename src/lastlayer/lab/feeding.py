"""Batches: which ones a step sees depends on the seed and the number of the step alone."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer.lab.data import LabelData, LabelPart, PairData, PairPart, SparseRows, TextData
from lastlayer.lab.errors import LabError

PADDING = -100


class Batch(NamedTuple):
    """What a step sees, on the device of the model."""

    inputs: Any
    target: Tensor
    size: int
    """Tokens, or rows: what is counted as processed."""


class Feed(Protocol):
    """Where batches come from."""

    steps_per_epoch: int
    batch_size: int
    """Tokens or rows in a step."""

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of a step, from 0."""

    def held_out(self, part: str, rows: int) -> Iterator[Batch]:
        """About so many rows spread evenly over a part; always the same."""


class _Order:
    """A new order of all places in each epoch."""

    def __init__(self, places: int) -> None:
        self._places, self._key = places, (-1, -1)
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def of(self, seed: int, epoch: int) -> NDArray[np.int64]:
        if self._key != (seed, epoch):
            self._key = seed, epoch
            self._order = np.random.default_rng([seed, epoch]).permutation(self._places)
        return self._order


class TextFeed:
    """Windows of tokens; each target is the token after.

    Args:
        data: the text.
        batch: windows in a step.
        length: tokens in a window.
        device: where batches go.
    """

    def __init__(self, data: TextData, batch: int, length: int, device: torch.device) -> None:
        shortest = min(len(data.train), len(data.valid), len(data.test))
        if shortest < 2:
            raise LabError(
                f"DATA: expected at least 2 tokens in each part of {data.name}, got {shortest}; "
                "use a longer text"
            )
        self._data, self._device = data, device
        self.length = min(length, len(data.train) - 1)
        self._windows = (len(data.train) - 1) // self.length
        self._batch = min(batch, self._windows)
        self.steps_per_epoch = self._windows // self._batch
        self.batch_size = self._batch * self.length
        self._order = _Order(self._windows)

    def batch(self, seed: int, step: int) -> Batch:
        """Windows without overlap, all of an epoch in another order."""
        epoch, place = divmod(step, self.steps_per_epoch)
        chosen = self._order.of(seed, epoch)[place * self._batch : (place + 1) * self._batch]
        return self._windows_at(self._data.train, chosen * self.length, self.length)

    def held_out(self, part: str, rows: int) -> Iterator[Batch]:
        """Windows at even distances."""
        ids = getattr(self._data, part)
        length = min(self.length, len(ids) - 1)
        windows = (len(ids) - 1) // length
        wanted = max(1, min(windows, rows // length))
        places = np.unique(np.linspace(0, windows - 1, wanted).astype(np.int64))
        for first in range(0, len(places), self._batch):
            yield self._windows_at(ids, places[first : first + self._batch] * length, length)

    def _windows_at(self, ids: NDArray[Any], starts: NDArray[np.int64], length: int) -> Batch:
        taken = ids[starts[:, None] + np.arange(length + 1)].astype(np.int64)
        tokens = _moved(torch.from_numpy(taken), self._device)
        return Batch(tokens[:, :-1], tokens[:, 1:], len(starts) * length)


class RowFeed:
    """Rows of features with their class, with their labels, or with the features of their keys.

    A target is the class of each row; labels, padded to the longest list of a batch; or for pairs
    the group of each.

    Args:
        data: features and labels, or pairs.
        batch: rows in a step.
        device: where batches go.
    """

    def __init__(self, data: LabelData | PairData, batch: int, device: torch.device) -> None:
        self._data, self._device = data, device
        n_rows = data.train.n_rows
        for part in ("train", "valid", "test"):
            if not getattr(data, part).n_rows:
                raise LabError(f"DATA: expected rows in each part, got none in {part}")
        self.batch_size = min(batch, n_rows)
        self.steps_per_epoch = n_rows // self.batch_size
        self._order = _Order(n_rows)

    def batch(self, seed: int, step: int) -> Batch:
        """Rows in another order in each epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        chosen = self._order.of(seed, epoch)[first : first + self.batch_size]
        return self._rows(self._data.train.select(chosen))

    def held_out(self, part: str, rows: int) -> Iterator[Batch]:
        """Rows at even distances."""
        taken: LabelPart | PairPart = getattr(self._data, part)
        wanted = min(rows, taken.n_rows)
        places = np.unique(np.linspace(0, taken.n_rows - 1, wanted).astype(np.int64))
        for first in range(0, len(places), self.batch_size):
            yield self._rows(taken.select(places[first : first + self.batch_size]))

    def _rows(self, part: LabelPart | PairPart) -> Batch:
        if isinstance(part, PairPart):
            inputs: Any = self._inputs(part.query), self._inputs(part.key)
            target = torch.from_numpy(part.group)
        else:
            inputs = self._inputs(part.features)
            one = self._data.task == "classification"
            target = torch.from_numpy(part.labels.indices) if one else _padded(part)
        return Batch(inputs, _moved(target, self._device), part.n_rows)

    def _inputs(self, features: Any) -> Any:
        if isinstance(features, SparseRows):
            arrays = features.indices, features.offsets[:-1], features.values
            return tuple(self._tensor(each) for each in arrays)
        return self._tensor(features)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return _moved(torch.from_numpy(np.ascontiguousarray(array)), self._device)


def _padded(part: LabelPart) -> Tensor:
    lengths = np.diff(part.labels.offsets)
    table = np.full((part.n_rows, max(1, int(lengths.max(initial=0)))), PADDING, np.int64)
    table[np.arange(table.shape[1]) < lengths[:, None]] = part.labels.indices
    return torch.from_numpy(table)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
