"""Which heads to try first, each with the fact that speaks for it."""

from collections.abc import Iterator

from lastlayer.lab._inspection import Suggestion

# Below so many classes a step is a small matrix product whatever ends it.
_FEW = 2_000
_MANY = 10_000


def for_text(
    *,
    classes: int,
    effective: float,
    half: int,
    seen_once: float,
    huffman: float,
    cutoffs: tuple[int, ...],
    speedup: float,
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
        if cutoffs and speedup >= 1.5:
            yield Suggestion(
                f"adaptive:cutoffs={','.join(map(str, cutoffs))}",
                f"{half:,} of {classes:,} classes have half of all targets: with the frequent ones "
                f"at the top a step is about {speedup:.0f} times shorter at width {hidden}.",
            )
        yield Suggestion(
            "full",
            "It is exact, and what the others have to come near; it never holds the "
            f"{classes:,} scores of a row, but a step computes all of them.",
        )
        yield Suggestion(
            "hierarchical",
            f"Huffman's tree needs {huffman:.1f} choices a target on average, "
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
        f"{cardinality:.1f} of {labels:,} labels a row: it ranks the positive ones above the "
        "others and above 0, and needs no weight for the many negatives.",
    )
    yield Suggestion(
        "bce", "One logistic choice a label is the usual way, and what the others have to beat."
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
