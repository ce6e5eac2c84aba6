"""Colours, style and files of the pictures that scripts here draw into pictures/."""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
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
    """A figure of so many inches that no window is opened for."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write(name: str, draw: Callable[[], Figure], **style: object) -> None:
    """Draw pictures/name, the same bytes each time, in this style but for what is given."""
    with mpl.rc_context(STYLE | style):
        target = Path(__file__).parent / "pictures" / name
        draw().savefig(target, bbox_inches="tight", metadata={"Date": None})
