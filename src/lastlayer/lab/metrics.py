"""Metrics of a run: name, unit, and whether lower is better."""

import math
from dataclasses import dataclass
from typing import Literal

Style = Literal["number", "percent", "share", "ms", "seconds", "megabytes", "count", "rate"]


@dataclass(frozen=True)
class Metric:
    """One column of the summary."""

    key: str  # its name in result.json
    label: str
    style: Style
    lower_is_better: bool
    log: bool = False  # whether it is averaged and drawn on a logarithmic scale
    tested: bool = True  # whether it is measured on test data; otherwise it is a cost of the run
    least: float = 0.0  # lowest possible value, at which intervals are clipped

    @property
    def most(self) -> float:
        """The highest possible value."""
        return 1.0 if self.style in {"percent", "share"} else math.inf

    def format(self, value: float | None) -> str:
        """The value as text, with its unit."""
        return format_value(value, self.style)

    def better(self, one: float, other: float) -> bool:
        """Whether ``one`` is better than ``other``."""
        return one < other if self.lower_is_better else one > other


def _perplexity(key: str, label: str) -> Metric:
    return Metric(key, label, "number", lower_is_better=True, log=True, least=1.0)


def _share(key: str, label: str) -> Metric:
    return Metric(key, label, "percent", lower_is_better=False)


def _cost(key: str, label: str, style: Style, lower_is_better: bool = True) -> Metric:
    return Metric(key, label, style, lower_is_better, log=True, tested=False)


PERPLEXITY = _perplexity("perplexity", "perplexity")
EPS_PERPLEXITY = _perplexity("eps_perplexity", "ε-smoothed perplexity")
MICRO_F1 = _share("micro_f1", "micro-F1")
PRECISION_AT_1 = _share("precision_at_1", "precision@1")
ACCURACY = _share("top1", "accuracy")
RECALL_AT_1 = _share("recall_at_1", "recall@1")
QUALITY = (
    PERPLEXITY,
    EPS_PERPLEXITY,
    MICRO_F1,
    _share("mean_average_precision", "mAP"),
    _share("native_micro_f1", "micro-F1, own rule"),
    PRECISION_AT_1,
    _share("precision_at_3", "precision@3"),
    _share("precision_at_5", "precision@5"),
    _share("micro_precision", "micro-precision"),
    _share("micro_recall", "micro-recall"),
    _share("exact_match", "exact match"),
    Metric("loss", "test loss", "number", lower_is_better=True),
    RECALL_AT_1,
    _share("recall_at_10", "recall@10"),
    Metric("reciprocal_rank", "mean reciprocal rank", "number", lower_is_better=False),
    ACCURACY,
    _share("top5", "top-5"),
    _share("macro_f1", "macro-F1"),
    _share("top10", "top-10"),
    Metric("coverage", "coverage", "share", lower_is_better=False),
    Metric("support", "support size", "number", lower_is_better=True),
    Metric("calibration_error", "calibration error", "percent", lower_is_better=True),
)
STEPS = _cost("steps", "steps", "count", lower_is_better=False)
EPOCHS = Metric("epochs", "epochs", "number", lower_is_better=False, tested=False)
RATE_OF_LEARNING = Metric("lr", "learning rate", "number", lower_is_better=True, tested=False)
SECONDS = _cost("seconds", "training time", "seconds")
STEP_MS = _cost("step_ms", "time per step", "ms")
RATE = _cost("tokens_per_second", "tokens per second", "rate", lower_is_better=False)
MEMORY = _cost("peak_memory_mb", "peak memory", "megabytes")
PARAMETERS = _cost("parameters", "parameters", "count")
HEAD_PARAMETERS = _cost("head_parameters", "parameters of the head", "count")
GAIN = Metric("gain", "gained in the last quarter", "percent", True, tested=False)
COSTS = (
    STEPS, EPOCHS, SECONDS, STEP_MS, RATE, MEMORY, PARAMETERS, HEAD_PARAMETERS, RATE_OF_LEARNING,
)  # fmt: skip
BY_KEY = {metric.key: metric for metric in (*QUALITY, *COSTS)}

NOTHING = "–"


def format_value(value: float | None, style: Style) -> str:
    """Three significant digits and a unit.

    Example:
        >>> format_value(143.27, "number"), format_value(0.3127, "percent")
        ('143', '31.3%')
        >>> format_value(1_234_567, "count"), format_value(None, "ms")
        ('1.23M', '–')
    """
    if value is None or math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if style in {"percent", "share"}:
        return f"{100 * value:.1f}%" if value < 0.9995 else f"{100 * value:.0f}%"
    if style in {"count", "rate"}:
        return _short(value)
    if style == "seconds":
        return seconds(value)
    unit = {"ms": " ms", "megabytes": " MB"}.get(style, "")
    return three_digits(value) + unit


def three_digits(value: float) -> str:
    """Three significant digits, with separators; with a letter for millions and billions.

    Example:
        >>> three_digits(0.01234), three_digits(12.345), three_digits(12345.6)
        ('0.0123', '12.3', '12,346')
    """
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e12:
        return f"{value:.0e}".replace("e+", "e")
    if size >= 999_999.5:
        return _short(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.9995:
        return f"{value:.2f}"
    return f"{value:.3g}" if size >= 1e-4 else f"{value:.1e}"


def seconds(value: float) -> str:
    """A duration as text.

    Example:
        >>> seconds(30.0), seconds(95.0), seconds(0.25)
        ('30 s', '1 min 35 s', '0.25 s')
    """
    if value >= 3600:
        hours, rest = divmod(round(value / 60), 60)
        return f"{hours} h {rest} min"
    if value >= 60:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{value:.3g} s"


def _short(value: float) -> str:
    """A count in thousands, millions or billions."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        # A value that rounds to the unit is shown in it: 999,999.9 is 1M.
        if abs(value) >= 0.9995 * size * (10 if letter == "k" else 1):
            scaled = value / size
            return f"{scaled:.3g}{letter}" if scaled < 999.5 else f"{scaled:,.0f}{letter}"
    return f"{value:,.0f}"
