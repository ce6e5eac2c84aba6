"""Evaluation on held-out rows, and the baseline that predicts the class frequencies.

One class per row: exact, normalised log-probabilities of every head, also of heads that are trained
on samples. Several labels per row: the best labels of each row, with a threshold that is tuned on
validation data for every loss alike, and also the labels that the head itself predicts. The rows
are the same for all heads, and their number depends on the number of classes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from lastlayer.heads import AdaptiveSoftmax, HierarchicalSoftmax, TopK
from lastlayer.lab.feeding import PADDING, Batch, Feed
from lastlayer.lab.statistics import exp

EPSILON = 1e-4
"""The share of probability that ε-smoothed perplexity spreads evenly over all classes."""
BINS = 15
"""Number of bins of the calibration error."""
AS_GOOD = 0.03
"""Relative difference up to which scores of two learning rates count as equal."""
DECILES = 10
_BEST = 10
# With several labels: depths of precision@k, and how many best labels of a row may be predicted.
_DEPTHS, _CANDIDATES = (1, 3, 5), 32

# Log-probabilities (rows × classes) of an evaluation on each part, and how many times as many on a
# GPU, which computes them in a fraction of a second.
_SCORES, _ON_GPU = {"valid": 2**24, "test": 2**26}, 32
_FEWEST, _MOST = {"valid": 512, "test": 2048}, {"valid": 2048, "test": 16_384}
# Scores (rows × classes) of a chunk.
_CHUNK = 2**24

Reals = NDArray[np.float64]


def rows_for(part: str, n_classes: int, *, on_gpu: bool) -> int:
    """Number of rows for evaluation: fewer with more classes, so that its time is bounded."""
    wanted = _SCORES[part] * (_ON_GPU if on_gpu else 1) // max(1, n_classes)
    return max(_FEWEST[part], min(_MOST[part], wanted))


class Frequencies(nn.Module):
    """The baseline: predicts the class frequencies of the training part for every row.

    A class that never occurs has a count of 0.5.
    """

    def __init__(self, counts: NDArray[np.int64]) -> None:
        super().__init__()
        shares = torch.from_numpy(np.maximum(counts, 0.5))
        self.n_classes = len(counts)
        self._log_prob = torch.log(shares / shares.sum())
        self._order = torch.from_numpy(np.argsort(-counts, kind="stable").copy())

    def log_prob(self, _hidden: Tensor, classes: Tensor) -> Tensor:
        return self._log_prob.to(classes.device)[classes]

    def topk(self, hidden: Tensor, k: int) -> TopK:
        best = self._order[:k]
        both = (
            each.to(hidden.device).expand(len(hidden), k) for each in (self._log_prob[best], best)
        )
        return TopK(*both)


# Heads that compute the probability of the target and the best classes without all others; none of
# their probabilities is 0.
_SEARCHED = (HierarchicalSoftmax, AdaptiveSoftmax, Frequencies)


@dataclass(frozen=True)
class Rows:
    """Evaluation results of rows with one class each."""

    target: NDArray[np.int64]
    nll: Reals  # negative log-probability of the target
    # Rank of the target among the ten best classes, from 0; 10 if it is not one of them.
    place: NDArray[np.int64]
    confidence: Reals  # the highest probability
    support: NDArray[np.int64]  # number of classes with a probability above 0
    guess: NDArray[np.int64]  # the class with the highest probability


@torch.no_grad()
def judge_rows(head: nn.Module, states: Iterable[tuple[Tensor, Tensor]]) -> Rows:
    """Evaluate a head on pairs of hidden states and targets, in chunks of bounded size."""
    step, parts = max(1, _CHUNK // int(head.n_classes)), []  # type: ignore[arg-type]
    for hidden, target in states:
        rows, classes = hidden.flatten(0, -2), target.reshape(-1)
        kept = classes != PADDING
        chunks = zip(rows[kept].split(step), classes[kept].split(step), strict=True)
        parts += [_evaluated(head, *chunk) for chunk in chunks]
    return Rows(*(torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True)))


def _evaluated(head: nn.Module, hidden: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    if isinstance(head, _SEARCHED):
        own = head.log_prob(hidden, target.unsqueeze(-1)).squeeze(-1)
        found = head.topk(hidden, min(_BEST, head.n_classes))
        support = torch.full_like(target, head.n_classes)
        sure, classes, first = found.values[:, 0].exp(), found.classes, found.classes[:, 0]
    else:
        log_prob: Tensor = head.log_prob(hidden)  # type: ignore[operator]
        own = log_prob.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        best = log_prob.topk(min(_BEST, log_prob.shape[-1]), -1)
        # A class with probability 0 is not one of the best.
        classes = best.indices.masked_fill(best.values == -math.inf, -1)
        support = torch.full_like(target, log_prob.shape[-1])
        # Counting is slow, and most heads have no zeros.
        sparse = log_prob.amin(-1) == -math.inf
        support[sparse] = (log_prob[sparse] > -math.inf).sum(-1)
        sure, first = best.values[:, 0].exp(), best.indices[:, 0]
    # The target's rank among the best classes.
    hit = classes == target.unsqueeze(-1)
    place = torch.where(hit.any(-1), hit.int().argmax(-1), _BEST)
    return target, -own.double(), place, sure.double(), support, first


def quality(rows: Rows, n_classes: int) -> dict[str, Any]:
    """Means over rows. A NaN in one row makes the mean NaN; an infinite loss makes it infinite."""
    probability = np.exp(-rows.nll)
    smoothed = -np.log((1 - EPSILON) * probability + EPSILON / n_classes)
    nll = float(rows.nll.mean())
    return {
        "nll": nll,
        "perplexity": exp(nll),
        "top1": float((rows.place == 0).mean()),
        "top10": float((rows.place < _BEST).mean()),
        "coverage": float((rows.nll < math.inf).mean()),
        "support": float(rows.support.mean()),
        "eps_nll": float(smoothed.mean()),
        "eps_perplexity": exp(float(smoothed.mean())),
    }


def calibration(rows: Rows) -> dict[str, Any]:
    """Accuracy of the best class in bins of its probability, and the calibration error."""
    bin_of = np.minimum((np.nan_to_num(rows.confidence) * BINS).astype(np.int64), BINS - 1)
    bins = [
        {"confidence": float(rows.confidence[inside].mean()),
         "accuracy": float((rows.place[inside] == 0).mean()), "count": int(inside.sum())}
        for i in range(BINS) if (inside := bin_of == i).any()
    ]  # fmt: skip
    gaps = (each["count"] * abs(each["confidence"] - each["accuracy"]) for each in bins)
    return {"calibration_error": sum(gaps) / len(bin_of), "calibration": bins}


def deciles_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The frequency decile of each class, 0 for the most frequent classes.

    Classes by falling count are divided into groups with a tenth each of all occurrences in the
    training part; a class that spans several tenths belongs to the one that contains its middle.
    """
    order = np.argsort(-counts, kind="stable")
    ends = np.cumsum(counts[order])
    middle = (ends - counts[order] / 2) / max(1, int(ends[-1]))
    decile = np.empty(len(counts), np.int64)
    decile[order] = np.minimum((middle * DECILES).astype(np.int64), DECILES - 1)
    return decile


def by_decile(rows: Rows, decile: NDArray[np.int64], n_classes: int) -> list[dict[str, Any]]:
    """Quality by how frequent the target is; deciles from 1, the most frequent first."""
    parts = []
    for i in range(DECILES):
        inside = decile[rows.target] == i
        found: dict[str, Any] = {"nll": None, "top1": None}
        if inside.any():
            some = quality(Rows(*(each[inside] for each in vars(rows).values())), n_classes)
            found = {name: some[name] for name in ("nll", "eps_nll", "top1", "top10", "coverage")}
        parts.append({"decile": i + 1, "count": int(inside.sum()), **found})
    return parts


class Judge:
    """Evaluates models on held-out rows of the feed, the same for all models.

    ``counts`` are class counts of the training part.
    """

    baseline_name: ClassVar[str]
    _one_class: ClassVar[bool] = True

    def __init__(self, feed: Feed, counts: NDArray[np.int64], *, on_gpu: bool = False) -> None:
        self._feed, self._counts, self._n_classes = feed, counts, len(counts)
        self._on_gpu = on_gpu
        self._decile = deciles_of(counts)

    def on_the_way(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """Evaluate on validation data, for a point of the learning curve."""
        return self._found(body, head, "valid")

    def at_the_end(self, body: nn.Module, head: nn.Module) -> dict[str, Any]:
        """Evaluate on test data, for the result."""
        return self._found(body, head, "test")

    def baseline(self) -> dict[str, Any]:
        """The quality of predicting class frequencies of the training part."""
        known = Frequencies(self._counts)
        return {part: self._found(None, known, part) for part in ("valid", "test")}

    def score(self, found: dict[str, Any]) -> float:
        """The score by which validations are compared; lower is better."""
        raise NotImplementedError

    def is_as_good(self, score: float, best: float) -> bool:
        """Whether a score is within 3% of the best one."""
        return score <= best + AS_GOOD * abs(best)

    def _found(self, body: nn.Module | None, head: nn.Module, part: str) -> dict[str, Any]:
        raise NotImplementedError

    def _held_out(self, part: str) -> Iterator[Batch]:
        rows = rows_for(part, self._n_classes, on_gpu=self._on_gpu)
        return self._feed.held_out(part, rows)

    @torch.no_grad()
    def _states(
        self, body: nn.Module | None, head: nn.Module, part: str
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Hidden states with their targets; empty ones without a backbone."""
        for module in (body, head):
            if module is not None:
                module.eval()
        for batch in self._held_out(part):
            target = batch.target
            rows = target.shape if self._one_class else target.shape[:1]
            empty = target.new_empty(*rows, 0, dtype=torch.float32)
            yield empty if body is None else body(batch.inputs), target


class TextJudge(Judge):
    """Evaluates models that predict one class per row."""

    baseline_name = "unigram"

    def score(self, found: dict[str, Any]) -> float:
        return math.log(found["eps_perplexity"])

    def is_as_good(self, score: float, best: float) -> bool:
        """Whether a perplexity is within 3% of the best one."""
        return score <= best + math.log1p(AS_GOOD)

    def _found(self, body: nn.Module | None, head: nn.Module, part: str) -> dict[str, Any]:
        rows = judge_rows(head, self._states(body, head, part))
        found = {**quality(rows, self._n_classes), **self._more(rows)}
        if part == "valid":
            return {name: each for name, each in found.items() if name not in _AT_THE_END}
        deciles = by_decile(rows, self._decile, self._n_classes)
        size = {"rows": len(rows.target), "epsilon": EPSILON}
        return {**size, **found, **calibration(rows), "by_decile": deciles}

    def _more(self, _rows: Rows) -> dict[str, Any]:
        return {}


# Left out of learning curves.
_AT_THE_END = ("support", "eps_nll")


class ClassJudge(TextJudge):
    """Evaluates classification models: also by top-5 and by macro-F1."""

    baseline_name = "majority class"

    def score(self, found: dict[str, Any]) -> float:
        """Negative accuracy, by which the verdict ranks heads."""
        return -float(found["top1"])

    def is_as_good(self, score: float, best: float) -> bool:
        return Judge.is_as_good(self, score, best)

    def _more(self, rows: Rows) -> dict[str, Any]:
        """Top-5 and macro-F1, the mean over classes that are the target or guess of some row."""
        n = 1 + int(max(rows.target.max(initial=0), rows.guess.max(initial=0)))
        right = np.bincount(rows.target[rows.guess == rows.target], minlength=n)
        both = np.bincount(rows.target, minlength=n) + np.bincount(rows.guess, minlength=n)
        f1 = 2 * right[both > 0] / both[both > 0]
        return {"top5": float((rows.place < 5).mean()), "macro_f1": float(f1.mean())}


class PairJudge(Judge):
    """Evaluates models that find the key of a query among all held-out keys, by cosine similarity.

    Other keys of the same group, such as one with the same text, are also right. Recall at k is
    the share of queries with a right key among the k nearest.
    """

    baseline_name = "chance"

    def score(self, found: dict[str, Any]) -> float:
        return -float(found["reciprocal_rank"])

    def baseline(self) -> dict[str, Any]:
        """Keys in random order, each query with one right key."""
        sizes = {
            part: sum(each.size for each in self._held_out(part)) for part in ("valid", "test")
        }
        return {part: _recall(1 + np.arange(size)) for part, size in sizes.items()}

    @torch.no_grad()
    def _found(self, body: nn.Module | None, head: nn.Module, part: str) -> dict[str, Any]:
        hidden, group = map(torch.cat, zip(*self._states(body, head, part), strict=True))
        query, key = functional.normalize(hidden.float(), dim=-1).unbind(1)
        ranks = []
        for some, own in zip(query.split(1024), group.split(1024), strict=True):
            scores = some @ key.T
            wrong = own[:, None] != group
            best = scores.masked_fill(wrong, -math.inf).amax(1, keepdim=True)
            # Ties count against the model, so that constant vectors have no recall.
            ranks.append(1 + ((scores >= best) & wrong).sum(1))
        return _recall(torch.cat(ranks).cpu().numpy())


def _recall(ranks: NDArray[np.int64]) -> dict[str, Any]:
    """Metrics from the rank (from 1) of the first right key of each query."""
    return {
        "rows": len(ranks),
        **{f"recall_at_{k}": float((ranks <= k).mean()) for k in (1, 10)},
        "reciprocal_rank": float((1 / ranks).mean()),
    }


@dataclass(frozen=True)
class LabelRows:
    """Evaluation results of rows with several labels."""

    scores: Reals  # of the best labels of each row, falling
    labels: NDArray[np.int64]  # ids of these labels
    hits: NDArray[np.bool_]  # whether each of them is right
    present: NDArray[np.int64]  # number of labels of each row
    occurrences: NDArray[np.int64]  # number of rows with each label
    native: dict[str, float]  # sums over rows: loss, and counts of the head's own predictions


class LabelJudge(Judge):
    """Evaluates models that predict several labels per row.

    Labels are ranked by the head's scores. Metrics without a threshold are precision at k, the
    share of right labels among the 1, 3 and 5 best of a row, and the mean average precision of
    rows. For the others a label is predicted if its score reaches the threshold with the best
    micro-F1 on validation data, for every loss alike. Micro-F1 of the head's own predictions is
    recorded, too.
    """

    baseline_name = "label frequencies"
    _one_class = False

    def score(self, found: dict[str, Any]) -> float:
        """Negative mean average precision, which needs no threshold."""
        return -float(found["mean_average_precision"])

    @torch.no_grad()
    def _rows(self, body: nn.Module | None, head: Any, part: str) -> LabelRows:
        parts: list[tuple[Tensor, ...]] = []
        native = dict.fromkeys(("loss", "true", "guessed"), 0.0)
        for hidden, target in self._states(body, head, part):
            truth = as_table(target, self._n_classes)
            best = head.topk(hidden, min(_CANDIDATES, self._n_classes))
            hits = truth.gather(1, best.classes)
            parts.append(
                (best.values.double(), best.classes, hits, truth.sum(1), truth.sum(0)[None])
            )
            if body is not None:
                guess = as_table(head.predict(hidden), self._n_classes)
                native["loss"] += len(hidden) * float(head(hidden, target))
                native["true"] += float((guess & truth).sum())
                native["guessed"] += float(guess.sum())
        columns = (torch.cat(each).cpu().numpy() for each in zip(*parts, strict=True))
        scores, labels, right, present, often = columns
        return LabelRows(scores, labels, right, present, often.sum(0), native if body else {})

    def _found(self, body: nn.Module | None, head: nn.Module, part: str) -> dict[str, Any]:
        """Metrics of a part, with the threshold from validation data."""
        rows = self._rows(body, head, "valid")
        threshold = best_threshold(rows)
        if part == "test":
            rows = self._rows(body, head, "test")
        n, depth = rows.hits.shape
        guess = rows.scores >= threshold
        right, present = (guess & rows.hits).sum(), rows.present.sum()
        # Labels below the candidates are never predicted.
        exact = (guess == rows.hits).all(1) & (rows.hits.sum(1) == rows.present)
        so_far = np.cumsum(rows.hits, 1) / np.arange(1, depth + 1)
        of_row = (so_far * rows.hits).sum(1) / np.maximum(rows.present, 1)
        counted = rows.present > 0
        made = {
            "rows": n,
            "threshold": threshold,
            "micro_f1": _share(2 * right, guess.sum() + present),
            "micro_precision": _share(right, guess.sum()),
            "micro_recall": _share(right, present),
            "exact_match": float(exact.mean()),
            "mean_average_precision": float(of_row[counted].mean()) if counted.any() else 0.0,
            **{f"precision_at_{k}": float(rows.hits[:, :k].sum(1).mean() / k) for k in _DEPTHS},
        }
        if native := rows.native:
            f1 = _share(2 * native["true"], native["guessed"] + present)
            made |= {"loss": native["loss"] / n, "native_micro_f1": f1}
        return {**made, "by_decile": self._by_decile(rows, guess)} if part == "test" else made

    def _by_decile(self, rows: LabelRows, guess: NDArray[np.bool_]) -> list[dict[str, Any]]:
        """Recall by the frequency decile of the label."""
        of_label = self._decile[rows.labels]
        hit = np.bincount(of_label[guess & rows.hits], minlength=DECILES)
        there = np.bincount(self._decile, rows.occurrences, minlength=DECILES)
        return [
            {"decile": i + 1, "count": int(n), "recall": _share(h, n)}
            for i, (h, n) in enumerate(zip(hit, there, strict=True))
        ]


def best_threshold(rows: LabelRows) -> float:
    """The threshold of scores with the highest micro-F1."""
    scores, hits = rows.scores.ravel(), rows.hits.ravel()
    known = scores > -math.inf
    if not known.any():
        return math.inf
    scores, hits = scores[known], hits[known]
    order = np.argsort(-scores, kind="stable")
    right = np.cumsum(hits[order])
    f1 = 2 * right / (np.arange(1, len(order) + 1) + rows.present.sum())
    # A threshold cannot separate equal scores.
    last = np.append(scores[order][1:] < scores[order][:-1], True)
    f1[~last] = -1.0
    place = int(f1.argmax())
    below = scores[order][place + 1] if place + 1 < len(order) else scores[order][place] - 1.0
    # Between two scores, so that rounding on another machine does not change predictions.
    return float(0.5 * (scores[order][place] + below))


def as_table(positives: Tensor, n_classes: int) -> Tensor:
    """Convert padded lists of classes to booleans, ``(rows, n_classes)``."""
    table = torch.zeros(len(positives), n_classes + 1, dtype=torch.bool, device=positives.device)
    # Padding goes into an extra column.
    places = torch.where(positives < 0, n_classes, positives)
    return table.scatter_(1, places, value=True)[:, :-1]


JUDGES: dict[str, type[Judge]] = {
    "lm": TextJudge, "classification": ClassJudge, "multilabel": LabelJudge, "pairs": PairJudge,
}  # fmt: skip


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
