"""Losses on rows of scores whose classes are spread over processes.

A process has the scores of its own classes. What the gradient of a row needs to know of all the
others is small: the logsumexp of each process for a softmax, the few candidates of each for entmax
and top-k softmax. These are exchanged, once per chunk of rows. The losses of these functions are
parts: their sum over processes is the loss, which costs one number per batch.

Targets are places in this process, negative where the class is in another one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._processes import Shards
from lastlayer._torch import accumulation_dtype, keeps_float32
from lastlayer.fused.cross_entropy import shaped
from lastlayer.fused.function import fused_loss
from lastlayer.fused.prediction import top_classes
from lastlayer.fused.rows import (
    ROW_LOSSES,
    ROWS,
    Chunk,
    RowLoss,
    RowLossKind,
    RowResult,
    Sparse,
)

# Candidates for a support of entmax that each process tells the others of a row. Rows with more go
# on with two numbers per round.
TOLD = 32
# Scores of half precision are shrunk by this to find candidates, whose exact scores then decide.
_SLACK = 0.8
# How many more than k classes are looked at where scores are rounded.
_TOP_SLACK = 16
# Rounds of a search for a threshold; Newton's method takes less than 15 of them.
_MOST_ROUNDS = 100


def cross_entropy_rows(
    shards: Shards,
    class_weight: Tensor | None,
    smoothing: float,
    z_loss: float,
    softcap: float,
    temperature: float,
) -> RowLoss:
    """One number per row is exchanged, the logsumexp of each process's scores."""
    total_weight: Tensor | float | None = None

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        nonlocal total_weight
        dtype, target = accumulation_dtype(scores.dtype), chunk.target
        inside, place = target >= 0, target.clamp(min=0)
        known = at_target = scores.new_zeros(target.shape, dtype=dtype)
        slope, lse = known, known - torch.inf
        if scores.shape[1]:
            known = _target_scores(scores, chunk)
            lse = kernels.softmax_rows.forward_(
                "auto", scores, place, known, None, None, 0.0, 0.0, softcap, temperature, False
            )[1]
            at_target, slope = shaped(known, softcap, temperature)
        lse = shards.logsumexp(lse)
        # Fully masked rows have infinite loss and zero gradient.
        empty = lse == -torch.inf
        origin = lse.masked_fill(empty, 0.0)
        pull = known.new_full((), 1.0 - smoothing)
        if chunk.target_weight is not None:
            pull = pull * chunk.target_weight
        loss = torch.where(inside, pull * (lse - at_target), 0.0)
        push = pull + 2.0 * z_loss * origin
        if z_loss and shards.rank == 0:
            loss = loss + z_loss * lse.square()
        less = None
        if smoothing:
            share = smoothing / shards.n_classes
            weights = scores.new_ones(scores.shape[1], dtype=dtype)
            weights = weights if class_weight is None else class_weight
            if total_weight is None:
                total_weight = shards.sum(weights.sum())
            values, slopes = shaped(scores.to(dtype), softcap, temperature)
            loss = loss + share * (weights.sum() * lse - values @ weights)
            push = push + share * total_weight
            less = slopes.mul_(share * weights)
        loss = loss.masked_fill(empty, torch.inf)
        if chunk.row_scale is None:
            return RowResult(loss, None)
        scale = chunk.row_scale.masked_fill(empty, 0.0)
        push, pull = push * scale, pull * scale
        if scores.shape[1]:
            true = (push * torch.expm1(at_target - origin) + (push - pull)) * slope
            kernels.softmax_rows.gradient_(
                "auto", scores, torch.where(inside, place, -1), true, origin, push, softcap,
                temperature,
            )  # fmt: skip
            if less is not None:
                scores.sub_(less.mul_(scale.unsqueeze(-1)))
        return RowResult(loss, scores)

    return rows


def _target_scores(scores: Tensor, chunk: Chunk) -> Tensor:
    """Of each target in full precision; in rows whose target is elsewhere that of class 0."""
    dtype, place = accumulation_dtype(scores.dtype), chunk.target.clamp(min=0).unsqueeze(-1)
    held = scores.gather(-1, place).squeeze(-1).to(dtype)
    if keeps_float32(scores):
        return held
    # A row whose target is elsewhere puts back what it has.
    exact = chunk.exact_scores(place).squeeze(-1)
    return torch.where(chunk.target >= 0, exact, held)


def logsumexp_rows(shards: Shards, class_weight: Tensor | None, temperature: float) -> RowLoss:
    """Not a loss but the logsumexp itself, of all classes but one per row.

    That is the target, where there is one: it is left out.
    """
    del class_weight

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        dtype, target = accumulation_dtype(scores.dtype), chunk.target
        inside, place = target >= 0, target.clamp(min=0)
        lse = scores.new_full(target.shape, -torch.inf, dtype=dtype)
        if scores.shape[1]:
            held = scores.gather(-1, place.unsqueeze(-1)).squeeze(-1).to(dtype)
            known = held.masked_fill(inside, -torch.inf)
            scores.scatter_(-1, place.unsqueeze(-1), known.to(scores.dtype).unsqueeze(-1))
            lse = kernels.softmax_rows.forward_(
                "auto", scores, place, known, None, None, 0.0, 0.0, 0.0, temperature, False
            )[1]
        lse = shards.logsumexp(lse)
        if chunk.row_scale is None or not scores.shape[1]:
            return RowResult(lse, None if chunk.row_scale is None else scores)
        empty = lse == -torch.inf
        push = chunk.row_scale.masked_fill(empty, 0.0)
        kernels.softmax_rows.gradient_(
            "auto", scores, torch.full_like(target, -1), push, lse.masked_fill(empty, 0.0), push,
            0.0, temperature,
        )  # fmt: skip
        return RowResult(lse, scores)

    return rows


def spread_logsumexp(
    shards: Shards,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    left_out: Tensor,
    temperature: float,
    chunk_rows: int | str,
) -> Tensor:
    """log Σ e^((w·h + b) / T) of each row ``(n,)`` over the columns of all processes.

    Args:
        shards: of the columns; only their most counts.
        hidden: ``(n, d)``, the same in all processes, which get their part of its gradient.
        weight: ``(m, d)``, the columns of this process.
        bias: ``(m,)``, what is added to their scores.
        left_out: the column of each row that does not count, negative where all do.
        temperature: T.
        chunk_rows: rows of scores held at a time, "auto" or "low".
    """
    options = "logsumexp", (temperature,), None, str(chunk_rows), False, *shards
    operands = hidden, weight, bias, left_out, None, None, None
    return fused_loss(ROWS, operands, options, "none")[0]


def entmax_rows(shards: Shards, class_weight: Tensor | None, alpha: float) -> RowLoss:
    """The support of a row is part of the union of what each process would have by itself.

    So its candidates are exchanged, :data:`TOLD` of each process. Where a process has more, the
    threshold is found together by Newton's method, with two numbers per row and round.
    """
    del class_weight

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        own, listed, size = _candidates(scores, chunk, alpha)
        told = shards.gathered(torch.cat([own, size.unsqueeze(-1)], -1))
        if told.numel() and int(told[..., TOLD].max()) > TOLD:
            return _dense(scores, chunk, alpha, lambda some: _by_newton(shards, some, alpha))
        mine, peak = _of_candidates(shards, told, alpha)
        return _listed(scores, chunk, alpha, mine, own, listed, peak)

    return rows


def _of_candidates(shards: Shards, told: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Probabilities of this process's candidates, and the best score of each row."""
    merged = told[..., :TOLD].transpose(0, 1)
    probs = kernels.entmax.forward("auto", merged.flatten(1), alpha, None)
    return probs.view(merged.shape)[:, shards.rank], merged.amax((1, 2))


def _candidates(scores: Tensor, chunk: Chunk | None, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and places of what may be in the support, and their number, :data:`TOLD` + 1 for more.

    A candidate that is none has the score -inf and the place 0. ``chunk`` gives scores of half
    precision their full precision.
    """
    n, dtype = scores.shape[0], accumulation_dtype(scores.dtype)
    if not scores.shape[1]:
        none = scores.new_full((n, TOLD), -torch.inf, dtype=dtype)
        return none, torch.zeros_like(none, dtype=torch.int64), none.new_zeros(n)
    slack = _SLACK if scores.itemsize < 4 else 1.0
    values, listed, size = kernels.entmax.support("auto", scores, alpha, None, TOLD, True, slack)
    own = _scores_of(scores, chunk, listed).masked_fill(values == 0, -torch.inf)
    return own, listed, size.clamp(max=TOLD + 1).to(dtype)


def _scores_of(scores: Tensor, chunk: Chunk | None, places: Tensor) -> Tensor:
    """In full precision."""
    if scores.itemsize < 4 and chunk is not None:
        return chunk.exact_scores(places)
    return scores.gather(-1, places)


def topk_rows(shards: Shards, class_weight: Tensor | None, k: float) -> RowLoss:
    """The k best of each process are exchanged; the k best of these count."""
    del class_weight
    most = min(int(k), shards.most)

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        n, dtype = scores.shape[0], accumulation_dtype(scores.dtype)
        own = scores.new_full((n, most), -torch.inf, dtype=dtype)
        listed = torch.zeros_like(own, dtype=torch.int64)
        some = min(most, scores.shape[1])
        if some:
            rounded = scores.itemsize < 4
            wider = min(some + _TOP_SLACK, scores.shape[1]) if rounded else some
            places = top_classes(scores, wider)[1].sort(-1).values
            values, order = top_classes(_scores_of(scores, chunk, places), some)
            own[:, :some], listed[:, :some] = values, places.gather(-1, order)
        mine, peak = _among_best(shards, own, int(k))
        return _listed(scores, chunk, 1.0, mine, own, listed, peak)

    return rows


def _among_best(shards: Shards, own: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The softmax over the k best scores of all processes, for those of this one; and the best."""
    merged = shards.gathered(own).transpose(0, 1)
    columns = merged.shape[1] * merged.shape[2]
    best, places = top_classes(merged.flatten(1), min(k, columns))
    probs = torch.softmax(best, -1)
    probs = torch.where(best[:, :1] == -torch.inf, 0.0, probs)
    spread = own.new_zeros(own.shape[0], columns).scatter_(-1, places, probs)
    return spread.view(merged.shape)[:, shards.rank], merged.amax((1, 2))


def _listed(
    scores: Tensor, chunk: Chunk, alpha: float, probs: Tensor, own: Tensor, places: Tensor,
    peak: Tensor,
) -> RowResult:  # fmt: skip
    """From the probabilities and scores of a few classes of this process; others have none."""
    inside = chunk.target >= 0
    at_target = scores.new_zeros(inside.shape, dtype=own.dtype)
    if scores.shape[1]:
        at_target = _target_scores(scores, chunk)
    loss = _loss(probs, own, at_target, inside, peak, alpha, chunk.target_weight)
    if chunk.row_scale is None:
        return RowResult(loss, None)
    scale = _weighted(chunk.row_scale, chunk.target_weight).masked_fill(peak == -torch.inf, 0.0)
    true = torch.where(inside, -scale, 0.0)
    values = torch.cat([probs * scale.unsqueeze(-1), true.unsqueeze(-1)], -1)
    classes = torch.cat([places, chunk.target.clamp(min=0).unsqueeze(-1)], -1)
    if not scores.shape[1]:
        return RowResult(loss, scores)
    return RowResult(loss, Sparse(values, classes))


def _dense(
    scores: Tensor,
    chunk: Chunk,
    alpha: float,
    probabilities: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> RowResult:
    """From all probabilities of this process, and the best score of each row."""
    dtype, inside = accumulation_dtype(scores.dtype), chunk.target >= 0
    at_target = scores.new_zeros(inside.shape, dtype=dtype)
    if scores.shape[1]:
        at_target = _target_scores(scores, chunk)
    values = scores.to(dtype)
    probs, peak = probabilities(values)
    loss = _loss(probs, values, at_target, inside, peak, alpha, chunk.target_weight)
    if chunk.row_scale is None:
        return RowResult(loss, None)
    scale = _weighted(chunk.row_scale, chunk.target_weight).masked_fill(peak == -torch.inf, 0.0)
    if scores.shape[1]:
        place = chunk.target.clamp(min=0).unsqueeze(-1)
        probs = probs.scatter_add(-1, place, -inside.to(dtype).unsqueeze(-1))
        scores.copy_(probs.mul_(scale.unsqueeze(-1)))
    return RowResult(loss, scores)


def _weighted(numbers: Tensor, weight: Tensor | None) -> Tensor:
    return numbers if weight is None else numbers * weight


def _loss(
    probs: Tensor, scores: Tensor, at_target: Tensor, inside: Tensor, peak: Tensor, alpha: float,
    weight: Tensor | None,
) -> Tensor:  # fmt: skip
    """``<p, s> - s_y + H(p)`` of what this process has, from scores below the best one of a row."""
    origin = peak.masked_fill(peak == -torch.inf, 0.0)
    below = scores - origin.unsqueeze(-1)
    # 0 · -inf is nothing; a NaN has to show.
    loss = torch.where(probs == 0, 0.0, probs * below).sum(-1)
    if alpha == 1.0:
        loss = loss + torch.special.entr(probs).sum(-1)
    else:
        loss = loss + (probs - probs.pow(alpha)).sum(-1) / (alpha * (alpha - 1.0))
    loss = loss - torch.where(inside, at_target - origin, 0.0)
    return _weighted(loss, weight).masked_fill(peak == -torch.inf, torch.inf)


def spread_entmax(shards: Shards, scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """Probabilities of this process's classes, and the best score of each row in all processes.

    From the candidates of each process, or by Newton's method where there are too many. Scores are
    float32 or float64.
    """
    own, listed, size = _candidates(scores, None, alpha)
    told = shards.gathered(torch.cat([own, size.unsqueeze(-1)], -1))
    if told.numel() and int(told[..., TOLD].max()) > TOLD:
        return _by_newton(shards, scores, alpha)
    mine, peak = _of_candidates(shards, told, alpha)
    probs = torch.zeros_like(scores)
    return (probs.scatter_add_(-1, listed, mine) if scores.shape[1] else probs), peak


def _by_newton(shards: Shards, scores: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """The same, however many classes have a probability.

    Newton's method on the threshold, from below: every round adds up two numbers per row over the
    processes. For alpha above 2, where it may jump too far, a bracket holds it.
    """
    n, excess = scores.shape[0], alpha - 1.0
    peak = scores.amax(-1) if scores.shape[1] else scores.new_full((n,), -torch.inf)
    peak = shards.gathered(peak).amax(0)
    origin = peak.masked_fill(peak == -torch.inf, 0.0).unsqueeze(-1)
    x = (scores - origin) * excess
    threshold, low, high = (scores.new_full((n,), number) for number in (-1.0, -1.0, 0.0))
    tiny = torch.finfo(scores.dtype).eps
    for _ in range(_MOST_ROUNDS):
        margin = (x - threshold.unsqueeze(-1)).clamp_(min=0.0)
        slopes = torch.where(margin > 0, margin.pow(1.0 / excess - 1.0), 0.0)
        mass, slope = shards.sum(torch.stack([(slopes * margin).sum(-1), slopes.sum(-1)]))
        low = torch.where(mass >= 1.0, threshold, low)
        high = torch.where(mass < 1.0, threshold, high)
        found = threshold + (mass - 1.0) * excess / slope
        found = torch.where((found >= low) & (found <= high), found, (low + high) / 2)
        moved, threshold = (found - threshold).abs(), found
        # A NaN moves nowhere. The same numbers are seen by all processes, and they stop together.
        if not bool((moved > 2 * tiny).any()):
            break
    probs = (x - threshold.unsqueeze(-1)).clamp_(min=0.0).pow_(1.0 / excess)
    total = shards.sum(probs.sum(-1))
    # Rounded thresholds leave a little more or less than 1.
    return probs.div_(torch.where(total == 0, 1.0, total).unsqueeze(-1)), peak


# By the names of lastlayer.fused.rows.ROW_LOSSES.
SPREAD_LOSSES: dict[str, Callable[..., RowLoss]] = {
    "cross_entropy": cross_entropy_rows,
    "entmax": entmax_rows,
    "topk_softmax": topk_rows,
    "logsumexp": logsumexp_rows,
}
# It is asked for by spread_logsumexp alone, and has no form for one process.
ROW_LOSSES["logsumexp"] = RowLossKind(cross_entropy_rows, complete=True)
