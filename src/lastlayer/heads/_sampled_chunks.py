"""How many rows of scores of drawn classes are held at a time."""

# Bytes of scores, whose memory becomes that of their gradient. On a GPU in half precision chunks
# are large, so that the products with a gradient are, and launches few.
_NARROW = {"auto": 144_000_000, "low": 36_000_000}
_WIDE = {"auto": 48_000_000, "low": 12_000_000}
_STEP = 128


def rows_for(chunk_rows: str, n_rows: int, n_draws: int, narrow: bool) -> int:
    """Of ``n_rows`` with ``n_draws`` each; ``narrow`` where the gradient is in half precision."""
    n_rows = max(1, n_rows)
    if chunk_rows.isdecimal():
        return min(n_rows, int(chunk_rows))
    fitting = (_NARROW if narrow else _WIDE)[chunk_rows] // (4 * max(1, n_draws))
    fitting = max(_STEP, fitting // _STEP * _STEP)
    # Chunks of about the same size, in steps that suit the tiles of a matrix unit.
    even = -(-n_rows // -(-n_rows // fitting))
    return min(n_rows, -(-even // _STEP) * _STEP)
