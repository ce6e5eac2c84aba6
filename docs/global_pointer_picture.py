"""The picture of spans: draws pictures/global_pointer.svg.

``python docs/global_pointer_picture.py``. The script trains a head for a few steps on the text that
is shown.
"""

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from drawn_style import FAINT, INK, ORANGE, new_figure, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lastlayer.heads.spans import GlobalPointer

TOKENS = ["the", "University", "of", "New", "York", "hired", "Ada", "PAD", "PAD"]
SPANS = {"organisation": [(1, 4)], "place": [(3, 4)], "person": [(6, 6)]}


def trained_scores() -> torch.Tensor:
    torch.manual_seed(0)
    hidden = torch.randn(len(TOKENS), 32)
    mask = torch.tensor([token != "PAD" for token in TOKENS])
    target = torch.tensor(
        [(kind, *span) for kind, spans in enumerate(SPANS.values()) for span in spans]
    )
    head = GlobalPointer(32, len(SPANS), 16)
    optimiser = torch.optim.Adam(head.parameters(), 0.01)
    for _ in range(14):
        optimiser.zero_grad()
        head(hidden, target, mask).backward()
        optimiser.step()
    return head.scores(hidden, mask).detach()


def triangle(axes: Axes, scores: torch.Tensor, spans: list[tuple[int, int]], name: str) -> None:
    """Scores by start and end; pairs that are not spans are white, padding is hatched."""
    n, real = len(TOKENS), sum(token != "PAD" for token in TOKENS)
    shown = scores.masked_fill(scores.isinf(), torch.nan)
    axes.imshow(shown, cmap="RdBu", vmin=-6, vmax=6)
    for start in range(n):
        for end in range(n):
            if start > end:
                continue
            padded = start >= real or end >= real
            axes.add_patch(
                Rectangle(
                    (end - 0.5, start - 0.5), 1, 1, facecolor="none", linewidth=0.5,
                    edgecolor=FAINT, hatch="////" if padded else None,
                )
            )  # fmt: skip
    for start, end in spans:
        axes.add_patch(
            Rectangle((end - 0.5, start - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.8)
        )
    axes.set_title(f"type “{name}”", color=INK)
    axes.set_xticks(range(n), TOKENS, rotation=55, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(n), TOKENS)
    axes.set_xlabel("end")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def tiles(axes: Axes) -> None:
    """The tiles in which the fused loss processes the triangle."""
    n, height = 9, 3
    for first in range(0, n, height):
        colour = ORANGE if first == height else "#F6DDA6"
        axes.add_patch(
            Rectangle((first, first), n - first, height, facecolor=colour, edgecolor=INK, lw=0.8)
        )
    axes.plot([0, n, n], [0, 0, n], color=INK, lw=1)
    axes.plot([0, n], [0, n], color=INK, lw=1, ls="--")
    axes.text(0.8 * n, 1.5 * height, "a tile:\nscores →\ntwo sums", ha="center", va="center")
    axes.text(
        0.3, n - 0.4, "end before\nstart: not\ncomputed", ha="left", va="bottom", color="#777777"
    )
    axes.set_title("one tile at a time", color=INK)
    axes.set(
        xlim=(-0.1, n + 0.1), ylim=(n + 0.1, -0.1), xlabel="end", ylabel="start", aspect="equal"
    )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def draw() -> Figure:
    figure = new_figure(12, 3.5)
    *panels, last = figure.subplots(1, len(SPANS) + 1)
    for axes, scores, (name, spans) in zip(panels, trained_scores(), SPANS.items(), strict=True):
        triangle(axes, scores, spans, name)
    panels[0].set_ylabel("start")
    for axes in panels[1:]:
        axes.set_yticklabels([])
    tiles(last)
    return figure


if __name__ == "__main__":
    write("global_pointer.svg", draw)
