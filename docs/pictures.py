"""The pictures of the documentation, computed by the library itself.

``python docs/pictures.py FOLDER`` draws them without building the pages.
"""

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import drawn_style
import matplotlib as mpl
import torch
from drawn_style import BLUE, FAINT, GREEN, INK, ORANGE, VERMILION, new_figure
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

import lastlayer
from lastlayer import trees

PURPLE, SKY = "#CC79A7", "#56B4E9"
STYLE = drawn_style.STYLE | {
    "axes.grid": True,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "font.size": 10,
    "grid.color": "#E6E6E6",
    "lines.linewidth": 2.2,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}
Map = Callable[[Tensor], Tensor]


def _entmax(alpha: float) -> Map:
    return lambda scores: lastlayer.entmax(scores, alpha, impl="reference")


def _topk(k: int) -> Map:
    return lambda scores: lastlayer.topk_softmax(scores, k, impl="reference")


def _tsallis_entropy(alpha: float) -> Map:
    if alpha == 1.0:
        return lambda probs: torch.special.entr(probs).sum(-1)
    return lambda probs: (probs - probs**alpha).sum(-1) / (alpha * (alpha - 1))


def _panels(
    count: int, width: float, height: float, **options: object
) -> tuple[Figure, list[Axes]]:
    figure = new_figure(width, height)
    return figure, [*figure.subplots(1, count, squeeze=False, **options)[0]]


def same_scores() -> Figure:
    """One row of scores under four maps."""
    scores = torch.tensor(
        [2.2, 1.95, 1.6, 1.4, 1.1, 0.5, 0.3, 0.0, -0.4, -0.9, -1.4, -2.0]
    ).double()
    maps = {
        "softmax": (_entmax(1.0), "#8C8C8C"),
        "entmax, α = 1.5": (_entmax(1.5), BLUE),
        "sparsemax": (_entmax(2.0), GREEN),
        "top-k softmax, k = 3": (_topk(3), VERMILION),
    }
    figure, panels = _panels(len(maps), 10, 2.9, sharey=True)
    classes = range(1, len(scores) + 1)
    for panel, (name, (map_, colour)) in zip(panels, maps.items(), strict=True):
        probs = map_(scores).tolist()
        panel.bar(classes, probs, color=colour, width=0.75, zorder=3)
        zeros = [c for c, p in zip(classes, probs, strict=True) if p == 0]
        if zeros:
            heights = [0] * len(zeros)
            panel.plot(zeros, heights, "o", mfc="white", mec=colour, ms=5, zorder=4, clip_on=False)
        alive = len(probs) - len(zeros)
        panel.set_title(name)
        panel.text(
            0.97, 0.93, f"{alive} of {len(probs)}\nabove zero",
            transform=panel.transAxes, ha="right", va="top", fontsize=9.5, color="#555555",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 2}, zorder=5,
        )  # fmt: skip
        panel.set_xticks([1, 4, 8, 12])
        panel.grid(axis="x", visible=False)
        panel.set_xlabel("class, sorted by score")
    panels[0].set_ylabel("probability")
    return figure


def two_classes() -> Figure:
    """The probability of one of two classes, and its derivative."""
    t = torch.linspace(-3.5, 3.5, 1401, dtype=torch.float64)
    figure, (value, slope) = _panels(2, 9.5, 3.6)
    for name, alpha, colour, dashes in (
        ("softmax (α = 1)", 1.0, "#8C8C8C", "-"),
        ("entmax, α = 1.5", 1.5, BLUE, "-"),
        ("sparsemax (α = 2)", 2.0, GREEN, "--"),
    ):
        lead = t.clone().requires_grad_()
        probs = _entmax(alpha)(torch.stack([lead, torch.zeros_like(lead)], -1))[:, 0]
        (rate,) = torch.autograd.grad(probs.sum(), lead)
        value.plot(t, probs.detach(), color=colour, ls=dashes, label=name)
        slope.plot(t, rate, color=colour, ls=dashes)
    value.set(title="probability of class 1 for the scores (t, 0)", xlabel="t", yticks=[0, 0.5, 1])
    slope.set(title="its derivative", xlabel="t", ylim=(0, 0.56))
    value.legend(loc="upper left", fontsize=9)
    return figure


def supports() -> Figure:
    """Which of three classes have a probability above 0, over the plane of scores."""
    reach, steps = 2.2, 600
    line = torch.linspace(-reach, reach, steps, dtype=torch.float64)
    y, x = torch.meshgrid(line, line, indexing="ij")
    corners = torch.tensor([[math.cos(a), math.sin(a)] for a in _thirds()]).double()
    # The plane of scores that sum to 0, drawn so that the simplex is the inner triangle.
    scores = math.sqrt(2 / 3) * torch.stack([x, y], -1) @ corners.T
    figure, panels = _panels(4, 10.5, 3.1)
    cmap = ListedColormap(["#FBE3B8", "#A9D5EF", "#BFE3D3"])
    for panel, (name, map_) in zip(
        panels,
        {
            "softmax": _entmax(1.0),
            "entmax, α = 1.5": _entmax(1.5),
            "sparsemax": _entmax(2.0),
            "top-k softmax, k = 2": _topk(2),
        }.items(),
        strict=True,
    ):
        probs = map_(scores)
        panel.pcolormesh(
            x, y, (probs != 0).sum(-1), cmap=cmap, vmin=0.5, vmax=3.5, shading="nearest",
            rasterized=True,
        )  # fmt: skip
        for c in range(3):
            panel.contour(
                x, y, probs[..., c], levels=[0.2, 0.4, 0.6, 0.8],
                colors=[(BLUE, GREEN, VERMILION)[c]], linewidths=0.9, alpha=0.75,
            )  # fmt: skip
        triangle = corners[[0, 1, 2, 0]] * math.sqrt(2 / 3)
        panel.plot(*triangle.T, color=INK, lw=1.4)
        for c, (a, b) in enumerate(corners * 1.85):
            panel.text(a, b, str(c + 1), ha="center", va="center", fontsize=11, weight="bold")
        panel.set_title(name)
        panel.set(aspect="equal", xticks=[], yticks=[], xlim=(-reach, reach), ylim=(-reach, reach))
        panel.grid(visible=False)
        panel.spines[:].set_visible(False)
    names = ("one class", "two classes", "all three")
    patches = [
        mpl.patches.Patch(facecolor=cmap.colors[i], edgecolor=FAINT, label=name)
        for i, name in enumerate(names)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, title="support")
    return figure


def _thirds() -> list[float]:
    return [math.pi / 2 + 2 * math.pi * c / 3 for c in range(3)]


def alpha_sweep() -> Figure:
    """The support shrinks as alpha grows."""
    figure, (few, many) = _panels(2, 9.5, 3.7)
    alphas = torch.linspace(1.0, 3.0, 401, dtype=torch.float64)
    scores = torch.tensor([1.3, 1.0, 0.6, 0.1, -0.5, -1.2]).double()
    probs = lastlayer.entmax(scores.expand(len(alphas), -1), alphas[:, None], impl="reference")
    colours = [BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE]
    few.stackplot(alphas, *probs.T, colors=colours, edgecolor="white", linewidth=0.6)
    for c in range(1, len(scores)):
        gone = probs[:, c] == 0
        if gone.any():
            place = int(gone.nonzero()[0])
            few.plot(
                alphas[place],
                1.0,
                "o",
                color=colours[c],
                mec="white",
                ms=8,
                clip_on=False,
                zorder=5,
            )
    few.set(
        title="six classes; ● a class drops to zero", xlabel="α", ylabel="probability",
        xlim=(1, 3), ylim=(0, 1),
    )  # fmt: skip
    few.grid(visible=False)

    n = 10_000
    noise = torch.randn(8, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fewer = torch.cat([torch.linspace(1.02, 1.5, 25), torch.linspace(1.6, 3.0, 15)]).double()
    for scale, colour, marker in ((0.5, ORANGE, "o"), (1.0, BLUE, "s"), (2.0, GREEN, "^")):
        sizes = [
            (lastlayer.entmax(scale * noise, float(a), impl="reference") != 0)
            .double()
            .sum(-1)
            .mean()
            for a in fewer
        ]
        many.plot(
            fewer,
            sizes,
            color=colour,
            marker=marker,
            markevery=5,
            ms=5,
            label=f"{scale:g} · N(0, 1)",
        )
    many.set(
        title=f"classes above zero, of {n:,}", xlabel="α", ylabel="mean size of the support",
        yscale="log", xlim=(1, 3), ylim=(0.9, 1.5 * n),
    )  # fmt: skip
    many.legend(title="scores", fontsize=9)
    return figure


def newton() -> Figure:
    """Newton's method for the threshold of entmax 1.5, from below."""
    scores = torch.cat([torch.tensor([0.0, -0.3]), torch.linspace(-0.9, -2.5, 60)]).double()

    def margins(tau: Tensor) -> Tensor:
        return (scores / 2 - tau).clamp(min=0)

    def norm(tau: Tensor) -> Tensor:
        return margins(tau).norm()

    top = _entmax(1.5)(scores).max()
    root = -top.sqrt()
    taus = torch.linspace(-1.05, -0.5, 300, dtype=torch.float64)
    figure, (panel,) = _panels(1, 6.6, 3.7)
    panel.plot(taus, [norm(tau) for tau in taus], color=BLUE, label="‖u(τ)‖, u = [d/2 − τ]₊")
    panel.axhline(1, color=INK, lw=1)
    guess = torch.tensor(-1.0).double()
    for step in range(4):
        height = norm(guess)
        following = guess + height * (height - 1) / margins(guess).sum()
        panel.plot([guess, following], [height, 1], color=VERMILION, lw=1.6)
        panel.plot([guess, guess], [1, height], color=VERMILION, lw=1, ls=":")
        panel.plot(guess, height, "o", color=VERMILION, ms=5)
        if step < 3:
            panel.annotate(
                f"τ{'₀₁₂'[step]}", (guess, 1), (0, -14), textcoords="offset points", ha="center"
            )
        guess = following
    panel.plot(root, 1, "D", color=GREEN, ms=7, zorder=5, label="the threshold")
    panel.set(title="Newton's method approaches the threshold from below", xlabel="τ")
    panel.legend()
    return figure


def losses() -> Figure:
    """Losses of two classes by the lead of the right one, and their derivatives."""
    t = torch.linspace(-3, 3.5, 1301, dtype=torch.float64)
    target = torch.zeros(len(t), dtype=torch.int64)
    figure, (value, slope) = _panels(2, 9.5, 3.8)

    def loss_of(map_: Map, alpha: float) -> Map:
        return lambda scores: lastlayer.fenchel_young_loss(
            scores, target, map_, _tsallis_entropy(alpha), reduction="none"
        )

    for name, loss, colour, dashes in (
        ("cross entropy (α = 1)", loss_of(_entmax(1.0), 1.0), "#8C8C8C", "-"),
        ("entmax loss, α = 1.5", loss_of(_entmax(1.5), 1.5), BLUE, "-"),
        ("sparsemax loss (α = 2)", loss_of(_entmax(2.0), 2.0), GREEN, "-"),
        ("top-k softmax loss, k = 1", loss_of(_topk(1), 1.0), VERMILION, "-."),
    ):
        lead = t.clone().requires_grad_()
        values = loss(torch.stack([lead, torch.zeros_like(lead)], -1))
        (rate,) = torch.autograd.grad(values.sum(), lead)
        value.plot(t, values.detach(), color=colour, ls=dashes, label=name)
        slope.plot(t, rate, color=colour, ls=dashes)
    huber = torch.where(t >= 1, 0.0, torch.where(t <= -1, -t, (1 - t) ** 2 / 4))
    value.plot(
        t[::60], huber[::60], "o", mfc="none", mec=INK, ms=5, label="Huber classification loss"
    )
    for margin, colour in ((1, GREEN), (2, BLUE)):
        value.annotate(
            f"margin {margin}", (margin, 0), (margin + 0.1, 0.9 if margin == 1 else 0.55),
            color=colour, fontsize=9, arrowprops={"arrowstyle": "-|>", "color": colour},
        )  # fmt: skip
    value.set(title="loss", xlabel="lead of the right class, t", ylim=(-0.08, 3.1))
    slope.set(
        title="derivative: probability of the right class − 1", xlabel="lead of the right class, t"
    )
    value.legend(fontsize=9)
    return figure


def tree_kinds() -> Figure:
    """Four trees over the same words; line widths show frequencies."""
    counts = {
        "the": 700, "of": 360, "cat": 24, "dog": 30, "trout": 5, "salmon": 8, "oak": 9,
        "rose": 14, "walks": 12, "runs": 26, "sees": 48, "swims": 6,
    }  # fmt: skip
    parents = {
        **dict.fromkeys(["the", "of"], "grammar"),
        **dict.fromkeys(["cat", "dog"], "mammals"),
        **dict.fromkeys(["trout", "salmon"], "fish"),
        **dict.fromkeys(["mammals", "fish"], "animals"),
        **dict.fromkeys(["oak", "rose"], "plants"),
        **dict.fromkeys(["animals", "plants"], "things"),
        **dict.fromkeys(["walks", "runs", "sees", "swims"], "verbs"),
        **dict.fromkeys(["grammar", "things", "verbs"], "words"),
    }
    words, often = list(counts), list(counts.values())
    made = {
        "balanced(12)": trees.balanced(len(words), labels=words),
        "huffman(counts)": trees.huffman(often, labels=words),
        "huffman(counts).collapse(4)": trees.huffman(often, labels=words).collapse(4),
        "from_parents({…})": trees.from_parents(parents, words),
    }
    figure = new_figure(10, 6.6)
    for panel, (name, tree) in zip(figure.subplots(2, 2).flat, made.items(), strict=True):
        tree.plot(panel, counts=often)
        depth = tree.expected_depth(often)
        panel.set_title(f"{name}, expected depth {depth:.2f}", loc="left")
    return figure


def tree_costs() -> Figure:
    """The cost of a row by number of classes for several trees, and the top of a large tree."""
    figure, (curves, top) = _panels(2, 11, 4.3)
    sizes = [10**p for p in (2, 2.5, 3, 3.5, 4, 4.5, 5)]
    kinds: dict[str, tuple[Callable[[list[float]], trees.Tree], str, str]] = {
        "flat": (lambda c: trees.balanced(len(c), len(c)), "#8C8C8C", "-"),
        "two_level(n)": (lambda c: trees.two_level(len(c)), ORANGE, "--"),
        "two_level(counts)": (trees.two_level, ORANGE, "-"),
        "huffman(counts, 16)": (lambda c: trees.huffman(c, 16), GREEN, "-"),
        "balanced(n)": (lambda c: trees.balanced(len(c)), BLUE, "--"),
        "huffman(counts)": (trees.huffman, BLUE, "-"),
    }
    for name, (build, colour, dashes) in kinds.items():
        costs = []
        for size in sizes:
            zipf = [1 / rank for rank in range(1, int(size) + 1)]
            costs.append(build(zipf).step_cost(zipf, 1))
        curves.plot(sizes, costs, color=colour, ls=dashes, marker="o", ms=4, label=name)
    curves.set(
        title="vectors scored per row, Zipf's counts", xlabel="classes", xscale="log",
        yscale="log",
    )  # fmt: skip
    curves.legend(fontsize=9)
    zipf = [1 / rank for rank in range(1, 50_001)]
    words = [f"word {rank:,}" for rank in range(1, 50_001)]
    trees.huffman(zipf, labels=words).plot(top, max_nodes=32, counts=zipf)
    return figure


PICTURES = (
    same_scores,
    two_classes,
    supports,
    alpha_sweep,
    newton,
    losses,
    tree_kinds,
    tree_costs,
)


def draw_all(folder: Path, suffix: str = "svg") -> None:
    """Draws every picture into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for picture in PICTURES:
            metadata = {"Date": None} if suffix == "svg" else {}
            picture().savefig(
                folder / f"{picture.__name__}.{suffix}",
                dpi=160,
                bbox_inches="tight",
                metadata=metadata,
            )


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]), "png" if "--png" in sys.argv else "svg")
