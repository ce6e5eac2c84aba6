"""The picture of the fused losses: ``python docs/engine_picture.py`` draws pictures/engine.svg."""

from drawn_style import BLUE, FAINT, GREEN, INK, ORANGE, new_figure, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

Box = tuple[float, float, float, float]


def box(axes: Axes, place: Box, colour: str, *, filled: bool = False, dashed: bool = False) -> None:
    x, y, width, height = place
    axes.add_patch(
        Rectangle(
            (x, y), width, height, facecolor=colour if filled else "none", edgecolor=colour,
            alpha=0.85 if filled else 1.0, linewidth=1.2, linestyle="--" if dashed else "-",
        )
    )  # fmt: skip


def arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float]) -> None:
    axes.add_patch(
        FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=12, color=INK, linewidth=1.2)
    )


def say(axes: Axes, x: float, y: float, text: str, **options: object) -> None:
    settings = {"ha": "center", "va": "center", **options}
    axes.text(x, y, text, **settings)


def chunks(axes: Axes) -> None:
    """Chunks of rows: three matrix products and a row loss in place."""
    axes.set_title("chunks of rows", fontsize=11, color=INK, loc="left")
    say(axes, 1.1, 5.75, "hidden\nn × d")
    box(axes, (0.5, 0.9, 1.2, 4.4), FAINT)
    box(axes, (0.5, 3.1, 1.2, 1.1), BLUE, filled=True)

    say(axes, 5.6, 7.55, "weight, transposed: d × v")
    box(axes, (3.0, 6.1, 5.2, 1.1), BLUE, filled=True)

    box(axes, (3.0, 0.9, 5.2, 4.4), FAINT, dashed=True)
    say(axes, 5.0, 1.8, "all scores, n × v:\nnever stored", color="#888888")
    box(axes, (3.0, 3.1, 5.2, 1.1), ORANGE, filled=True)
    say(axes, 5.6, 3.86, "② row loss, in place", weight="bold")
    say(axes, 5.6, 3.43, "scores → losses → their gradient")
    arrow(axes, (1.75, 3.65), (2.95, 3.65))
    say(axes, 2.35, 3.95, "①")
    arrow(axes, (5.6, 6.05), (5.6, 4.25))
    say(axes, 5.85, 5.0, "①")

    say(axes, 10.1, 5.75, "its gradient\nn × d")
    box(axes, (9.5, 0.9, 1.2, 4.4), FAINT)
    box(axes, (9.5, 3.1, 1.2, 1.1), GREEN, filled=True)
    arrow(axes, (8.25, 3.65), (9.45, 3.65))
    say(axes, 8.85, 3.95, "③")

    box(axes, (3.0, -1.1, 5.2, 1.1), GREEN, filled=True)
    say(axes, 5.6, -0.55, "its gradient: a sum over chunks")
    arrow(axes, (7.6, 3.05), (7.6, 0.05))
    say(axes, 7.85, 2.4, "③")
    axes.set(xlim=(0.2, 11.0), ylim=(-1.3, 8.0))


def tiles(axes: Axes) -> None:
    """Tiles: scores are only in registers."""
    axes.set_title("tiles, for d ≤ 256", fontsize=11, color=INK, loc="left")
    box(axes, (2.2, 4.0, 6.0, 3.2), FAINT, dashed=True)
    box(axes, (2.2, 5.4, 6.0, 0.9), "#F6DDA6", filled=True)
    box(axes, (3.9, 5.4, 0.9, 0.9), ORANGE, filled=True)
    box(axes, (1.1, 5.4, 0.6, 0.9), BLUE, filled=True)
    arrow(axes, (4.9, 5.85), (6.6, 5.85))
    say(axes, 5.2, 7.55, "① each program has some rows and loops over classes")
    box(axes, (8.7, 5.4, 0.6, 0.9), GREEN, filled=True)
    say(axes, 5.2, 4.7, "writes logsumexp and mean class vector,\nfor the gradient of hidden")

    box(axes, (2.2, -0.4, 6.0, 3.2), FAINT, dashed=True)
    box(axes, (5.6, -0.4, 0.9, 3.2), "#F6DDA6", filled=True)
    box(axes, (5.6, 1.55, 0.9, 0.9), ORANGE, filled=True)
    box(axes, (5.6, 2.95, 0.9, 0.35), BLUE, filled=True)
    arrow(axes, (6.05, 1.5), (6.05, 0.0))
    say(axes, 5.2, 3.6, "② each program has some classes and loops over rows")
    box(axes, (5.6, -0.95, 0.9, 0.35), GREEN, filled=True)
    say(axes, 3.9, 1.2, "recomputes scores,\nsums its rows of\nthe weight's gradient")
    say(axes, 7.35, 1.2, "written\nonce,\nno locks")
    axes.set(xlim=(0.8, 9.6), ylim=(-1.3, 8.0))


def engine() -> Figure:
    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=[10.8, 8.8])
    for axes, draw in ((left, chunks), (right, tiles)):
        draw(axes)
        axes.set_aspect("equal")
        axes.axis("off")
    return figure


if __name__ == "__main__":
    write("engine.svg", engine)
