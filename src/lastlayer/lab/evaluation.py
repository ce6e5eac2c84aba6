"""Judging a language model on held-out text: by its exact, normalised probabilities.

Every head is asked for its normalised log-probabilities, those that are trained on samples too.
The rows are the same for all heads, and their number follows from the number of classes alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lastlayer.heads import AdaptiveSoftmax, HierarchicalSoftmax
from lastlayer.lab.feeding import Batch, Feed

EPSILON = 1e-4
"""How much of a probability the ε-smoothed perplexity spreads evenly over all classes."""
BINS = 15
"""Of the calibration error."""
DECILES = 10
_BEST = 10

# Log-probabilities of one judgement, in rows × classes, on the way and at the end.
_SCORES = {"valid": 2**25, "test": 2**27}
_FEWEST, _MOST = {"valid": 512, "test": 2048}, {"valid": 4096, "test": 32_768}
# Numbers that are held at a time.
_CHUNK = 2**24

# They find the target and the best classes without a look at all others; none has probability 0.
_SEARCHED = (HierarchicalSoftmax, AdaptiveSoftmax)

Reals = NDArray[np.float64]


def rows_for(part: str, n_classes: int) -> int:
    """How many rows are judged: fewer where each has more classes, so that time is bounded."""
    wanted = _SCORES[part] // max(1, n_classes)
    return max(_FEWEST[part], min(_MOST[part], wanted))


@dataclass(frozen=True)
class Rows:
    """What is kept of each row.

    Attributes:
        target: its class.
        nll: minus the log-probability of the target.
        place: where the target is among the ten best classes, from 0; 10 where it is not.
        confidence: the highest probability.
        support: how many classes have a probability above 0.
    """

    target: NDArray[np.int64]
    nll: Reals
    place: NDArray[np.int64]
    confidence: Reals
    support: NDArray[np.int64]


@torch.no_grad()
def judge_rows(body: nn.Module, head: nn.Module, batches: Iterator[Batch]) -> Rows:
    """All rows of the batches, in chunks of bounded size."""
    body.eval()
    head.eval()
    parts = [
        _judged(head, body(batch.inputs).flatten(0, -2), batch.target.reshape(-1))
        for batch in batches
    ]
    columns = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
    target, nll, place, confidence, support = columns
    return Rows(target, nll.astype(np.float64), place, confidence.astype(np.float64), support)


def _judged(head: nn.Module, hidden: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    step = max(1, _CHUNK // int(head.n_classes))  # type: ignore[arg-type]
    parts = zip(hidden.split(step), target.split(step), strict=True)
    made = [_judged_chunk(head, rows, ids) for rows, ids in parts]
    return tuple(torch.cat(each) for each in zip(*made, strict=True))


def _judged_chunk(head: nn.Module, hidden: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    if isinstance(head, _SEARCHED):
        own = head.log_prob(hidden, target.unsqueeze(-1)).squeeze(-1)
        found = head.topk(hidden, min(_BEST, head.n_classes))
        everything = torch.full_like(target, head.n_classes)
        return target, -own, _place(found.classes, target), found.values[:, 0].exp(), everything
    log_prob: Tensor = head.log_prob(hidden)  # type: ignore[operator]
    own = log_prob.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    best = log_prob.topk(min(_BEST, log_prob.shape[-1]), -1)
    # A class without a probability is none of the best.
    classes = best.indices.masked_fill(best.values == -math.inf, -1)
    support = torch.full_like(target, log_prob.shape[-1])
    # Counting is slow, and most heads have no zeros.
    sparse = log_prob.amin(-1) == -math.inf
    support[sparse] = (log_prob[sparse] > -math.inf).sum(-1)
    return target, -own, _place(classes, target), best.values[:, 0].exp(), support


def _place(best: Tensor, target: Tensor) -> Tensor:
    """Where the target is among the best classes; 10 where it is not."""
    hit = best == target.unsqueeze(-1)
    return torch.where(hit.any(-1), hit.int().argmax(-1), _BEST)


def quality(rows: Rows, n_classes: int) -> dict[str, Any]:
    """Means over the rows. A NaN in one is a NaN in all; an infinite loss stays infinite."""
    probability = np.exp(-rows.nll)
    smoothed = -np.log((1 - EPSILON) * probability + EPSILON / n_classes)
    nll = float(rows.nll.mean())
    return {
        "nll": nll,
        "perplexity": _exp(nll),
        "top1": float((rows.place == 0).mean()),
        "top10": float((rows.place < _BEST).mean()),
        "coverage": float((rows.nll < math.inf).mean()),
        "support": float(rows.support.mean()),
        "eps_nll": float(smoothed.mean()),
        "eps_perplexity": _exp(float(smoothed.mean())),
    }


def calibration(rows: Rows) -> dict[str, Any]:
    """How often the best class is right, beside how sure the head was: bins of confidence."""
    right = rows.place == 0
    sure = np.nan_to_num(rows.confidence)
    bin_of = np.minimum((sure * BINS).astype(np.int64), BINS - 1)
    bins = []
    error = 0.0
    for i in range(BINS):
        inside = bin_of == i
        count = int(inside.sum())
        if not count:
            continue
        confidence, accuracy = float(rows.confidence[inside].mean()), float(right[inside].mean())
        error += count / len(bin_of) * abs(confidence - accuracy)
        bins.append({"confidence": confidence, "accuracy": accuracy, "count": count})
    return {"calibration_error": error, "calibration": bins}


def deciles_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The decile of each class, 0 for the most frequent tenth of all occurrences.

    Classes by falling count are cut where a tenth of all occurrences in the training part is full;
    a class that spans several tenths belongs to the one with its middle.
    """
    order = np.argsort(-counts, kind="stable")
    ends = np.cumsum(counts[order])
    middle = (ends - counts[order] / 2) / max(1, int(ends[-1]))
    decile = np.empty(len(counts), np.int64)
    decile[order] = np.minimum((middle * DECILES).astype(np.int64), DECILES - 1)
    return decile


def by_decile(rows: Rows, decile: NDArray[np.int64], n_classes: int) -> list[dict[str, Any]]:
    """Quality by how frequent the target is; deciles from 1, the most frequent first."""
    of_row = decile[rows.target]
    parts = []
    for i in range(DECILES):
        inside = of_row == i
        count = int(inside.sum())
        if count:
            some = Rows(*(each[inside] for each in vars(rows).values()))
            found = quality(some, n_classes)
            kept = {name: found[name] for name in ("nll", "eps_nll", "top1", "top10", "coverage")}
            parts.append({"decile": i + 1, "count": count, **kept})
        else:
            parts.append({"decile": i + 1, "count": 0, "nll": None, "top1": None})
    return parts


class TextJudge:
    """Judges models on one text.

    Args:
        feed: where held-out rows come from.
        counts: how often each class stands in the training part.
    """

    def __init__(self, feed: Feed, counts: NDArray[np.int64]) -> None:
        self._feed, self._n_classes = feed, len(counts)
        self._decile = deciles_of(counts)

    def on_the_way(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For a point of the learning curve."""
        rows = self._rows(body, head, "valid")
        found = quality(rows, self._n_classes)
        kept = ("nll", "perplexity", "top1", "top10", "coverage", "eps_perplexity")
        return {name: found[name] for name in kept}

    def at_the_end(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For the result."""
        rows = self._rows(body, head, "test")
        return {
            "rows": len(rows.target),
            "epsilon": EPSILON,
            **quality(rows, self._n_classes),
            **calibration(rows),
            "by_decile": by_decile(rows, self._decile, self._n_classes),
        }

    def _rows(self, body: nn.Module, head: nn.Module, part: str) -> Rows:
        wanted = rows_for(part, self._n_classes)
        return judge_rows(body, head, self._feed.held_out(part, wanted))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
