"""Spans of a text, nested ones too: every pair of a start and an end has a score."""

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
    """A span that was found in a text, whose tokens are ``tokens[start : end + 1]``."""

    type: int
    """Which of the head's types."""
    start: int
    """Its first token."""
    end: int
    """Its last token, included in the span."""
    score: float
    """Its score, above the threshold."""


class GlobalPointer(SavedModule):
    r"""Finds spans of several types in a text: entities that may be nested or overlap.

    Each token has, for each type :math:`t`, a vector :math:`q` as a start and a vector :math:`k` as
    an end. The score of a span from token i to token j, **both included**, is

    .. math:: s_t(i, j) = \frac{(R_i q_{t,i})^\top (R_j k_{t,j})}{\sqrt{\text{head\_size}}},
              \qquad i \le j

    with :math:`R_i` the rotation of rotary position embeddings, so that a score depends on the two
    hidden states and on their distance. A span is predicted where its score is above 0.

    With ``efficient=True`` all types share :math:`q` and :math:`k`, which find spans, and a type
    adds a score of each of the two ends: :math:`w_t^\top [q_i; k_i] + u_t^\top [q_j; k_j] + b_t`,
    without rotation. It has far fewer parameters, and often a higher accuracy where types are many
    and examples few.

    The loss is :func:`lastlayer.zlpr_loss` over the n(n+1)/2 spans of a text, for each type
    separately; the mean is over texts and types. What is no span (it ends before it starts, or
    an end of it is padding) is left out of all sums, whatever its hidden states are, NaN included.

    It is no :class:`lastlayer.heads.Head`, since a text has any number of spans: instead of
    ``log_prob``, ``topk`` and ``sample`` it has :meth:`scores` and :meth:`decode`. It is saved and
    loaded as heads are.

    Cost: 4 products of texts × types × n²/2 × head_size per step (one type for ``efficient``), 3
    where all scores fit into one tile. Memory is that of the vectors, texts × types × n ×
    head_size, their gradients, and one tile of scores. On CUDA, up to a head_size of 64, a kernel
    makes 5 such products and stores no tile. Scores are float32 whatever the dtype of the head, or
    float64.

    Args:
        in_features: size of the hidden state of a token.
        n_types: number of types of spans.
        head_size: size of a start or an end vector; even with rope.
        rope: whether scores depend on the distance of start and end (rotary positions).
        efficient: whether all types share the vectors.
        bias: whether the linear layers have one.
        ignore_index: the type that pads lists of spans, below 0; None where nothing is padding.
        reduction: "mean" over the types of all texts that have a token (0 where there is none),
            "sum", or "none" for ``(*batch, n_types)``. It can be changed at any time.
        chunk_spans: scores that are held at a time (at least those of one start in one text),
            "auto" or "low"; the kernel holds none.
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
                "head_size: expected an even number, as rotary positions turn pairs, got "
                f"{head_size}; take {head_size + 1}, or rope=False"
            )
        if ignore_index is not None:
            note = "which is no type, or None"
            ignore_index = check_int("ignore_index", ignore_index, least=None, most=-1, note=note)
        check_reduction(reduction)
        check_chunk(chunk_spans, "chunk_spans")
        self.rope, self.efficient, self.ignore_index = rope, efficient, ignore_index
        self.reduction, self.chunk_spans = reduction, chunk_spans
        vectors = 2 * self.head_size * (1 if efficient else self.n_types)
        # For each type first the numbers of q, then those of k.
        self.project = torch.nn.Linear(self.in_features, vectors, bias, device=device, dtype=dtype)
        sizes = 2 * self.head_size, 2 * self.n_types
        of_types = torch.nn.Linear(*sizes, bias, device=device, dtype=dtype) if efficient else None
        self.type_bias = of_types

    def reset_parameters(self) -> None:
        """Fresh parameters, distributed as those of ``nn.Linear``."""
        for layer in (self.project, self.type_bias):
            if layer is not None:
                layer.reset_parameters()

    def forward(self, hidden: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The training loss in float32, or in float64 from float64.

        Args:
            hidden: ``(*batch, n, in_features)``.
            target: the right spans, as lists of (type, start, end) of any integer dtype,
                ``(*batch, m, 3)``, padded with the type ``ignore_index``, the end inclusive and
                duplicates counted once; or as bool, ``(*batch, n_types, n, n)`` by type, start and
                end. Right spans at a masked token do not count.
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
        """All scores at once, for short texts, also twice differentiable; -inf where no span is.

        ``lastlayer.zlpr_loss(scores.flatten(-2), target.flatten(-2))`` is the loss.

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
        """The spans of each text with scores above the threshold, a tile of scores at a time.

        Spans may overlap. The host waits for each tile.

        Args:
            hidden: ``(*batch, n, in_features)``.
            mask: bool ``(*batch, n)``, True for tokens.
            threshold: 0 is what the loss trains for; more for precision, less for recall.
            max_spans: of more spans in a text, the best that many are kept; of equal scores those
                that come first.

        Returns:
            A list for each text, counted over all batch dimensions, of
            :class:`lastlayer.heads.Span` ``(type, start, end, score)`` with the end included, in
            the order of start, end and type.
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
        """Hidden states of at least one token per text, and one bool per token or None."""
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
        """Start and end vectors, rotated and scaled, of all texts one after the other."""
        n, n_texts = hidden.shape[-2], hidden.shape[:-2].numel()
        wide = accumulation_dtype(hidden.dtype)
        states = hidden.reshape(n_texts, n, self.in_features)
        if mask is not None:
            mask = mask.reshape(n_texts, n)
            # A NaN in padding would come back through the weight's gradient, as 0 · NaN.
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
    r"""Rotary positions: vectors ``(*batch, n, d)``, that at place p rotated by p, times a scale.

    Of each pair of numbers :math:`(x_{2i}, x_{2i+1})` the angle is :math:`p\,10000^{-2i/d}`, so
    that a product of two rotated vectors is that of one with the other rotated by their distance.
    """
    n, d = vectors.shape[-2:]
    # In float64: at place 4096 an angle in float32 would be off by 2e-4.
    rate = 10_000.0 ** (torch.arange(0, d, 2, dtype=torch.float64, device=vectors.device) / -d)
    angle = torch.arange(n, dtype=torch.float64, device=vectors.device).unsqueeze(-1) * rate
    cos, sin = ((scale * each).to(vectors.dtype) for each in (angle.cos(), angle.sin()))
    even, odd = vectors.unflatten(-1, (d // 2, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _check_spans(target: Any, hidden: Tensor, n_types: int, ignore_index: int | None) -> None:
    """Bools for all spans, or lists of them. ``hidden`` is checked already."""
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
            f"end, got {tuple(target.shape)}; lists of spans are integers"
        )
    listed = target.dim() > 1 and target.shape[-1] == 3 and tuple(target.shape[:-2]) == batch
    if not dense and not listed:
        expected = "(" + "".join(f"{size}, " for size in batch) + "m, 3)"
        raise ValueError(
            f"target: expected shape {expected}, lists of (type, start, end) padded with "
            f"ignore_index, got {tuple(target.shape)}; one label per span is torch.bool"
        )
    check_device("target", target, hidden)
    if not values_are_checked(target):
        return
    # In numpy, which costs the host less than torch.
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
    """``(texts, starts, ends, types)``: the cells of a text in the order of start, end, type."""
    scores = tile_scores(parts, tile)
    # A NaN is above no threshold, but would take the place of a span among the best.
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
    """Of the tiles of some texts: the best so far compete with the best of each tile."""
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
            # Earlier starts come first, so that of equal scores they stay.
            found, more = torch.cat([places, found], 1), torch.cat([scores, more], 1)
        scores, order = top_classes(more, min(max_spans, more.shape[1]))
        places = found.gather(1, order.unsqueeze(-1).expand(*order.shape, 4))
    above = scores > threshold
    return places[above], scores[above]
