"""What every picture needs: matplotlib, a figure, and colours."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSTALL_COMMAND = 'pip install "lastlayer[lab]"'

# Okabe and Ito's colours, which colour-blind readers can tell apart.
OURS_COLOURS = ("#0072B2", "#009E73", "#56B4E9")
OTHER_COLOURS = ("#D55E00", "#CC79A7", "#E69F00", "#000000", "#7F7F7F")


class MissingPlotLibrary(ImportError):  # noqa: N818 — it says what is missing
    """Matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__(f"a plot needs matplotlib, which is not installed: {INSTALL_COMMAND}")


def require_matplotlib() -> None:
    """Raise before any work is done for a plot that could not be drawn.

    Raises:
        MissingPlotLibrary: with the command that installs it.
    """
    if find_spec("matplotlib") is None:
        raise MissingPlotLibrary


def new_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches that no window is opened for.

    Raises:
        MissingPlotLibrary: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Write the PNG, the same bytes for the same figure."""
    figure.savefig(path, format="png", metadata={"Software": None})
