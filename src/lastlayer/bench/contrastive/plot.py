"""Times and memory against the batch as a PNG."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.contrastive.truth import SYMMETRIC
from lastlayer.bench.plot import OTHER_COLOURS, OURS_COLOURS, new_figure, save, without_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Lines end here where a method took no memory that counts.
_LEAST_GB = 0.001


def against_batch(records: Sequence[ContrastiveRecord], path: Path) -> None:
    """Draw a line a method: milliseconds, and memory beyond inputs and gradients.

    Args:
        records: those that were not timed are left out; of the symmetric loss where there are any.
        path: where the PNG goes.

    Raises:
        MissingPlotLibrary: matplotlib is not installed.
        ValueError: no record has a time to draw.
    """
    timed = [r for r in records if r.median_ms is not None]
    timed = [r for r in timed if r.section == SYMMETRIC] or timed
    if not timed:
        raise ValueError("records: expected timings of contrastive losses, got none")
    figure = new_figure(9.5, 3.8)
    left, right = figure.subplots(1, 2)
    _lines(left, timed, lambda r: r.median_ms)
    _lines(right, timed, lambda r: None if r.peak_bytes is None else r.peak_bytes / 1e9)
    first = timed[0]
    left.set_title(
        f"{first.section}, width {first.shape[1]}, {first.dtype} · {first.device}",
        loc="left",
        fontsize=8.5,
    )
    left.set_ylabel("forward + backward, ms", fontsize=8)
    right.set_ylabel("peak beyond inputs and gradients, GB", fontsize=8)
    left.legend(fontsize=7, frameon=False)
    save(figure, path)


def _lines(
    panel: "Axes",
    records: Sequence[ContrastiveRecord],
    value: Callable[[ContrastiveRecord], float | None],
) -> None:
    methods = dict.fromkeys(record.label for record in records)
    ours = iter(OURS_COLOURS)
    others = iter(OTHER_COLOURS[::-1])
    for label in methods:
        mine = sorted((r for r in records if r.label == label), key=lambda r: r.shape)
        colour = next(ours if mine[0].is_ours else others)
        points = [(r.shape[0], max(_LEAST_GB, y)) for r in mine if (y := value(r)) is not None]
        if points:
            panel.plot(*zip(*points, strict=True), "o-", label=label, color=colour, ms=3.5)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("pairs in the batch", fontsize=8)
    # Plain numbers: a range within one power of ten would be labelled in powers with factors.
    panel.set_xticks(batches := sorted({r.shape[0] for r in records}), [f"{n:,}" for n in batches])
    panel.minorticks_off()
    panel.set_yticks(*_round_numbers(panel.get_ylim()))
    panel.tick_params(labelsize=7)
    without_frame(panel)


def _round_numbers(limits: tuple[float, float]) -> tuple[list[float], list[str]]:
    """1, 2 and 5 times powers of ten between two numbers, and how they are written."""
    steps = (m * 10.0**e for e in range(-4, 7) for m in (1, 2, 5))
    inside = [step for step in steps if limits[0] <= step <= limits[1]]
    return inside, [f"{step:g}" for step in inside]
