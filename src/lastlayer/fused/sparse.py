"""The losses of entmax and top-k softmax from hidden states and class vectors.

Both are Fenchel-Young losses, ``<p - y, scores> + H(p)`` with gradient ``p - y``, and ``p`` has few
non-zeros. Where these are few enough the gradient of a chunk is kept as lists, and the products of
the backward pass become sums over short lists; else it is dense.
"""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_alpha_number, check_k
from lastlayer._torch import host_sync_allowed
from lastlayer.fused.cross_entropy import PLAIN, cross_entropy_rows
from lastlayer.fused.rows import (
    ROW_LOSSES,
    Chunk,
    RowLoss,
    RowLossKind,
    RowOptions,
    RowResult,
    Sparse,
    linear_loss,
)
from lastlayer.fused.scores import device_kind

# Supports of entmax up to this size are kept as lists; chunks with a wider one take dense products.
WIDEST_SUPPORT = 128
# So many rows of the first chunk are looked at before all of it is, where it has many times more.
_PROBED_ROWS, _PROBES_PAY = 32, 8
# Rounded scores are shrunk by this to find the candidates, whose exact scores then decide: a class
# that belongs to the support only by its exact score is among them.
_SUPPORT_SLACK = 0.8
# Beyond a k of this size dense products are faster than lists.
WIDEST_TOP = 512
# How many more classes are looked at where scores are rounded: their exact scores then decide.
_TOP_SLACK = 16
# Probabilities of these are small whole powers, which a kernel makes while it streams scores.
_BY_POWERS = (1.5, 4 / 3, 1.25, 1.2, 1.125)
# Dense probabilities are held for one of so many parts of a chunk, beside its scores.
_PIECES = 4
# Multiplications of one product up to which it is made dense, whatever the supports are: less time
# than finding them takes the host, and on a GPU nothing waits.
_SMALL = {"cpu": 1 << 23, "cuda": 1 << 31}


def linear_entmax_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.5,
    **options: Unpack[RowOptions],
) -> Tensor:
    r"""``entmax_loss(hidden @ weight.T + bias, target, alpha)`` without the matrix of scores.

    alpha = 2 is the loss of sparsemax, alpha = 1 the cross entropy.

    Its gradient has non-zeros for the support and the target alone. Where the supports of a chunk
    have 128 classes or fewer, as they do once a model has learnt something, both products of the
    backward pass become sums over short lists, and class vectors outside every support are not
    touched: a step then costs one product instead of three. Flat rows take dense products.

    On a GPU the host waits once a chunk, to see which of the two it is.

    Args:
        hidden: ``(*batch, d)``.
        weight: ``(v, d)``, one row a class.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        alpha: a number of at least 1.
        options: ``ignore_index``, ``reduction``, ``class_weight``, ``row_weight``, ``chunk_rows``,
            ``weight_grad``, ``process_group`` and ``hidden_grad``, as in
            :func:`linear_cross_entropy`.

    Returns:
        The loss in float32, or in float64 from float64.

    Example:
        >>> import torch
        >>> hidden, weight = torch.ones(1, 1), torch.tensor([[3.0], [0.0], [0.0]])
        >>> linear_entmax_loss(hidden, weight, torch.tensor([0]), alpha=2.0)
        tensor(0.)

    Reference:
        Peters, Niculae and Martins, Sparse Sequence-to-Sequence Models, ACL 2019,
        arXiv:1905.05702.
    """
    alpha = check_alpha_number(alpha)
    name: str
    numbers: tuple[float, ...]
    name, numbers = ("cross_entropy", PLAIN) if alpha == 1.0 else ("entmax", (alpha,))
    return linear_loss(name, numbers, hidden, weight, target, bias, **options)[0]


def linear_topk_softmax_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    **options: Unpack[RowOptions],
) -> Tensor:
    r"""``topk_softmax_loss(hidden @ weight.T + bias, target, k)`` without the matrix of scores.

    Only the k best classes and the target have a gradient. Up to k = 512 the products of the
    backward pass are sums over lists of k + 1 classes a row; beyond that they are dense.

    Args:
        hidden: ``(*batch, d)``.
        weight: ``(v, d)``, one row a class.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        k: how many classes are in the running, at least 1; v or more is the cross entropy.
        options: ``ignore_index``, ``reduction``, ``class_weight``, ``row_weight``, ``chunk_rows``,
            ``weight_grad``, ``process_group`` and ``hidden_grad``, as in
            :func:`linear_cross_entropy`.

    Returns:
        The loss in float32, or in float64 from float64.

    Example:
        >>> import torch
        >>> hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [0.0], [-1.0]])
        >>> linear_topk_softmax_loss(hidden, weight, torch.tensor([0]), k=2)
        tensor(0.6931)

    Reference:
        Su, spaces.ac.cn/archives/8046 (sparse softmax).
    """
    numbers = (float(check_k(k)),)
    return linear_loss("topk_softmax", numbers, hidden, weight, target, bias, **options)[0]


def entmax_rows(class_weight: Tensor | None, alpha: float) -> RowLoss:
    """Sparse gradient where the supports of a chunk are small, else dense."""
    flat: bool | None = None

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        nonlocal flat
        if _is_small(scores, chunk):
            probs = kernels.entmax.forward("auto", scores, alpha, None)
            return _loss_of(probs, scores, chunk, class_weight, alpha)
        widest = min(WIDEST_SUPPORT, scores.shape[1])
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
        # Supports of sparsemax are small even then: entmax's own kernel reads little of a row.
        chosen = kernels.selected("entmax", scores.device.type, scores.dtype)
        if chosen == "triton" and alpha in _BY_POWERS:
            return _flat_rows(scores, chunk, class_weight, alpha)
        return dense_rows(
            scores, chunk, class_weight, alpha,
            lambda some: kernels.entmax.forward("auto", some, alpha, None),
        )  # fmt: skip

    return rows


def _is_small(scores: Tensor, chunk: Chunk) -> bool:
    """Whether dense products take less time than finding lists for sparse ones."""
    most = _SMALL[device_kind(scores)]
    return scores.itemsize >= 4 and scores.numel() * chunk.width <= most and scores.is_contiguous()


def _loss_of(
    probs: Tensor, scores: Tensor, chunk: Chunk, class_weight: Tensor | None, alpha: float
) -> RowResult:
    """From all probabilities, which become the gradient."""
    weights, scale = weights_and_scale(chunk, class_weight)
    loss = kernels.entmax_rows.forward_("auto", probs, scores, chunk.target, scale, alpha)
    loss = loss if weights is None else loss * weights
    return RowResult(loss, None if scale is None else probs)


def _lists(scores: Tensor, alpha: float, widest: int) -> tuple[Tensor, Tensor, int]:
    """Candidates for the support of each row, and how many the largest has, 1 at least."""
    values, classes, size = kernels.entmax.support(
        "auto", scores, alpha, None, widest, True, _SUPPORT_SLACK if scores.itemsize < 4 else 1.0
    )
    return values, classes, max(1, int(size.max())) if size.numel() else 0


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


def topk_rows(class_weight: Tensor | None, k: float) -> RowLoss:
    """Sparse gradient with k + 1 entries a row; dense where k is large."""
    k = int(k)
    softmax = cross_entropy_rows(class_weight, *PLAIN)

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        if k >= scores.shape[1]:
            return softmax(scores, chunk)
        if _is_small(scores, chunk):
            probs = kernels.topk_softmax.forward("auto", scores, k)
            return _loss_of(probs, scores, chunk, class_weight, 1.0)
        if k <= WIDEST_TOP:
            rounded = scores.itemsize < 4
            candidates = min(k + _TOP_SLACK, scores.shape[1]) if rounded else k
            classes = _top_classes(scores, candidates)
            own, at_target = scores_of_listed(scores, chunk, classes)
            if rounded:
                own, best = torch.topk(own, k, sorted=False)
                classes = classes.gather(-1, best)
            return sparse_rows(chunk, class_weight, own, at_target, classes, 1.0)
        return dense_rows(
            scores, chunk, class_weight, 1.0,
            lambda some: kernels.topk_softmax.forward("auto", some, k),
        )  # fmt: skip

    return rows


def _top_classes(scores: Tensor, k: int) -> Tensor:
    """Of each row, in any order."""
    if scores.is_contiguous():
        return torch.topk(scores, k, sorted=False).indices
    # torch copies rows that are apart: only a few at a time.
    some = scores.split(max(1, -(-scores.shape[0] // _PIECES)))
    return torch.cat([torch.topk(each, k, sorted=False).indices for each in some])


def scores_of_listed(scores: Tensor, chunk: Chunk, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Of the classes (rows, k) and of the target, in full precision; -1 is none, with anything."""
    if scores.itemsize < 4:
        at_target = chunk.exact_scores(chunk.target.unsqueeze(-1)).squeeze(-1)
        return chunk.exact_scores(classes), at_target
    # Both from one product, whose rounding they share.
    at_target = scores.gather(-1, chunk.target.unsqueeze(-1)).squeeze(-1)
    return scores.gather(-1, classes.clamp(min=0)), at_target


def sparse_rows(
    chunk: Chunk,
    class_weight: Tensor | None,
    own: Tensor,
    at_target: Tensor,
    classes: Tensor,
    alpha: float,
) -> RowResult:
    """From the scores (rows, k) of all classes that can have probability; -1 is none."""
    loss, *gradient = kernels.entmax_rows.listed(
        "auto", own, classes, chunk.target, at_target, chunk.row_scale, class_weight, alpha
    )
    return RowResult(loss, None if chunk.row_scale is None else Sparse(*gradient))


def weights_and_scale(
    chunk: Chunk, class_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """What the loss of each row is weighted by, and what its gradient is multiplied by."""
    if class_weight is None:
        return None, chunk.row_scale
    weights = class_weight[chunk.target]
    return weights, None if chunk.row_scale is None else chunk.row_scale * weights


def dense_rows(
    scores: Tensor,
    chunk: Chunk,
    class_weight: Tensor | None,
    alpha: float,
    probabilities: Callable[[Tensor], Tensor],
) -> RowResult:
    """From all probabilities, a few rows at a time; the scores' memory becomes the gradient."""
    weights, scale = weights_and_scale(chunk, class_weight)
    losses = []
    step = max(1, -(-scores.shape[0] // _PIECES))
    for first in range(0, max(1, scores.shape[0]), step):
        part = slice(first, first + step)
        probs = probabilities(scores[part])
        some_scale = None if scale is None else scale[part]
        losses.append(
            kernels.entmax_rows.forward_(
                "auto", probs, scores[part], chunk.target[part], some_scale, alpha
            )
        )
        if scale is not None:
            scores[part] = probs
    loss = torch.cat(losses)
    if weights is not None:
        loss = loss * weights
    return RowResult(loss, None if scale is None else scores)


def _small_in_float32(hidden: Tensor, n_classes: int) -> bool:
    """Exact scores of small problems cost nothing, and need no lists of candidates."""
    work = hidden.numel() * n_classes
    return hidden.itemsize < 4 and work <= _SMALL[device_kind(hidden)]


ROW_LOSSES["entmax"] = RowLossKind(entmax_rows, 1.0 + 1.0 / _PIECES, wide=_small_in_float32)
ROW_LOSSES["topk_softmax"] = RowLossKind(topk_rows, 1.0 + 1.0 / _PIECES, wide=_small_in_float32)
