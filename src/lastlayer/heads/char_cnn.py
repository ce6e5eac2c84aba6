"""The softmax over words whose vectors are made from their spellings, exact."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList, Parameter

from lastlayer._checks import check_chunk_rows
from lastlayer.fused import linear_cross_entropy
from lastlayer.fused._options import cross_entropy_options
from lastlayer.heads._char_cnn import CharCNN, Words, check_filters
from lastlayer.heads._checks import check_count, check_hidden
from lastlayer.heads._scoring import ScoringHead
from lastlayer.heads._spelling import check_spellings
from lastlayer.heads._stale_steps import refuse_stale_steps
from lastlayer.heads._vector_cache import VectorCache

FILTERS = ((1, 32), (2, 32), (3, 64), (4, 128), (5, 256))


class CharCNNSoftmax(ScoringHead):
    r"""Softmax and cross entropy, with class vectors that a character CNN reads off the spelling.

    .. math:: \log p_c = \theta_c - \log \sum_j e^{\theta_j}, \qquad
              \theta_c = h \cdot \bigl(P\, \mathrm{cnn}(\text{spelling}_c) + M k_c\bigr) + b_c

    A word is the bytes of its UTF-8 text between a mark for its begin and one for its end, of which
    the first ``max_length`` bytes are read. Filters of several widths run over their embeddings;
    each gives its largest value over the word. Highway layers and a projection P make a vector
    of it. Words of like spelling get like vectors, so a small correction :math:`k_c` is learned
    for each class, which M spreads over ``in_features``.

    Choose it where the parameters of a full layer are too many, or where words that were never
    seen have to be scored: :meth:`add_classes`. It is no faster than :class:`FullSoftmax`.

    Cost: that of :class:`FullSoftmax`, and each training step makes the vectors of all classes
    and carries their gradient back, however few rows there are: some 4 million multiplications a
    class with the default filters. Where no gradient is recorded, vectors are kept until a
    parameter changes. Backward keeps about 1 GB of what is between; of more classes it makes
    it again, chunk by chunk.

    Args:
        in_features: how many numbers a hidden state has.
        spellings: one word a class, none of them twice; neither case nor Unicode's ways to write
            the same letter are made equal.
        correction: numbers of :math:`k_c`; 0 for no correction.
        bias: whether each class has a bias: how frequent a word is shows little in its spelling.
        char_features: numbers of the embedding of a byte.
        filters: pairs (width in bytes, how many filters of this width).
        highway_layers: how many there are; 0 for none.
        max_length: bytes of a word that are read. Longer words that begin with the same ones
            differ by their correction and bias alone.
        chunk_classes: classes whose vectors are made at a time, or "auto".
        label_smoothing: how much of the target the loss spreads evenly over all classes.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        chunk_rows: rows of scores held at a time, "auto" or "low".
        device: where the parameters are made.
        dtype: of the parameters.

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
        _check_from_zero("correction", correction, "for no correction")
        _check_from_zero("highway_layers", highway_layers, "for none")
        check_count("char_features", char_features)
        check_count("max_length", max_length)
        _check_chunk_classes(chunk_classes)
        check_chunk_rows(chunk_rows)
        cross_entropy_options(label_smoothing, 0.0, None, 1.0)
        self.filters = check_filters(filters, max_length)
        self.correction, self.char_features = correction, char_features
        self.highway_layers, self.max_length = highway_layers, max_length
        self.chunk_classes, self.chunk_rows = chunk_classes, chunk_rows
        self.label_smoothing = label_smoothing
        self._spellings = words

        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.cnn = CharCNN(self.filters, char_features, highway_layers, in_features, **made)
        self._register("bias", torch.empty(self.n_classes, **made) if bias else None)
        numbers = torch.empty(self.n_classes, correction, **made) if correction else None
        self._register("corrections", numbers)
        self.correct = Linear(correction, in_features, bias=False, **made) if correction else None
        self._cache = VectorCache()
        self.words = ModuleList()
        self.register_load_state_dict_post_hook(_spell_again)
        self.reset_parameters()

    def _register(self, name: str, values: Tensor | None) -> None:
        self.register_parameter(name, None if values is None else Parameter(values))

    @property
    def spellings(self) -> tuple[str, ...]:
        """The word of each class."""
        return self._spellings

    def reset_parameters(self) -> None:
        """Fresh numbers, and the tensors that are made from the spellings."""
        self.cnn.reset_parameters()
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        if self.corrections is not None and self.correct is not None:
            # Small beside what the spelling says, but not 0: then M would get no gradient.
            torch.nn.init.normal_(self.corrections, std=0.1)
            bound = 1.0 / math.sqrt(self.correction * self.in_features)
            torch.nn.init.uniform_(self.correct.weight, -bound, bound)
        self._spell()

    def _spell(self) -> None:
        widths = [width for width, _ in self.filters]
        chunks = self.cnn.spell(self._spellings, widths, self.max_length, self.chunk_classes)
        self.words = chunks
        self._is_spelled = all(not each.is_meta for each in self.parameters())
        self._cache.drop()

    def class_vectors(self) -> Tensor:
        """The vectors of all classes, ``(n_classes, in_features)``.

        They are in the dtype of the head, or of autocast where it is on, and differentiable, so
        every fused loss can be trained on them. Call it once a step.
        Where no gradient is recorded, the vectors of the last call are given again until a
        parameter changes: is written in place, replaced or loaded. What is written through
        ``parameter.data`` or by another process is not seen; ``train()`` and ``eval()`` forget
        the vectors. Do not write to them.

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
        parameters = list(self.parameters())
        if torch.is_grad_enabled() and any(each.requires_grad for each in parameters):
            self._cache.drop()
            return self._made_vectors()
        return self._cache.get(parameters, self._made_vectors)

    def _made_vectors(self) -> Tensor:
        vectors: Tensor = self.cnn(cast("list[Words]", list(self.words)))
        if self.corrections is None or self.correct is None:
            return vectors
        corrected: Tensor = vectors + self.correct(self.corrections)
        return corrected

    # Not in inference mode, whose tensors could never be trained.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def add_classes(self, spellings: Sequence[str]) -> range:
        """More classes, after those there are. Their words are scored by spelling at once.

        Their corrections begin at 0, and their biases at the mean of those there are: most
        classes are rare, so that is a rare word. The words of all classes are read again: add
        many at a time.

        ``corrections`` and ``bias`` stay the same parameters, with more rows and without a
        gradient. An optimiser that keeps numbers for each of them, as Adam and momentum do, has
        too few: make a new one; the next step of the old one is refused. The other parameters, and
        all of them where the head has neither correction nor bias, are as before.

        Args:
            spellings: words that are no classes yet.

        Returns:
            The new class ids.
        """
        words = check_spellings("spellings", spellings, self._spellings)
        before, self._spellings = self.n_classes, self._spellings + words
        self.n_classes += len(words)
        if self.corrections is not None:
            _extend(self.corrections, self.corrections.new_zeros(len(words), self.correction))
        if self.bias is not None:
            _extend(self.bias, self.bias.mean().expand(len(words)))
        self._spell()
        return range(before, self.n_classes)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The cross entropy of the targets; see :func:`lastlayer.fused.linear_cross_entropy`."""
        check_hidden(self, hidden)
        return linear_cross_entropy(
            hidden,
            self.class_vectors(),
            target,
            self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            chunk_rows=self.chunk_rows,
        )

    def _log_probs(self, scores: Tensor) -> Tensor:
        return torch.log_softmax(scores, -1)

    def _vectors_and_biases(self) -> tuple[Tensor, Tensor | None]:
        return self.class_vectors(), self.bias

    def train(self, mode: bool = True) -> Self:
        self._cache.drop()
        return super().train(mode)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:
        self._cache.drop()
        super()._apply(fn, recurse)
        return self

    def config(self) -> dict[str, Any]:
        shared = super().config()
        del shared["n_classes"]
        return {
            **shared,
            "spellings": list(self._spellings),
            "correction": self.correction,
            "bias": self.bias is not None,
            "char_features": self.char_features,
            "filters": self.filters,
            "highway_layers": self.highway_layers,
            "max_length": self.max_length,
            "chunk_classes": self.chunk_classes,
            "label_smoothing": self.label_smoothing,
            "chunk_rows": self.chunk_rows,
        }

    def extra_repr(self) -> str:
        words = f"spellings={list(self._spellings)!r}"
        return super().extra_repr().replace(words, f"n_classes={self.n_classes}")


def _spell_again(head: "CharCNNSoftmax", _keys: Any) -> None:
    """A head that was made on the meta device has no words before it has its parameters."""
    if not head._is_spelled:
        head._spell()


def _extend(parameter: Parameter, more: Tensor) -> None:
    n_rows = parameter.shape[0]
    parameter.data = torch.cat([parameter.data, more])
    parameter.grad = None
    refuse_stale_steps(parameter, n_rows)


def _check_from_zero(name: str, value: Any, zero: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, 0 {zero}, got {type(value).__name__} {value!r}")
    if value < 0:
        raise ValueError(f"{name}: expected at least 0, 0 {zero}, got {value}")


def _check_chunk_classes(chunk_classes: Any) -> None:
    if isinstance(chunk_classes, str):
        if chunk_classes != "auto":
            raise ValueError(f"chunk_classes: expected an int or 'auto', got {chunk_classes!r}")
        return
    check_count("chunk_classes", chunk_classes)
