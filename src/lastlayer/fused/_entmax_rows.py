"""The row loss of entmax: only the support has a gradient."""

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import host_sync_allowed
from lastlayer.fused._sparse_rows import (
    dense_rows,
    scores_of_listed,
    sparse_rows,
    weights_and_scale,
)
from lastlayer.fused.engine import Chunk, RowLoss, RowResult

# Supports up to this size are kept as lists; chunks with a wider one take dense products.
WIDEST_LIST = 128
# So many rows of the first chunk are looked at before all of it is, where it has many times more.
_PROBED_ROWS, _PROBES_PAY = 32, 8
# Rounded scores are shrunk by this to find the candidates, whose exact scores then decide: who
# belongs to the support only by its exact score is among them.
SLACK = 0.8


def entmax_rows(class_weight: Tensor | None, alpha: float) -> RowLoss:
    """Sparse gradient where the supports of a chunk are small, else dense."""
    flat: bool | None = None

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        nonlocal flat
        widest = min(WIDEST_LIST, scores.shape[1])
        # Here the host waits: which products follow depends on the supports.
        step = scores.shape[0] // _PROBED_ROWS
        if flat is None and step >= _PROBES_PAY and host_sync_allowed(scores):
            *_, needed = _lists(scores[::step], alpha, widest)
            flat = needed > widest
        # After one flat chunk the others are taken to be flat as well.
        if not flat and host_sync_allowed(scores):
            values, classes, needed = _lists(scores, alpha, widest)
            if needed <= widest:
                listed = torch.where(values[:, :needed] == 0, -1, classes[:, :needed])
                own, at_target = scores_of_listed(scores, chunk, listed)
                return sparse_rows(chunk, class_weight, own, at_target, listed, alpha)
            flat = True
        if _has_flat_kernel(scores, alpha):
            return _flat_rows(scores, chunk, class_weight, alpha)
        return dense_rows(
            scores, chunk, class_weight, alpha,
            lambda some: kernels.entmax.forward("auto", some, alpha, None),
        )  # fmt: skip

    return rows


def _lists(scores: Tensor, alpha: float, widest: int) -> tuple[Tensor, Tensor, int]:
    """Candidates for the support of each row, and how many the largest has, 1 at least."""
    values, classes, size = kernels.entmax.support(
        "auto", scores, alpha, None, widest, True, SLACK if scores.itemsize < 4 else 1.0
    )
    return values, classes, max(1, int(size.max())) if size.numel() else 0


def _has_flat_kernel(scores: Tensor, alpha: float) -> bool:
    # Supports of sparsemax are small even then: entmax's own kernel reads little of a row.
    chosen = kernels.selected("entmax", scores.device.type, scores.dtype)
    return chosen == "triton" and alpha == 1.5


def _flat_rows(
    scores: Tensor, chunk: Chunk, class_weight: Tensor | None, alpha: float
) -> RowResult:
    """As :func:`dense_rows`, but probabilities are not stored on the way."""
    # Here, as Triton is not everywhere.
    from lastlayer.kernels.entmax_rows.triton import flat_

    weights, scale = weights_and_scale(chunk, class_weight)
    loss = flat_(scores, chunk.target, scale, alpha)
    loss = loss if weights is None else loss * weights
    return RowResult(loss, None if scale is None else scores)
