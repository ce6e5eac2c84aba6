"""Label proportions of simulated documents: the softmax loss compared with the sparsemax loss."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer import sparsemax, sparsemax_loss
from lastlayer.lab.statistics import estimate
from studies.frame import Options, Study, Verdict, mean, spread
from studies.linear import fit_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = {"train": 1200, "dev": 200, "test": 1000}
LENGTHS = tuple(range(200, 2001, 200))
CLASSES = (10, 50)
KINDS = ("uniform", "random")
PENALTIES = (1e-2, 1e-4, 1e-6, 1e-8)
METHODS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax": (cross_entropy, partial(torch.softmax, dim=-1)),
    "sparsemax": (sparsemax_loss, sparsemax),
}
MEASURES = {"square": "squared error", "js": "Jensen-Shannon divergence"}


class Documents(NamedTuple):
    """Word frequencies and label proportions."""

    features: Tensor
    shares: Tensor


def simulate(n_classes: int, kind: str, length: int, seed: int) -> dict[str, Documents]:
    """Simulates documents as mixtures of the labels' word distributions.

    There are as many words as labels. Each label has a random distribution over words and a random
    frequency. The number of labels of a document is Poisson with mean 1, redrawn if it is 0. Their
    proportions are uniform or from a Dirichlet distribution, and the number of words is Poisson.
    """
    draw = np.random.default_rng([seed, n_classes, length, KINDS.index(kind)])
    words = draw.random((n_classes, n_classes))
    words /= words.sum(1, keepdims=True)
    common = draw.random(n_classes)
    common /= common.sum()
    n = sum(ROWS.values())
    shares = np.zeros((n, n_classes))
    for row in shares:
        size = 0
        while not 0 < size <= n_classes:
            size = draw.poisson(1.0)
        labels = draw.choice(n_classes, size, replace=False, p=common)
        row[labels] = 1 / size if kind == "uniform" else draw.dirichlet(np.ones(size))
    lengths = np.maximum(1, draw.poisson(length, n))
    counts = draw.multinomial(lengths, shares @ words)
    features = torch.tensor(counts * (n_classes / lengths[:, None]))
    parts = [part.tolist() for part in np.split(np.arange(n), np.cumsum([*ROWS.values()])[:-1])]
    return {
        name: Documents(features[rows], torch.tensor(shares)[rows])
        for name, rows in zip(ROWS, parts, strict=True)
    }


def errors(probs: Tensor, shares: Tensor) -> dict[str, float]:
    """Means over documents and labels, as in the authors' code."""
    middle = (probs + shares) / 2
    each = [torch.xlogy(x, x) - torch.xlogy(x, middle) for x in (probs, shares)]
    js = float(torch.stack(each).sum(0).mean()) / 2
    return {"square": float((probs - shares).square().mean()), "js": js}


def one_run(n_classes: int, kind: str, length: int, seed: int) -> dict[str, dict[str, float]]:
    """Test errors of both losses on the same documents, with the best penalty on dev."""
    made = simulate(n_classes, kind, length, seed)
    train, dev, test = made["train"], made["dev"], made["test"]
    result = {}
    for name, (loss, to_probs) in METHODS.items():
        path = [
            (errors(to_probs(model(dev.features)), dev.shares),
             errors(to_probs(model(test.features)), test.shares))
            for _, model in fit_path(
                train.features, n_classes, partial(loss, target=train.shares), PENALTIES
            )
        ]  # fmt: skip
        result[name] = {key: min(path, key=lambda pair: pair[0][key])[1][key] for key in MEASURES}
    return result


def measure(options: Options) -> dict[str, Any]:
    """Runs every number of labels, kind of proportions, length and seed."""
    lengths = (200, 2000) if options.quick else LENGTHS
    classes = CLASSES[:1] if options.quick else CLASSES
    runs = [
        {"classes": n, "kind": kind, "length": length, "seed": seed,
         "errors": one_run(n, kind, length, seed)}
        for n in classes for kind in KINDS for length in lengths for seed in options.seeds
    ]  # fmt: skip
    return {"runs": runs}


def _cells(found: Mapping[str, Any]) -> dict[tuple[int, str], dict[int, list[Any]]]:
    """Runs by labels and kind, then by length."""
    cells: dict[tuple[int, str], dict[int, list[Any]]] = {}
    for run in found["runs"]:
        of = cells.setdefault((run["classes"], run["kind"]), {})
        of.setdefault(run["length"], []).append(run["errors"])
    return cells


def _gains(runs: list[Any], key: str) -> list[float]:
    """Relative reduction of error by sparsemax over softmax, for each seed."""
    return [1 - run["sparsemax"][key] / run["softmax"][key] for run in runs]


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """Both errors at the shortest, a middle and the longest length."""
    rows = []
    for (n, kind), by_length in _cells(found).items():
        lengths = sorted(by_length)
        for length in sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]}):
            runs = by_length[length]
            row = [str(n), kind, f"{length:,}"]
            for key in MEASURES:
                row += [spread([run[m][key] for run in runs], 2, scale=1000) for m in METHODS]
                row.append(spread(_gains(runs, key), 0, scale=100) + "%")
            rows.append(row)
    heads = [f"{name}: {each}" for name in ("squared", "JS") for each in (*METHODS, "lower by")]
    return [Grid("Errors × 1,000 on test documents, means over documents and labels",
                 ["labels", "proportions", "words", *heads], rows)]  # fmt: skip


def _signs(found: Mapping[str, Any], kind: str) -> dict[str, int]:
    """Number of cases in which each method has the lower JS divergence, with 95% confidence."""
    tally = {"sparsemax": 0, "softmax": 0, "neither": 0}
    for (_, each), by_length in _cells(found).items():
        for runs in by_length.values() if each == kind else ():
            made = estimate(_gains(runs, "js"))
            if made is None or made.low is None or made.high is None:
                tally["neither"] += 1
            else:
                tally[
                    "sparsemax" if made.low > 0 else "softmax" if made.high < 0 else "neither"
                ] += 1
    return tally


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Sparsemax is better with uniform proportions, and better for longer documents."""
    even, drawn = _signs(found, "uniform"), _signs(found, "random")
    parts = []
    for (n, kind), by_length in _cells(found).items():
        lengths = sorted(by_length)
        ends = [mean(_gains(by_length[length], "js")) for length in (lengths[0], lengths[-1])]
        parts.append((n, kind, lengths, ends))
    told = "; ".join(
        f"{n} labels, {kind}: {ends[0]:+.0%} at {lengths[0]:,} words, {ends[1]:+.0%} at "
        f"{lengths[-1]:,}"
        for n, kind, lengths, ends in parts
    )
    rises = all(ends[1] > ends[0] for *_, ends in parts)
    text = (
        f"Reduction of the JS divergence by sparsemax, relative to softmax: {told}. With "
        f"uniform proportions sparsemax is significantly better in {even['sparsemax']} of "
        f"{sum(even.values())} cases and softmax in {even['softmax']}; with random ones "
        f"{drawn['sparsemax']} and {drawn['softmax']} of {sum(drawn.values())}."
    )
    better = even["sparsemax"] > sum(even.values()) / 2 and even["softmax"] == 0
    if better and rises:
        return Verdict("holds", text)
    return Verdict("holds in part" if better or rises else "does not hold", text)


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """One column per number of labels and kind; squared error above, JS divergence below."""
    cells = _cells(found)
    panels = figure.subplots(2, len(cells), squeeze=False, sharex=True)
    for column, ((n, kind), by_length) in enumerate(cells.items()):
        for row, (key, title) in enumerate(MEASURES.items()):
            panel, lengths = panels[row, column], sorted(by_length)
            for name, colour in zip(METHODS, (OTHER_COLOURS[0], OURS_COLOURS[0]), strict=True):
                values = [[1000 * run[name][key] for run in by_length[x]] for x in lengths]
                panel.plot(lengths, [mean(each) for each in values], "o-", color=colour, ms=3,
                           label=name)  # fmt: skip
                for seed in zip(*values, strict=True):
                    panel.plot(lengths, seed, color=colour, lw=0.5, alpha=0.4)
            panel.set_ylim(bottom=0)
            if row == 0:
                panel.set_title(f"{n} labels, {kind} proportions")
            if column == 0:
                panel.set_ylabel(f"{title} × 1,000")
            if row == 1:
                panel.set_xlabel("words per document")
    panels[0, 0].legend()


STUDY = Study(
    title="label proportions of simulated documents, softmax vs sparsemax",
    claim=(
        "Martins and Astudillo (ICML 2016, section 4.1 and its figure, which has no numbers): "
        "sparsemax has the lower error if label proportions are uniform; with random proportions "
        "softmax is better for short documents (about 400 words or fewer) and sparsemax for long "
        "ones (recalled)."
    ),
    protocol=(
        "The simulation of the authors' code: 1,200 training, 200 dev and 1,000 test documents, "
        "as many words as labels, Poisson numbers of labels, 200 to 2,000 words; a linear "
        "model on word frequencies by L-BFGS (100 steps), the penalty chosen on dev from four; "
        "errors averaged over documents and labels. The random number generator differs."
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    size=(10.0, 4.6),
    seeds=5,
    cpu_only=True,
)  # fmt: skip
