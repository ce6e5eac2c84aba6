"""An audit as numbers, as a table and as a picture."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from lastlayer.heads._audit_gradients import GradientError
from lastlayer.heads._log_z import Drift, drift_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BIAS, _DEVIATION, _ROWS = "#D55E00", "#0072B2", "#9A9A9A"


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
            f"{self.head}: {self.n_samples:,} of {self.n_classes:,} classes a step, "
            f"{self.n_draws} draws on {self.n_rows:,} rows"
        )
        columns = "norm", "bias", "/ norm", "deviation", "/ norm", "cosine"
        head = f"{'gradient of':<12}" + "".join(f"{name:>11}" for name in columns)
        rows = [f"{name:<12}{_cells(of)}" for name, of in self.gradients.items()]
        drift, error = self.drift, self.log_z_error
        sizes = (
            f"effective sample size: {self.mean_ess:.1f} a row on average, {self.least_ess:.1f} at "
            f"least, of {self.n_samples:,}"
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
        """Errors of the gradients, and how sample sizes and log Z lie over rows. Needs matplotlib.

        Args:
            path: where to save the picture; its ending says in which format. None saves nothing.

        Returns:
            The figure.
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


def _cells(of: GradientError) -> str:
    """A bias that chance explains is shown as what it is at most."""
    below = "<" if of.bias < of.least_bias else ""
    bias = max(of.bias, of.least_bias)
    cells = (
        f"{of.norm:.3g}",
        f"{below}{bias:.3g}",
        f"{below}{bias / of.norm if of.norm else 0.0:.3f}",
        f"{of.deviation:.3g}",
        f"{of.relative_deviation:.3f}",
        f"{of.cosine:.4f}",
    )
    return "".join(f"{cell:>11}" for cell in cells)
