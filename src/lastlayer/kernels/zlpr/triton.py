"""ZLPR on CUDA: how labels and rows are laid out, and the launches.

README.md beside this file has the derivation.
"""

import torch
from torch import Tensor

from lastlayer.kernels._triton import cdiv, next_power_of_2
from lastlayer.kernels.zlpr._gradient_triton import fill_gradient
from lastlayer.kernels.zlpr._labels_triton import BITS, HARD, LISTED, SOFT
from lastlayer.kernels.zlpr._sums_triton import merge_parts, sum_rows

# Scores that a program looks at together.
SCORES_A_PROGRAM = 2048
# Rows are cut into parts where there are fewer programs than this.
ENOUGH_PROGRAMS = 1024
LIST = 64


def forward(scores: Tensor, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    return _forward(scores, mask, *_dense(target))


def backward(
    scores: Tensor, target: Tensor, mask: Tensor | None, stats: Tensor, grad: Tensor
) -> Tensor:
    """As the reference's, from the stats of forward."""
    return _backward(scores, mask, stats, grad, *_dense(target))


def forward_listed(
    scores: Tensor,
    classes: Tensor,
    rows: Tensor,
    starts: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    smoothing: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    lists = _lists(scores, classes, rows, starts, values, smoothing)
    return _forward(scores, mask, *lists)


def backward_listed(
    scores: Tensor,
    classes: Tensor,
    rows: Tensor,
    starts: Tensor,
    values: Tensor | None,
    mask: Tensor | None,
    smoothing: float,
    stats: Tensor,
    grad: Tensor,
) -> Tensor:
    """As the reference's, from the stats of forward."""
    lists = _lists(scores, classes, rows, starts, values, smoothing)
    return _backward(scores, mask, stats, grad, *lists)


def _dense(target):
    target = _rows_together(target)
    if target.is_floating_point():
        return SOFT, target, None, None, None, 0.0
    labels = target.view(torch.uint8) if target.dtype == torch.bool else target
    return HARD, labels, None, None, None, 0.0


def _lists(scores, classes, rows, starts, values, smoothing):
    """One bit a class says whether it is listed."""
    n_rows, n = scores.shape
    words = cdiv(n, 32)
    listed = classes.clamp(min=0)
    bit = torch.where(classes < 0, 0, 1 << (listed & 31)).to(torch.int32)
    bits = torch.zeros(n_rows * words, dtype=torch.int32, device=scores.device)
    # Listed classes are all different, so that adding bits is setting them.
    bits.index_add_(0, rows * words + (listed >> 5), bit)
    bits = bits.view(n_rows, words)
    if values is None and smoothing == 0.0:
        return BITS, bits, None, None, None, 0.0
    values = torch.ones_like(classes, dtype=torch.float32) if values is None else values.float()
    return LISTED, bits, classes.contiguous(), values.contiguous(), starts.contiguous(), smoothing


def _forward(scores, mask, kind, labels, classes, values, starts, smoothing):
    scores = _rows_together(scores)
    n_rows, n = scores.shape
    losses = torch.empty(n_rows, device=scores.device, dtype=torch.float32)
    stats = torch.empty((4, n_rows), device=scores.device, dtype=torch.float32)
    counts = torch.empty(n_rows, device=scores.device, dtype=torch.uint8)
    if not n_rows:
        return losses, stats, counts.view(torch.bool)
    height, width = _tile_of(n, kind)
    tiles, blocks = cdiv(n_rows, height), cdiv(n, width)
    parts = max(1, min(cdiv(ENOUGH_PROGRAMS, tiles), blocks // 4, 1024))
    span = cdiv(blocks, parts) * width
    parts = max(1, cdiv(n, span)) if span else 1
    pieces = losses if parts == 1 else stats.new_empty((5, parts, n_rows))
    mask_view, mask_row, mask_column = _mask_of(mask)
    sum_rows[(tiles, parts)](
        scores, labels, mask_view, classes, values, starts, losses, stats, counts, pieces,
        n_rows, n, span, scores.stride(0), labels.stride(0), mask_row, mask_column, smoothing,
        ROWS=height, BLOCK=width, KIND=kind.value, MASKED=mask is not None, WHOLE=parts == 1,
        LIST=LIST, num_warps=max(1, height * width // 512), enable_fp_fusion=True,
    )  # fmt: skip
    if parts > 1:
        merge_parts[(n_rows,)](
            pieces, losses, stats, counts, n_rows, parts, PARTS=next_power_of_2(parts),
            num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return losses, stats, counts.view(torch.bool)


def _backward(scores, mask, stats, grad, kind, labels, classes, values, starts, smoothing):
    scores = _rows_together(scores)
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    n_rows, n = scores.shape
    if not out.numel():
        return out
    height, width = _tile_of(n, kind)
    mask_view, mask_row, mask_column = _mask_of(mask)
    fill_gradient[(cdiv(n_rows, height), cdiv(n, width))](
        scores, labels, mask_view, classes, values, starts, stats, grad.contiguous(), out,
        n_rows, n, scores.stride(0), labels.stride(0), mask_row, mask_column, smoothing,
        ROWS=height, BLOCK=width, KIND=kind.value, MASKED=mask is not None,
        LIST=LIST, num_warps=max(1, height * width // 512), enable_fp_fusion=True,
    )  # fmt: skip
    return out


def _tile_of(n, kind):
    """Rows and columns that a program looks at together; one row where it has a list."""
    width = min(SCORES_A_PROGRAM, max(16, next_power_of_2(n)))
    return (1 if kind.value == LISTED.value else SCORES_A_PROGRAM // width), width


def _rows_together(rows):
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _mask_of(mask):
    """A mask that was expanded is read where it is, by its strides."""
    return (None, 0, 0) if mask is None else (mask.view(torch.uint8), *mask.stride())
