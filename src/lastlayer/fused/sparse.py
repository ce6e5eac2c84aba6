"""The losses of entmax and top-k softmax from hidden states and class vectors.

Both are Fenchel-Young losses, ``<p - y, scores> + H(p)`` with gradient ``p - y``, and ``p`` has few
non-zeros. If these are few enough, the gradient of a chunk is stored as lists, and the products of
the backward pass become sums over short lists. Otherwise it is dense.
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

# Entmax supports up to this size are stored as lists; chunks with a larger one use dense products.
WIDEST_SUPPORT = 128
# The supports of this many rows of the first chunk are computed as a probe, if the chunk has at
# least this many times more rows.
_PROBED_ROWS, _PROBES_PAY = 32, 8
# Rounded scores are multiplied by this to find candidates for the support. Smaller scores give a
# larger support, so classes that belong to it only by their exact score are among the candidates.
_SUPPORT_SLACK = 0.8
# Beyond a k of this size dense products are faster than lists.
WIDEST_TOP = 512
# Additional candidates for the top k if scores are rounded; their exact scores then decide.
_TOP_SLACK = 16
# For these alphas probabilities are integer powers, which a kernel computes as it reads scores.
_BY_POWERS = (1.5, 4 / 3, 1.25, 1.2, 1.125)
# Dense probabilities are held for 1 / _PIECES of a chunk at a time, in addition to its scores.
_PIECES = 4
# Up to this many multiplications per product, products are always dense: that is faster than
# finding the supports, and needs no host sync on a GPU.
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

    Its gradient is non-zero only for the support and the target. If the supports of a chunk have at
    most 128 classes, as they usually do once a model has learned something, both products of the
    backward pass become sums over short lists, and class vectors outside every support are not
    read: a step then costs one product instead of three. Larger supports use dense products.

    On a GPU there is one host sync per chunk, to choose between the two.

    Args:
        hidden: ``(*batch, d)``.
        weight: ``(v, d)``, one row per class.
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

    Only the top k classes and the target have a gradient. Up to k = 512 the products of the
    backward pass are sums over lists of k + 1 classes per row; beyond that they are dense.

    Args:
        hidden: ``(*batch, d)``.
        weight: ``(v, d)``, one row per class.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        k: number of classes with non-zero probability, at least 1; v or more is the cross entropy.
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
    """Entmax as a row loss; the gradient is sparse if the supports of a chunk are small."""
    flat: bool | None = None

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        nonlocal flat
        if _is_small(scores, chunk):
            probs = kernels.entmax.forward("auto", scores, alpha, None)
            return _loss_of(probs, scores, chunk, class_weight, alpha)
        widest = min(WIDEST_SUPPORT, scores.shape[1])
        # A host sync: the choice of products depends on the supports.
        step = scores.shape[0] // _PROBED_ROWS
        if flat is None and step >= _PROBES_PAY and host_sync_allowed(scores):
            *_, needed = _lists(scores[::step], alpha, widest)
            flat = needed > widest
        # After one chunk with large supports, dense products are used for all others.
        if not flat and host_sync_allowed(scores):
            values, classes, needed = _lists(scores, alpha, widest)
            if needed <= widest:
                listed = torch.where(values[:, :needed] == 0, -1, classes[:, :needed])
                own, at_target = scores_of_listed(scores, chunk, listed)
                return sparse_rows(chunk, class_weight, own, at_target, listed, alpha)
            flat = True
        # alpha = 2 is not among them: its supports stay small, and the entmax kernel reads little.
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
    """The loss from dense probabilities, which are overwritten by the gradient."""
    weights, scale = weights_and_scale(chunk, class_weight)
    loss = kernels.entmax_rows.forward_("auto", probs, scores, chunk.target, scale, alpha)
    loss = loss if weights is None else loss * weights
    return RowResult(loss, None if scale is None else probs)


def _lists(scores: Tensor, alpha: float, widest: int) -> tuple[Tensor, Tensor, int]:
    """Candidates for the support of each row, and the size of the largest support, at least 1."""
    values, classes, size = kernels.entmax.support(
        "auto", scores, alpha, None, widest, True, _SUPPORT_SLACK if scores.itemsize < 4 else 1.0
    )
    return values, classes, max(1, int(size.max())) if size.numel() else 0


def _flat_rows(
    scores: Tensor, chunk: Chunk, class_weight: Tensor | None, alpha: float
) -> RowResult:
    """As :func:`dense_rows`, but without storing probabilities."""
    # Imported here: Triton may not be installed.
    from lastlayer.kernels.entmax_rows.triton import flat_

    weights, scale = weights_and_scale(chunk, class_weight)
    loss = flat_(scores, chunk.target, scale, alpha)
    loss = loss if weights is None else loss * weights
    return RowResult(loss, None if scale is None else scores)


def topk_rows(class_weight: Tensor | None, k: float) -> RowLoss:
    """Top-k softmax as a row loss; the gradient is sparse, with k + 1 entries, or dense."""
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
    """The k classes with the highest scores of each row, in any order."""
    if scores.is_contiguous():
        return torch.topk(scores, k, sorted=False).indices
    # torch.topk copies non-contiguous input: pass a few rows at a time.
    some = scores.split(max(1, -(-scores.shape[0] // _PIECES)))
    return torch.cat([torch.topk(each, k, sorted=False).indices for each in some])


def scores_of_listed(scores: Tensor, chunk: Chunk, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Exact scores of the classes (rows, k) and of the target; undefined for a class of -1."""
    if scores.itemsize < 4:
        at_target = chunk.exact_scores(chunk.target.unsqueeze(-1)).squeeze(-1)
        return chunk.exact_scores(classes), at_target
    # Both from the same product, so that they are rounded alike.
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
    """The loss from the scores (rows, k) of all classes with probability; class -1 is padding."""
    loss, *gradient = kernels.entmax_rows.listed(
        "auto", own, classes, chunk.target, at_target, chunk.row_scale, class_weight, alpha
    )
    return RowResult(loss, None if chunk.row_scale is None else Sparse(*gradient))


def weights_and_scale(
    chunk: Chunk, class_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The weight of each row's loss, and the factor of each row's gradient."""
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
    """The loss from dense probabilities, some rows at a time; the gradient overwrites scores."""
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
    """Whether a problem is so small that float32 scores are cheap; these need no candidates."""
    work = hidden.numel() * n_classes
    return hidden.itemsize < 4 and work <= _SMALL[device_kind(hidden)]


ROW_LOSSES["entmax"] = RowLossKind(entmax_rows, 1.0 + 1.0 / _PIECES, wide=_small_in_float32)
ROW_LOSSES["topk_softmax"] = RowLossKind(topk_rows, 1.0 + 1.0 / _PIECES, wide=_small_in_float32)
