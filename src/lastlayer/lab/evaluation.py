"""Judging models on held-out rows, and the baseline that knows the frequencies of classes alone.

One class per row: every head is asked for its exact, normalised log-probabilities, those that are
trained on samples too. Several labels per row: the best labels of each row, with a threshold that
is tuned on validation data for every loss alike, and beside it the labels that the head's own rule
gives. The rows are the same for all heads, and their number follows from the number of classes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from lastlayer.heads import AdaptiveSoftmax, HierarchicalSoftmax
from lastlayer.lab.feeding import PADDING, Batch, Feed

EPSILON = 1e-4
"""How much of a probability the ε-smoothed perplexity spreads evenly over all classes."""
BINS = 15
"""Of the calibration error."""
DECILES = 10
_BEST = 10
# Of several labels: precision at these depths, and the best labels of a row that may be predicted.
_DEPTHS, _CANDIDATES = (1, 3, 5), 32

# Log-probabilities of one judgement, in rows × classes, on the way and at the end.
_SCORES = {"valid": 2**24, "test": 2**26}
_FEWEST, _MOST = {"valid": 512, "test": 2048}, {"valid": 2048, "test": 16_384}
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
        guess: the class with the highest probability.
    """

    target: NDArray[np.int64]
    nll: Reals
    place: NDArray[np.int64]
    confidence: Reals
    support: NDArray[np.int64]
    guess: NDArray[np.int64]


@torch.no_grad()
def judge_rows(body: nn.Module, head: nn.Module, batches: Iterator[Batch]) -> Rows:
    """All rows of the batches, in chunks of bounded size."""
    body.eval()
    head.eval()
    parts = [_judged(head, *_kept(body(batch.inputs), batch.target)) for batch in batches]
    columns = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
    target, nll, place, confidence, *rest = columns
    return Rows(target, nll.astype(np.float64), place, confidence.astype(np.float64), *rest)


def _kept(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states in rows, without those whose target is to be ignored."""
    rows, classes = hidden.flatten(0, -2), target.reshape(-1)
    kept = classes != PADDING
    return (rows, classes) if kept.all() else (rows[kept], classes[kept])


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
        sure, classes = found.values[:, 0].exp(), found.classes
        return target, -own, _place(classes, target), sure, everything, classes[:, 0]
    log_prob: Tensor = head.log_prob(hidden)  # type: ignore[operator]
    own = log_prob.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    best = log_prob.topk(min(_BEST, log_prob.shape[-1]), -1)
    # A class without a probability is none of the best.
    classes = best.indices.masked_fill(best.values == -math.inf, -1)
    support = torch.full_like(target, log_prob.shape[-1])
    # Counting is slow, and most heads have no zeros.
    sparse = log_prob.amin(-1) == -math.inf
    support[sparse] = (log_prob[sparse] > -math.inf).sum(-1)
    sure = best.values[:, 0].exp()
    return target, -own, _place(classes, target), sure, support, best.indices[:, 0]


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
    """Judges models that choose one class per row.

    Args:
        feed: where held-out rows come from.
        counts: how often each class stands in the training part.
    """

    baseline_name = "unigram"

    def __init__(self, feed: Feed, counts: NDArray[np.int64]) -> None:
        self._feed, self._counts = feed, counts
        self._n_classes = len(counts)
        self._decile = deciles_of(counts)

    def on_the_way(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For a point of the learning curve."""
        return self._on_the_way(self._rows(body, head, "valid"))

    def at_the_end(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For the result."""
        return self._at_the_end(self._rows(body, head, "test"))

    def score(self, found: dict[str, Any]) -> float:
        """What validation is compared by, lower is better; every head has it."""
        return math.log(found["eps_perplexity"])

    def baseline(self) -> dict[str, Any]:
        """Every row gets the frequencies of the training part; a count of 0 counts as a half."""
        shares = np.maximum(self._counts, 0.5)
        logs = np.log(shares / shares.sum())
        best = np.argsort(-shares, kind="stable")[:_BEST]
        place_of = np.full(self._n_classes, _BEST)
        place_of[best] = np.arange(len(best))
        made = {}
        for part, judged in (("valid", self._on_the_way), ("test", self._at_the_end)):
            batches = self._feed.held_out(part, rows_for(part, self._n_classes))
            target = np.concatenate([batch.target.reshape(-1).cpu().numpy() for batch in batches])
            target = target[target != PADDING]
            sure = np.full(len(target), math.exp(logs[best[0]]))
            everything, first = (np.full(len(target), n) for n in (self._n_classes, best[0]))
            rows = Rows(target, -logs[target], place_of[target], sure, everything, first)
            made[part] = judged(rows)
        return made

    def _on_the_way(self, rows: Rows) -> dict[str, Any]:
        found = quality(rows, self._n_classes)
        kept = ("nll", "perplexity", "top1", "top10", "coverage", "eps_perplexity")
        return {name: found[name] for name in kept}

    def _at_the_end(self, rows: Rows) -> dict[str, Any]:
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


class ClassJudge(TextJudge):
    """Judges models that choose the class of a row: also by top-5 and by macro-F1."""

    baseline_name = "majority class"

    def score(self, found: dict[str, Any]) -> float:
        """What validation is compared by, lower is better: the accuracy that the verdict is of."""
        return -float(found["top1"])

    def _on_the_way(self, rows: Rows) -> dict[str, Any]:
        return {**super()._on_the_way(rows), **_of_classes(rows)}

    def _at_the_end(self, rows: Rows) -> dict[str, Any]:
        return {**super()._at_the_end(rows), **_of_classes(rows)}


def _of_classes(rows: Rows) -> dict[str, Any]:
    """Macro-F1 is the mean over classes that are a target or a guess of some row."""
    n = 1 + int(max(rows.target.max(initial=0), rows.guess.max(initial=0)))
    right = np.bincount(rows.target[rows.guess == rows.target], minlength=n)
    both = np.bincount(rows.target, minlength=n) + np.bincount(rows.guess, minlength=n)
    f1 = 2 * right[both > 0] / both[both > 0]
    return {"top5": float((rows.place < 5).mean()), "macro_f1": float(f1.mean())}


class PairJudge:
    """Judges models that find the key of a query among all keys of held-out pairs, by cosine.

    A key of the same group, such as another with the same text, is right as well. Recall at k is
    the share of queries with a right key among the k nearest.

    Args:
        feed: where held-out pairs come from.
        counts: one for each pair of the training part.
    """

    baseline_name = "chance"

    def __init__(self, feed: Feed, counts: NDArray[np.int64]) -> None:
        self._feed, self._n_classes = feed, len(counts)

    def on_the_way(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For a point of the learning curve."""
        return self._found(body, head, "valid")

    def at_the_end(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For the result."""
        return self._found(body, head, "test")

    def score(self, found: dict[str, Any]) -> float:
        """What validation is compared by, lower is better."""
        return -float(found["reciprocal_rank"])

    def baseline(self) -> dict[str, Any]:
        """Keys in random order, each query with one right key."""
        made = {}
        for part in ("valid", "test"):
            batches = self._feed.held_out(part, rows_for(part, self._n_classes))
            made[part] = _recall(1 + np.arange(sum(batch.size for batch in batches)))
        return made

    @torch.no_grad()
    def _found(self, body: nn.Module, head: nn.Module, part: str) -> dict[str, Any]:
        body.eval()
        head.eval()
        batches = list(self._feed.held_out(part, rows_for(part, self._n_classes)))
        hidden = torch.cat([body(batch.inputs) for batch in batches])
        group = torch.cat([batch.target for batch in batches])
        query, key = functional.normalize(hidden.float(), dim=-1).unbind(1)
        ranks = []
        for some, own in zip(query.split(1024), group.split(1024), strict=True):
            scores = some @ key.T
            best = scores.masked_fill(own[:, None] != group, -math.inf).amax(1, keepdim=True)
            # A key as near that is wrong comes first: vectors that are all alike find nothing.
            before = (scores >= best) & (own[:, None] != group)
            ranks.append(1 + before.sum(1))
        return _recall(torch.cat(ranks).cpu().numpy())


def _recall(ranks: NDArray[np.int64]) -> dict[str, Any]:
    """Of the rank of the first right key of each query, from 1."""
    return {
        "rows": len(ranks),
        **{f"recall_at_{k}": float((ranks <= k).mean()) for k in (1, 10)},
        "reciprocal_rank": float((1 / ranks).mean()),
    }


@dataclass(frozen=True)
class LabelRows:
    """What is kept of rows with several labels.

    Attributes:
        scores: of the best labels of each row, falling.
        labels: which these are.
        hits: whether each of them is right.
        present: how many labels each row has.
        occurrences: in how many rows each label is.
    """

    scores: Reals
    labels: NDArray[np.int64]
    hits: NDArray[np.bool_]
    present: NDArray[np.int64]
    occurrences: NDArray[np.int64]
    native: dict[str, float]
    """Sums over all rows of the head's own rule, and of its loss."""


class LabelJudge:
    """Judges models that choose several labels per row.

    Labels are ranked by the head's scores. Measures without a threshold: the share of right ones
    among the 1, 3 and 5 best of a row (precision at k), and the mean average precision of rows.
    With one: a label is predicted where its score is above the threshold that has the best
    micro-F1 on validation data, the same search for every loss. The head's own rule is beside it.

    Args:
        feed: where held-out rows come from.
        counts: in how many rows of the training part each label stands.
    """

    baseline_name = "label frequencies"

    def __init__(self, feed: Feed, counts: NDArray[np.int64]) -> None:
        self._feed, self._counts, self._n_classes = feed, counts, len(counts)
        self._decile = deciles_of(counts)

    def on_the_way(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For a point of the learning curve; the threshold is the best one there."""
        rows = self._rows(body, head, "valid")
        return self._found(rows, best_threshold(rows), deciles=False)

    def at_the_end(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """For the result, with the threshold of the validation part."""
        threshold = best_threshold(self._rows(body, head, "valid"))
        return self._found(self._rows(body, head, "test"), threshold)

    def score(self, found: dict[str, Any]) -> float:
        """What validation is compared by, lower is better; it needs no threshold."""
        return -float(found["mean_average_precision"])

    def baseline(self) -> dict[str, Any]:
        """Every row gets the labels in the order of their frequency."""
        order = np.argsort(-self._counts, kind="stable")[: self._depth]
        shares = self._counts[order] / max(1, int(self._counts.max(initial=1)))
        rows = {part: self._of_all(order, shares, part) for part in ("valid", "test")}
        threshold = best_threshold(rows["valid"])
        return {
            "valid": self._found(rows["valid"], threshold, deciles=False),
            "test": self._found(rows["test"], threshold),
        }

    @property
    def _depth(self) -> int:
        return min(_CANDIDATES, self._n_classes)

    def _of_all(self, order: NDArray[np.int64], shares: Reals, part: str) -> LabelRows:
        hits, present, often = [], [], np.zeros(self._n_classes, np.int64)
        for batch in self._feed.held_out(part, rows_for(part, self._n_classes)):
            truth = as_table(batch.target, self._n_classes).cpu().numpy()
            hits.append(truth[:, order])
            present.append(truth.sum(1))
            often += truth.sum(0)
        found = np.concatenate(hits)
        size = len(found), len(order)
        return LabelRows(
            np.broadcast_to(shares, size), np.broadcast_to(order, size), found,
            np.concatenate(present), often, {},
        )  # fmt: skip

    @torch.no_grad()
    def _rows(self, body: nn.Module, head: Any, part: str) -> LabelRows:
        body.eval()
        head.eval()
        parts: list[tuple[NDArray[Any], ...]] = []
        sums: dict[str, float] = {}
        often = np.zeros(self._n_classes, np.int64)
        for batch in self._feed.held_out(part, rows_for(part, self._n_classes)):
            hidden = body(batch.inputs)
            truth = as_table(batch.target, self._n_classes)
            best = head.topk(hidden, self._depth)
            hits = truth.gather(1, best.classes)
            parts.append(
                tuple(
                    each.cpu().numpy() for each in (best.values, best.classes, hits, truth.sum(1))
                )
            )
            often += truth.sum(0).cpu().numpy()
            guess = as_table(head.predict(hidden), self._n_classes)
            numbers = {
                "loss": batch.size * float(head(hidden, batch.target)),
                "true": float((guess & truth).sum()),
                "guessed": float(guess.sum()),
            }
            for name, value in numbers.items():
                sums[name] = sums.get(name, 0.0) + value
        scores, labels, right, present = map(np.concatenate, zip(*parts, strict=True))
        return LabelRows(scores.astype(np.float64), labels, right, present, often, sums)

    def _found(self, rows: LabelRows, threshold: float, deciles: bool = True) -> dict[str, Any]:
        n, depth = rows.hits.shape
        guess = rows.scores >= threshold
        right = (guess & rows.hits).sum()
        # Labels below the candidates are never predicted.
        exact = (guess == rows.hits).all(1) & (rows.hits.sum(1) == rows.present)
        ranks = np.arange(1, depth + 1)
        so_far = np.cumsum(rows.hits, 1) / ranks
        of_row = (so_far * rows.hits).sum(1) / np.maximum(rows.present, 1)
        counted = rows.present > 0
        made = {
            "rows": n,
            "threshold": threshold,
            "micro_f1": _share(2 * right, guess.sum() + rows.present.sum()),
            "micro_precision": _share(right, guess.sum()),
            "micro_recall": _share(right, rows.present.sum()),
            "exact_match": float(exact.mean()),
            "mean_average_precision": float(of_row[counted].mean()) if counted.any() else 0.0,
            **{f"precision_at_{k}": float(rows.hits[:, :k].sum(1).mean() / k) for k in _DEPTHS},
        }
        if rows.native:
            made |= {
                "loss": rows.native["loss"] / n,
                "native_micro_f1": _share(
                    2 * rows.native["true"], rows.native["guessed"] + rows.present.sum()
                ),
            }
        return {**made, "by_decile": self._by_decile(rows, guess)} if deciles else made

    def _by_decile(self, rows: LabelRows, guess: NDArray[np.bool_]) -> list[dict[str, Any]]:
        """The share of labels that were found, by how frequent the label is."""
        of_label = self._decile[rows.labels]
        hit = np.bincount(of_label[guess & rows.hits], minlength=DECILES)
        there = np.bincount(self._decile, rows.occurrences, minlength=DECILES)
        return [
            {"decile": i + 1, "count": int(n), "recall": _share(h, n)}
            for i, (h, n) in enumerate(zip(hit, there, strict=True))
        ]


def best_threshold(rows: LabelRows) -> float:
    """The score from which on labels are predicted such that micro-F1 is highest."""
    scores, hits = rows.scores.ravel(), rows.hits.ravel()
    known = scores > -math.inf
    if not known.any():
        return math.inf
    scores, hits = scores[known], hits[known]
    order = np.argsort(-scores, kind="stable")
    right = np.cumsum(hits[order])
    f1 = 2 * right / (np.arange(1, len(order) + 1) + rows.present.sum())
    # Of equal scores all are taken or none.
    last = np.append(scores[order][1:] < scores[order][:-1], True)
    f1[~last] = -1.0
    place = int(f1.argmax())
    below = scores[order][place + 1] if place + 1 < len(order) else scores[order][place] - 1.0
    # Between two scores, where rounding on another machine changes nothing.
    return float(0.5 * (scores[order][place] + below))


def as_table(positives: Tensor, n_classes: int) -> Tensor:
    """Padded lists of classes as a table of booleans, ``(rows, n_classes)``."""
    table = torch.zeros(len(positives), n_classes + 1, dtype=torch.bool, device=positives.device)
    # Padding goes into a column of its own.
    places = torch.where(positives < 0, n_classes, positives)
    return table.scatter_(1, places, value=True)[:, :-1]


Judge = TextJudge | LabelJudge | PairJudge


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
