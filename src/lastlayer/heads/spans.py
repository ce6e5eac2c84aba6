"""Spans of a text, including nested ones, from a score for each pair of start and end."""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer._checks import (
    check_chunk,
    check_device,
    check_int,
    check_real,
    check_reduction,
    check_tensor,
)
from lastlayer._torch import (
    accumulation_dtype,
    as_numpy,
    in_dtype,
    values_are_checked,
    without_autocast,
)
from lastlayer.fused.prediction import top_classes
from lastlayer.fused.scores import spans_at_a_time
from lastlayer.fused.spans import Tile, not_spans, span_loss, tile_scores, tiles
from lastlayer.heads.base import SavedModule
from lastlayer.kernels.span_sums import SpanParts


class Span(NamedTuple):
    """A predicted span of a text, with the tokens ``tokens[start : end + 1]``."""

    type: int
    """The type of the span."""
    start: int
    """Its first token."""
    end: int
    """Its last token, inclusive."""
    score: float
    """Its score."""


class GlobalPointer(SavedModule):
    r"""Finds spans of several types in a text, such as named entities, which may overlap.

    For each type :math:`t`, each token has a start vector :math:`q` and an end vector :math:`k`.
    The score of a span from token i to token j, **both inclusive**, is

    .. math:: s_t(i, j) = \frac{(R_i q_{t,i})^\top (R_j k_{t,j})}{\sqrt{\text{head\_size}}},
              \qquad i \le j

    with the rotation :math:`R_i` of rotary position embeddings, so that a score depends on the two
    hidden states and on their distance. Spans with a score above 0 are predicted.

    With ``efficient=True`` all types share :math:`q` and :math:`k`, and each type adds a score for
    both ends: :math:`w_t^\top [q_i; k_i] + u_t^\top [q_j; k_j] + b_t`, without rotation. This has
    far fewer parameters, and is often more accurate with many types and few examples.

    The loss is :func:`lastlayer.zlpr_loss` over the n(n+1)/2 spans of a text, for each type
    separately; the mean is over texts and types. Pairs that are not spans (the end is before the
    start, or one of them is padding) are masked, even if their hidden states are NaN.

    It is not a :class:`lastlayer.heads.Head`, since a text may have any number of spans: it has
    :meth:`scores` and :meth:`decode` instead of ``log_prob``, ``topk`` and ``sample``. It is saved
    and loaded like a head.

    Cost: 4 products of texts × types × n²/2 × head_size per step (one type for ``efficient``), 3
    if all scores fit into one tile. Memory: the vectors, texts × types × n × head_size, their
    gradients, and one tile of scores. On CUDA, for a head_size of up to 64, a kernel computes 5
    such products and stores no tile. Scores are float32 for any dtype of the head except float64.

    Args:
        in_features: size of the hidden state of a token.
        n_types: number of span types.
        head_size: size of start and end vectors; must be even with rope.
        rope: whether to use rotary position embeddings, so that scores depend on the distance of
            start and end.
        efficient: whether all types share the vectors.
        bias: whether the linear layers have a bias.
        ignore_index: the type that pads lists of spans, below 0; None for no padding.
        reduction: "mean" over the types of all texts that have a token (0 if there are none),
            "sum", or "none" for ``(*batch, n_types)``. It can be changed at any time.
        chunk_spans: maximum number of scores in memory (at least those of one start in one text),
            "auto" or "low"; the kernel stores none.
        device, dtype: of the parameters.

    Example:
        >>> import torch
        >>> head = GlobalPointer(in_features=32, n_types=3, head_size=16)
        >>> hidden = torch.randn(2, 7, 32)  # two texts of seven tokens
        >>> mask = torch.arange(7) < torch.tensor([[7], [5]])  # the second one has five
        >>> spans = torch.tensor([[[0, 1, 2], [2, 1, 6]], [[1, 4, 4], [-100, -100, -100]]])
        >>> head(hidden, spans, mask).backward()
        >>> [len(each) for each in head.decode(hidden, mask, threshold=-float("inf"))]
        [84, 45]

    Reference:
        Su et al., Global Pointer: Novel Efficient Span-based Approach for Named Entity
        Recognition, 2022, arXiv:2208.03054; Su et al., RoFormer: Enhanced Transformer with Rotary
        Position Embedding, 2021, arXiv:2104.09864.
    """

    def __init__(
        self,
        in_features: int,
        n_types: int,
        head_size: int = 64,
        *,
        rope: bool = True,
        efficient: bool = False,
        bias: bool = True,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        chunk_spans: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_int("in_features", in_features)
        self.n_types = check_int("n_types", n_types)
        self.head_size = check_int("head_size", head_size)
        if rope and self.head_size % 2:
            raise ValueError(
                "head_size: expected an even number for rotary position embeddings, got "
                f"{head_size}; use {head_size + 1}, or rope=False"
            )
        if ignore_index is not None:
            note = "which is no type, or None"
            ignore_index = check_int("ignore_index", ignore_index, least=None, most=-1, note=note)
        check_reduction(reduction)
        check_chunk(chunk_spans, "chunk_spans")
        self.rope, self.efficient, self.ignore_index = rope, efficient, ignore_index
        self.reduction, self.chunk_spans = reduction, chunk_spans
        vectors = 2 * self.head_size * (1 if efficient else self.n_types)
        # The columns of each type: first q, then k.
        self.project = torch.nn.Linear(self.in_features, vectors, bias, device=device, dtype=dtype)
        sizes = 2 * self.head_size, 2 * self.n_types
        of_types = torch.nn.Linear(*sizes, bias, device=device, dtype=dtype) if efficient else None
        self.type_bias = of_types

    def reset_parameters(self) -> None:
        """Reinitialises the parameters, with the distribution of ``nn.Linear``."""
        for layer in (self.project, self.type_bias):
            if layer is not None:
                layer.reset_parameters()

    def forward(self, hidden: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The training loss in float32, or in float64 from float64.

        Args:
            hidden: ``(*batch, n, in_features)``.
            target: the gold spans, as lists of (type, start, end) of any integer dtype,
                ``(*batch, m, 3)``, padded with the type ``ignore_index``; the end is inclusive, and
                duplicates count once. Or as bool, ``(*batch, n_types, n, n)``, by type, start and
                end. Spans at a masked token are ignored.
            mask: bool ``(*batch, n)``, True for tokens, False for padding.
        """
        self._check_tokens(hidden, mask)
        check_reduction(self.reduction)
        _check_spans(target, hidden, self.n_types, self.ignore_index)
        parts = self._parts(hidden, mask)
        target = target.reshape(parts.query.shape[0], *target.shape[hidden.dim() - 2 :])
        if target.dtype != torch.bool:
            target = in_dtype(target, torch.int64)
        loss = span_loss(parts, target, self.n_types, self.reduction, self.chunk_spans)
        return loss.reshape(*hidden.shape[:-2], self.n_types) if loss.dim() else loss

    def scores(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """The scores of all spans at once, for short texts; -inf for pairs that are not spans.

        They are twice differentiable. The loss is
        ``lastlayer.zlpr_loss(scores.flatten(-2), target.flatten(-2))``.

        Args:
            hidden: ``(*batch, n, in_features)``.
            mask: bool ``(*batch, n)``, True for tokens.

        Returns:
            ``(*batch, n_types, n, n)`` by type, start and end; float32, or float64 from float64.
        """
        self._check_tokens(hidden, mask)
        parts, n = self._parts(hidden, mask), hidden.shape[-2]
        whole = Tile(slice(0, parts.query.shape[0]), slice(0, n), slice(0, n))
        with without_autocast(hidden):
            scores = tile_scores(parts, whole).masked_fill(not_spans(parts, whole), -math.inf)
        return scores.reshape(*hidden.shape[:-2], self.n_types, n, n)

    @torch.no_grad()
    def decode(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        threshold: float = 0.0,
        max_spans: int | None = None,
    ) -> list[list[Span]]:
        """Finds the spans of each text with scores above the threshold, tile by tile.

        Spans may overlap. There is one host sync per tile.

        Args:
            hidden: ``(*batch, n, in_features)``.
            mask: bool ``(*batch, n)``, True for tokens.
            threshold: minimum score, exclusive. The loss trains for 0; higher values increase
                precision, lower values recall.
            max_spans: maximum number of spans per text: those with the highest scores, and the
                first of equal scores.

        Returns:
            For each text, in the order of the flattened batch dimensions, a list of
            :class:`lastlayer.heads.Span` ``(type, start, end, score)``, with inclusive ends, sorted
            by start, end and type.
        """
        self._check_tokens(hidden, mask)
        least = check_real("threshold", threshold, "a number", lambda x: not math.isnan(x))
        if max_spans is not None:
            max_spans = check_int("max_spans", max_spans)
        parts, n = self._parts(hidden, mask), hidden.shape[-2]
        n_texts, n_spans = parts.query.shape[0], spans_at_a_time(self.chunk_spans, parts.query)
        in_tiles = groupby(tiles(n_texts, self.n_types, n, n_spans), key=lambda tile: tile.texts)
        spans: list[list[Span]] = [[] for _ in range(n_texts)]
        with without_autocast(hidden):
            for _, of_texts in in_tiles:
                if max_spans is None:
                    found = [_all_above(parts, tile, least) for tile in of_texts]
                else:
                    found = [_best_above(parts, of_texts, least, max_spans)]
                for places, scores in found:
                    for place, score in zip(places.tolist(), scores.tolist(), strict=True):
                        text, kind, start, end = place
                        spans[text].append(Span(kind, start, end, score))
        return [sorted(each, key=lambda span: (span.start, span.end, span.type)) for each in spans]

    def _check_tokens(self, hidden: Any, mask: Any) -> None:
        """Checks hidden states with at least one token per text, and the mask."""
        self._check_hidden(hidden)
        if hidden.dim() < 2 or hidden.shape[-2] == 0:
            raise ValueError(
                f"hidden: expected shape (*batch, n, {self.in_features}), at least one token per "
                f"text, got {tuple(hidden.shape)}"
            )
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(
                f"mask: expected a bool tensor with True for tokens, got {got}; convert with "
                "mask.bool()"
            )
        if mask.shape != hidden.shape[:-1]:
            raise ValueError(
                f"mask: expected shape {tuple(hidden.shape[:-1])}, one bool per token, got "
                f"{tuple(mask.shape)}"
            )
        check_device("mask", mask, hidden)

    def _parts(self, hidden: Tensor, mask: Tensor | None) -> SpanParts:
        """Start and end vectors, rotated and scaled, with batch dimensions flattened."""
        n, n_texts = hidden.shape[-2], hidden.shape[:-2].numel()
        wide = accumulation_dtype(hidden.dtype)
        states = hidden.reshape(n_texts, n, self.in_features)
        if mask is not None:
            mask = mask.reshape(n_texts, n)
            # A NaN in padding would reach the gradient of the weight, as 0 · NaN.
            states = states.masked_fill(~mask.unsqueeze(-1), 0.0)
        made = self.project(states)
        start_bias = end_bias = None
        if self.type_bias is not None:
            both = in_dtype(self.type_bias(made), wide).mT.contiguous()
            start_bias, end_bias = both.chunk(2, 1)
        # (texts, n, types, q or k, head_size) to two of (texts, types, n, head_size)
        types = 1 if self.efficient else self.n_types
        vectors = in_dtype(made, wide).view(n_texts, n, types, 2, self.head_size)
        vectors, scale = vectors.permute(3, 0, 2, 1, 4), self.head_size**-0.25
        vectors = rotated(vectors, scale) if self.rope else vectors * scale
        query, key = vectors.contiguous().unbind()
        return SpanParts(query, key, start_bias, end_bias, mask)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "bias": self.project.bias is not None}


def rotated(vectors: Tensor, scale: float = 1.0) -> Tensor:
    r"""Applies rotary position embeddings and a scale to vectors ``(*batch, n, d)``.

    At position p, the pair :math:`(x_{2i}, x_{2i+1})` is rotated by the angle
    :math:`p\,10000^{-2i/d}`, so that products of rotated vectors depend on positions only through
    their distance.
    """
    n, d = vectors.shape[-2:]
    # In float64: at position 4096, an angle in float32 would have an error of 2e-4.
    rate = 10_000.0 ** (torch.arange(0, d, 2, dtype=torch.float64, device=vectors.device) / -d)
    angle = torch.arange(n, dtype=torch.float64, device=vectors.device).unsqueeze(-1) * rate
    cos, sin = ((scale * each).to(vectors.dtype) for each in (angle.cos(), angle.sin()))
    even, odd = vectors.unflatten(-1, (d // 2, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _check_spans(target: Any, hidden: Tensor, n_types: int, ignore_index: int | None) -> None:
    """Checks targets, dense or as lists, for hidden states that have been checked."""
    check_tensor("target", target)
    batch, n = tuple(hidden.shape[:-2]), hidden.shape[-2]
    dense = target.dtype == torch.bool
    if target.is_floating_point() or target.is_complex():
        raise TypeError(
            "target: expected integer lists of spans, or torch.bool with one label per span, got "
            f"{target.dtype}; convert with target.long() or target.bool()"
        )
    if dense and target.shape != (*batch, n_types, n, n):
        raise ValueError(
            f"target: expected shape {(*batch, n_types, n, n)}, a bool for each type, start and "
            f"end, got {tuple(target.shape)}; for lists of spans use integers"
        )
    listed = target.dim() > 1 and target.shape[-1] == 3 and tuple(target.shape[:-2]) == batch
    if not dense and not listed:
        expected = "(" + "".join(f"{size}, " for size in batch) + "m, 3)"
        raise ValueError(
            f"target: expected shape {expected}, lists of (type, start, end) padded with "
            f"ignore_index, got {tuple(target.shape)}; for one label per span use torch.bool"
        )
    check_device("target", target, hidden)
    if not values_are_checked(target):
        return
    # numpy takes less host time than torch.
    values = as_numpy(target.cpu())
    allowed = []
    if dense:
        *_, kinds, starts, ends = values.nonzero()
    else:
        spans = values.reshape(-1, 3)
        kinds, starts, ends = spans[spans[:, 0] != ignore_index].T
        padding = "" if ignore_index is None else f", or the type {ignore_index=} for padding"
        bounds = ("types", kinds, n_types), ("starts", starts, n), ("ends", ends, n)
        for name, given, most in bounds:
            inside = (given >= 0) & (given < most)
            allowed.append((f"{name} from 0 to {most - 1}{padding}", inside))
    in_order = "spans that end where they start or later (the end is inclusive)", ends >= starts
    for expected, right in (*allowed, in_order):
        if not right.all():
            first = tuple(int(each[~right][0]) for each in (kinds, starts, ends))
            raise ValueError(f"target: expected {expected}, got (type, start, end) = {first}")


def _decoded_scores(parts: SpanParts, tile: Tile) -> Tensor:
    """Scores ``(texts, starts, ends, types)`` of a tile; -inf for NaN and for what is no span."""
    scores = tile_scores(parts, tile)
    # A NaN is not above any threshold, but top-k would select it.
    scores = scores.masked_fill_(not_spans(parts, tile) | scores.isnan(), -math.inf)
    return scores.permute(0, 2, 3, 1)


def _all_above(parts: SpanParts, tile: Tile, threshold: float) -> tuple[Tensor, Tensor]:
    """Text, type, start and end of each span above the threshold, ``(k, 4)``, and the scores."""
    scores = _decoded_scores(parts, tile)
    at = (scores > threshold).nonzero()
    first = [tile.texts.start, tile.starts.start, tile.ends.start, 0]
    places = at + torch.tensor(first, device=at.device)
    return places[:, [0, 3, 1, 2]], scores[at.unbind(-1)]


def _best_above(
    parts: SpanParts, of_texts: Iterable[Tile], threshold: float, max_spans: int
) -> tuple[Tensor, Tensor]:
    """The best spans of some texts, from all tiles of these texts in turn."""
    places = scores = torch.empty(0)
    for tile in of_texts:
        cells = _decoded_scores(parts, tile)
        width, n_types = cells.shape[2:]
        more, cell = top_classes(cells.flatten(1), min(max_spans, cells[0].numel()))
        text = torch.arange(tile.texts.start, tile.texts.stop, device=cell.device)
        found = torch.stack([
            text.unsqueeze(-1).expand_as(cell),
            cell % n_types,
            cell // (width * n_types) + tile.starts.start,
            cell // n_types % width + tile.ends.start,
        ], -1)  # fmt: skip
        if scores.numel():
            # Earlier starts are first, so that they are kept among equal scores.
            found, more = torch.cat([places, found], 1), torch.cat([scores, more], 1)
        scores, order = top_classes(more, min(max_spans, more.shape[1]))
        places = found.gather(1, order.unsqueeze(-1).expand(*order.shape, 4))
    above = scores > threshold
    return places[above], scores[above]
