"""Exact softmax over words, with class vectors computed from their spelling by a CNN."""

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Embedding, Linear, Module, ModuleList, Parameter
from torch.nn.functional import embedding, embedding_bag, linear
from torch.utils.checkpoint import checkpoint

from lastlayer._checks import as_pairs, check_chunk, check_int
from lastlayer._torch import (
    accumulation_dtype,
    autocast_dtype,
    host_sync_allowed,
    is_functorch_wrapped,
)
from lastlayer.fused.cross_entropy import cross_entropy_numbers, linear_cross_entropy
from lastlayer.fused.recompute import in_chunks
from lastlayer.heads.base import ScoredHead, all_in_dtype
from lastlayer.heads.recipes import Recipe

# Symbols: the bytes of UTF-8, begin and end of a word, and padding after its end.
BEGIN, END, AFTER = 256, 257, 258
N_SYMBOLS = 259
# Approximate limit of activations kept for backward; with more, they are recomputed.
_KEPT_BYTES = 1_000_000_000
# Activations per class, feature and layer: layers, gates, indices of maxima.
_KEPT_NUMBERS = 8
FILTERS = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256))


class CharCNNSoftmax(ScoredHead):
    r"""Softmax and cross entropy, with class vectors computed by a CNN from the spelling of words.

    .. math:: \log p_c = \theta_c - \log \sum_j e^{\theta_j}, \qquad
              \theta_c = h \cdot \bigl(P\, \mathrm{cnn}(\text{spelling}_c) + M k_c\bigr) + b_c

    A word is the first ``max_length`` bytes of its UTF-8 text, between a begin and an end symbol.
    Convolutions of several widths run over the byte embeddings, followed by max pooling over the
    word, highway layers, and a projection P. Words with similar spelling have similar vectors, so
    each class also has a small learned correction :math:`k_c`, which M maps to ``in_features``.

    Choose it if a full layer has too many parameters, or to score words that were not seen in
    training: :meth:`add_classes`. It is not faster than :class:`FullSoftmax`.

    Cost: that of :class:`FullSoftmax`, plus, for any batch size, the vectors of all classes and
    their gradients: about 4 million multiplications per class with the default filters. Without
    gradients, vectors are cached until a parameter changes. Backward keeps about 1 GB of
    activations; if there are more, they are recomputed chunk by chunk.

    Args:
        in_features: size of the hidden state.
        spellings: one unique word per class; there is no normalisation of case or Unicode.
        correction: size of :math:`k_c`; 0 for no correction.
        bias: whether each class has a bias; the spelling says little about word frequency.
        char_features: size of the embedding of a byte.
        filters: pairs (width in bytes, number of filters of this width).
        highway_layers: number of highway layers, may be 0.
        max_length: maximum number of bytes of a word. Longer words that begin with the same bytes
            differ only by their correction and bias.
        chunk_classes: number of classes whose vectors are computed at a time, or "auto".
        label_smoothing, ignore_index, reduction, chunk_rows, device, dtype: as in ``FullSoftmax``.

    Example:
        >>> import torch
        >>> head = CharCNNSoftmax(16, ["cat", "cats", "dog", "dogs"])
        >>> hidden, target = torch.randn(8, 16), torch.randint(4, (8,))
        >>> head(hidden, target).backward()
        >>> head.add_classes(["catnip"])
        range(4, 5)
        >>> head.log_prob(hidden).shape
        torch.Size([8, 5])

    Reference:
        Jozefowicz et al., Exploring the Limits of Language Modeling, 2016, arXiv:1602.02410;
        Kim et al., Character-Aware Neural Language Models, AAAI 2016, arXiv:1508.06615.
    """

    bias: Parameter | None
    corrections: Parameter | None
    spellings: tuple[str, ...]
    """The word of each class."""

    recipes = (
        Recipe(
            "char_cnn",
            "class vectors from their spelling",
            compared=("char_cnn:filters=1x16,2x16,3x32",),
            rank=23,
        ),
    )

    def __init__(
        self,
        in_features: int,
        spellings: Sequence[str],
        *,
        correction: int = 16,
        bias: bool = True,
        char_features: int = 16,
        filters: Sequence[Sequence[int]] = FILTERS,
        highway_layers: int = 2,
        max_length: int = 50,
        chunk_classes: int | str = "auto",
        label_smoothing: float = 0.0,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        chunk_rows: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        words = check_spellings("spellings", spellings)
        super().__init__(in_features, len(words), ignore_index=ignore_index, reduction=reduction)
        note = "0 for none"
        self.correction = check_int("correction", correction, least=0, note=note)
        self.highway_layers = check_int("highway_layers", highway_layers, least=0, note=note)
        self.char_features = check_int("char_features", char_features)
        self.max_length = check_int("max_length", max_length)
        if chunk_classes != "auto":
            if isinstance(chunk_classes, str):
                raise ValueError(f"chunk_classes: expected an int or 'auto', got {chunk_classes!r}")
            check_int("chunk_classes", chunk_classes)
        check_chunk(chunk_rows)
        cross_entropy_numbers(label_smoothing, 0.0, None, 1.0)
        self.filters = as_pairs("filters", filters, ("width", "number"))
        for i, (width, _) in enumerate(self.filters):
            if width > max_length:
                raise ValueError(
                    f"filters: expected widths up to max_length={max_length}, got {width} at "
                    f"position {i}; no word fills it"
                )
        self.chunk_classes, self.chunk_rows = chunk_classes, chunk_rows
        self.label_smoothing = label_smoothing
        self.spellings = words

        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.cnn = CharCNN(self.filters, char_features, highway_layers, in_features, **made)
        biases = torch.empty(self.n_classes, **made) if bias else None
        self.register_parameter("bias", None if biases is None else Parameter(biases))
        rows = torch.empty(self.n_classes, correction, **made) if correction else None
        self.register_parameter("corrections", None if rows is None else Parameter(rows))
        self.correct = Linear(correction, in_features, bias=False, **made) if correction else None
        # The cached vectors: their key, the parameters, values of the parameters, and the vectors.
        self._kept: tuple[Any, list[Tensor], list[Tensor] | None, Tensor] | None = None
        # Whether a gradient was recorded since train() or eval() was called.
        self._recorded = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialises the parameters; completes ``to_empty`` after meta."""
        self.cnn.reset_parameters()
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        if self.corrections is not None:
            # Small compared with the vectors of the CNN, but not 0, so that M gets a gradient.
            torch.nn.init.normal_(self.corrections, std=0.1)
        self._reset_correct()
        self._make_ready()

    def _reset_correct(self) -> None:
        """Reinitialises the matrix M of the corrections."""
        if self.correct is not None:
            bound = 1.0 / math.sqrt(self.correction * self.in_features)
            torch.nn.init.uniform_(self.correct.weight, -bound, bound)

    def _make_tables(self, device: torch.device) -> None:
        self.words = self.cnn.spell(self.spellings, self.max_length, self.chunk_classes, device)
        self._kept = None

    def class_vectors(self) -> Tensor:
        """The vectors of all classes, ``(n_classes, in_features)``.

        They are in the dtype of the head, or of autocast, and differentiable, so that they work
        with every fused loss. Call this once per step. Do not modify the result.

        Without gradients, the vectors of the last call are cached until a parameter changes. A
        fused optimiser may not increase a parameter's version, so values are compared, which is a
        host sync. They are not compared in eval mode, if no gradient has been recorded since
        ``eval()`` and no parameter has a ``grad``: changes through ``parameter.data`` or by another
        process are not detected then; call ``eval()`` again.

        Example:
            >>> import torch
            >>> from lastlayer import fused
            >>> head = CharCNNSoftmax(16, ["cat", "cats", "dog", "dogs"])
            >>> hidden, target = torch.randn(8, 16), torch.randint(4, (8,))
            >>> vectors = head.class_vectors()
            >>> fused.linear_entmax_loss(hidden, vectors, target, head.bias).backward()
        """
        if torch.compiler.is_compiling():
            return self._made_vectors()
        parameters = [each for each in _all_parameters(self) if each is not self.bias]
        if torch.is_grad_enabled() and any(each.requires_grad for each in parameters):
            self._kept, self._recorded = None, True
            return self._made_vectors()
        if any(map(_has_no_version, parameters)) or not host_sync_allowed(parameters[0]):
            return self._made_vectors()
        settled = not (self.training or self._recorded) and all(
            each.is_leaf and each.grad is None for each in parameters
        )
        # The version changes with in-place writes, the pointer if the memory is replaced.
        state = [(each._version, each.data_ptr(), each.dtype, each.device) for each in parameters]
        now = autocast_dtype(parameters[0]), torch.is_inference_mode_enabled(), state
        if self._kept is not None:
            made_of, before, values, vectors = self._kept
            # Identity is safe: a reference is held, so no other tensor can have the same address.
            same = now == made_of and all(map(operator.is_, before, parameters))
            if same and (settled if values is None else all(map(torch.equal, values, parameters))):
                return vectors
        vectors = self._made_vectors()
        values = None if settled else [each.detach().clone() for each in parameters]
        self._kept = now, parameters, values, vectors
        return vectors

    def _made_vectors(self) -> Tensor:
        vectors: Tensor = self.cnn.vectors(self.words)
        if self.corrections is None or self.correct is None:
            return vectors
        corrected: Tensor = vectors + self.correct(self.corrections)
        return corrected

    # Not in inference mode, since inference tensors cannot be trained.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def add_classes(self, spellings: Sequence[str]) -> range:
        """Adds classes, whose words can be scored by their spelling without training.

        Their corrections are 0, and their biases the mean of the existing ones, which is that of a
        rare word, since most classes are rare. All words are processed again, so add many classes
        in one call.

        ``corrections`` and ``bias`` become new parameters with more rows. Create a new optimiser
        afterwards, since the old one keeps updating the old tensors. All other parameters stay the
        same.

        Args:
            spellings: words that are not classes yet.

        Returns:
            The new class ids.
        """
        words = check_spellings("spellings", spellings, self.spellings)
        before, self.spellings = self.n_classes, self.spellings + words
        self.n_classes += len(words)
        if self.corrections is not None:
            zeros = self.corrections.new_zeros(len(words), self.correction)
            self.corrections = _longer(self.corrections, zeros)
        if self.bias is not None:
            self.bias = _longer(self.bias, self.bias.mean().expand(len(words)))
        self._make_ready()
        return range(before, self.n_classes)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The cross entropy of the targets; see :func:`lastlayer.fused.linear_cross_entropy`."""
        self._check_hidden(hidden)
        return linear_cross_entropy(
            hidden, self.class_vectors(), target, self.bias, ignore_index=self.ignore_index,
            reduction=self.reduction, label_smoothing=self.label_smoothing,
            chunk_rows=self.chunk_rows,
        )  # fmt: skip

    def _score_tensors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        return all_in_dtype(dtype, self.class_vectors(), self.bias)

    def train(self, mode: bool = True) -> Self:
        self._kept, self._recorded = None, False
        return super().train(mode)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        self._kept = None
        super()._apply(fn, recurse)
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts without cached vectors.
        return {**self.__dict__, "_kept": None}

    def extra_repr(self) -> str:
        sizes = {"in_features": self.in_features, "n_classes": self.n_classes}
        return self._shown({k: v for k, v in (sizes | self.config()).items() if k != "spellings"})


def _longer(parameter: Parameter, more: Tensor) -> Parameter:
    """A new parameter with more rows; optimiser state of the old one would have a wrong shape."""
    return Parameter(torch.cat([parameter, more]), requires_grad=parameter.requires_grad)


def _all_parameters(module: torch.nn.Module) -> list[Tensor]:
    """``list(module.parameters())``, but five times faster, since it builds no names."""
    found: list[Tensor] = [each for each in module._parameters.values() if each is not None]
    for part in module._modules.values():
        if part is not None:
            found += _all_parameters(part)
    return found


def _has_no_version(parameter: Tensor) -> bool:
    """Whether changes of such a tensor cannot be detected."""
    return (
        parameter.is_inference()
        or type(parameter) not in (Tensor, Parameter)
        or is_functorch_wrapped(parameter)
    )


def check_spellings(name: str, spellings: Any, known: Sequence[str] = ()) -> tuple[str, ...]:
    """Checks that words are non-empty, unique, and not in ``known``."""
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
            raise ValueError(f"{name}: expected non-empty words, got '' at position {i}")
        if word in place:
            first = place[word]
            new = first - len(known)
            where = f"as class {first} already" if new < 0 else f"at position {new}"
            raise ValueError(
                f"{name}: expected unique words, got {word!r} {where} and at position {i}"
            )
        place[word] = len(known) + i
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}: expected text that UTF-8 can encode, got {word!r} at position {i}: "
                f"{error.reason}"
            ) from error
    return words


class Words:
    """Words as tensors of n-grams. They are not part of the state, since spellings determine them.

    A window of each width starts at every symbol of a word, including begin and end; of long words
    only the first bytes are used. ``starts`` ``(n_words,)`` is the first window of each word,
    ``symbols[i]`` has the unique windows of the i-th width, and ``windows[i]`` the index of each
    window in ``symbols[i]``.
    """

    def __init__(
        self, words: Sequence[str], widths: Sequence[int], max_length: int, device: torch.device
    ) -> None:
        texts = [word.encode()[:max_length] for word in words]
        lengths = np.array([len(text) + 2 for text in texts])
        ends = lengths.cumsum()
        starts = ends - lengths
        symbols = np.full(ends[-1], -1, dtype=np.int64)
        symbols[starts], symbols[ends - 1] = BEGIN, END
        symbols[symbols < 0] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        self.starts = _ids(starts, device)
        self.symbols = [self.starts] * len(widths)
        self.windows = [self.starts] * len(widths)
        place, end_of_word = np.arange(len(symbols)), ends.repeat(lengths)
        columns, rank = [symbols], np.zeros_like(symbols)
        # Codes of each width are built from ranks of the previous one, so that they fit into int64.
        for width in range(1, max(widths) + 1):
            codes = rank * N_SYMBOLS + columns[-1]
            _, first, rank = np.unique(codes, return_index=True, return_inverse=True)
            for i in (i for i, each in enumerate(widths) if each == width):
                self.symbols[i] = _ids(np.stack([each[first] for each in columns], -1), device)
                self.windows[i] = _ids(rank, device)
            later = np.minimum(place + width, len(symbols) - 1)
            columns.append(np.where(place + width < end_of_word, symbols[later], AFTER))


def _ids(values: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)


class Highway(Module):
    """Highway layer: a gate mixes its input with a nonlinear layer."""

    def __init__(self, features: int, **made: Any) -> None:
        super().__init__()
        self.linear = Linear(features, 2 * features, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        # The gates are almost closed at first, so that a deep stack starts near the identity.
        torch.nn.init.constant_(self.linear.bias.chunk(2)[1], -2.0)

    def forward(self, features: Tensor) -> Tensor:
        changed, gate = self.linear(features).chunk(2, -1)
        mixed: Tensor = features + gate.sigmoid() * (changed.relu() - features)
        return mixed


class CharCNN(Module):
    """Computes one vector ``(out_features,)`` per word."""

    def __init__(
        self,
        filters: tuple[tuple[int, int], ...],
        char_features: int,
        highway_layers: int,
        out_features: int,
        **made: Any,
    ) -> None:
        super().__init__()
        self.widths = [width for width, _ in filters]
        self.features = sum(number for _, number in filters)
        self.chars = Embedding(N_SYMBOLS, char_features, **made)
        self.filters = ModuleList(
            Linear(width * char_features, number, **made) for width, number in filters
        )
        self.highway = ModuleList(Highway(self.features, **made) for _ in range(highway_layers))
        # No bias: it would shift all scores of a row equally, which does not change a softmax.
        self.project = Linear(self.features, out_features, bias=False, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.chars.reset_parameters()
        for layer in (*self.filters, *self.highway):
            layer.reset_parameters()
        # Scores then vary between classes about as much as those of a new nn.Linear.
        bound = 3.0 / math.sqrt(self.features * self.project.out_features)
        torch.nn.init.uniform_(self.project.weight, -bound, bound)

    def vectors(self, chunks: Sequence[Words]) -> Tensor:
        """The vectors of all chunks; if there are several, backward recomputes each of them."""
        if len(chunks) == 1:
            return self(chunks[0])  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            return torch.cat([self(words) for words in chunks])
        if torch.compiler.is_compiling():
            # Compiled code needs no check for in-place changes, so torch's checkpoint is enough.
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
        """The maximum of each filter over each word; ReLU is applied later, on fewer elements.

        Half precision computes it in float32: rounding would make close n-grams equal, and the
        gradient could go to the wrong one.
        """
        found, dtype = [], self.chars.weight.dtype
        wide = accumulation_dtype(dtype)
        layer: Any
        with torch.autocast(words.starts.device.type, enabled=False):
            chars = self.chars.weight.to(wide)
            for i, layer in enumerate(self.filters):
                # Words share most of their n-grams, so filters are applied to unique ones only.
                symbols = embedding(words.symbols[i], chars).flatten(1)
                seen = linear(symbols, layer.weight.to(wide), layer.bias.to(wide))
                found.append(embedding_bag(words.windows[i], seen, words.starts, mode="max"))
            return torch.cat(found, -1).to(dtype)

    def spell(
        self, words: Sequence[str], max_length: int, chunk: int | str, device: torch.device
    ) -> list[Words]:
        """The words as tensors, in chunks whose vectors are computed together."""
        if isinstance(chunk, str):
            layers = 1 + len(self.highway)
            kept = _KEPT_NUMBERS * layers * self.features * self.project.weight.element_size()
            chunk = max(1, _KEPT_BYTES // kept)
        n, n_chunks = len(words), -(-len(words) // chunk)
        cuts = [n * i // n_chunks for i in range(n_chunks + 1)]
        return [
            Words(words[first:last], self.widths, max_length, device)
            for first, last in pairwise(cuts)
        ]
