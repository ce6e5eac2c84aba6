"""The picture of the multi-label losses: draws pictures/multilabel.svg.

``python docs/multilabel_picture.py``; all values are computed by the library.
"""

import itertools
import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from drawn_style import BLUE, FAINT, GREEN, INK, ORANGE, VERMILION, new_figure, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lastlayer.losses.calibration import ZLPRCalibrator
from lastlayer.losses.multilabel import bce_loss
from lastlayer.losses.zlpr import zlpr_loss, zlpr_probability


def threshold(axes: Axes) -> None:
    """Scores of one row on both sides of 0, and the gradient of each."""
    scores = torch.tensor([3.0, 1.2, -0.6, 1.6, 0.4, -0.5, -1.5, -3.0], requires_grad=True)
    labels = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    zlpr_loss(scores, labels).backward()
    place = range(len(labels))
    colours = [BLUE if label else VERMILION for label in labels]
    axes.bar(place, scores.detach(), 0.55, color=colours, alpha=0.25)
    axes.bar(place, -2.0 * scores.grad, 0.2, color=colours)
    axes.axhline(0.0, color=INK, lw=1)
    axes.plot([], [], color=BLUE, lw=5, label="positives")
    axes.plot([], [], color=VERMILION, lw=5, label="negatives")
    axes.set(title="labels with scores above 0 are predicted", xlabel="classes",
             ylabel="score (pale), −2 × gradient (dark)")  # fmt: skip
    axes.set_xticks([])
    axes.legend(fontsize=8)


def push(axes: Axes) -> None:
    """The gradient on all negatives relative to that on one positive."""
    sizes = [10**power for power in range(1, 6)]
    for name, loss, colour in (
        ("binary cross entropy", bce_loss, ORANGE),
        ("ZLPR", zlpr_loss, BLUE),
    ):
        ratios = []
        for n in sizes:
            scores = torch.full((n,), -2.0, requires_grad=True)
            labels = torch.zeros(n, dtype=torch.bool)
            labels[0] = True
            loss(scores, labels).backward()
            ratios.append(float(scores.grad[1:].sum() / -scores.grad[0]))
        axes.plot(sizes, ratios, color=colour, marker="o", ms=4, label=name)
    axes.axhline(1.0, color=FAINT, lw=1, zorder=0)
    axes.set(
        title="gradient on all negatives / on one positive", xlabel="classes, all with score −2",
        xscale="log", yscale="log",
    )  # fmt: skip
    axes.legend(fontsize=8)


def optimum(chance: Tensor) -> Tensor:
    """The scores that minimise the expected loss of independent hard labels."""
    every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=len(chance)))).double()
    weight = torch.where(every > 0, chance, 1.0 - chance).prod(-1)
    scores = torch.zeros_like(chance, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [scores], max_iter=300, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = (weight * zlpr_loss(scores.expand_as(every), every, reduction="none")).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return scores.detach()


def calibration(axes: Axes) -> None:
    """Probabilities by formulas and by a fit, for hard labels with known probabilities."""
    chance = torch.linspace(0.04, 0.96, 10).double()
    scores = optimum(chance)
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(4000, 10, generator=generator, dtype=torch.float64) < chance
    fitted = ZLPRCalibrator().fit(scores.expand_as(labels), labels)
    axes.plot([0, 1], [0, 1], color=FAINT, lw=1)
    axes.plot(chance, torch.sigmoid(scores), "v", color=ORANGE, ms=5, label="σ(s)")
    axes.plot(chance, zlpr_probability(scores), "^", color=VERMILION, ms=5, label="σ(2s)")
    axes.plot(chance, fitted(scores), "o", color=GREEN, ms=5, label="ZLPRCalibrator")
    axes.set(title="hard labels: no formula is calibrated", xlabel="true probability of a label")
    axes.legend(fontsize=8)


def draw() -> Figure:
    figure = new_figure(11.5, 3.3)
    left, middle, right = figure.subplots(1, 3)
    threshold(left)
    push(middle)
    calibration(right)
    return figure


if __name__ == "__main__":
    write("multilabel.svg", draw)
