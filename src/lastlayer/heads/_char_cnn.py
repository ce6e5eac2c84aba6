"""Vectors from spellings: words as symbols, filters over them, highway layers."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Embedding, Linear, Module, ModuleList
from torch.nn.functional import embedding_bag
from torch.utils.checkpoint import checkpoint

from lastlayer.fused.recompute import in_chunks

# The bytes of UTF-8, the marks of a word, and what a window sees after the end of a word.
BEGIN, END, AFTER = 256, 257, 258
N_SYMBOLS = 259
# What backward may keep of all classes, roughly; beyond that it is computed again.
_KEPT_BYTES = 1_000_000_000
# Numbers kept for each feature and layer of a class: layers, gates, places of the largest.
_KEPT_NUMBERS = 8


def check_spellings(name: str, spellings: Any, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Words that are not empty, each of them once, none of them known."""
    if isinstance(spellings, (str, bytes)) or not hasattr(spellings, "__iter__"):
        raise TypeError(f"{name}: expected a list of strings, got {type(spellings).__name__}")
    words = tuple(spellings)
    if not words:
        raise ValueError(f"{name}: expected at least one class, got an empty list")
    place = {word: i for i, word in enumerate(known)}
    for i, word in enumerate(words):
        if not isinstance(word, str):
            raise TypeError(
                f"{name}: expected strings, got {type(word).__name__} {word!r} at position {i}"
            )
        if not word:
            raise ValueError(f"{name}: expected words of a letter or more, got '' at position {i}")
        if word in place:
            first = place[word]
            new = first - len(known)
            where = f"as class {first} already" if new < 0 else f"at position {new}"
            raise ValueError(
                f"{name}: expected each word once, got {word!r} {where} and at position {i}"
            )
        place[word] = len(known) + i
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}: expected text that UTF-8 can write, got {word!r} at position {i}: "
                f"{error.reason}"
            ) from error
    return words


class Words(Module):
    """Some words as tensors. They are no state: spellings make them again.

    A window of each width begins at every symbol of a word, marks included; of a long word the
    first bytes alone are read. ``starts`` ``(n_words,)`` says where the windows of each word begin.
    """

    starts: Tensor

    def __init__(
        self, words: Sequence[str], widths: Sequence[int], max_length: int, device: torch.device
    ) -> None:
        super().__init__()
        texts = [word.encode()[:max_length] for word in words]
        lengths = np.array([len(text) + 2 for text in texts])
        ends = lengths.cumsum()
        starts = ends - lengths
        symbols = np.full(ends[-1], -1, dtype=np.int64)
        symbols[starts], symbols[ends - 1] = BEGIN, END
        symbols[symbols < 0] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        self._put("starts", starts, device)
        place, end_of_word = np.arange(len(symbols)), ends.repeat(lengths)
        columns, rank = [symbols], np.zeros_like(symbols)
        # Each width from the one before: a code never outgrows its integer.
        for width in range(1, max(widths) + 1):
            codes = rank * N_SYMBOLS + columns[-1]
            _, first, rank = np.unique(codes, return_index=True, return_inverse=True)
            for i in (i for i, each in enumerate(widths) if each == width):
                self._put(f"symbols_{i}", np.stack([each[first] for each in columns], -1), device)
                self._put(f"windows_{i}", rank, device)
            later = np.minimum(place + width, len(symbols) - 1)
            columns.append(np.where(place + width < end_of_word, symbols[later], AFTER))

    def _put(self, name: str, values: Any, device: torch.device) -> None:
        ids = torch.from_numpy(values.astype(np.int32)).to(device)
        self.register_buffer(name, ids, persistent=False)

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

    def vectors(self, chunks: Sequence[Words]) -> Tensor:
        """Those of all chunks; of more than one, backward computes each of them again."""
        if len(chunks) == 1:
            return self(chunks[0])  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            return torch.cat([self(words) for words in chunks])
        if torch.compiler.is_compiling():
            # A compiler sees no change in place; it only has to be told to recompute.
            return torch.cat([
                checkpoint(self, words, use_reentrant=False, preserve_rng_state=False)
                for words in chunks
            ])  # fmt: skip
        names, parameters = zip(*self.named_parameters(), strict=True)
        device = chunks[0].starts.device.type
        dtype, autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

        def of_chunk(number: Tensor, *values: Tensor) -> Tensor:
            given = dict(zip(names, values, strict=True))
            with torch.autocast(device, dtype, enabled=autocast):
                made: Tensor = functional_call(self, given, (chunks[int(number)],))
            return made

        # One row per chunk.
        parts = [slice(i, i + 1) for i in range(len(chunks))]
        return in_chunks(of_chunk, torch.arange(len(chunks)), (), parameters, parts)

    def forward(self, words: Words) -> Tensor:
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
        n, n_chunks = len(words), -(-len(words) // chunk)
        cuts = [n * i // n_chunks for i in range(n_chunks + 1)]
        device = self.project.weight.device
        return ModuleList(
            Words(words[first:last], widths, max_length, device) for first, last in pairwise(cuts)
        )
