"""The multi-label table of the sparsemax paper, with ZLPR as further columns."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer import bce_loss, multilabel_sparsemax_loss, smooth_labels, sparsemax, zlpr_loss
from lastlayer.lab.data import LabelData, LabelPart, load
from studies.frame import RECALLED, Needed, Options, Study, Verdict, mean, spread
from studies.linear import Linear, fit_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rows of the training part, where the files have no split: as in the paper (recalled).
SETS = {"scene": None, "emotions": None, "birds": None, "cal500": 400}
# Micro and macro F1 of Table 2, recalled.
_NAMES = ("logistic", "softmax", "sparsemax")
PUBLISHED = {
    name: dict(zip(_NAMES, values, strict=True))
    for name, values in {
        "scene": ((70.96, 72.95), (74.01, 75.03), (73.45, 74.57)),
        "emotions": ((66.75, 68.56), (67.34, 67.51), (66.38, 66.07)),
        "birds": ((45.78, 33.77), (48.67, 37.06), (49.44, 39.13)),
        "cal500": ((48.88, 24.49), (47.46, 23.51), (48.47, 26.20)),
    }.items()
}
PENALTIES, FOLDS, SMOOTHING = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001), 5, 0.05
# A set whose rows without labels have a class of their own, on the published split alone.
WITH_NONE = ", with a class for none"
MEASURES = {"micro": "micro-F1", "macro": "macro-F1 (authors')", "sklearn": "macro-F1 (sklearn)"}


class Rows(NamedTuple):
    """Features and labels, ``(n, d)`` and 0/1 ``(n, labels)``."""

    features: Tensor
    labels: Tensor

    def at(self, rows: Tensor) -> "Rows":
        """Some of them."""
        return Rows(self.features[rows], self.labels[rows])


@dataclass(frozen=True)
class Method:
    """A loss by its name, and the rules that may turn scores into labels."""

    loss: str
    rules: Sequence[float]
    predict: Callable[[Tensor, float], Tensor]


def _softmax_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Against the uniform distribution over the labels of a row; rows without any are left out."""
    some = labels.sum(1) > 0
    return cross_entropy(scores[some], labels[some] / labels[some].sum(1, keepdim=True))


def _soft_zlpr(scores: Tensor, labels: Tensor) -> Tensor:
    return zlpr_loss(scores, smooth_labels(labels, SMOOTHING))


def _above(scores: Tensor, threshold: float) -> Tensor:
    return scores > threshold


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logistic": bce_loss,
    "softmax": _softmax_loss,
    "sparsemax": multilabel_sparsemax_loss,
    "ZLPR": zlpr_loss,
    "soft ZLPR": _soft_zlpr,
}
_THRESHOLDS = [0.5 * n for n in range(-10, 3)]
METHODS = {
    "logistic": Method(
        "logistic", [0.05 * n for n in range(1, 11)], lambda scores, p: torch.sigmoid(scores) > p
    ),
    "softmax": Method(
        "softmax", range(1, 11), lambda scores, n: torch.softmax(scores, -1) > n / scores.shape[-1]
    ),
    "sparsemax": Method(
        "sparsemax", [1 + 0.5 * n for n in range(9)], lambda scores, t: sparsemax(t * scores) > 0
    ),
    "ZLPR, at 0": Method("ZLPR", [0.0], _above),
    "ZLPR": Method("ZLPR", _THRESHOLDS, _above),
    "soft ZLPR": Method("soft ZLPR", _THRESHOLDS, _above),
}


def f1_scores(labels: Tensor, predicted: Tensor) -> dict[str, float]:
    """Micro-F1; the harmonic mean of macro precision and recall; the mean F1 over labels."""
    true = labels.bool()
    hits, said, there = ((x.sum(0).double()) for x in (true & predicted, predicted, true))
    precision, recall = (hits / x.clamp(min=1) for x in (said, there))
    p, r = precision.mean().item(), recall.mean().item()
    return {
        "micro": (2 * hits.sum() / (said.sum() + there.sum()).clamp(min=1)).item(),
        "macro": 2 * p * r / (p + r) if p + r else 0.0,
        "sklearn": (2 * hits / (said + there).clamp(min=1)).mean().item(),
    }


def read(folder: Path) -> tuple[Rows, int]:
    """All rows, those for training first, and how many these are."""
    data = load(folder, task="multilabel")
    if not isinstance(data, LabelData):
        raise ValueError(f"{folder}: expected rows with labels")
    parts = data.train, data.valid, data.test
    made = [_dense(part, data.n_classes) for part in parts]
    whole = Rows(*(torch.cat(each) for each in zip(*made, strict=True)))
    return whole, data.train.n_rows + data.valid.n_rows


def _dense(part: LabelPart, n_labels: int) -> Rows:
    features = part.features if isinstance(part.features, np.ndarray) else part.features.dense()
    labels = torch.zeros(part.n_rows, n_labels, dtype=torch.float64)
    row = np.repeat(np.arange(part.n_rows), np.diff(part.labels.offsets))
    labels[row, part.labels.indices] = 1.0
    return Rows(torch.from_numpy(features).double(), labels)


def splits(rows: Rows, n_train: int, seeds: Sequence[int]) -> Iterator[tuple[int, Rows, Rows]]:
    """For each seed a random split of the same sizes; features have mean 0 and variance 1."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        yield seed, *_split(rows, torch.randperm(len(rows.labels), generator=generator), n_train)


def _split(rows: Rows, order: Tensor, n_train: int) -> tuple[Rows, Rows]:
    train, test = (rows.at(each) for each in (order[:n_train], order[n_train:]))
    middle, scale = train.features.mean(0), train.features.std(0)
    scale = torch.where(scale > 0, scale, 1.0)
    made = [each._replace(features=(each.features - middle) / scale) for each in (train, test)]
    return made[0], made[1]


def evaluate(
    train: Rows, test: Rows, folds: int, n_labels: int | None = None
) -> dict[str, dict[str, float]]:
    """F1 on test rows, each with the penalty and the rule that it chose in cross-validation.

    ``macro_by_micro`` is the authors' macro-F1 where micro-F1 chose. Only the first ``n_labels``
    count.
    """

    def rate(labels: Tensor, predicted: Tensor) -> dict[str, float]:
        return f1_scores(labels[:, :n_labels], predicted[:, :n_labels])

    result: dict[str, dict[str, float]] = {}
    for name, loss in LOSSES.items():
        held, final = _scores(loss, train, test, folds)
        for key, method in METHODS.items():
            if method.loss != name:
                continue
            rated = {
                (penalty, rule): rate(labels, method.predict(scores, rule))
                for penalty, (scores, labels) in held.items()
                for rule in method.rules
            }
            tested = {
                (penalty, rule): rate(test.labels, method.predict(final[penalty], rule))
                for penalty, rule in rated
            }
            result[key] = {}
            for which in MEASURES:
                chosen = {pair: each[which] for pair, each in rated.items()}
                best = max(chosen, key=chosen.__getitem__)
                result[key][which] = tested[best][which]
                result[key] |= {f"{which}_penalty": best[0], f"{which}_rule": float(best[1])}
            by_micro = max(rated, key=lambda pair: rated[pair]["micro"])
            result[key]["macro_by_micro"] = tested[by_micro]["macro"]
    return result


def _scores(
    loss: Callable[[Tensor, Tensor], Tensor], train: Rows, test: Rows, folds: int
) -> tuple[dict[float, tuple[Tensor, Tensor]], dict[float, Tensor]]:
    """By penalty: scores and labels of training rows when held out, and scores of test rows."""

    def path(rows: Rows) -> Iterator[tuple[float, Linear]]:
        return fit_path(
            rows.features, rows.labels.shape[1], lambda scores: loss(scores, rows.labels), PENALTIES
        )

    held: dict[float, list[Rows]] = {}
    fold = torch.arange(len(train.labels)) % folds
    for number in range(folds):
        left = train.at(fold == number)
        for penalty, model in path(train.at(fold != number)):
            held.setdefault(penalty, []).append(Rows(model(left.features), left.labels))
    pooled = {
        penalty: (torch.cat([x.features for x in each]), torch.cat([x.labels for x in each]))
        for penalty, each in held.items()
    }
    return pooled, {penalty: model(test.features) for penalty, model in path(train)}


def with_none(rows: Rows) -> Rows:
    """One more label, for the rows that have none."""
    none = (rows.labels.sum(1, keepdim=True) == 0).to(rows.labels.dtype)
    return rows._replace(labels=torch.cat([rows.labels, none], 1))


def measure(options: Options) -> dict[str, Any]:
    """The published split where there is one, and random ones of the same sizes."""
    runs: list[dict[str, Any]] = []
    for name, given in list(SETS.items())[: 2 if options.quick else None]:
        rows, n_train = read(options.path(f"mulan/{name}"))
        made = list(splits(rows, given or n_train, options.seeds))
        if given is None:
            made.insert(0, (-1, *_split(rows, torch.arange(len(rows.labels)), n_train)))
        folds = 2 if options.quick else FOLDS
        for seed, train, test in made[: 1 if options.quick else None]:
            split = "published" if seed < 0 else seed
            f1 = evaluate(train, test, folds)
            runs.append({"set": name, "split": split, "train": len(train.labels), "f1": f1})
        empty = (rows.labels.sum(1) == 0).double().mean().item()
        if empty and given is None:
            _, train, test = made[0]
            f1 = evaluate(with_none(train), with_none(test), folds, rows.labels.shape[1])
            told = {"set": name + WITH_NONE, "split": "published", "empty": empty}
            runs.append({**told, "train": len(train.labels), "f1": f1})
    return {"runs": runs}


def _values(
    found: Mapping[str, Any], name: str, method: str, key: str, published: bool
) -> list[float]:
    return [
        100 * run["f1"][method][key]
        for run in found["runs"]
        if run["set"] == name and (run["split"] == "published") == published
    ]


def _sets(found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(run["set"] for run in found["runs"]))


def _published(name: str) -> dict[str, tuple[float, float]]:
    return PUBLISHED[name.removesuffix(WITH_NONE)]


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """A table for each measure."""
    made = []
    for place, (key, title) in enumerate(MEASURES.items()):
        rows = []
        for name in _sets(found):
            if place < 2:
                cells = [f"{each[place]:.2f}{RECALLED}" for each in _published(name).values()]
                rows.append([name, "in the paper", *cells, *[""] * (len(METHODS) - len(cells))])
            for which, told in ((True, "published split"), (False, "random splits")):
                values = [_values(found, name, m, key, which) for m in METHODS]
                if values[0]:
                    rows.append([name, told, *(spread(each, 1) for each in values)])
        made.append(Grid(f"{title}, percent", ["set", "", *METHODS], rows))
    return made


def _ours(found: Mapping[str, Any], name: str, method: str, place: int) -> float:
    key = list(MEASURES)[place]
    return mean(_values(found, name, method, key, published=False)
                or _values(found, name, method, key, published=True))  # fmt: skip


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Whether the three are close to each other and to the paper, and win where they won."""
    every = _sets(found)
    sets = [name for name in every if name + WITH_NONE not in every]
    gaps, same, spans = [], 0, []
    for name, place in product(sets, range(2)):
        ours = {m: _ours(found, name, m, place) for m in _published(name)}
        theirs = {m: each[place] for m, each in _published(name).items()}
        gaps += [abs(ours[m] - theirs[m]) for m in ours]
        same += max(ours, key=ours.__getitem__) == max(theirs, key=theirs.__getitem__)
        spans.append(max(ours.values()) - min(ours.values()))
    cases = 2 * len(sets)
    zlpr = [
        _ours(found, name, "ZLPR", 0) - max(_ours(found, name, m, 0) for m in _published(name))
        for name in sets
    ]
    text = (
        f"The paper's message is that the three losses are close, with no clear winner. Here they "
        f"differ by {mean(spans):.1f} points on average ({max(spans):.1f} at most), and are "
        f"{mean(gaps):.1f} points from the recalled figures on average ({max(gaps):.1f} at most); "
        f"the winner is the paper's in {same} of {cases} cases. "
        f"ZLPR with a chosen threshold is "
        + ", ".join(f"{gap:+.1f} on {name}" for name, gap in zip(sets, zlpr, strict=True))
        + " beside the best of the three by micro-F1."
    )
    for run in found["runs"]:
        if "empty" not in run:
            continue
        name = run["set"].removesuffix(WITH_NONE)
        theirs = {m: each[0] for m, each in PUBLISHED[name].items()}
        plain = [theirs[m] - _ours(found, name, m, 0) for m in theirs]
        text += (
            f" On {name} {run['empty']:.0%} of the rows have no label, which the rules of softmax "
            f"and sparsemax can hardly say: without a class for that, which is not counted above, "
            f"sparsemax is {plain[-1]:.0f} points of micro-F1 below the paper. "
            "The class was added after this was seen; what the authors did is not known here."
        )
    close = mean(gaps) < 4
    if close and same > cases / 2:
        return Verdict("holds", text)
    return Verdict("holds in part" if close else "does not hold", text)


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """Micro and macro F1 of each set; the paper's as crosses."""
    panels = figure.subplots(1, 2)
    colours = (OTHER_COLOURS[3], OTHER_COLOURS[0], *OURS_COLOURS)
    for place, (panel, key) in enumerate(zip(panels, MEASURES, strict=False)):
        for row, name in enumerate(_sets(found)):
            for column, (method, colour) in enumerate(zip(METHODS, colours, strict=False)):
                at = row + 0.14 * (column - 2.5)
                panel.bar(at, _ours(found, name, method, place), 0.13, color=colour,
                          label=method if row == 0 else None)  # fmt: skip
                dots = _values(found, name, method, key, published=False)
                panel.plot([at] * len(dots), dots, "k.", ms=2)
                if method in _published(name):
                    panel.plot(at, _published(name)[method][place], "kx", ms=5,
                               label="paper (recalled)" if row + column == 0 else None)  # fmt: skip
        names = [name.replace(WITH_NONE, ",\nclass for none") for name in _sets(found)]
        panel.set_xticks(range(len(names)), names)
        panel.set_ylabel(f"{MEASURES[key]}, %")
    panels[1].legend(fontsize=7)


STUDY = Study(
    title="multi-label F1 of logistic, softmax, sparsemax and ZLPR losses",
    claim=(
        "Martins and Astudillo (ICML 2016, Table 2): with a linear model the three losses are "
        "close, sparsemax best in 4 of 10 columns, softmax and logistic in 3 each (recalled)."
    ),
    protocol=(
        "A linear model on standardised features by L-BFGS (100 steps). Penalty (of six) and "
        "decision rule are chosen in 5-fold cross-validation, by each measure for itself; they are "
        "authors': a threshold for logistic, n/K for softmax, the support of sparsemax(t·z). ZLPR "
        "has a threshold of scores, 0 or a chosen one; soft ZLPR has labels smoothed by 0.05. Rows "
        "without labels count for logistic and ZLPR alone, unless they have a class of their own. "
        "Choosing by each measure was settled after a first run in which micro-F1 chose for all: "
        "macro-F1 on CAL500 was then 6 to 9 points lower. Larger penalties were added after a "
        "first run that chose the edge of the grid. "
        "The random splits have the sizes of the "
        "published one (CAL500: "
        "400 training rows, no published split); bars are their means. Not measured: Reuters "
        "(RCV1), which is not in the data, and bibtex and delicious."
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    needs=tuple(
        Needed(f"mulan/{name}", f"the ARFF and XML files of {name} from mulan.sourceforge.net")
        for name in SETS
    ),
    cpu_only=True,
)  # fmt: skip
