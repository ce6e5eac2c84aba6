"""Statistics of data, and which heads to try first. Nothing is trained."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy import stats

from lastlayer.lab.data import Data, LabelData, PairData, SparseRows, TextData
from lastlayer.lab.errors import LabError

Counts = NDArray[np.int64]
# Hidden size for which cutoffs are chosen.
HIDDEN = 256
# Smaller counts are shared by many ranks, too coarse for a slope.
_FEWEST = 5
# Number of ranks in a fit, evenly spaced on a log scale.
_PLACES = 200
# Up to this many classes, the full softmax is a small matrix product.
_FEW = 2_000
_MANY = 10_000


@dataclass(frozen=True)
class ZipfFit:
    """count(rank) ≈ scale · rank^−slope."""

    slope: float
    r_squared: float  # 1 if the law holds exactly
    ranks: int  # number of ranks in the fit


@dataclass(frozen=True)
class Suggestion:
    """A head to try, as a spec for ``lastlayer compare --head``, and the reason."""

    head: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Statistics of data and suggested heads."""

    task: str
    name: str
    source: str
    classes: int
    sizes: dict[str, int]  # tokens or rows of each part
    zipf: ZipfFit | None  # None if too few classes are frequent
    numbers: dict[str, Any]  # other statistics of the training part, with the keys of SAID
    suggestions: tuple[Suggestion, ...]  # heads to try, the best first

    def as_json(self) -> dict[str, Any]:
        """For JSON; ``numbers`` are merged into the object."""
        record = asdict(self)
        return {**record, **record.pop("numbers")}


SAID = {
    # Of one class per target. 2 to the power of the entropy is the effective number of classes.
    "entropy_bits": ("entropy of the frequencies", "{:.2f} bits"),
    "effective_classes": ("effective number of classes", "{:,.0f}"),
    "unigram_perplexity": ("unigram perplexity, validation", "{:,.0f}"),
    "half": ("classes that cover half of the targets", "{:,}"),
    "tail_1k": ("targets outside the top 1,000", "{:.1%}"),
    "tail_10k": ("targets outside the top 10,000", "{:.1%}"),
    "seen_once": ("classes seen once", "{:.1%}"),
    "unknown": ("targets that are <unk>, train", "{:.1%}"),
    "unknown_valid": ("targets that are <unk>, validation", "{:.1%}"),
    "huffman_bits": ("choices per target, Huffman's tree", "{:.2f}"),
    "balanced_bits": ("choices per target, balanced tree", "{:.2f}"),
    "hidden": ("hidden size for the cutoffs", "{:,}"),
    "cutoffs": ("adaptive cutoffs", "{}"),
    "adaptive_savings": ("times fewer multiply-adds per target", "{:.1f}"),
    # Of several labels per row.
    "features": ("features", "{:,}"),
    "filled": ("features that are not 0", "{:.1%}"),
    "cardinality": ("labels per row (cardinality)", "{:.2f}"),
    "density": ("density: labels per row over all labels", "{:.2%}"),
    "without": ("rows without a label", "{:.1%}"),
    "most": ("most labels of a row", "{:,}"),
    "distinct": ("different sets of labels", "{:,}"),
    "most_frequent": ("rows with the most frequent label", "{:.2%}"),
    "median_frequent": ("rows with the median label", "{:.2%}"),
    "least_frequent": ("rows with the rarest label", "{:.2%}"),
    "imbalance": ("most frequent label over the mean", "{:.1f}"),
    "rare": ("labels in fewer than 10 rows", "{:.1%}"),
    "unseen": ("classes or labels never seen in training", "{:.1%}"),
    "unseen_in_test": ("labels of test rows never seen", "{:.1%}"),
}
"""Display name and format of each statistic."""


def inspect_data(data: Data, *, hidden: int = HIDDEN) -> Inspection:
    """Compute statistics and suggest heads for this hidden size; imports torch."""
    if isinstance(data, PairData):
        raise LabError("DATA: expected data with classes, got pairs; use lastlayer compare")
    if isinstance(data, LabelData) and data.task == "multilabel":
        numbers = _of_labels(data)
        tried = for_labels(data.n_classes, numbers)
    else:
        numbers = _of_classes(data, hidden)
        tried = for_text(data.n_classes, numbers)
    return Inspection(
        task=data.task, name=data.name, source=str(data.description.get("source", "")),
        classes=data.n_classes, sizes=data.sizes, zipf=zipf_fit(data.counts), numbers=numbers,
        suggestions=tried,
    )  # fmt: skip


def _of_classes(data: TextData | LabelData, hidden: int) -> dict[str, Any]:
    from lastlayer import trees

    counts, total = data.counts, data.counts.sum()
    falling, bits = np.sort(counts)[::-1], float(stats.entropy(counts, base=2))
    cutoffs, savings = _adaptive(falling, hidden)
    valid = data.valid if isinstance(data, TextData) else data.valid.labels.indices
    numbers = {
        "entropy_bits": bits,
        "effective_classes": 2**bits,
        "unigram_perplexity": float(np.exp(unigram_nll(counts, valid))),
        "half": int((np.cumsum(falling) >= 0.5 * total).argmax()) + 1,
        "tail_1k": float(falling[1_000:].sum() / total),
        "tail_10k": float(falling[10_000:].sum() / total),
        "seen_once": float((counts == 1).mean()),
        "unseen": float((counts == 0).mean()),
        # Classes that never occur also have a leaf in a tree.
        "huffman_bits": trees.huffman(np.maximum(counts, 1)).expected_depth(counts),
        "balanced_bits": trees.balanced(data.n_classes).expected_depth(counts),
        "hidden": hidden,
        "cutoffs": cutoffs,
        "adaptive_savings": savings,
    }
    if isinstance(data, TextData):
        unknown = data.vocabulary.unknown
        numbers["unknown"] = float(counts[unknown] / total)
        numbers["unknown_valid"] = float((valid == unknown).mean())
    return numbers


def _adaptive(falling: Counts, hidden: int, rows: int = 256) -> tuple[tuple[int, ...], float]:
    """Adaptive cutoffs, and the factor by which they reduce multiply-adds per target."""
    from lastlayer.heads.layout import cutoffs_from_counts, tail_widths

    cutoffs = cutoffs_from_counts(falling, hidden, rows=rows)
    below = np.concatenate([[0.0], np.cumsum(falling / falling.sum())])
    ends = [*cutoffs, len(falling)]
    multiply_adds = float(hidden * (ends[0] + len(cutoffs)))
    widths = tail_widths(hidden, len(cutoffs), 4.0, 8)
    for (start, stop), width in zip(pairwise(ends), widths, strict=True):
        multiply_adds += float(below[stop] - below[start]) * width * (hidden + stop - start)
    return tuple(cutoffs), len(falling) * hidden / multiply_adds


def _of_labels(data: LabelData) -> dict[str, Any]:
    counts, rows, labels = data.counts, data.train.n_rows, data.train.labels
    per_row, tested = np.diff(labels.offsets), data.test.labels.indices
    features, cardinality = data.train.features, float(per_row.mean())
    filled = features.values if isinstance(features, SparseRows) else features
    sets = {labels.indices[a:b].tobytes() for a, b in pairwise(labels.offsets.tolist())}
    return {
        "features": data.n_features,
        "filled": float(np.count_nonzero(filled) / (rows * data.n_features)),
        "cardinality": cardinality,
        "density": cardinality / data.n_classes,
        "without": float((per_row == 0).mean()),
        "most": int(per_row.max()),
        "distinct": len(sets),
        "most_frequent": float(counts.max() / rows),
        "median_frequent": float(np.median(counts) / rows),
        "least_frequent": float(counts.min() / rows),
        "imbalance": float(counts.max() / counts.mean()),
        "rare": float((counts < 10).mean()),
        "unseen": float((counts == 0).mean()),
        "unseen_in_test": float((counts[tested] == 0).mean()) if len(tested) else 0.0,
    }


def zipf_fit(counts: Counts) -> ZipfFit | None:
    """Fit a line through log count against log rank by least squares.

    The points are evenly spaced in the logarithm of the rank, so that the many rare classes have no
    more weight than the few frequent ones; only ranks with a count of at least 5 are used. None if
    there are fewer than 10 such ranks.

    Example:
        >>> fit = zipf_fit((1e7 / np.arange(1, 2001) ** 1.2).astype(np.int64))
        >>> round(fit.slope, 2), fit.ranks
        (1.2, 2000)
    """
    falling = np.sort(counts)[::-1]
    n = int(np.count_nonzero(falling >= _FEWEST))
    if n < 10:
        return None
    places = np.unique(np.geomspace(1, n, _PLACES).round().astype(np.int64))
    x, y = np.log(places), np.log(falling[places - 1])
    fit = stats.linregress(x, y)
    # If all counts are equal, the line is level and exact.
    return ZipfFit(-float(fit.slope), float(fit.rvalue**2) if np.ptp(y) > 0 else 1.0, n)


def unigram_nll(counts: Counts, ids: NDArray[Any]) -> float:
    """Mean negative log-likelihood of a unigram model with add-one smoothing."""
    log_prob = np.log(counts + 1.0) - np.log(counts.sum() + len(counts))
    seen = np.bincount(ids, minlength=len(counts))
    return float(-(seen @ log_prob) / len(ids))


def for_text(classes: int, found: Mapping[str, Any]) -> tuple[Suggestion, ...]:
    """Suggested heads for one class per target, the best first, from the statistics."""
    half, once, huffman = found["half"], found["seen_once"], found["huffman_bits"]
    effective, hidden = found["effective_classes"], found["hidden"]
    cutoffs, savings = found["cutoffs"], found["adaptive_savings"]
    few, many, rare = classes <= _FEW, classes > _MANY, once > 0.25
    return (
        *_where(few, "full",
            f"{classes:,} classes are few: all logits are one small matrix product, so cheaper "
            "heads save next to nothing."),
        *_where(not few and len(cutoffs) > 0 and savings >= 1.5,
            f"adaptive:cutoffs={','.join(map(str, cutoffs))}",
            f"{half:,} of {classes:,} classes have half of all targets: with the frequent ones at "
            f"the top a target needs {savings:.0f} times fewer multiply-adds at hidden size "
            f"{hidden}."),
        *_where(not few, "full",
            "It is exact, and the reference for the quality of the others. A step computes all "
            f"{classes:,} logits of a row, but never stores them at once."),
        *_where(not few, "hierarchical",
            f"Huffman's tree needs {huffman:.1f} choices per target on average, "
            f"{classes / max(1.0, huffman):,.0f} times fewer vectors than there are classes."),
        *_where(many, "sampled",
            "A training step samples a few hundred classes, so it costs as much with "
            f"{classes:,} classes as with ten times as many; predictions are a full softmax."),
        *_where(effective < classes / 20, "entmax",
            f"The effective number of classes is only about {effective:,.0f}: most of the "
            f"{classes:,} should have probability 0 in most contexts."),
        *_where(rare, "char_cnn",
            f"{once:.0%} of the classes occur once: too rarely to learn a vector for each, but "
            "vectors computed from the spelling can. It is slow."),
        *_where(many and not rare, "differentiated",
            f"{half:,} classes have half of the targets: narrower vectors are enough for the "
            f"others, which halves the {classes * hidden / 1e6:,.0f} million parameters."),
    )  # fmt: skip


def for_labels(labels: int, found: Mapping[str, Any]) -> tuple[Suggestion, ...]:
    """Suggested heads for several labels per row, from the statistics."""
    cardinality, density, most = found["cardinality"], found["density"], found["most"]
    return (
        *_where(True, "zlpr",
            f"{cardinality:.1f} of {labels:,} labels per row: it ranks the positive labels above "
            "the others and above 0, and needs no weight for the many negatives."),
        *_where(True, "bce",
            "One binary classifier per label is the usual way, and the reference for the others."),
        *_where(density < 0.1 or found["imbalance"] > 10, "asymmetric",
            f"Only {density:.1%} of all pairs of row and label are positive: easy negatives would "
            "dominate the gradient."),
        *_where(most <= 20 and cardinality <= 5, "sparsemax_labels",
            f"No row has more than {most} labels: a sparse distribution is zero on the others."),
    )  # fmt: skip


def _where(holds: bool, head: str, why: str) -> tuple[Suggestion, ...]:
    return (Suggestion(head, why),) if holds else ()


def render(found: Inspection, console: Console) -> None:
    """Print the statistics, then the heads to try. Text from the data is printed verbatim."""
    console.print(Text.assemble((found.name, "bold"), f"  {found.source}"))
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    unit = "tokens" if found.task == "lm" else "rows"
    table.add_row(
        f"{unit}, train / validation / test",
        " / ".join(map("{:,}".format, found.sizes.values())),
    )
    table.add_row("labels" if found.task == "multilabel" else "classes", f"{found.classes:,}")
    slope = "too few frequent classes"
    if fit := found.zipf:
        slope = f"{fit.slope:.2f} (R² {fit.r_squared:.2f}, {fit.ranks:,} ranks)"
    table.add_row("Zipf slope", slope)
    for key in (key for key in SAID if key in found.numbers):
        label, form = SAID[key]
        value = found.numbers[key]
        if key.startswith("tail") and not value:
            # There are not as many classes.
            continue
        if key == "cutoffs":
            value = ", ".join(f"{each:,}" for each in value) or "none: a full softmax is as fast"
        table.add_row(label, Text(form.format(value)))
    console.print(table)
    console.print(Text("Try first", style="bold"))
    for number, each in enumerate(found.suggestions, 1):
        console.print(Text.assemble(f"{number}. ", (each.head, "cyan"), f"  {each.why}"))
