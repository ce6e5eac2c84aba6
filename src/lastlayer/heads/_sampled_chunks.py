"""How many rows of scores of drawn classes are held at a time."""

from typing import NamedTuple

# Bytes. On a GPU in half precision a gradient is kept for many rows, so that the products with it
# are large, and float32 scores for as few as stay in the cache between two kernels.
_GRADIENT = {"auto": 144_000_000, "low": 36_000_000}
_CACHED = {"auto": 36_000_000, "low": 18_000_000}
# Else both are the same memory.
_SCORES = {"auto": 48_000_000, "low": 12_000_000}
_STEP = 128


class Sizes(NamedTuple):
    """Rows of scores, and rows of their gradient: at least as many."""

    scores: int
    gradient: int


def sizes_for(chunk_rows: str, n_rows: int, n_draws: int, narrow: bool) -> Sizes:
    """For ``n_rows`` with ``n_draws`` each; ``narrow`` where the gradient is in half precision."""
    n_rows = max(1, n_rows)
    if chunk_rows.isdecimal():
        rows = min(n_rows, int(chunk_rows))
        return Sizes(rows, rows)
    if not narrow:
        rows = _even(n_rows, _SCORES[chunk_rows] // (4 * n_draws))
        return Sizes(rows, rows)
    rows = _even(n_rows, _GRADIENT[chunk_rows] // (2 * n_draws))
    return Sizes(_even(rows, _CACHED[chunk_rows] // (4 * n_draws)), rows)


def _even(n_rows: int, fitting: int) -> int:
    """Chunks of about the same size, in steps that suit the tiles of a matrix unit."""
    fitting = max(_STEP, fitting // _STEP * _STEP)
    even = -(-n_rows // -(-n_rows // fitting))
    return min(n_rows, -(-even // _STEP) * _STEP)
