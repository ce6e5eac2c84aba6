"""How much memory the scores of a fused loss may take: one table for all engines.

A chunk is some rows of scores with all classes, a slab all rows with some classes, a tile some
spans of some texts. The larger they are, the less often the weight and its gradient are read.
"""

from collections.abc import Iterator

from torch import Tensor

from lastlayer._torch import accumulation_dtype

# Bytes of scores held at a time, by engine, device and setting.
BYTES = {
    ("rows", "cuda", "auto"): 1_060_000_000,
    ("rows", "cuda", "low"): 290_000_000,
    ("rows", "cpu", "auto"): 48_000_000,
    ("rows", "cpu", "low"): 12_000_000,
    ("labels", "cuda", "auto"): 900_000_000,
    ("labels", "cuda", "low"): 250_000_000,
    ("labels", "cpu", "auto"): 8_000_000,
    ("labels", "cpu", "low"): 2_000_000,
    ("similarity", "cuda", "auto"): 190_000_000,
    ("similarity", "cuda", "low"): 47_500_000,
    ("similarity", "cpu", "auto"): 16_000_000,
    ("similarity", "cpu", "low"): 4_000_000,
    ("spans", "cuda", "auto"): 1 << 27,
    ("spans", "cuda", "low"): 1 << 25,
    ("spans", "cpu", "auto"): 1 << 21,
    ("spans", "cpu", "low"): 1 << 19,
    ("sampled", "cuda", "auto"): 48_000_000,
    ("sampled", "cuda", "low"): 12_000_000,
    ("sampled", "cpu", "auto"): 48_000_000,
    ("sampled", "cpu", "low"): 12_000_000,
    # In half precision chunks are larger, so that products are, and launches few.
    ("sampled half", "cuda", "auto"): 144_000_000,
    ("sampled half", "cuda", "low"): 36_000_000,
}
# On a CPU a quarter of the weight's own size is allowed as well: less would be slower.
_SHARE_OF_WEIGHT = 4
# Rows of a chunk, and labels of a slab, that suit the tiles of a matrix unit.
_STEP = {"cuda": 128, "cpu": 8}
_LABEL_STEP = {"cuda": 128, "cpu": 16}


def device_kind(tensor: Tensor) -> str:
    """Which entries of the table count: "cpu", or "cuda" for every other device."""
    return "cpu" if tensor.device.type == "cpu" else "cuda"


def budget_bytes(engine: str, chunk: str, tensor: Tensor) -> int:
    """Bytes of scores that "auto" or "low" allow on the device of ``tensor``."""
    return BYTES[engine, device_kind(tensor), chunk]


def as_chunk(text: str) -> int | str:
    """A chunk size as it was before an operation took it as a string."""
    return int(text) if text.isdecimal() else text


def rows_at_a_time(
    chunk_rows: int | str, hidden: Tensor, n_classes: int, copies: float = 1.0
) -> int:
    """Rows of a chunk; ``copies`` is how many times its scores are held in memory."""
    n = max(1, hidden.shape[0])
    if isinstance(chunk_rows, int):
        return min(n, chunk_rows)
    kind = device_kind(hidden)
    budget = BYTES["rows", kind, chunk_rows]
    row_bytes = max(1, n_classes) * hidden.element_size() * copies
    if n * row_bytes <= budget:
        return n
    step = _STEP[kind]
    if chunk_rows == "auto" and kind == "cpu":
        weight_bytes = n_classes * hidden.shape[-1] * hidden.element_size()
        budget = max(budget, weight_bytes // _SHARE_OF_WEIGHT)
    fitting = int(budget / row_bytes)
    fitting = fitting // step * step or max(1, fitting)
    # Chunks of the same size: a small last one would pay for the whole weight again.
    even = -(-n // -(-n // fitting))
    return min(n, -(-even // step) * step)


def row_chunks(
    rows: Tensor, n_classes: int, chunk_rows: int | str, copies: float
) -> Iterator[slice]:
    """Slices of the rows: at least one, an empty one where there are no rows.

    ``copies`` is how many numbers in the accumulation dtype are held for each row and class.
    """
    size = accumulation_dtype(rows.dtype).itemsize
    step = rows_at_a_time(chunk_rows, rows, n_classes, copies * size / rows.element_size())
    n = rows.shape[0]
    for first in range(0, max(1, n), step):
        yield slice(first, min(n, first + step))


def classes_at_a_time(chunk_classes: int | str, hidden: Tensor, n_classes: int) -> int:
    """Labels of a slab."""
    if isinstance(chunk_classes, int):
        return min(n_classes, chunk_classes)
    step = _LABEL_STEP[device_kind(hidden)]
    row_bytes = max(1, hidden.shape[0]) * hidden.element_size()
    fitting = budget_bytes("labels", chunk_classes, hidden) // row_bytes
    return min(n_classes, max(1, fitting // step) * step)


def slab_stride(hidden: Tensor, classes: int) -> int:
    """How far apart the rows of a slab are in memory: on a GPU as suits its matrix units."""
    step = 1 if hidden.device.type == "cpu" else _LABEL_STEP["cuda"]
    return -(-classes // step) * step


def spans_at_a_time(chunk_spans: int | str, vectors: Tensor) -> int:
    """Scores of a tile of spans."""
    if isinstance(chunk_spans, str):
        return budget_bytes("spans", chunk_spans, vectors) // vectors.element_size()
    return chunk_spans
