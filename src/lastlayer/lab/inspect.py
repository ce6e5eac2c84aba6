"""What data looks like, and which heads to try on it first. Nothing is trained."""

from itertools import pairwise
from typing import Any

import numpy as np

from lastlayer.lab._frequencies import classes_for, entropy_bits, tail_mass, unigram_nll, zipf_fit
from lastlayer.lab._inspection import Inspection, LabelInspection, Suggestion, TextInspection
from lastlayer.lab._inspection_view import render
from lastlayer.lab._suggestions import for_labels, for_text
from lastlayer.lab.data import Data, LabelData, PairData, SparseRows, TextData
from lastlayer.lab.errors import LabError

__all__ = [
    "Inspection",
    "LabelInspection",
    "Suggestion",
    "TextInspection",
    "inspect_data",
    "render",
]

# The width of hidden states for which cutoffs are chosen.
HIDDEN = 256


def inspect_data(data: Data, *, hidden: int = HIDDEN) -> Inspection:
    """Count, fit and compare; torch is imported here, for trees and cutoffs.

    Args:
        data: what :func:`lastlayer.lab.data.load` gives.
        hidden: the width of the hidden states that a head will see.
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
    cutoffs, speedup = _adaptive(counts, hidden)
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
                speedup=speedup,
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
        adaptive_speedup=speedup,
    )


def _adaptive(counts: Any, hidden: int, rows: int = 256) -> tuple[tuple[int, ...], float]:
    """Cutoffs, and how many times the cost model says a step with them is shorter."""
    from lastlayer.heads.layout import COSTS, cutoffs_from_counts
    from lastlayer.lab._plan_costs import adaptive_microseconds

    cutoffs = cutoffs_from_counts(counts, hidden, rows=rows)
    cost = COSTS["cpu"]
    shares = np.sort(counts)[::-1] / counts.sum()
    full = cost.step(1, cost.work(len(counts), rows, hidden))
    return tuple(cutoffs), float(full / adaptive_microseconds(cost, shares, cutoffs, hidden, rows))


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
