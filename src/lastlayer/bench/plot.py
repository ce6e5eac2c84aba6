"""What every picture needs: matplotlib, a figure, and colours."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lastlayer.bench.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RecordT = TypeVar("RecordT", bound=Record)

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


def panels_by_device(
    figure_size: tuple[float, float], records: Sequence[RecordT]
) -> tuple["Figure", Iterator[tuple["Axes", str, list[RecordT]]]]:
    """A figure with a panel a device below each other, and with each panel its records.

    Args:
        figure_size: inches of one panel.
        records: of any devices.
    """
    devices = list(dict.fromkeys(record.device for record in records))
    width, height = figure_size
    figure = new_figure(width, height * len(devices))
    panels = figure.subplots(len(devices), 1, squeeze=False)[:, 0]
    mine = ([r for r in records if r.device == device] for device in devices)
    return figure, zip(panels, devices, mine, strict=True)


def without_frame(panel: "Axes") -> None:
    """Leave only the two axes."""
    panel.spines[["top", "right"]].set_visible(False)


def beside_legend(panel: "Axes", distance: float) -> None:
    """A grid, and what the lines are to the right of it, so far away in widths of the panel."""
    panel.grid(visible=True, alpha=0.3)
    without_frame(panel)
    place = (1 + distance, 0.5)
    panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=place)


def save(figure: "Figure", path: Path) -> None:
    """Write the PNG, the same bytes for the same figure."""
    figure.savefig(path, format="png", metadata={"Software": None})
