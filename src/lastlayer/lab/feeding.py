"""Batches, which depend only on the seed and the step."""

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
    """Inputs and targets of a step, on the device of the model."""

    inputs: Any
    target: Tensor
    size: int
    """Number of tokens, or of rows."""


class Feed(Protocol):
    """A source of batches."""

    steps_per_epoch: int
    batch_size: int
    """Tokens or rows per step."""

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of a step, from 0."""

    def held_out(self, part: str, rows: int) -> Iterator[Batch]:
        """Batches of about ``rows`` rows, evenly spaced over a part; always the same."""


class _Places:
    """The order of ``n`` windows or rows, which are shuffled in each epoch."""

    def __init__(self, n: int, batch: int) -> None:
        self.n, self.batch = n, min(batch, n)
        self.steps = n // self.batch
        self._key, self._order = (-1, -1), np.empty(0, np.int64)

    def at(self, seed: int, step: int) -> NDArray[np.int64]:
        """The windows or rows of a step."""
        epoch, place = divmod(step, self.steps)
        if self._key != (seed, epoch):
            self._key = seed, epoch
            self._order = np.random.default_rng([seed, epoch]).permutation(self.n)
        return self._order[place * self.batch : (place + 1) * self.batch]

    def spread(self, n: int, wanted: int) -> Iterator[NDArray[np.int64]]:
        """About ``wanted`` of ``n`` indices, evenly spaced, in batches."""
        places = np.unique(np.linspace(0, n - 1, max(1, min(n, wanted))).astype(np.int64))
        for first in range(0, len(places), self.batch):
            yield places[first : first + self.batch]


class TextFeed:
    """Non-overlapping windows of tokens; the target of each token is the next one."""

    def __init__(self, data: TextData, batch: int, length: int, device: torch.device) -> None:
        shortest = min(len(data.train), len(data.valid), len(data.test))
        if shortest < 2:
            raise LabError(
                f"DATA: expected at least 2 tokens in each part of {data.name}, got {shortest}; "
                "use a longer text"
            )
        self._data, self._device = data, device
        self.length = min(length, len(data.train) - 1)
        self._places = _Places((len(data.train) - 1) // self.length, batch)
        self.steps_per_epoch = self._places.steps
        self.batch_size = self._places.batch * self.length

    def batch(self, seed: int, step: int) -> Batch:
        return self._windows(self._data.train, self._places.at(seed, step), self.length)

    def held_out(self, part: str, rows: int) -> Iterator[Batch]:
        ids = getattr(self._data, part)
        length = min(self.length, len(ids) - 1)
        for places in self._places.spread((len(ids) - 1) // length, rows // length):
            yield self._windows(ids, places, length)

    def _windows(self, ids: NDArray[Any], places: NDArray[np.int64], length: int) -> Batch:
        taken = ids[places[:, None] * length + np.arange(length + 1)].astype(np.int64)
        tokens = _moved(taken, self._device)
        return Batch(tokens[:, :-1], tokens[:, 1:], len(places) * length)


class RowFeed:
    """Rows of features with a class or labels, or pairs of rows.

    Targets are the class of each row, its labels, padded to the longest list of the batch, or the
    group of each pair.
    """

    def __init__(self, data: LabelData | PairData, batch: int, device: torch.device) -> None:
        for part in ("train", "valid", "test"):
            if not getattr(data, part).n_rows:
                raise LabError(f"DATA: expected rows in each part, got none in {part}")
        self._data, self._device = data, device
        self._places = _Places(data.train.n_rows, batch)
        self.steps_per_epoch, self.batch_size = self._places.steps, self._places.batch

    def batch(self, seed: int, step: int) -> Batch:
        return self._rows(self._data.train.select(self._places.at(seed, step)))

    def held_out(self, part: str, rows: int) -> Iterator[Batch]:
        taken: LabelPart | PairPart = getattr(self._data, part)
        for places in self._places.spread(taken.n_rows, rows):
            yield self._rows(taken.select(places))

    def _rows(self, part: LabelPart | PairPart) -> Batch:
        if isinstance(part, PairPart):
            inputs: Any = self._inputs(part.query), self._inputs(part.key)
            target = part.group
        else:
            inputs = self._inputs(part.features)
            one = self._data.task == "classification"
            target = part.labels.indices if one else _padded(part)
        return Batch(inputs, _moved(target, self._device), part.n_rows)

    def _inputs(self, features: Any) -> Any:
        if isinstance(features, SparseRows):
            arrays = features.indices, features.offsets[:-1], features.values
            return tuple(_moved(each, self._device) for each in arrays)
        return _moved(features, self._device)


def _padded(part: LabelPart) -> NDArray[np.int64]:
    lengths = np.diff(part.labels.offsets)
    table = np.full((part.n_rows, max(1, int(lengths.max(initial=0)))), PADDING, np.int64)
    table[np.arange(table.shape[1]) < lengths[:, None]] = part.labels.indices
    return table


def _moved(array: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
