"""The picture of the contrastive loss: draws pictures/contrastive.svg.

``python docs/contrastive_picture.py``; the curves are computed by the library.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from drawn_style import BLUE, FAINT, GREEN, ORANGE, VERMILION, new_figure, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lastlayer.losses.contrastive import info_nce


def temperature(axes: Axes) -> None:
    """The gradient on each of 100 negatives, from the most similar to the least."""
    cosines = torch.linspace(0.6, -0.2, 100)
    query = torch.tensor([[1.0, 0.0]])
    key = torch.tensor([[0.7, 0.51**0.5]])
    for value, colour in ((0.5, FAINT), (0.1, ORANGE), (0.03, BLUE)):
        negatives = torch.stack([cosines, (1.0 - cosines**2).sqrt()], 1).requires_grad_()
        info_nce(query, key, negatives, temperature=value, normalize=False).backward()
        push = negatives.grad[:, 0]
        axes.plot(range(1, 101), push / push.sum(), color=colour, label=f"T = {value:g}")
    axes.set(
        title="a low temperature emphasises hard negatives",
        xlabel="negatives, most similar first", ylabel="share of the gradient",
    )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(1e-5, 1.0)
    axes.legend(fontsize=8)


def repeated(axes: Axes) -> None:
    """The loss of a perfect encoder on a batch with repeated pairs."""
    copies = range(1, 9)
    pairs = torch.eye(16)
    curves: dict[str, list[float]] = {"without groups": [], "with groups": []}
    for number in copies:
        rows, ids = pairs.repeat(number, 1), torch.arange(16).repeat(number)
        options = dict(temperature=0.03, symmetric=True)
        curves["without groups"].append(float(info_nce(rows, rows, **options)))
        curves["with groups"].append(float(info_nce(rows, rows, **options, groups=ids)))
    for (name, losses), colour in zip(curves.items(), (VERMILION, GREEN), strict=True):
        axes.plot(copies, losses, color=colour, marker="o", ms=4, label=name)
    axes.set(
        title="perfect vectors, repeated pairs", xlabel="copies of each pair in the batch",
        ylabel="loss",
    )  # fmt: skip
    axes.legend(fontsize=8)


def passes(axes: Axes) -> None:
    """A chunk of the rows of similarities, and the sums that are kept."""
    axes.set(xlim=(-2.4, 8.6), ylim=(-1.7, 7.2), title="chunks of queries against all keys")
    axes.set_axis_off()
    axes.add_patch(Rectangle((0, 0), 6, 6, fill=False, ec=FAINT, ls="--", lw=1.2))
    axes.add_patch(Rectangle((0, 2.6), 6, 1.4, color=ORANGE, lw=0))
    for since, until in ((0.0, 2.0), (3.4, 6.0)):  # with a gap for the text
        axes.plot([since, until], [6 - since, 6 - until], color=BLUE, lw=1.5)
    axes.text(4.2, 0.9, "own keys", color=BLUE, ha="right", va="center")
    axes.text(3.0, 5.1, "never all stored", color="#888888", ha="center", va="center")
    axes.text(3.0, 3.6, "products, then their gradient,", ha="center", va="center", fontsize=8)
    axes.text(3.0, 3.1, "in the same memory", ha="center", va="center", fontsize=8)
    axes.text(-0.3, 3.3, "queries", ha="right", va="center")
    axes.text(3.0, 6.4, "keys", ha="center", va="center")
    axes.add_patch(Rectangle((6.3, 0), 0.35, 6, color=GREEN, alpha=0.85, lw=0))
    axes.text(6.85, 3.3, "row sums", color=GREEN, va="center")
    axes.add_patch(Rectangle((0, -0.65), 6, 0.35, color=GREEN, alpha=0.85, lw=0))
    axes.text(3.0, -1.2, "column sums, for the symmetric loss", color=GREEN, ha="center")


def draw() -> Figure:
    figure = new_figure(11.5, 3.3)
    left, middle, right = figure.subplots(1, 3)
    temperature(left)
    repeated(middle)
    passes(right)
    return figure


if __name__ == "__main__":
    write("contrastive.svg", draw)
