"""How many rows of scores are stored at a time."""

from torch import Tensor

# Bytes of scores. The larger a chunk, the less often the weight and its gradient are read.
_BYTES = {"cuda": 1_060_000_000, "cpu": 48_000_000}
_LOW_BYTES = {"cuda": 290_000_000, "cpu": 12_000_000}
# On a CPU a quarter of the weight's own size is allowed as well: less would be slower.
_SHARE_OF_WEIGHT = 4
# Rows that suit the tiles of a matrix unit.
_STEP = {"cuda": 128, "cpu": 8}


def budget_bytes(chunk_rows: str, hidden: Tensor) -> int:
    """Bytes of scores that "auto" or "low" allow."""
    return (_BYTES if chunk_rows == "auto" else _LOW_BYTES)[_kind(hidden)]


def _kind(hidden: Tensor) -> str:
    return "cpu" if hidden.device.type == "cpu" else "cuda"


def rows_at_a_time(
    chunk_rows: int | str, hidden: Tensor, n_classes: int, copies: float = 1.0
) -> int:
    """Rows of a chunk; ``copies`` is how many times its scores are held in memory."""
    n = max(1, hidden.shape[0])
    if isinstance(chunk_rows, int):
        return min(n, chunk_rows)
    step = _STEP[_kind(hidden)]
    budget = budget_bytes(chunk_rows, hidden)
    if chunk_rows == "auto" and _kind(hidden) == "cpu":
        weight_bytes = n_classes * hidden.shape[-1] * hidden.element_size()
        budget = max(budget, weight_bytes // _SHARE_OF_WEIGHT)
    fitting = int(budget / (max(1, n_classes) * hidden.element_size() * copies))
    fitting = fitting // step * step or max(1, fitting)
    # Chunks of the same size: a small last one would pay for the whole weight again.
    chunks = -(-n // fitting)
    even = -(-n // chunks)
    return min(n, -(-even // step) * step)
