"""Spans of a text, nested ones too: every pair of a start and an end has a score."""

import inspect
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from lastlayer._checks import check_reduction
from lastlayer._labels import reduced
from lastlayer._torch import accumulation_dtype
from lastlayer.heads._checks import check_count
from lastlayer.heads._rotary import rotated
from lastlayer.heads._saving import load_head, save_head
from lastlayer.heads._span_checks import (
    check_head_size,
    check_padding_type,
    check_spans,
    check_threshold,
    check_token_mask,
    check_tokens,
)
from lastlayer.heads._span_decode import Span, decoded
from lastlayer.heads._span_labels import listed_cells
from lastlayer.heads._span_loss import span_losses
from lastlayer.heads._span_tiles import (
    Tile,
    check_chunk_spans,
    not_spans,
    spans_at_a_time,
    tile_scores,
)
from lastlayer.kernels.span_sums import SpanParts

if TYPE_CHECKING:
    from lastlayer.heads.base import Head


class GlobalPointer(torch.nn.Module):
    r"""Finds spans of several types in a text: entities that may be nested or overlap.

    A token has for each type :math:`t` a vector :math:`q` as a start and one, :math:`k`, as an end.
    The score of a span from token i to token j, **both included**, is

    .. math:: s_t(i, j) = \frac{(R_i q_{t,i})^\top (R_j k_{t,j})}{\sqrt{\text{head\_size}}},
              \qquad i \le j

    with :math:`R_i` the rotation of rotary positions, so that a score depends on the two states and
    on how far apart they are. A span is predicted where its score is above 0.

    With ``efficient=True`` all types share :math:`q` and :math:`k`, which find spans, and a type
    adds what it makes of the two ends: :math:`w_t^\top [q_i; k_i] + u_t^\top [q_j; k_j] + b_t`,
    without rotation. It has far fewer parameters, and often more accuracy where types are many and
    examples few.

    The loss is :func:`lastlayer.zlpr_loss` over the n(n+1)/2 spans of a text, for each type by
    itself; the mean is over texts and types. What is no span (it ends before it starts, or an end
    of it is padding) is left out of all sums, whatever stands there, NaN included.

    It is no :class:`lastlayer.heads.Head`: those choose one class for a state, and their
    log-probabilities sum to 1. Here a text has any number of spans, and the classes, pairs of
    tokens, change with each text. So there is no ``log_prob``, ``topk`` or ``sample``, but
    :meth:`scores` and :meth:`decode`. It is saved and loaded as heads are.

    Cost: 4 products of texts × types × n²/2 × head_size a step (one type for ``efficient``), of
    which two are forward scores made twice. Memory is that of the vectors, texts × types × n ×
    head_size, and of a tile of scores; nothing is kept for all spans. On CUDA, up to a head_size
    of 64, a kernel makes 5 such products and stores no tile. Scores are float32 whatever the dtype
    of the head, or float64.

    Args:
        in_features: how many numbers the state of a token has.
        n_types: how many types of spans there are.
        head_size: how many numbers a start or an end vector has; even with rope.
        rope: whether scores know how far apart start and end are.
        efficient: whether all types share the vectors.
        bias: whether the linear layers have one.
        ignore_index: the type that pads lists of spans.
        reduction: "mean" over the types of all texts that have a token (0 where there is none),
            "sum", or "none" for ``(*batch, n_types)``.
        chunk_spans: scores that are held at a time (at least those of one start in one text),
            "auto" or "low"; the kernel holds none.
        device: where the parameters are made.
        dtype: of the parameters.

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
        ignore_index: int = -100,
        reduction: str = "mean",
        chunk_spans: int | str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, count in (
            ("in_features", in_features), ("n_types", n_types), ("head_size", head_size),
        ):  # fmt: skip
            check_count(name, count)
        check_head_size(head_size, rope)
        check_padding_type(ignore_index)
        check_reduction(reduction)
        check_chunk_spans(chunk_spans)
        self.in_features, self.n_types, self.head_size = in_features, n_types, head_size
        self.rope, self.efficient = rope, efficient
        self.ignore_index, self.reduction, self.chunk_spans = ignore_index, reduction, chunk_spans
        vectors = 2 * head_size * (1 if efficient else n_types)
        # For each type first the numbers of q, then those of k.
        self.project = torch.nn.Linear(in_features, vectors, bias, device=device, dtype=dtype)
        self.type_bias = (
            torch.nn.Linear(2 * head_size, 2 * n_types, bias, device=device, dtype=dtype)
            if efficient
            else None
        )

    def reset_parameters(self) -> None:
        """Fresh numbers, distributed as those of ``nn.Linear``."""
        for layer in (self.project, self.type_bias):
            if layer is not None:
                layer.reset_parameters()

    def forward(self, hidden: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """The training loss in float32, or in float64 from float64.

        Args:
            hidden: ``(*batch, n, in_features)``.
            target: the right spans, as lists of (type, start, end), int64 ``(*batch, m, 3)``,
                padded with the type ``ignore_index``, the end inclusive and duplicates counted
                once; or as bool, ``(*batch, n_types, n, n)`` by type, start and end. Right spans
                at a masked token do not count.
            mask: bool ``(*batch, n)``, True for tokens, False for padding.
        """
        self._check(hidden, mask)
        check_spans(target, hidden, self.n_types, self.ignore_index)
        parts, n = self._parts(hidden, mask), hidden.shape[-2]
        n_texts = parts.query.shape[0]
        if target.dtype == torch.bool:
            labels = target.reshape(n_texts, self.n_types, n, n)
        else:
            listed = target.reshape(n_texts, target.shape[-2], 3)
            labels = listed_cells(listed, self.n_types, n, parts.mask)
        n_spans = spans_at_a_time(self.chunk_spans, hidden.device)
        losses = span_losses(parts, labels, self.n_types, n_spans)
        counts = None if parts.mask is None else parts.mask.any(-1, keepdim=True).expand_as(losses)
        return reduced(losses.reshape(*hidden.shape[:-2], self.n_types), counts, self.reduction)

    def scores(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """All scores at once, for short texts; -inf where there is no span.

        They can be differentiated, also twice: ``lastlayer.zlpr_loss(scores.flatten(-2),
        target.flatten(-2))`` is the loss, from memory of this size.

        Args:
            hidden: ``(*batch, n, in_features)``.
            mask: bool ``(*batch, n)``, True for tokens.

        Returns:
            ``(*batch, n_types, n, n)`` by type, start and end; float32, or float64 from float64.
        """
        self._check(hidden, mask)
        parts, n = self._parts(hidden, mask), hidden.shape[-2]
        whole = Tile(slice(0, parts.query.shape[0]), slice(0, n), slice(0, n))
        with torch.autocast(hidden.device.type, enabled=False):
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

        Nothing stops spans from overlapping. The host waits for each tile.

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
        self._check(hidden, mask)
        check_threshold(threshold)
        if max_spans is not None:
            check_count("max_spans", max_spans)
        n_spans = spans_at_a_time(self.chunk_spans, hidden.device)
        parts = self._parts(hidden, mask)
        with torch.autocast(hidden.device.type, enabled=False):
            return decoded(parts, self.n_types, threshold, max_spans, n_spans)

    def _check(self, hidden: Any, mask: Any) -> None:
        check_tokens(hidden, self.in_features, self.project.weight)
        check_token_mask(mask, hidden)

    def _parts(self, hidden: Tensor, mask: Tensor | None) -> SpanParts:
        """Start and end vectors, rotated and scaled, of all texts one after the other."""
        n = hidden.shape[-2]
        n_texts = hidden.shape[:-2].numel()
        wide = accumulation_dtype(hidden.dtype)
        states = hidden.reshape(n_texts, n, self.in_features)
        if mask is not None:
            mask = mask.reshape(n_texts, n)
            # A NaN in padding would come back through the weight's gradient, as 0 · NaN.
            states = states.masked_fill(~mask.unsqueeze(-1), 0.0)
        made = self.project(states)
        start_bias = end_bias = None
        if self.type_bias is not None:
            both = self.type_bias(made).to(wide).mT.contiguous()
            start_bias, end_bias = both.chunk(2, 1)
        # (texts, n, types, q or k, head_size) to two of (texts, types, n, head_size)
        vectors = made.to(wide).unflatten(-1, (1 if self.efficient else self.n_types, 2, -1))
        query, key = vectors.permute(3, 0, 2, 1, 4)
        if self.rope:
            query, key = rotated(query), rotated(key)
        scaled = query / math.sqrt(self.head_size)
        return SpanParts(scaled, key.contiguous(), start_bias, end_bias, mask)

    def config(self) -> dict[str, Any]:
        """The arguments that make such a head, as JSON can hold them; without its state."""
        return {
            "in_features": self.in_features,
            "n_types": self.n_types,
            "head_size": self.head_size,
            "rope": self.rope,
            "efficient": self.efficient,
            "bias": self.project.bias is not None,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "chunk_spans": self.chunk_spans,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """A head from what :meth:`config` gave; its state is still to be loaded."""
        return cls(**config)

    def save(self, folder: str | Path) -> None:
        """Write ``model.safetensors``, the state, and ``config.json``, what :meth:`config` gives.

        Args:
            folder: made where it does not exist.
        """
        save_head(cast("Head", self), Path(folder))

    @classmethod
    def load(cls, folder: str | Path, *, device: str | torch.device = "cpu") -> Self:
        """The head that :meth:`save` wrote. Nothing is unpickled.

        Args:
            folder: where it was saved.
            device: where its state goes.
        """
        as_head = cast("type[Head]", cls)
        return cast("Self", load_head(as_head, Path(folder), torch.device(device)))

    def _save_extra(self, folder: Path) -> None:
        """JSON holds all arguments."""

    @classmethod
    def _load_extra(cls, folder: Path) -> dict[str, Any]:  # noqa: ARG003 — there is nothing extra
        return {}

    def extra_repr(self) -> str:
        """What the constructor takes by position, and options that are not as by default."""
        taken = inspect.signature(type(self)).parameters
        return ", ".join(
            f"{name}={value!r}"
            for name, value in self.config().items()
            if taken[name].kind is not inspect.Parameter.KEYWORD_ONLY
            or taken[name].default != value
        )
