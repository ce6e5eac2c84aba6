"""The loss along paths of a binary tree on CUDA, without atomics: the order of a sum is fixed.

* ``losses_of_rows``: a program has one row, its hidden state in registers, and gathers the vectors
  of a few nodes of its path at a time. The gradient of hidden comes out of the same pass.
* Rows are sorted by their class's place in the tree, so that those of a node are one run. The runs
  are cut at every ``tile`` rows: ``sum_tiles`` adds up the pieces, and writes those that are a
  whole run; ``sum_pieces`` adds up the pieces of the others, from left to right.

README.md has the derivation.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2
from lastlayer.kernels.tree_path._losses_triton import losses_of_rows, sort_keys
from lastlayer.kernels.tree_path._sums_triton import compare_paths, sum_pieces, sum_tiles

# Rows between two cuts; more where the pieces of long runs would take too much memory.
TILE, WIDEST_TILE, PIECE_NUMBERS = 64, 1024, 1 << 25
# Levels of a row that a program has, and the rows that it reads at a time; pieces of a run that it
# reads at a time; and how many numbers of each.
LEVELS, ROWS, PIECES, WIDEST = 4, 4, 16, 512


def loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rank: Tensor,
    path_start: Tensor,
    path_edge: Tensor,
    ignore_index: int | None,
    longest: int,
    to_nodes: bool,
    to_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference's."""
    n, depth = hidden.shape
    hidden, weight, target = _in_rows(hidden), _in_rows(weight), target.contiguous()
    losses = hidden.new_empty(n, dtype=torch.float32)
    slopes = hidden.new_zeros(n if to_nodes else 0, longest, dtype=torch.float32)
    gradient = hidden.new_empty(n if to_hidden else 0, depth, dtype=torch.float32)
    ignoring = dict(ignored=ignore_index or 0, IGNORES=ignore_index is not None)
    if not n:
        return losses, target.new_empty(0), slopes, gradient
    order = None
    if to_nodes:
        keys = torch.empty(n, device=hidden.device, dtype=torch.int32)
        sort_keys[(cdiv(n, 1024),)](
            target, rank, keys, n, len(rank), **ignoring, ROWS=1024, enable_fp_fusion=True
        )
        order = torch.sort(keys, stable=True).indices
    width = max(16, next_power_of_2(depth))
    # A warp or two: a row is little work, and many rows at a time hide the wait for a gather.
    nodes = max(1, min(16, 1024 // width, next_power_of_2(longest)))
    losses_of_rows[(n,)](
        hidden, weight, bias, target, order, path_start, path_edge, losses, slopes, gradient,
        depth, longest, len(rank), hidden.stride(0), weight.stride(0), **ignoring, NODES=nodes,
        WIDTH=width, BIASED=bias is not None, ORDERED=order is not None, TO_NODES=to_nodes,
        TO_HIDDEN=to_hidden, num_warps=max(1, nodes * width // 1024),
        enable_fp_fusion=True,
    )  # fmt: skip
    return losses, target.new_empty(0) if order is None else order, slopes, gradient


def to_nodes(
    slopes: Tensor,
    factor: Tensor,
    hidden: Tensor,
    target: Tensor,
    order: Tensor,
    path_start: Tensor,
    path_edge: Tensor,
    ignore_index: int | None,
    n_nodes: int,
    dtype: torch.dtype,
    to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor]:
    """As the reference's. The host waits for nothing."""
    weight = slopes.new_zeros(n_nodes if to_weight else 0, hidden.shape[1], dtype=dtype)
    bias = slopes.new_zeros(n_nodes if to_bias else 0, dtype=dtype)
    runs = _runs(target, order, path_start, path_edge, ignore_index, slopes.shape[1], False)
    _add_up(runs, slopes, factor, hidden, order, path_edge, weight, bias, None)
    return weight, bias


def to_touched_nodes(
    slopes: Tensor,
    factor: Tensor,
    hidden: Tensor,
    target: Tensor,
    order: Tensor,
    path_start: Tensor,
    path_edge: Tensor,
    ignore_index: int | None,
    dtype: torch.dtype,
    to_weight: bool,
    to_bias: bool,
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's. The host waits for the number of nodes, unless there is room for most."""
    runs = _runs(target, order, path_start, path_edge, ignore_index, slopes.shape[1], True)
    new, m = slopes.new_zeros, most
    if m is None:
        new, m = slopes.new_empty, int(runs.place[-1]) if runs.place.numel() else 0
    touched = new(m, dtype=torch.int64)
    weight = new(m if to_weight else 0, hidden.shape[1], dtype=dtype)
    bias = new(m if to_bias else 0, dtype=dtype)
    _add_up(runs, slopes, factor, hidden, order, path_edge, weight, bias, touched)
    return touched, weight, bias


class _Runs(NamedTuple):
    """Of each row, in order: where its path starts, its nodes, and those that it shares."""

    start: Tensor
    length: Tensor
    # How many nodes the row before it has as well.
    shared: Tensor
    # (longest, n): how many nodes come up first at this level and row, or before; or empty.
    place: Tensor


def _runs(
    target: Tensor,
    order: Tensor,
    path_start: Tensor,
    path_edge: Tensor,
    ignore_index: int | None,
    longest: int,
    placed: bool,
) -> _Runs:
    n = len(order)
    start = target.new_empty(n)
    length, shared = torch.empty(2, n, device=target.device, dtype=torch.int32).unbind()
    new = torch.empty(longest if placed else 0, n, device=target.device, dtype=torch.int32)
    if n:
        compare_paths[(cdiv(n, 32),)](
            target.contiguous(), order, path_start, path_edge, start, length, shared, new, n,
            len(path_start) - 1, longest, ignored=ignore_index or 0,
            IGNORES=ignore_index is not None, ROWS=32, LEVELS=32, PLACED=placed,
            enable_fp_fusion=True,
        )  # fmt: skip
    place = torch.cumsum(new.view(-1), 0, dtype=torch.int32) if placed else new
    return _Runs(start, length, shared, place)


def _add_up(
    runs: _Runs,
    slopes: Tensor,
    factor: Tensor,
    hidden: Tensor,
    order: Tensor,
    path_edge: Tensor,
    weight: Tensor,
    bias: Tensor,
    touched: Tensor | None,
) -> None:
    """Writes sums into the rows of weight and bias, and which nodes they are of."""
    (n, longest), depth = slopes.shape, hidden.shape[1]
    if not n or not weight.numel() + bias.numel():
        return
    hidden = _in_rows(hidden)
    tile = TILE
    while tile < WIDEST_TILE and cdiv(n, tile) * longest * depth > PIECE_NUMBERS:
        tile *= 2
    tiles = cdiv(n, tile)
    # Of the run that starts in a tile and goes on, and of the one that came in, at each level.
    pieces = slopes.new_empty(2, tiles, longest, depth if weight.numel() else 0)
    bias_pieces = slopes.new_empty(2, tiles, longest)
    through = torch.empty(tiles, longest, device=slopes.device, dtype=torch.int32)
    width = min(WIDEST, max(16, next_power_of_2(depth)))
    blocks = cdiv(depth, width) if weight.numel() else 1
    given = runs.start, runs.shared, runs.place, path_edge, touched, weight, bias
    parts = pieces, bias_pieces, through
    options: dict[str, Any] = dict(
        TILE=tile, WIDTH=width, PLACED=touched is not None,
        TO_WEIGHT=weight.numel() > 0, TO_BIAS=bias.numel() > 0, enable_fp_fusion=True,
    )  # fmt: skip
    sum_tiles[(n, cdiv(longest, LEVELS), blocks)](
        slopes, factor, hidden, order, runs.length, *given, *parts, n, depth, longest,
        hidden.stride(0), int(factor.dim() > 0), LEVELS=LEVELS, GROUP=ROWS, **options,
    )  # fmt: skip
    if tiles > 1:
        sum_pieces[(tiles - 1, longest, blocks)](
            *given, *parts, n, tiles, depth, longest, GROUP=PIECES, **options
        )


def _in_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
