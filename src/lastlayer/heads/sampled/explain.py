"""What a step of a sampled head costs, and how many samples it should draw."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lastlayer._checks import check_int
from lastlayer._torch import accumulation_dtype
from lastlayer.heads.sampled.audit import Audit

if TYPE_CHECKING:
    from lastlayer.heads.sampled.base import SampledHead

# At an effective sample size of 100 the estimate of log Z is off by about 1/√100.
WANTED_ESS = 100.0
# Without an audit: the share of classes, and bounds that hold whatever their number.
_SHARE, _FEWEST, _MOST = 0.01, 64, 8192
# From this share of the classes on the exact loss is faster: it gathers and scatters nothing.
_WORTHWHILE = 0.25


@dataclass(frozen=True)
class Cost:
    """Of a training step, forward and backward, without the optimiser."""

    flops: float
    """Of the products with class vectors, one forward and two backward."""
    gathered: int
    """Class vectors that are read, at most so many, since some come twice."""
    traffic: float
    """Bytes of class vectors that are read, and of their gradients that are written."""
    optimizer: float
    """Bytes that a step of Adam moves, for gradient, vectors and two moments in float32."""


@dataclass(frozen=True)
class Explanation:
    """What ``head.explain`` says."""

    head: str
    """The name of the head's class."""
    n_rows: int
    n_classes: int
    n_samples: int
    """Classes that are drawn; as an audit found where each row draws until it has enough."""
    sampled: Cost
    """Of this head."""
    full: Cost
    """Of a full softmax."""
    sparse: bool
    """Whether the gradients of this head are row-sparse."""
    suggested: int
    """How many samples to draw; ``n_classes`` where a full softmax is the better choice."""
    reason: str
    """Why so many."""

    @property
    def speedup(self) -> float:
        """How many times fewer operations than the full softmax."""
        return self.full.flops / self.sampled.flops

    def text(self) -> str:
        """Lines for a terminal."""
        rows = [
            ("operations", _scaled(self.sampled.flops, "FLOP"), _scaled(self.full.flops, "FLOP")),
            ("class vectors read", f"{self.sampled.gathered:,}", f"{self.full.gathered:,}"),
            ("bytes moved", _scaled(self.sampled.traffic, "B"), _scaled(self.full.traffic, "B")),
            ("bytes in Adam", _scaled(self.sampled.optimizer, "B"),
             _scaled(self.full.optimizer, "B")),
        ]  # fmt: skip
        title = (
            f"{self.head}: a step of {self.n_rows:,} rows against {self.n_samples:,} of "
            f"{self.n_classes:,} classes"
        )
        lines = [
            title,
            "",
            f"{'':<20}{'sampled':>14}{'full softmax':>14}",
            *(f"{name:<20}{ours:>14}{theirs:>14}" for name, ours, theirs in rows),
            "",
            f"{self.speedup:,.1f} times fewer operations.",
            self.reason,
        ]
        if not self.sparse:
            lines.append(
                "Gradients are dense: with sparse=True, and optim.RowAdagrad or RowAdam, a step "
                "writes the rows it has read alone."
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def explain(head: "SampledHead", audit: Audit | None = None, *, n_rows: int = 1024) -> Explanation:
    """As :meth:`SampledHead.explain` says it."""
    n_rows = check_int("n_rows", n_rows)
    _check_audit(audit, head.n_classes)
    suggested, reason = _suggestion(head.n_classes, audit)
    if audit is None and getattr(head, "target_ess", None) is not None:
        reason += " Rows draw until they have enough: an audit counts how many that takes."
    n_samples = head.n_samples if audit is None else audit.n_samples
    took_all = 0.0 if audit is None else audit.took_all
    return Explanation(
        head=type(head).__name__,
        n_rows=n_rows,
        n_classes=head.n_classes,
        n_samples=n_samples,
        sampled=_sampled_cost(head, n_rows, n_samples, took_all),
        full=_full_cost(head, n_rows),
        sparse=head.sparse,
        suggested=suggested,
        reason=reason,
    )


def _sampled_cost(head: "SampledHead", n_rows: int, n_samples: int, took_all: float) -> Cost:
    """Of ``n_samples`` per row, where a share of the rows took all classes besides."""
    vector, wide = _vector_bytes(head)
    always = head._always_counted()
    gathered = n_samples * (n_rows if head.draws_for_each_row else 1) + always + n_rows
    gathered += head.n_classes if took_all else 0
    touched = min(gathered, head.n_classes)
    written = touched if head.sparse else head.n_classes
    scored = n_samples + always + 1 + took_all * head.n_classes
    return Cost(
        flops=6.0 * n_rows * scored * head.in_features,
        gathered=gathered,
        traffic=gathered * vector + written * vector,
        optimizer=written * (vector * 3 + 4 * wide),
    )


def _full_cost(head: "SampledHead", n_rows: int) -> Cost:
    vector, wide = _vector_bytes(head)
    return Cost(
        flops=6.0 * n_rows * head.n_classes * head.in_features,
        gathered=head.n_classes,
        # Forward, and for the gradient of hidden.
        traffic=3.0 * head.n_classes * vector,
        optimizer=head.n_classes * (vector * 3 + 4 * wide),
    )


def _vector_bytes(head: "SampledHead") -> tuple[float, float]:
    """Of a class vector as it is kept, and as a moment."""
    wide = accumulation_dtype(head.weight.dtype).itemsize
    return float(head.in_features * head.weight.element_size()), float(head.in_features * wide)


def _check_audit(audit: Any, n_classes: int) -> None:
    if audit is None:
        return
    if not isinstance(audit, Audit):
        raise TypeError(f"audit: expected what head.audit gives, got {type(audit).__name__}")
    if audit.n_classes != n_classes:
        raise ValueError(
            f"audit: expected one of a head with {n_classes} classes, got {audit.n_classes}"
        )


def _suggestion(v: int, found: Audit | None) -> tuple[int, str]:
    if found is None or not found.mean_ess > 0.0:
        wanted = min(v, _power_of_two(min(max(_SHARE * v, _FEWEST), _MOST)))
        return wanted, (
            f"{wanted:,} samples are a first guess for {v:,} classes; "
            "audit(hidden, target) on a batch of yours says what they are worth."
        )
    # Of the rows that are worst off, not of the mean: they have the largest errors.
    low = torch.quantile(found.ess, 0.1).item()
    exact = found.n_samples * WANTED_ESS / max(low, 1.0)
    worth = (
        f"In the audit {found.n_samples:,} samples were worth {found.mean_ess:.0f} per row, and "
        f"{low:.0f} or less in a tenth of the rows"
    )
    if found.took_all:
        worth += f", and {found.took_all:.0%} of the rows took all classes"
    if exact > _WORTHWHILE * v:
        return v, (
            f"{worth}: for {WANTED_ESS:.0f} there, {exact:,.0f} samples would be needed of {v:,} "
            "classes. A sampler closer to the model helps, or a full softmax."
        )
    wanted = min(v, _power_of_two(exact))
    return wanted, f"{worth}: {wanted:,} samples bring {WANTED_ESS:.0f} there."


def _power_of_two(number: float) -> int:
    return 1 << max(0, math.ceil(math.log2(number)))


def _scaled(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000.0 or prefix == "T":
            break
        number /= 1000.0
    return f"{number:.3g} {prefix}{unit}"
