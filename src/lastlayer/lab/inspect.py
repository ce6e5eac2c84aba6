"""What data looks like, and which heads to try on it first. Nothing is trained."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastlayer.lab.data import Data, LabelData, PairData, SparseRows, TextData
from lastlayer.lab.errors import LabError

Counts = NDArray[np.int64]
Line = tuple[str, str]
# Hidden size for which cutoffs are chosen.
HIDDEN = 256
# Counts below this are too coarse for a slope: many ranks share one.
_FEWEST = 5
# Places of a fit, evenly spaced in the logarithm of the rank.
_PLACES = 200
# Below so many classes a step is a small matrix product whatever the head.
_FEW = 2_000
_MANY = 10_000


@dataclass(frozen=True)
class ZipfFit:
    """count(rank) ≈ scale · rank^−slope."""

    slope: float
    r_squared: float
    """1 where the law holds exactly."""
    ranks: int
    """How many ranks it was fitted over."""


@dataclass(frozen=True)
class Suggestion:
    """A head to try, as a spec for ``lastlayer compare --head``, and why."""

    head: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What is known of data before anything is trained.

    Attributes:
        task: of the data.
        name: of the data.
        source: where it is.
        classes: how many a head chooses among.
        sizes: tokens or rows of each part.
        zipf: the slope of frequencies, None where too few classes are frequent.
        suggestions: which heads to try, the first first.
    """

    task: str
    name: str
    source: str
    classes: int
    sizes: dict[str, int]
    zipf: ZipfFit | None
    suggestions: tuple[Suggestion, ...]

    def as_json(self) -> dict[str, Any]:
        """For JSON; numbers keep their names."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TextInspection(Inspection):
    """Of text; shares and counts are those of the training part.

    Attributes:
        entropy_bits: of the frequencies; and ``effective_classes`` is 2 to that power.
        unigram_perplexity: on validation data, of a model that knows the frequencies alone.
        tail_1k: the share of targets outside the 1,000 most frequent classes, and ``tail_10k``.
        half: how many classes have half of all targets.
        seen_once: the share of classes that occur once; ``unseen`` of those that never do.
        unknown: the share of targets that are ``<unk>``; ``unknown_valid`` of validation data.
        huffman_bits: the expected depth of Huffman's tree; ``balanced_bits`` of a balanced one.
        hidden: hidden size for which cutoffs were chosen.
        cutoffs: of an adaptive softmax; none where a full one is as fast.
        adaptive_savings: how many times fewer multiply-adds a target needs with them.
    """

    entropy_bits: float
    effective_classes: float
    unigram_perplexity: float
    tail_1k: float
    tail_10k: float
    half: int
    seen_once: float
    unseen: float
    unknown: float
    unknown_valid: float
    huffman_bits: float
    balanced_bits: float
    hidden: int
    cutoffs: tuple[int, ...]
    adaptive_savings: float


@dataclass(frozen=True, kw_only=True)
class LabelInspection(Inspection):
    """Of labelled rows; shares and counts are those of the training part.

    Attributes:
        features: columns of the features; ``filled`` is the share of them that is not 0.
        cardinality: labels per row.
        density: cardinality over the number of labels.
        without: the share of rows that have no label.
        most: the largest number of labels of a row.
        distinct: how many different sets of labels there are.
        most_frequent: the share of rows that have the most frequent label, ``median_frequent`` the
            one in the middle, ``least_frequent`` the rarest.
        imbalance: how many times more often the most frequent label comes than one on average.
        rare: the share of labels in fewer than 10 rows; ``unseen`` in none.
        unseen_in_test: the share of the labels of test rows that the training part never has.
    """

    features: int
    filled: float
    cardinality: float
    density: float
    without: float
    most: int
    distinct: int
    most_frequent: float
    median_frequent: float
    least_frequent: float
    imbalance: float
    rare: float
    unseen: float
    unseen_in_test: float


def inspect_data(data: Data, *, hidden: int = HIDDEN) -> Inspection:
    """Count, fit and compare; torch is imported here, for trees and cutoffs.

    Args:
        data: what :func:`lastlayer.lab.data.load` gives.
        hidden: size of the hidden state that a head will see.
    """
    if isinstance(data, PairData):
        raise LabError("DATA: expected classes to count, got pairs; compare takes them")
    if isinstance(data, TextData) or data.task == "classification":
        return _of_classes(data, hidden)
    return _of_labels(data)


def _of_classes(data: TextData | LabelData, hidden: int) -> TextInspection:
    from lastlayer import trees

    counts = data.counts
    n = data.n_classes
    bits = entropy_bits(counts)
    # A class that never occurs still has a place in a tree.
    huffman = trees.huffman(np.maximum(counts, 1)).expected_depth(counts)
    cutoffs, savings = _adaptive(counts, hidden)
    half, seen_once = classes_for(counts, 0.5), float((counts == 1).mean())
    if isinstance(data, TextData):
        parts = {"train": data.train, "valid": data.valid, "test": data.test}
        unknown = data.vocabulary.unknown
    else:
        parts = {p: getattr(data, p).labels.indices for p in ("train", "valid", "test")}
        unknown = -1
    return TextInspection(
        task=data.task,
        name=data.name,
        source=str(data.description.get("source", "")),
        classes=n,
        sizes={part: len(ids) for part, ids in parts.items()},
        zipf=zipf_fit(counts),
        suggestions=tuple(
            for_text(
                classes=n,
                effective=2**bits,
                half=half,
                seen_once=seen_once,
                huffman=huffman,
                cutoffs=cutoffs,
                savings=savings,
                hidden=hidden,
            )
        ),
        entropy_bits=bits,
        effective_classes=2**bits,
        unigram_perplexity=float(np.exp(unigram_nll(counts, parts["valid"]))),
        tail_1k=tail_mass(counts, 1_000),
        tail_10k=tail_mass(counts, 10_000),
        half=half,
        seen_once=seen_once,
        unseen=float((counts == 0).mean()),
        unknown=float(counts[unknown] / counts.sum()) if unknown >= 0 else 0.0,
        unknown_valid=float((parts["valid"] == unknown).mean()),
        huffman_bits=huffman,
        balanced_bits=trees.balanced(n).expected_depth(counts),
        hidden=hidden,
        cutoffs=cutoffs,
        adaptive_savings=savings,
    )


def _adaptive(counts: Counts, hidden: int, rows: int = 256) -> tuple[tuple[int, ...], float]:
    """Cutoffs, and how many times fewer multiply-adds a target needs with them."""
    from lastlayer.heads.layout import cutoffs_from_counts, tail_widths

    cutoffs = cutoffs_from_counts(counts, hidden, rows=rows)
    below = np.concatenate([[0.0], np.cumsum(np.sort(counts)[::-1] / counts.sum())])
    ends = [*cutoffs, len(counts)]
    needed = float(hidden * (ends[0] + len(cutoffs)))
    widths = tail_widths(hidden, len(cutoffs), 4.0, 8)
    for (start, stop), width in zip(pairwise(ends), widths, strict=True):
        needed += float(below[stop] - below[start]) * width * (hidden + stop - start)
    return tuple(cutoffs), len(counts) * hidden / needed


def _of_labels(data: LabelData) -> LabelInspection:
    train, n = data.train, data.n_classes
    counts, rows = data.counts, train.n_rows
    sizes = np.diff(train.labels.offsets)
    cardinality, most = float(sizes.mean()), int(sizes.max())
    features = train.features
    filled = features.values if isinstance(features, SparseRows) else features
    bounds = train.labels.offsets
    sets = {train.labels.indices[a:b].tobytes() for a, b in pairwise(bounds.tolist())}
    tested = data.test.labels.indices
    imbalance = float(counts.max() / counts.mean())
    return LabelInspection(
        task=data.task,
        name=data.name,
        source=str(data.description.get("source", "")),
        classes=n,
        sizes={"train": rows, "valid": data.valid.n_rows, "test": data.test.n_rows},
        zipf=zipf_fit(counts),
        suggestions=tuple(
            for_labels(
                labels=n,
                cardinality=cardinality,
                density=cardinality / n,
                imbalance=imbalance,
                most=most,
            )
        ),
        features=data.n_features,
        filled=float(np.count_nonzero(filled) / (rows * data.n_features)),
        cardinality=cardinality,
        density=cardinality / n,
        without=float((sizes == 0).mean()),
        most=most,
        distinct=len(sets),
        most_frequent=float(counts.max() / rows),
        median_frequent=float(np.median(counts) / rows),
        least_frequent=float(counts.min() / rows),
        imbalance=imbalance,
        rare=float((counts < 10).mean()),
        unseen=float((counts == 0).mean()),
        unseen_in_test=float((counts[tested] == 0).mean()) if len(tested) else 0.0,
    )


def zipf_fit(counts: Counts) -> ZipfFit | None:
    """The line through log count against log rank, by least squares.

    At places that are evenly spaced in the logarithm of the rank, so that the many rare classes
    weigh no more than the few frequent ones; over ranks whose count is at least 5. None where
    fewer than 10 have so many.

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
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    spread = float(dy @ dy)
    residual = float(((dy - slope * dx) ** 2).sum())
    # All alike: the line is level and exact.
    return ZipfFit(-slope, 1.0 - residual / spread if spread > 0 else 1.0, n)


def entropy_bits(counts: Counts) -> float:
    """Of the class of a target that is drawn by the counts: no code is shorter on average."""
    share = counts[counts > 0] / counts.sum()
    return max(0.0, float(-(share * np.log2(share)).sum()))


def tail_mass(counts: Counts, top: int) -> float:
    """The share of targets outside the ``top`` most frequent classes."""
    falling = np.sort(counts)[::-1]
    return float(falling[top:].sum() / falling.sum())


def classes_for(counts: Counts, share: float) -> int:
    """How many of the most frequent classes have this share of all targets."""
    reached = np.cumsum(np.sort(counts)[::-1]) >= share * counts.sum()
    return int(reached.argmax()) + 1


def unigram_nll(counts: Counts, ids: NDArray[Any]) -> float:
    """What a model that knows nothing but the counts, each one higher, loses on other targets."""
    log_prob = np.log(counts + 1.0) - np.log(counts.sum() + len(counts))
    seen = np.bincount(ids, minlength=len(counts))
    return float(-(seen @ log_prob) / len(ids))


def for_text(
    *,
    classes: int,
    effective: float,
    half: int,
    seen_once: float,
    huffman: float,
    cutoffs: tuple[int, ...],
    savings: float,
    hidden: int,
) -> Iterator[Suggestion]:
    """In the order in which they are worth a try."""
    if classes <= _FEW:
        yield Suggestion(
            "full",
            f"{classes:,} classes are few: all scores are one small matrix product, and nothing "
            "that saves work will be noticed.",
        )
    else:
        if cutoffs and savings >= 1.5:
            yield Suggestion(
                f"adaptive:cutoffs={','.join(map(str, cutoffs))}",
                f"{half:,} of {classes:,} classes have half of all targets: with the frequent ones "
                f"at the top a target needs {savings:.0f} times fewer multiply-adds at hidden size "
                f"{hidden}.",
            )
        yield Suggestion(
            "full",
            "It is exact, and what the others have to come near; it never holds the "
            f"{classes:,} scores of a row, but a step computes all of them.",
        )
        yield Suggestion(
            "hierarchical",
            f"Huffman's tree needs {huffman:.1f} choices per target on average, "
            f"{classes / max(1.0, huffman):,.0f} times fewer vectors than there are classes.",
        )
    if classes > _MANY:
        yield Suggestion(
            "sampled",
            f"A step against a few hundred drawn classes costs the same at {classes:,} classes as "
            "at ten times as many, and its scores are those of a full softmax.",
        )
    if effective < classes / 20:
        yield Suggestion(
            "entmax",
            f"Frequencies alone leave a choice among about {effective:,.0f} classes: most of "
            f"{classes:,} deserve a probability of exactly 0 in most places.",
        )
    if seen_once > 0.25:
        yield Suggestion(
            "char_cnn",
            f"{seen_once:.0%} of the classes occur once: vectors of their own learn next to "
            "nothing, vectors from their spelling do. It is slow.",
        )
    elif classes > _MANY:
        yield Suggestion(
            "differentiated",
            f"{half:,} classes have half of the targets: the others can do with narrower vectors, "
            f"and {classes * hidden / 1e6:,.0f} million numbers become half as many.",
        )


def for_labels(
    *, labels: int, cardinality: float, density: float, imbalance: float, most: int
) -> Iterator[Suggestion]:
    """In the order in which they are worth a try."""
    yield Suggestion(
        "zlpr",
        f"{cardinality:.1f} of {labels:,} labels per row: it ranks the positive ones above the "
        "others and above 0, and needs no weight for the many negatives.",
    )
    yield Suggestion(
        "bce", "One logistic choice per label is the usual way, and what the others have to beat."
    )
    if density < 0.1 or imbalance > 10:
        yield Suggestion(
            "asymmetric",
            f"Only {density:.1%} of all pairs of row and label are positive: easy negatives would "
            "have most of the gradient.",
        )
    if most <= 20 and cardinality <= 5:
        yield Suggestion(
            "sparsemax_labels",
            f"No row has more than {most} labels: a sparse distribution can be zero on the others.",
        )


def render(found: Inspection, console: Console) -> None:
    """Print what was found, then what to try. What comes from the data is printed as it is."""
    console.print(Text.assemble((found.name, "bold"), f"  {found.source}"))
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in _lines(found):
        table.add_row(name, Text(value))
    console.print(table)
    console.print(Text("Try first", style="bold"))
    for number, each in enumerate(found.suggestions, 1):
        console.print(Text.assemble(f"{number}. ", (each.head, "cyan"), f"  {each.why}"))


def _lines(found: Inspection) -> Iterator[Line]:
    unit = "tokens" if found.task == "lm" else "rows"
    yield f"{unit}, train / validation / test", " / ".join(f"{n:,}" for n in found.sizes.values())
    if isinstance(found, TextInspection):
        yield from _text_lines(found)
    elif isinstance(found, LabelInspection):
        yield from _label_lines(found)


def _text_lines(found: TextInspection) -> Iterator[Line]:
    yield "classes", f"{found.classes:,}"
    yield "Zipf slope", _slope(found)
    yield "entropy of the frequencies", f"{found.entropy_bits:.2f} bits"
    yield "effective number of classes", f"{found.effective_classes:,.0f}"
    yield "unigram perplexity, validation", f"{found.unigram_perplexity:,.0f}"
    yield "classes with half of the targets", f"{found.half:,}"
    yield "targets outside the top 1,000", f"{found.tail_1k:.1%}"
    yield "targets outside the top 10,000", f"{found.tail_10k:.1%}"
    yield "classes seen once", f"{found.seen_once:.1%}"
    if found.task == "lm":
        yield (
            "targets that are <unk>, train / validation",
            f"{found.unknown:.1%} / {found.unknown_valid:.1%}",
        )
    yield "choices per target, Huffman's tree", f"{found.huffman_bits:.2f}"
    yield "choices per target, balanced tree", f"{found.balanced_bits:.2f}"
    cutoffs = ", ".join(f"{each:,}" for each in found.cutoffs) or "none: a full softmax is as fast"
    yield f"adaptive cutoffs, hidden size {found.hidden}", cutoffs


def _label_lines(found: LabelInspection) -> Iterator[Line]:
    yield "labels", f"{found.classes:,}"
    yield "features", f"{found.features:,}, {found.filled:.1%} of them not 0"
    yield "labels per row (cardinality)", f"{found.cardinality:.2f}, at most {found.most}"
    yield "density", f"{found.density:.2%}"
    yield "rows without a label", f"{found.without:.1%}"
    yield "different sets of labels", f"{found.distinct:,}"
    shares = (found.most_frequent, found.median_frequent, found.least_frequent)
    yield "rows with a label, most / median / least", " / ".join(f"{s:.2%}" for s in shares)
    yield "Zipf slope", _slope(found)
    yield "labels in fewer than 10 rows", f"{found.rare:.1%}"
    yield "labels in no row", f"{found.unseen:.1%}"
    yield "labels of test rows never seen", f"{found.unseen_in_test:.1%}"


def _slope(found: Inspection) -> str:
    if found.zipf is None:
        return "too few frequent classes"
    return f"{found.zipf.slope:.2f} (R² {found.zipf.r_squared:.2f}, {found.zipf.ranks:,} ranks)"
