"""Colours and style of the pictures that scripts here draw into pictures/."""

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
