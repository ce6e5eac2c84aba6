"""Predictions of a softmax over a linear layer, without gradients and with bounded memory.

Scores are held for some rows and all classes. On a GPU with very many classes they are held for a
slab of classes, and the few relevant ones are recomputed. The kernels that read them are in
:mod:`lastlayer.kernels.prediction`.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from lastlayer import kernels
from lastlayer._torch import (
    accumulation_dtype,
    as_numpy,
    is_eager,
    is_exporting,
    values_are_checked,
)
from lastlayer.fused.scores import (
    fits_one_cpu_product,
    part_of,
    rows_at_a_time,
    scores_into,
    slab_stride,
)
from lastlayer.kernels.prediction import MOST_BEST
from lastlayer.maps.entmax import entmax

# On a GPU: number of scores to hold; minimum rows per product, so that the weight is not read too
# often; maximum number of scores for that many rows; and scores per slab of classes beyond that.
_SCORES, _FEWEST_ROWS, _MOST_SCORES, _SLAB = 40_000_000, 256, 64_000_000, 19_000_000
# On a GPU, up to this many scores all log-probabilities are computed, then the requested gathered.
FEW_SCORES = 8_000_000


# Values held per log-probability, including itself: in top_classes, whose sort keys take six times
# the memory but only for some rows at a time, and in drawn_by.
TOP_COPIES, _TOP_PARTS = 4.0, 4
DRAW_COPIES = 5.0


class Layer(NamedTuple):
    """Scores ``cap(rows @ weight.T + bias) / temperature``, with ``c * tanh(score / c)`` as cap."""

    weight: Tensor
    bias: Tensor | None
    softcap: float = 0.0
    temperature: float = 1.0
    chunk_rows: int | str = "auto"

    @property
    def shape(self) -> tuple[float, float]:
        """Soft cap and temperature, which are applied after the bias."""
        return self.softcap, self.temperature


def is_predictable(rows: Tensor, k: int = 0) -> bool:
    """Whether kernels support these rows, and the top k classes."""
    return (
        k <= MOST_BEST
        and is_eager(rows)
        and kernels.selected("best_classes", rows.device.type, rows.dtype) != "reference"
    )


def best_classes(
    rows: Tensor, layer: Layer, k: int, *, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (or scores) and ids of the top k classes ``(n, k)``, best first."""
    if fits_one_cpu_product(rows, layer.weight.shape[0], layer.chunk_rows):
        scores = linear(rows, layer.weight, layer.bias)
        values, classes, _ = kernels.prediction.best(
            "auto", scores, None, *layer.shape, k, normalised
        )
        return values, classes
    step, some = _sizes(rows, layer)
    if some < layer.weight.shape[0]:
        return _joined(
            [_best_by_slabs(part, layer, k, some, normalised) for part in rows.split(step)]
        )
    found = []
    for scores, bias in _chunks(rows, layer, step):
        found.append(kernels.prediction.best("auto", scores, bias, *layer.shape, k, normalised)[:2])
    return _joined(found)


def log_normalizers(rows: Tensor, layer: Layer) -> Tensor:
    """The logsumexp of the scores of each row, ``(n,)``."""
    step, some = _sizes(rows, layer)
    if some < layer.weight.shape[0]:
        of_parts = [
            _by_slabs(part, layer, some, peaks=False).choose(0)[0] for part in rows.split(step)
        ]
    else:
        of_parts = [_totals(*chunk, layer) for chunk in _chunks(rows, layer, step)]
    return of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts)


def _totals(scores: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
    total: Tensor = kernels.prediction.best("auto", scores, bias, *layer.shape, 0, True)[2]
    return total


def chosen_scores(rows: Tensor, layer: Layer, classes: Tensor) -> Tensor:
    """Scores of the given classes ``(n, k)``, after soft cap and temperature."""
    scores: Tensor = kernels.products.scores("auto", rows, layer.weight, layer.bias, classes)
    if layer.softcap:
        capped = layer.softcap * torch.tanh(scores / layer.softcap)
        scores = capped.masked_fill_(scores == -math.inf, -math.inf)
    return scores if layer.temperature == 1.0 else scores.div_(layer.temperature)


def log_probs_of(rows: Tensor, layer: Layer, classes: Tensor) -> Tensor:
    """Log-probabilities of the given classes ``(n, k)``."""
    step = _sizes(rows, layer)[0]
    wide = rows.dtype == accumulation_dtype(rows.dtype)
    if not rows.is_cpu and rows.shape[0] * layer.weight.shape[0] <= FEW_SCORES:
        # For small problems fewer launches matter more than a second pass over the scores.
        return all_log_probs(rows, layer).gather(-1, classes)
    if rows.is_cpu and wide and rows.shape[0] <= step and layer.shape == (0.0, 1.0):
        # These scores are not rounded, so the requested ones can be gathered.
        ((scores, _),) = _chunks(rows, layer, step)
        own, total = scores.gather(-1, classes), _totals(scores, None, layer)
    else:
        own, total = chosen_scores(rows, layer, classes), log_normalizers(rows, layer)
    # In a fully masked row all log-probabilities are -inf.
    total = total.unsqueeze(-1)
    return own.sub_(total.masked_fill_(total == -math.inf, 0.0))


def all_log_probs(rows: Tensor, layer: Layer) -> Tensor:
    """Log-probabilities of all classes, ``(n, classes)``, computed in place in the result."""
    shape = rows.shape[0], layer.weight.shape[0]
    made = kernels.empty(shape, accumulation_dtype(rows.dtype), rows.device)
    write_log_probs(made, rows, layer)
    return made


def write_log_probs(
    made: Tensor, rows: Tensor, layer: Layer, *, exclusive: bool = True,
    offset: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes log-probabilities ``(n, classes)``, plus an offset per row, to ``made``.

    ``exclusive`` selects the softmax; otherwise the sigmoid is used. ``made`` may be some columns
    of a larger matrix.
    """
    rows, layer = _tempered(rows, layer)
    on_cpu = rows.device.type == "cpu"
    step = _sizes(rows, layer)[0] if on_cpu else max(1, rows.shape[0])
    bias = None if on_cpu else layer.bias
    for first in range(0, rows.shape[0], step):
        here = slice(first, min(first + step, rows.shape[0]))
        part = part_of(made, here)
        scores_into(part, part_of(rows, here), layer.weight, layer.bias if on_cpu else None)
        if exclusive:
            own = None if offset is None else part_of(offset, here)
            kernels.prediction.log_softmax_("auto", part, bias, *layer.shape, own)
        else:
            kernels.prediction.log_sigmoid_("auto", part, bias, *layer.shape)


def write_topk_log_probs(out: Tensor, rows: Tensor, layer: Layer, k: int) -> None:
    """Writes log-probabilities of the top-k softmax, ``(n, classes)``; -inf for other classes."""
    step = _sizes(rows, layer)[0]
    parts = out.split(step) if rows.shape[0] else ()
    for part, (scores, bias) in zip(parts, _chunks(rows, layer, step), strict=False):
        kernels.topk_softmax.logs_into("auto", part, scores, bias, k)


def topk_log_probs_of(rows: Tensor, layer: Layer, k: int, classes: Tensor) -> Tensor:
    """Log-probabilities of the top-k softmax for the given classes ``(n, m)``."""
    # Copies: scores and log-probabilities are held at the same time.
    step, found = _sizes(rows, layer, 2.0)[0], []
    for part, (scores, bias) in zip(classes.split(step), _chunks(rows, layer, step), strict=True):
        logs = torch.empty_like(scores, memory_format=torch.contiguous_format)
        kernels.topk_softmax.logs_into("auto", logs, scores, bias, k)
        found.append(logs.gather(-1, part))
    return found[0] if len(found) == 1 else torch.cat(found)


def draw_classes(rows: Tensor, layer: Layer, uniform: Tensor) -> Tensor:
    """Samples class ids from uniform numbers ``(n, m)`` in [0, 1), float64.

    -1 for rows without probabilities.
    """
    if fits_one_cpu_product(rows, layer.weight.shape[0], layer.chunk_rows):
        return drawn_by(linear(rows, layer.weight, layer.bias), uniform, *layer.shape)
    step, some = _sizes(rows, layer, DRAW_COPIES)
    numbers = uniform.split(step)
    if some < layer.weight.shape[0]:
        parts = zip(rows.split(step), numbers, strict=True)
        drawn = [_draw_by_slabs(part, layer, of_part, some) for part, of_part in parts]
    else:
        chunks = zip(_chunks(rows, layer, step), numbers, strict=True)
        drawn = [
            kernels.prediction.draw("auto", scores, bias, *layer.shape, of_part)
            for (scores, bias), of_part in chunks
        ]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _tempered(rows: Tensor, layer: Layer) -> tuple[Tensor, Layer]:
    """Divides rows and bias, which are small, by the temperature; on a CPU in full precision."""
    temperature = layer.temperature
    if temperature == 1.0 or layer.softcap or rows.device.type != "cpu":
        return rows, layer
    if rows.dtype != accumulation_dtype(rows.dtype):
        return rows, layer
    bias = None if layer.bias is None else layer.bias / temperature
    return rows / temperature, layer._replace(bias=bias, temperature=1.0)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    values, classes = map(torch.cat, zip(*parts, strict=True))
    return values, classes


def rows_held(rows: Tensor, n_classes: int, chunk_rows: int | str, copies: float = 1.0) -> int:
    """Rows whose scores are held at a time; ``copies`` is the number of buffers on a CPU."""
    if rows.device.type != "cuda":
        copies *= accumulation_dtype(rows.dtype).itemsize / rows.element_size()
        return rows_at_a_time(chunk_rows, rows, n_classes, copies)
    step = min(max(1, rows.shape[0]), max(_FEWEST_ROWS, _SCORES // n_classes // 128 * 128))
    return min(step, chunk_rows) if isinstance(chunk_rows, int) else step


def _sizes(rows: Tensor, layer: Layer, copies: float = 1.0) -> tuple[int, int]:
    """Rows and classes whose scores are held at a time; ``copies`` as in :func:`rows_held`."""
    n_classes = layer.weight.shape[0]
    # A soft cap needs more buffers.
    copies = max(copies, 4.0 if layer.softcap else 1.0)
    step = rows_held(rows, n_classes, layer.chunk_rows, copies)
    if rows.device.type != "cuda" or step * n_classes <= _MOST_SCORES:
        return step, n_classes
    step = min(step, _FEWEST_ROWS)
    # A multiple of the number of classes per block.
    return step, -(-(_SLAB // step) // 4096) * 4096


def room_for_scores(rows: Tensor, n_classes: int, step: int) -> Tensor:
    """A buffer for the scores of up to ``step`` rows."""
    shape = min(rows.shape[0], step), slab_stride(rows, n_classes)
    held = kernels.empty(shape, accumulation_dtype(rows.dtype), rows.device)
    return held if shape[1] == n_classes else held[:, :n_classes]


def _chunks(rows: Tensor, layer: Layer, step: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields scores chunk by chunk, in one buffer, and the bias that is still to be added."""
    on_cpu, n_classes = rows.device.type == "cpu", layer.weight.shape[0]
    size = rows.shape[0] * n_classes * rows.itemsize
    if on_cpu and rows.shape[0] <= step and size < kernels.LARGE and rows.itemsize >= 4:
        yield linear(rows, layer.weight, layer.bias), None
        return
    held = room_for_scores(rows, n_classes, step)
    for part in rows.split(step):
        if on_cpu:
            yield scores_into(held, part, layer.weight, layer.bias), None
        else:
            yield scores_into(held, part, layer.weight, None), layer.bias


def _by_slabs(
    rows: Tensor, layer: Layer, some: int, *, peaks: bool = True, levels: bool = True
) -> Any:
    """Peaks and levels of all blocks of classes, computed slab by slab."""
    # Imported here: Triton may not be installed.
    from lastlayer.kernels.prediction.triton import Blocks

    n, n_classes = rows.shape[0], layer.weight.shape[0]
    held = torch.empty(n, some, dtype=torch.float32, device=rows.device)
    blocks = Blocks.empty(rows, n, n_classes, peaks=peaks, levels=levels)
    # One call makes all parts: slicing each takes longer on the host.
    weights = layer.weight.split(some)
    biases = [None] * len(weights) if layer.bias is None else layer.bias.split(some)
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        size = weight.shape[0]
        scores = scores_into(held if size == some else held[:, :size], rows, weight, None)
        blocks.read_(scores, bias, *layer.shape, i * some)
    return blocks


def _scores_of_blocks(rows: Tensor, layer: Layer, chosen: Tensor, width: int) -> Tensor:
    """Products ``(n, m * width)`` of rows with the classes of blocks ``(n, m)``, without bias."""
    n_classes = layer.weight.shape[0]
    lanes = torch.arange(width, device=rows.device)
    columns = (chosen.unsqueeze(-1) * width + lanes).flatten(1)
    columns = columns.masked_fill_((columns < 0) | (columns >= n_classes), -1)
    made: Tensor = kernels.products.scores("auto", rows, layer.weight, None, columns)
    return made


def _best_by_slabs(
    rows: Tensor, layer: Layer, k: int, some: int, normalised: bool
) -> tuple[Tensor, Tensor]:
    blocks = _by_slabs(rows, layer, some, levels=normalised)
    total, chosen = blocks.choose(k)
    scores = _scores_of_blocks(rows, layer, chosen, blocks.width)
    found: tuple[Tensor, Tensor] = blocks.best(
        scores, layer.bias, *layer.shape, total, chosen, k, normalised=normalised, compact=True
    )
    return found


def _draw_by_slabs(rows: Tensor, layer: Layer, uniform: Tensor, some: int) -> Tensor:
    blocks = _by_slabs(rows, layer, some, peaks=False)
    chosen, rest = blocks.draw(uniform)
    drawn = []
    # Each sample needs the scores of one block.
    step = max(1, _SLAB // (max(1, rows.shape[0]) * blocks.width))
    for of_blocks, of_rest in zip(chosen.split(step, 1), rest.split(step, 1), strict=True):
        scores = _scores_of_blocks(rows, layer, of_blocks, blocks.width)
        drawn.append(blocks.draw_inside(
            scores, layer.bias, *layer.shape, of_blocks.contiguous(), of_rest.contiguous(),
            compact=True,
        ))  # fmt: skip
    return torch.cat(drawn, 1)


def top_classes(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and classes ``(rows, k)`` of scores ``(rows, n)``, the largest first.

    Ties go to the lower class id, unlike in ``torch.topk``, where their order is undefined. The
    values have a gradient. NaN counts as the largest value, as in torch.
    """
    known = scores.detach()
    if is_predictable(known, k):
        classes = kernels.prediction.best("auto", known, None, 0.0, 1.0, k, False)[1]
        return scores.gather(-1, classes), classes
    # Checking for ties needs a host sync on a GPU, where sorting all rows is cheap; and values
    # cannot be read while tracing.
    on_cpu = known.device.type == "cpu" and values_are_checked(known)
    classes = _top_unless_tied(known, k) if on_cpu else _top_in_order(known, k)
    return scores.gather(-1, classes), classes


def _top_unless_tied(scores: Tensor, k: int) -> Tensor:
    """``torch.topk`` for rows without a tie at the k-th score, else :func:`_top_in_order`."""
    n = scores.shape[-1]
    values, classes = scores.topk(min(k + 1, n))
    kept = classes[:, :k].sort(-1).values
    order = scores.gather(-1, kept).sort(dim=-1, descending=True, stable=True).indices
    kept = kept.gather(-1, order)
    if k < n:
        tied = ~(values[:, k - 1] > values[:, k])
        if bool(tied.any()):
            kept[tied] = _top_in_order(scores[tied], k)
    return kept


def _top_in_order(scores: Tensor, k: int) -> Tensor:
    if is_exporting():
        # ONNX has only one sort; in ties the lower index comes first.
        by = {} if torch.onnx.is_in_onnx_export() else {"stable": True}
        return scores.sort(dim=-1, descending=True, **by).indices[..., :k]
    if scores.dtype == torch.float64:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    parts = scores.split(max(1, -(-scores.shape[0] // _TOP_PARTS)))
    keys = torch.cat([_unique_keys(part).topk(k).values for part in parts])
    return keys.bitwise_not_().bitwise_and_(0xFFFFFFFF)


def _unique_keys(scores: Tensor) -> Tensor:
    """Sort keys: float32 scores as ordered integers in the high bits, ~class in the low bits."""
    inf = torch.inf
    # A NaN of either sign goes to the top; + 0.0 makes -0.0 equal to 0.0.
    bits = scores.nan_to_num(nan=inf, posinf=inf, neginf=-inf).add_(0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    classes = torch.arange(scores.shape[-1], device=scores.device)
    return (bits.long() << 32).add_(classes.bitwise_not_().bitwise_and_(0xFFFFFFFF))


def drawn_by(
    log_probs: Tensor, uniform: Tensor, softcap: float = 0.0, temperature: float = 1.0
) -> Tensor:
    """Samples class ids ``(rows, m)`` from log-probabilities ``(rows, n)`` by inverse CDF.

    ``uniform`` ``(rows, m)`` is in [0, 1). The result is the first class whose cumulative
    probability exceeds the number: a class of probability 0 is never drawn. -1 for rows without
    probabilities.
    """
    drawn: Tensor = kernels.prediction.draw("auto", log_probs, None, softcap, temperature, uniform)
    return drawn


def entmax_log_probs(scores: Tensor, alpha: float) -> Tensor:
    """Log-probabilities of entmax; -inf, without a gradient, outside the support.

    ``scores`` may be overwritten.
    """
    if is_eager(scores) and not scores.requires_grad:
        kernels.entmax.log_("auto", scores, alpha)
        return scores
    probs = entmax(scores, alpha)
    outside = probs == 0
    # log(1) outside the support: the gradient of log(0) would be NaN.
    return probs.masked_fill(outside, 1.0).log().masked_fill(outside, -torch.inf)


def write_entmax_log_probs(out: Tensor, rows: Tensor, alpha: float, layer: Layer) -> None:
    """Writes log-probabilities of entmax on the scores of a layer to ``out``, contiguous."""
    # A CPU works in place; elsewhere the probabilities of a chunk need an additional buffer.
    step = max(1, rows.shape[0])
    if rows.device.type != "cpu":
        step = rows_held(rows, layer.weight.shape[0], layer.chunk_rows)
    for first in range(0, rows.shape[0], step):
        part = slice(first, min(first + step, rows.shape[0]))
        scores = scores_into(part_of(out, part), part_of(rows, part), layer.weight, layer.bias)
        kernels.entmax.log_("auto", scores, alpha)


def log_softmax(scores: Tensor) -> Tensor:
    """``torch.log_softmax`` over the last dimension; -inf in a fully masked row."""
    if scores.is_cpu and is_eager(scores):
        made = torch.log_softmax(scores, -1)
        # Fully masked rows are NaN in every column, so the first shows them. numpy's sum takes a
        # fifth of torch's host time.
        if not made.numel() or not math.isnan(np.add.reduce(as_numpy(made)[:, 0])):
            return made
    known = scores.detach()
    masked = known.amax(-1, keepdim=True) == -torch.inf
    made = torch.log_softmax(scores.masked_fill(masked, 0.0), -1)
    return made.masked_fill(masked, -torch.inf)
