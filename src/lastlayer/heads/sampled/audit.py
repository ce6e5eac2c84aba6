"""What a sampled gradient is worth beside the exact one, measured on a batch; and what it costs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lastlayer._checks import check_int
from lastlayer._torch import accumulation_dtype, in_dtype
from lastlayer.fused.scores import row_chunks, wide_scores
from lastlayer.heads.self_normalized import Drift, drift_of, log_normalizer, temperature_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lastlayer.heads.sampled.base import ComparedHead, SampledHead

_BIAS, _DEVIATION, _ROWS = "#D55E00", "#0072B2", "#9A9A9A"
# Numbers held for each score of a chunk, itself included.
_COPIES = 4.0
# At an effective sample size of 100 the estimate of log Z is off by about 1/√100.
_WANTED_ESS = 100.0
# Without an audit: the share of classes, and bounds that hold whatever their number.
_SHARE, _FEWEST, _MOST = 0.01, 64, 8192
# From this share of the classes on the exact loss is faster: it gathers and scatters nothing.
_WORTHWHILE = 0.25


@dataclass(frozen=True)
class GradientError:
    """An estimated gradient beside the exact one; all numbers are norms over the whole tensor."""

    norm: float
    """Of the exact gradient."""
    bias: float
    """Of the mean estimate less the exact one; what chance alone explains is taken out."""
    deviation: float
    """Of one estimate less the mean one, the root of the variance of all its numbers together."""
    cosine: float
    """Between the mean estimate and the exact one, 1 where a bias is a matter of length alone."""
    least_bias: float
    """The deviation of the mean; a smaller bias cannot be told from chance."""

    @property
    def relative_bias(self) -> float:
        """The bias over the norm of the exact gradient."""
        return _ratio(self.bias, self.norm)

    @property
    def relative_deviation(self) -> float:
        """The deviation over the norm of the exact gradient."""
        return _ratio(self.deviation, self.norm)

    def cells(self) -> str:
        """A line of a table; a bias that chance explains is shown as what it is at most."""
        below = "<" if self.bias < self.least_bias else ""
        bias = max(self.bias, self.least_bias)
        cells = (
            f"{self.norm:.3g}",
            f"{below}{bias:.3g}",
            f"{below}{bias / self.norm if self.norm else 0.0:.3f}",
            f"{self.deviation:.3g}",
            f"{self.relative_deviation:.3f}",
            f"{self.cosine:.4f}",
        )
        return "".join(f"{cell:>11}" for cell in cells)


@dataclass(frozen=True)
class Audit:
    """What ``head.audit`` found on a batch."""

    head: str
    """The name of the head's class."""
    n_rows: int
    """Rows that counted."""
    n_classes: int
    n_samples: int
    """Classes drawn in a step; the mean over rows where each draws until it has enough."""
    n_draws: int
    """How often the loss was drawn."""
    gradients: dict[str, GradientError]
    """Those of "hidden", "weight" and "bias" that are learned."""
    ess: Tensor = field(repr=False)
    """Effective sample size of each row, the mean over draws, float64 ``(n_rows,)``."""
    least_ess: float
    """The least of any row in any draw."""
    log_z: Tensor = field(repr=False)
    """How far log Z of each row is from where an unnormalised model has it, ``(n_rows,)``."""
    log_z_error: Drift | None
    """Of log Z as draws of noise estimate it, less the exact one; None for other heads."""
    took_all: float = 0.0
    """The share of rows that gave up drawing and took all classes."""

    @property
    def mean_ess(self) -> float:
        """Over rows and draws."""
        return self.ess.mean().item() if self.ess.numel() else 0.0

    @property
    def drift(self) -> Drift:
        """Of log Z over the rows."""
        return drift_of(self.log_z)

    def table(self) -> str:
        """Lines for a terminal."""
        columns = "norm", "bias", "/ norm", "deviation", "/ norm", "cosine"
        drift, error = self.drift, self.log_z_error
        text = (
            f"{self.head}: {self.n_samples:,} of {self.n_classes:,} classes per step, "
            f"{self.n_draws} draws on {self.n_rows:,} rows\n\n{'gradient of':<12}"
        )
        text += "".join(f"{name:>11}" for name in columns)
        for name, of in self.gradients.items():
            text += f"\n{name:<12}{of.cells()}"
        text += (
            f"\n\neffective sample size: {self.mean_ess:.1f} per row on average, "
            f"{self.least_ess:.1f} at least, of {self.n_samples:,}"
        )
        if self.took_all:
            text += f"\nall classes taken by {self.took_all:.1%} of the rows"
        text += (
            f"\nlog Z: {drift.mean:+.3f} ± {drift.deviation:.3f} from that of an unnormalised "
            f"model, at most {drift.largest:.3f}"
        )
        if error is not None:
            off = f"{error.mean:+.3f} ± {error.deviation:.3f}"
            text += f"\nlog Z from the draws: {off} from the exact one"
        return text

    __str__ = table

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Errors of the gradients, and how sample sizes and log Z vary over rows.

        Args:
            path: where to save the picture; its ending says in which format. None saves nothing.

        Returns:
            The figure, of matplotlib.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError(
                'a plot needs matplotlib, which is not installed: pip install "lastlayer[lab]"'
            ) from error
        figure, (left, middle, right) = plt.subplots(
            1, 3, figsize=(10.0, 3.0), layout="constrained"
        )
        for place, of in enumerate(self.gradients.values()):
            left.bar(place - 0.2, of.relative_bias, 0.4, color=_BIAS)
            left.bar(place + 0.2, of.relative_deviation, 0.4, color=_DEVIATION)
        left.set_xticks(range(len(self.gradients)), list(self.gradients))
        left.set_ylabel("relative to the exact gradient")
        left.legend(["bias", "deviation of a step"], frameon=False)
        middle.hist(self.ess.numpy(), bins=30, color=_ROWS)
        middle.set_xlabel(f"effective sample size of {self.n_samples:,}")
        middle.set_ylabel("rows")
        right.hist(self.log_z.numpy(), bins=30, color=_ROWS)
        right.axvline(0.0, color=_BIAS, linewidth=1.0)
        right.set_xlabel("log Z")
        for axes in (left, middle, right):
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(
            f"{self.head}, {self.n_samples:,} of {self.n_classes:,} classes", fontsize=10
        )
        if path is not None:
            figure.savefig(path)
        return figure


class GradientSums:
    """The sum of estimates and that of their squared norms: memory for two gradients."""

    def __init__(self, exact: Tensor) -> None:
        self._exact = exact.to(accumulation_dtype(exact.dtype))
        self._sum = torch.zeros_like(self._exact)
        self._squares = torch.zeros((), dtype=torch.float64, device=exact.device)
        self._n = 0

    def add(self, estimate: Tensor) -> None:
        """One draw, dense or row-sparse."""
        if estimate.layout == torch.strided:
            values = estimate.detach()
            self._sum += values
        else:
            estimate = estimate.detach().coalesce()
            values = estimate.values()
            self._sum.index_add_(0, estimate.indices()[0], values.to(self._sum.dtype))
        self._squares += values.double().square().sum()
        self._n += 1

    def compared(self) -> GradientError:
        """What the draws so far say. The host waits."""
        mean = self._sum / self._n
        of_mean, of_exact = _square(mean), _square(self._exact)
        variance = max(0.0, self._squares.item() / self._n - of_mean)
        variance *= self._n / (self._n - 1)
        by_chance = variance / self._n
        away = _square(mean.sub_(self._exact))
        # <m, g> = (|m|² + |g|² - |m - g|²) / 2.
        product = (of_mean + of_exact - away) / 2
        return GradientError(
            norm=math.sqrt(of_exact),
            bias=math.sqrt(max(0.0, away - by_chance)),
            deviation=math.sqrt(variance),
            cosine=_ratio(product, math.sqrt(of_mean * of_exact)),
            least_bias=math.sqrt(by_chance),
        )


def _square(values: Tensor) -> float:
    norm: float = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    return norm * norm


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (math.nan if part else 0.0)


def audit(
    head: "ComparedHead", hidden: Tensor, target: Tensor, n_draws: int = 64, **given: Any
) -> Audit:
    """As :meth:`ComparedHead.audit` says it."""
    head._check_hidden(hidden)
    target = head._check_targets(hidden, target)
    n_draws = check_int("n_draws", n_draws, least=2, note="a variance takes two")
    leaf = hidden.detach().clone().requires_grad_()
    named = {"hidden": leaf, "weight": head.weight, "bias": head.bias}
    leaves = {name: v for name, v in named.items() if v is not None and v.requires_grad}
    _, ids = head._rows(hidden, target)
    counts = (ids >= 0).any(-1)
    rows = hidden.detach().reshape(-1, head.in_features)[counts]
    worth: list[tuple[Tensor, Tensor | None]] = []
    drawn: list[tuple[float, float]] = []
    with _as_in_training(head), torch.enable_grad():
        exact = torch.autograd.grad(head._exact_loss(leaf, target), list(leaves.values()))
        sums = {
            name: GradientSums(gradient.detach().to_dense())
            for name, gradient in zip(leaves, exact, strict=True)
        }
        for _ in range(n_draws):
            before = {name: each.clone() for name, each in head.named_buffers(recurse=False)}
            head.ess = None
            loss = head.forward(leaf, target, **given)
            made = torch.autograd.grad(loss, list(leaves.values()))
            for name, gradient in zip(leaves, made, strict=True):
                sums[name].add(gradient)
            worth.append(_worth(head, rows, counts, before.get("rng_counter")))
            drawn.append(_drawn(head, counts))
    exact_log_z = log_normalizer(head, rows)
    own_log_z = getattr(head, "_row_log_z", None)
    log_z = exact_log_z if own_log_z is None else own_log_z(rows)
    sizes = torch.stack([ess for ess, _ in worth])
    estimates = [log_z for _, log_z in worth if log_z is not None]
    return Audit(
        head=type(head).__name__,
        n_rows=rows.shape[0],
        n_classes=head.n_classes,
        n_samples=round(sum(each for each, _ in drawn) / n_draws),
        n_draws=n_draws,
        gradients={name: each.compared() for name, each in sums.items()},
        ess=sizes.mean(0).double().cpu(),
        least_ess=float(sizes.min()) if sizes.numel() else 0.0,
        log_z=log_z.double().cpu(),
        log_z_error=drift_of(torch.stack(estimates) - exact_log_z) if estimates else None,
        took_all=sum(each for _, each in drawn) / n_draws,
    )


@torch.no_grad()
def _worth(
    head: "ComparedHead", rows: Tensor, counts: Tensor, rng_counter: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Effective sample size of each row, (Σr)² / Σr² with r = e^s / q, as the head reports it.

    For one that does not weigh its draws it is made from them, the same for all rows, and so is
    what they say that log Z is: the log of the mean of r.
    """
    if head.ess is None:
        # All classes counted.
        return rows.new_full(rows.shape[:1], head.n_classes), None
    if rng_counter is None or head.weighs_draws or not len(rows):
        return head.ess[counts], None
    drawing = cast("SampledHead", head)
    ids, log_q = drawing._draw(rng_counter, torch.float32)
    vectors = in_dtype(head.weight[ids], rows.dtype)
    biases = None if head.bias is None else in_dtype(head.bias[ids], rows.dtype)
    ess, log_z = [], []
    for part in row_chunks(rows, drawing.n_samples, head.chunk_rows, _COPIES):
        log_r = wide_scores(rows[part], vectors, biases) / temperature_of(head) - log_q
        total = torch.logsumexp(log_r, -1)
        ess.append(torch.exp(2.0 * total - torch.logsumexp(2.0 * log_r, -1)))
        log_z.append(total - math.log(drawing.n_samples))
    return torch.cat(ess), torch.cat(log_z)


def _drawn(head: "ComparedHead", counts: Tensor) -> tuple[float, float]:
    """How many classes a row drew in the last step, and which share of the rows took all."""
    n_drawn: Tensor | None = getattr(head, "n_drawn", None)
    took_all: Tensor | None = getattr(head, "took_all", None)
    if n_drawn is None or took_all is None or not bool(counts.any()):
        return float(head._classes_per_step()), 0.0
    return float(n_drawn[counts].double().mean()), float(took_all[counts].double().mean())


@contextmanager
def _as_in_training(head: "ComparedHead") -> Iterator[None]:
    """Training mode with a mean of rows and sparse gradients; everything is put back."""
    # What is no parameter, buffer or part: options, and what heads tell of their last step.
    plain = {name: value for name, value in vars(head).items() if not name.startswith("_")}
    buffers = {name: each.clone() for name, each in head.named_buffers()}
    head.train()
    head.reduction, head.sparse = "mean", True
    try:
        yield
    finally:
        head.train(plain["training"])
        vars(head).update(plain)
        for name, each in head.named_buffers():
            each.copy_(buffers[name])


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
        ours, full = self.sampled, self.full
        text = (
            f"{self.head}: a step of {self.n_rows:,} rows against {self.n_samples:,} of "
            f"{self.n_classes:,} classes\n\n{'':<20}{'sampled':>14}{'full softmax':>14}"
        )
        for name, unit, *both in (
            ("operations", "FLOP", ours.flops, full.flops),
            ("class vectors read", "", ours.gathered, full.gathered),
            ("bytes moved", "B", ours.traffic, full.traffic),
            ("bytes in Adam", "B", ours.optimizer, full.optimizer),
        ):
            cells = (_scaled(each, unit) if unit else f"{each:,}" for each in both)
            text += f"\n{name:<20}" + "".join(f"{cell:>14}" for cell in cells)
        text += f"\n\n{self.speedup:,.1f} times fewer operations.\n{self.reason}"
        if not self.sparse:
            text += (
                "\nGradients are dense: with sparse=True, and optim.RowAdagrad or RowAdam, a step "
                "writes the rows it has read alone."
            )
        return text

    __str__ = text


def explain(head: "SampledHead", found: Audit | None = None, *, n_rows: int = 1024) -> Explanation:
    """As :meth:`SampledHead.explain` says it."""
    n_rows = check_int("n_rows", n_rows)
    n_samples, took_all = head.n_samples, 0.0
    if found is not None:
        if not isinstance(found, Audit):
            raise TypeError(f"audit: expected what head.audit gives, got {type(found).__name__}")
        if found.n_classes != head.n_classes:
            raise ValueError(
                f"audit: expected one of a head with {head.n_classes} classes, got "
                f"{found.n_classes}"
            )
        n_samples, took_all = found.n_samples, found.took_all
    suggested, reason = _suggestion(head.n_classes, found)
    if found is None and getattr(head, "target_ess", None) is not None:
        reason += " Rows draw until they have enough: an audit counts how many that takes."
    sampled, full = _costs(head, n_rows, n_samples, took_all)
    return Explanation(
        head=type(head).__name__,
        n_rows=n_rows,
        n_classes=head.n_classes,
        n_samples=n_samples,
        sampled=sampled,
        full=full,
        sparse=head.sparse,
        suggested=suggested,
        reason=reason,
    )


def _costs(head: "SampledHead", n_rows: int, n_samples: int, took_all: float) -> tuple[Cost, Cost]:
    """Of ``n_samples`` per row, where a share of rows took all classes; and of a full softmax."""
    n_classes, depth, always = head.n_classes, head.in_features, head.n_head
    vector = float(depth * head.weight.element_size())
    moment = float(depth * accumulation_dtype(head.weight.dtype).itemsize)

    def cost(scored: float, gathered: int, moved: int, written: int) -> Cost:
        return Cost(
            flops=6.0 * n_rows * scored * depth,
            gathered=gathered,
            traffic=moved * vector,
            optimizer=written * (3 * vector + 4 * moment),
        )

    gathered = n_samples * (n_rows if head.draws_for_each_row else 1) + always + n_rows
    gathered += n_classes if took_all else 0
    written = min(gathered, n_classes) if head.sparse else n_classes
    scored = n_samples + always + 1 + took_all * n_classes
    # All vectors are read twice, forward and for the gradient of hidden.
    full = cost(n_classes, n_classes, 3 * n_classes, n_classes)
    return cost(scored, gathered, gathered + written, written), full


def _suggestion(v: int, found: Audit | None) -> tuple[int, str]:
    if found is None or not found.mean_ess > 0.0:
        wanted = min(v, _power_of_two(min(max(_SHARE * v, _FEWEST), _MOST)))
        return wanted, (
            f"{wanted:,} samples are a first guess for {v:,} classes; "
            "audit(hidden, target) on a batch of yours says what they are worth."
        )
    # Of the rows that are worst off, not of the mean: they have the largest errors.
    low = torch.quantile(found.ess, 0.1).item()
    exact = found.n_samples * _WANTED_ESS / max(low, 1.0)
    worth = (
        f"In the audit {found.n_samples:,} samples were worth {found.mean_ess:.0f} per row, and "
        f"{low:.0f} or less in a tenth of the rows"
    )
    if found.took_all:
        worth += f", and {found.took_all:.0%} of the rows took all classes"
    if exact > _WORTHWHILE * v:
        return v, (
            f"{worth}: for {_WANTED_ESS:.0f} there, {exact:,.0f} samples would be needed of {v:,} "
            "classes. A sampler closer to the model helps, or a full softmax."
        )
    wanted = min(v, _power_of_two(exact))
    return wanted, f"{worth}: {wanted:,} samples bring {_WANTED_ESS:.0f} there."


def _power_of_two(number: float) -> int:
    return 1 << max(0, math.ceil(math.log2(number)))


def _scaled(number: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000.0 or prefix == "T":
            break
        number /= 1000.0
    return f"{number:.3g} {prefix}{unit}"
