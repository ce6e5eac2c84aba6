"""Vectors from spellings: filters over characters, the largest of each, highway layers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, ModuleList
from torch.nn.functional import embedding_bag
from torch.utils.checkpoint import checkpoint

from lastlayer.heads._checks import check_count
from lastlayer.heads._spelling import N_SYMBOLS, Spelled, chunk_bounds, spell

# What backward may keep of all classes, roughly; beyond that it makes it again.
_KEPT_BYTES = 1_000_000_000
# Numbers kept for each feature and layer of a class: layers, gates, places of the largest.
_KEPT_NUMBERS = 8


def check_filters(filters: Any, max_length: int) -> tuple[tuple[int, int], ...]:
    """Pairs of a width, at most ``max_length``, and how many filters have it."""
    if isinstance(filters, str) or not isinstance(filters, Sequence):
        raise TypeError(
            f"filters: expected pairs (width, number), got {type(filters).__name__} {filters!r}"
        )
    if not filters:
        raise ValueError("filters: expected at least one pair (width, number), got none")
    for i, pair in enumerate(filters):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(
                f"filters: expected pairs (width, number), got {pair!r} at position {i}"
            )
        for what, value in zip(("width", "number"), pair, strict=True):
            check_count(f"filters: {what} at position {i}", value)
        if pair[0] > max_length:
            raise ValueError(
                f"filters: expected widths up to max_length={max_length}, got {pair[0]} at "
                f"position {i}; no word fills it"
            )
    return tuple((int(width), int(number)) for width, number in filters)


class Words(Module):
    """The spellings of some classes as tensors. They are no state: spellings make them again."""

    starts: Tensor

    def __init__(self, spelled: Spelled, device: torch.device | str | None) -> None:
        super().__init__()
        self._put("starts", spelled.starts, device)
        for i, gram in enumerate(spelled.grams):
            self._put(f"symbols_{i}", gram.symbols, device)
            self._put(f"windows_{i}", gram.windows, device)

    def _put(self, name: str, values: Any, device: torch.device | str | None) -> None:
        self.register_buffer(name, torch.from_numpy(values).to(device), persistent=False)

    def grams(self, i: int) -> tuple[Tensor, Tensor]:
        """The distinct n-grams of the i-th width, and which of them each window is."""
        return self.get_buffer(f"symbols_{i}"), self.get_buffer(f"windows_{i}")


class Highway(Module):
    """A layer that a gate mixes with its input."""

    def __init__(self, features: int, **made: Any) -> None:
        super().__init__()
        self.linear = Linear(features, 2 * features, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        # A gate that is nearly shut lets a deep stack begin as the identity.
        torch.nn.init.constant_(self.linear.bias.chunk(2)[1], -2.0)

    def forward(self, features: Tensor) -> Tensor:
        changed, gate = self.linear(features).chunk(2, -1)
        mixed: Tensor = features + gate.sigmoid() * (changed.relu() - features)
        return mixed


class CharCNN(Module):
    """One vector of ``out_features`` numbers for each of the words."""

    def __init__(
        self,
        filters: tuple[tuple[int, int], ...],
        char_features: int,
        highway_layers: int,
        out_features: int,
        **made: Any,
    ) -> None:
        super().__init__()
        self.features = sum(number for _, number in filters)
        self.chars = Embedding(N_SYMBOLS, char_features, **made)
        self.filters = ModuleList(
            Linear(width * char_features, number, **made) for width, number in filters
        )
        self.highway = ModuleList(Highway(self.features, **made) for _ in range(highway_layers))
        # A bias would add the same number to all scores of a row, which no softmax sees.
        self.project = Linear(self.features, out_features, bias=False, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.chars.reset_parameters()
        for layer in (*self.filters, *self.highway):
            layer.reset_parameters()
        # Scores then differ between classes about as much as those of a fresh nn.Linear.
        bound = 3.0 / math.sqrt(self.features * self.project.out_features)
        torch.nn.init.uniform_(self.project.weight, -bound, bound)

    def forward(self, chunks: Sequence[Words]) -> Tensor:
        if len(chunks) == 1:
            return self._vectors(chunks[0])
        if not torch.is_grad_enabled():
            return torch.cat([self._vectors(words) for words in chunks])
        return torch.cat([
            checkpoint(self._vectors, words, use_reentrant=False, preserve_rng_state=False)
            for words in chunks
        ])  # fmt: skip

    def _vectors(self, words: Words) -> Tensor:
        features = self._largest(words).relu()
        for layer in self.highway:
            features = layer(features)
        vectors: Tensor = self.project(features)
        return vectors

    def _largest(self, words: Words) -> Tensor:
        """What each filter finds at most in each word. ReLU comes later: the same for less work."""
        found = []
        # Rounded by autocast, near ties would go to the wrong n-gram, and its gradient with them.
        with torch.autocast(words.starts.device.type, enabled=False):
            for i, layer in enumerate(self.filters):
                symbols, windows = words.grams(i)
                # Words share most of their n-grams: a filter sees each of them once.
                seen = layer(self.chars(symbols).flatten(1))
                found.append(embedding_bag(windows, seen, words.starts, mode="max"))
        return torch.cat(found, -1)

    def spell(
        self, words: Sequence[str], widths: Sequence[int], max_length: int, chunk: int | str
    ) -> ModuleList:
        """The words as this network reads them, in chunks whose vectors are made at a time."""
        if isinstance(chunk, str):
            layers = 1 + len(self.highway)
            kept = _KEPT_NUMBERS * layers * self.features * self.project.weight.element_size()
            chunk = max(1, _KEPT_BYTES // kept)
        device = self.project.weight.device
        return ModuleList(
            Words(spell(words[first:last], widths, max_length), device)
            for first, last in chunk_bounds(len(words), chunk)
        )
