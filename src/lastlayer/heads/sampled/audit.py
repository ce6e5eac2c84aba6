"""Audits: the bias and the variance of a sampled gradient against the exact one, on a batch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lastlayer._checks import check_int
from lastlayer._torch import accumulation_dtype
from lastlayer.fused.scores import row_chunks, wide_scores
from lastlayer.heads.self_normalized import Drift, drift_of, log_normalizer, temperature_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lastlayer.heads.sampled.base import ComparedHead, SampledHead

_BIAS, _DEVIATION, _ROWS = "#D55E00", "#0072B2", "#9A9A9A"
# Numbers held for each score of a chunk, itself included.
_COPIES = 4.0


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
        title = (
            f"{self.head}: {self.n_samples:,} of {self.n_classes:,} classes per step, "
            f"{self.n_draws} draws on {self.n_rows:,} rows"
        )
        columns = "norm", "bias", "/ norm", "deviation", "/ norm", "cosine"
        head = f"{'gradient of':<12}" + "".join(f"{name:>11}" for name in columns)
        rows = [f"{name:<12}{of.cells()}" for name, of in self.gradients.items()]
        drift, error = self.drift, self.log_z_error
        sizes = (
            f"effective sample size: {self.mean_ess:.1f} per row on average, "
            f"{self.least_ess:.1f} at least, of {self.n_samples:,}"
        )
        away = (
            f"log Z: {drift.mean:+.3f} ± {drift.deviation:.3f} from that of an unnormalised model, "
            f"at most {drift.largest:.3f}"
        )
        lines = [title, "", head, *rows, "", sizes, away]
        if self.took_all:
            lines.insert(-1, f"all classes taken by {self.took_all:.1%} of the rows")
        if error is not None:
            lines.append(
                f"log Z from the draws: {error.mean:+.3f} ± {error.deviation:.3f} from the exact "
                "one"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

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
    weights: list[_Importance] = []
    drawn: list[tuple[float, float]] = []
    with _as_in_training(head), torch.enable_grad():
        exact = torch.autograd.grad(head._exact_loss(leaf, target), list(leaves.values()))
        sums = {
            name: GradientSums(gradient.detach().to_dense())
            for name, gradient in zip(leaves, exact, strict=True)
        }
        for _ in range(n_draws):
            rng_counter = getattr(head, "rng_counter", None)
            rng_counter = None if rng_counter is None else rng_counter.clone()
            head.ess = None
            loss = head.forward(leaf, target, **given)
            made = torch.autograd.grad(loss, list(leaves.values()))
            for name, gradient in zip(leaves, made, strict=True):
                sums[name].add(gradient)
            weights.append(_weights(head, rows, counts, rng_counter))
            drawn.append(_drawn(head, counts))
    exact_log_z = log_normalizer(head, rows)
    own_log_z = getattr(head, "_row_log_z", None)
    log_z = exact_log_z if own_log_z is None else own_log_z(rows)
    estimates = [each.log_z for each in weights if each.log_z is not None]
    return Audit(
        head=type(head).__name__,
        n_rows=rows.shape[0],
        n_classes=head.n_classes,
        n_samples=round(sum(each for each, _ in drawn) / n_draws),
        n_draws=n_draws,
        gradients={name: each.compared() for name, each in sums.items()},
        ess=torch.stack([each.ess for each in weights]).mean(0).double().cpu(),
        least_ess=min((float(each.ess.min()) for each in weights if each.ess.numel()), default=0.0),
        log_z=log_z.double().cpu(),
        log_z_error=drift_of(torch.stack(estimates) - exact_log_z) if estimates else None,
        took_all=sum(each for _, each in drawn) / n_draws,
    )


class _Importance(NamedTuple):
    """Of each row, ``(n,)``."""

    ess: Tensor
    """(Σr)² / Σr² with r = e^s / q."""
    log_z: Tensor | None
    """log of the mean of r: what the draws say that log Σ e^s is."""


def _weights(
    head: "ComparedHead", rows: Tensor, counts: Tensor, rng_counter: Tensor | None
) -> _Importance:
    """As the head reports them; for one that has no weights, those of its draws."""
    own = head.ess
    if not rows.shape[0]:
        return _Importance(rows.new_empty(0), None)
    if own is None:
        # All classes counted.
        return _Importance(rows.new_full(rows.shape[:1], head.n_classes), None)
    if rng_counter is None or head.weighs_draws:
        return _Importance(own.detach()[counts], None)
    return _importance(cast("SampledHead", head), rows, rng_counter)


@torch.no_grad()
def _importance(head: "SampledHead", rows: Tensor, rng_counter: Tensor) -> _Importance:
    """Of ``n_samples`` draws of the head's sampler, the same for all rows."""
    ids, log_q = head._draw(rng_counter, torch.float32)
    weight, bias = head._score_tensors(rows.dtype)
    if weight is None:
        raise RuntimeError("weight: expected class vectors")
    vectors, biases = weight[ids], None if bias is None else bias[ids]
    ess, log_z = [], []
    for part in row_chunks(rows, head.n_samples, head.chunk_rows, _COPIES):
        scores = wide_scores(rows[part], vectors, biases) / temperature_of(head)
        # A class that is always counted has no part in it.
        log_r = torch.where(log_q == -math.inf, -math.inf, scores - log_q)
        total = torch.logsumexp(log_r, -1)
        ess.append(torch.exp(2.0 * total - torch.logsumexp(2.0 * log_r, -1)))
        log_z.append(total - math.log(head.n_samples))
    return _Importance(torch.cat(ess), torch.cat(log_z))


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
