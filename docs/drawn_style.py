"""Colours, style and output of the pictures that the scripts in docs/ draw into pictures/."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
INK, FAINT = "#333333", "#BBBBBB"
STYLE = {
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.hashsalt": "lastlayer",
    "text.color": INK,
}


def new_figure(width: float, height: float) -> Figure:
    """Creates a figure without a window; sizes are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write(name: str, draw: Callable[[], Figure], **style: object) -> None:
    """Writes pictures/name reproducibly; ``style`` overrides entries of :data:`STYLE`."""
    with mpl.rc_context(STYLE | style):
        target = Path(__file__).parent / "pictures" / name
        draw().savefig(target, bbox_inches="tight", metadata={"Date": None})
