"""What ``lastlayer inspect`` finds, as plain numbers."""

from dataclasses import asdict, dataclass
from typing import Any

from lastlayer.lab._frequencies import ZipfFit


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
        unigram_perplexity: on the valid part, of a model that knows the frequencies alone.
        tail_1k: the share of targets outside the 1,000 most frequent classes, and ``tail_10k``.
        half: how many classes have half of all targets.
        seen_once: the share of classes that occur once; ``unseen`` of those that never do.
        unknown: the share of targets that are ``<unk>``; ``unknown_valid`` of the valid part.
        huffman_bits: the expected depth of Huffman's tree; ``balanced_bits`` of a balanced one.
        hidden: the width for which cutoffs were chosen.
        cutoffs: of an adaptive softmax; none where a full one is as fast.
        adaptive_speedup: how many times faster a step with them is, by the cost model.
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
    adaptive_speedup: float


@dataclass(frozen=True, kw_only=True)
class LabelInspection(Inspection):
    """Of labelled rows; shares and counts are those of the training part.

    Attributes:
        features: columns of the features; ``filled`` is the share of them that is not 0.
        cardinality: labels a row.
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
