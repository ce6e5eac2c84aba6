"""How many multiply-adds a training target costs a head, as a function of the number of classes.

Forward only, and of the products with class vectors alone: the model beneath is the same for all.
Frequencies are taken to follow Zipf's law, p(r) ∝ 1/r. Arguments of the head that are numbers are
used; the rest is as the head chooses by default. A head of the user's own has no formula.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

Arguments = Mapping[str, Any]
Formula = Callable[[int, int, Arguments], float]

# What the lab draws unless it is told how many.
_SAMPLES, _FEW_SAMPLES = 512, 64
# Of the numbers of a full layer, what the lab gives a differentiated softmax.
_SHARE = 0.5


def operations(family: str, n_classes: int, width: int, arguments: Arguments) -> float | None:
    """Multiply-adds a target; None for a head without a formula.

    Args:
        family: the name in a spec.
        n_classes: V.
        width: of the hidden state, D.
        arguments: of the head.
    """
    formula = _formula(family, arguments)
    return None if formula is None else formula(n_classes, width, arguments)


def in_words(family: str, arguments: Arguments) -> str:
    """The formula, for the page; empty for a head without one."""
    formula = _formula(family, arguments)
    return "" if formula is None else _IN_WORDS[formula]


def _formula(family: str, arguments: Arguments) -> Formula | None:
    if family == "hierarchical":
        return _TREES.get(str(arguments.get("tree")), _huffman)
    return _FORMULAS.get(family)


def _full(v: int, d: int, _arguments: Arguments) -> float:
    return float(v) * d


def _huffman(v: int, d: int, _arguments: Arguments) -> float:
    """A binary code of the length that the entropy of Zipf's law allows."""
    return d * max(1.0, zipf_entropy(v))


def _balanced(v: int, d: int, _arguments: Arguments) -> float:
    return d * max(1.0, math.log2(v))


def _two_level(v: int, d: int, _arguments: Arguments) -> float:
    """√V groups of √V classes; groups by frequency cost less."""
    return d * 2.0 * math.sqrt(v)


def _sampled(v: int, d: int, arguments: Arguments) -> float:
    return _drawn(v, d, arguments, _SAMPLES)


def _few(v: int, d: int, arguments: Arguments) -> float:
    return _drawn(v, d, arguments, _FEW_SAMPLES)


def _drawn(v: int, d: int, arguments: Arguments, usual: int) -> float:
    given = arguments.get("n_samples")
    drawn = given if isinstance(given, int) and not isinstance(given, bool) else usual
    return d * float(min(v, drawn + 1))


def _adaptive(v: int, d: int, arguments: Arguments) -> float:
    """The top at full width; each cluster behind it at a quarter of the last, 8 at least."""
    given = [c for c in _numbers(arguments.get("cutoffs")) if c < v]
    cutoffs: Sequence[int] = given or _cutoffs(v, d)
    divisor, least = _positive(arguments, "div_value", 4), _positive(arguments, "min_width", 8)
    edges = [*cutoffs, v]
    cost = float(d) * (edges[0] + len(cutoffs))
    for i, (start, stop) in enumerate(pairwise(edges), 1):
        narrow = max(min(d, int(least)), int(d / divisor**i))
        chance = (harmonic(stop) - harmonic(start)) / harmonic(v)
        cost += chance * narrow * (d + stop - start)
    return cost


def _bands(v: int, d: int, arguments: Arguments) -> float:
    """The share of a full layer's numbers that the bands keep."""
    bands, share = arguments.get("bands"), arguments.get("share", _SHARE)
    if isinstance(bands, list | tuple) and bands:
        kept = sum(int(classes) * int(width) for classes, width in bands)
        share = kept / (d * sum(int(classes) for classes, _ in bands))
    return v * d * float(share)


@cache
def _cutoffs(v: int, d: int) -> tuple[int, ...]:
    """Those that the head chooses for frequencies by Zipf's law; none for few classes."""
    # Torch comes with it, and no other chart needs that.
    from lastlayer.heads import cutoffs_from_counts

    return tuple(cutoffs_from_counts(1.0 / np.arange(1, v + 1), d))


def _positive(arguments: Arguments, name: str, usual: float) -> float:
    value = arguments.get(name, usual)
    return float(value) if isinstance(value, int | float) and value > 0 else usual


def _numbers(value: Any) -> Sequence[int]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list | tuple):
        return ()
    return [int(x) for x in value if str(x).strip().isdigit()]


def harmonic(n: int) -> float:
    """1 + 1/2 + … + 1/n."""
    if n < 64:
        return math.fsum(1 / i for i in range(1, n + 1))
    return math.log(n) + 0.5772156649015329 + 1 / (2 * n) - 1 / (12 * n * n)


def zipf_entropy(n: int) -> float:
    """In bits, of p(r) ∝ 1/r over n classes: log₂ H + (Σ ln r / r) / (H ln 2).

    Example:
        >>> round(zipf_entropy(1), 6), round(zipf_entropy(2), 4)
        (0.0, 0.9183)
    """
    total = harmonic(n)
    head = min(n, 64)
    weighted = math.fsum(math.log(r) / r for r in range(1, head + 1))
    if n > head:
        # Euler and Maclaurin: the integral of ln x / x, and half of both ends.
        weighted += (math.log(n) ** 2 - math.log(head) ** 2) / 2
        weighted += (math.log(n) / n - math.log(head) / head) / 2
    return math.log2(total) + weighted / (total * math.log(2))


_IN_WORDS: dict[Formula, str] = {
    _full: "V·D",
    _huffman: "D × code length",
    _balanced: "D × log₂ V",
    _two_level: "D × 2√V",
    _sampled: "D × (samples + 1)",
    _few: "D × (samples + 1)",
    _adaptive: "D × frequent classes, and one cluster",
    _bands: "Σ classes × width of their band",
}
_TREES: dict[str, Formula] = {"balanced": _balanced, "two_level": _two_level}
_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("full", "self_normalized", "entmax", "sparsemax", "topk", "char_cnn"), _full),
    **dict.fromkeys(("zlpr", "bce", "asymmetric", "sparsemax_labels"), _full),
    **dict.fromkeys(("sampled", "nce", "importance", "adaptive_importance"), _sampled),
    "negative": _few,
    "adaptive": _adaptive,
    "differentiated": _bands,
}
