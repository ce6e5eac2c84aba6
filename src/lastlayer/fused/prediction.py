"""What a softmax over a linear layer predicts, without gradients: a few scores are held at a time.

Scores are those of some rows and all classes; on a GPU, where there are very many classes, of a
slab of classes, and the few that matter are made again. :mod:`lastlayer.kernels.prediction` has
what is done with them.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype, is_eager
from lastlayer.fused.scores import rows_at_a_time, scores_into, slab_stride
from lastlayer.kernels.prediction import MOST_BEST

# On a GPU: scores that are held; rows that a product has at least, so that the weight is not read
# too often; scores that so few rows may hold; and those of a slab of classes, where they are more.
_SCORES, _FEWEST_ROWS, _MOST_SCORES, _SLAB = 40_000_000, 256, 64_000_000, 12_000_000


class Layer(NamedTuple):
    """Scores ``cap(rows @ weight.T + bias) / temperature``, with ``c * tanh(score / c)`` as cap."""

    weight: Tensor
    bias: Tensor | None
    softcap: float = 0.0
    temperature: float = 1.0
    chunk_rows: int | str = "auto"

    @property
    def shape(self) -> tuple[float, float]:
        """What scores go through after the bias."""
        return self.softcap, self.temperature


def is_predictable(rows: Tensor, k: int = 0) -> bool:
    """Whether there are kernels for these rows, and for the k best classes of them."""
    return (
        k <= MOST_BEST
        and is_eager(rows)
        and kernels.selected("best_classes", rows.device.type, rows.dtype) != "reference"
    )


def best_classes(
    rows: Tensor, layer: Layer, k: int, *, normalised: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, or scores, and ids of the k best classes ``(n, k)``, the best first."""
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
        of_parts = [
            kernels.prediction.best("auto", scores, bias, *layer.shape, 0, True)[2]
            for scores, bias in _chunks(rows, layer, step)
        ]
    return of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts)


def chosen_scores(rows: Tensor, layer: Layer, classes: Tensor) -> Tensor:
    """Of classes ``(n, k)`` alone, after cap and temperature."""
    scores: Tensor = kernels.products.scores("auto", rows, layer.weight, layer.bias, classes)
    if layer.softcap:
        capped = layer.softcap * torch.tanh(scores / layer.softcap)
        scores = capped.masked_fill_(scores == -math.inf, -math.inf)
    return scores if layer.temperature == 1.0 else scores.div_(layer.temperature)


def log_probs_of(rows: Tensor, layer: Layer, classes: Tensor) -> Tensor:
    """Of classes ``(n, k)``."""
    total = log_normalizers(rows, layer).unsqueeze(-1)
    # In a fully masked row all are -inf.
    return chosen_scores(rows, layer, classes) - total.masked_fill_(total == -math.inf, 0.0)


def all_log_probs(rows: Tensor, layer: Layer) -> Tensor:
    """``(n, classes)``; memory is that of the result."""
    rows, layer = _tempered(rows, layer)
    n, n_classes = rows.shape[0], layer.weight.shape[0]
    made = kernels.empty((n, n_classes), accumulation_dtype(rows.dtype), rows.device)
    on_cpu = rows.device.type == "cpu"
    step = _sizes(rows, layer)[0] if on_cpu else max(1, n)
    for first in range(0, n, step):
        part = made[first : first + step]
        scores_into(part, rows[first : first + step], layer.weight, layer.bias if on_cpu else None)
        bias = None if on_cpu else layer.bias
        kernels.prediction.log_softmax_("auto", part, bias, *layer.shape)
    return made


def draw_classes(rows: Tensor, layer: Layer, uniform: Tensor) -> Tensor:
    """Class ids for numbers ``(n, m)`` in [0, 1), float64; -1 in a row without probabilities."""
    rows, layer = _tempered(rows, layer)
    # On a CPU cumulated shares are in float64.
    step, some = _sizes(rows, layer, 5.0)
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
    """On a CPU the temperature goes into rows and bias, which are small; not in half precision."""
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
    """Rows of which scores of all classes are held at a time, on a CPU so many times."""
    if rows.device.type != "cuda":
        copies *= accumulation_dtype(rows.dtype).itemsize / rows.element_size()
        return rows_at_a_time(chunk_rows, rows, n_classes, copies)
    step = min(max(1, rows.shape[0]), max(_FEWEST_ROWS, _SCORES // n_classes // 128 * 128))
    return min(step, chunk_rows) if isinstance(chunk_rows, int) else step


def _sizes(rows: Tensor, layer: Layer, copies: float = 1.0) -> tuple[int, int]:
    """Rows and classes of which scores are held at a time, on a CPU so many times."""
    n_classes = layer.weight.shape[0]
    # A cap takes a few more.
    copies = max(copies, 4.0 if layer.softcap else 1.0)
    step = rows_held(rows, n_classes, layer.chunk_rows, copies)
    if rows.device.type != "cuda" or step * n_classes <= _MOST_SCORES:
        return step, n_classes
    step = min(step, _FEWEST_ROWS)
    # A multiple of the classes of a block.
    return step, -(-(_SLAB // step) // 4096) * 4096


def room_for_scores(rows: Tensor, n_classes: int, step: int) -> Tensor:
    """Memory for the scores of up to ``step`` rows."""
    shape = min(rows.shape[0], step), slab_stride(rows, n_classes)
    held = kernels.empty(shape, accumulation_dtype(rows.dtype), rows.device)
    return held if shape[1] == n_classes else held[:, :n_classes]


def _chunks(rows: Tensor, layer: Layer, step: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scores of some rows after the other, in the same memory, and the bias still to be added."""
    on_cpu, held = rows.device.type == "cpu", room_for_scores(rows, layer.weight.shape[0], step)
    for part in rows.split(step):
        if on_cpu:
            yield scores_into(held, part, layer.weight, layer.bias), None
        else:
            yield scores_into(held, part, layer.weight, None), layer.bias


def _by_slabs(
    rows: Tensor, layer: Layer, some: int, *, peaks: bool = True, levels: bool = True
) -> Any:
    """Peaks and levels of all blocks of classes, from a slab of scores after the other."""
    # Imported here: Triton is not on every machine.
    from lastlayer.kernels.prediction.triton import Blocks

    n, n_classes = rows.shape[0], layer.weight.shape[0]
    held = torch.empty(n, some, dtype=torch.float32, device=rows.device)
    blocks = Blocks.empty(rows, n, n_classes, peaks=peaks, levels=levels)
    for first in range(0, n_classes, some):
        weight = layer.weight[first : first + some]
        bias = None if layer.bias is None else layer.bias[first : first + some]
        scores = scores_into(held[:, : weight.shape[0]], rows, weight, None)
        blocks.read_(scores, bias, *layer.shape, first)
    return blocks


def _scores_of_blocks(rows: Tensor, layer: Layer, chosen: Tensor, width: int) -> Tensor:
    """Scores ``(n, m * width)`` of the classes of blocks ``(n, m)``; without what comes after."""
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
    # Each draw takes the scores of a block.
    step = max(1, _SLAB // (max(1, rows.shape[0]) * blocks.width))
    for of_blocks, of_rest in zip(chosen.split(step, 1), rest.split(step, 1), strict=True):
        scores = _scores_of_blocks(rows, layer, of_blocks, blocks.width)
        drawn.append(blocks.draw_inside(
            scores, layer.bias, *layer.shape, of_blocks.contiguous(), of_rest.contiguous(),
            compact=True,
        ))  # fmt: skip
    return torch.cat(drawn, 1)
