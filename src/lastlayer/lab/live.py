"""How far a comparison is: a live table in a terminal, lines elsewhere, or nothing."""

import time
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lastlayer.lab.specs import HeadSpec
from lastlayer.lab.training import Progress

# Drawing a table takes milliseconds: it gets this share of the time, four times per second at most.
_DRAWING_SHARE, _REDRAWN_SECONDS = 0.02, 0.25
_TOLD_SECONDS = 5.0
_NAME_WIDTH, _BAR_WIDTH = 22, 10


class Watcher:
    """Hears what happens, and shows nothing."""

    def says(self, text: str) -> None:
        """Something beside the runs."""

    def starts(self, spec: HeadSpec, seed: int) -> None:
        """A run begins."""

    def moves(self, share: float, progress: Progress, loss: float | None) -> None:
        """The run is so far, from 0 to 1."""

    def ends(self, spec: HeadSpec, seed: int, result: dict[str, Any]) -> None:
        """The run is over, or was before."""

    def measures(self, spec: HeadSpec, classes: int, share: float) -> None:
        """The runs are over, and costs are measured: so far, from 0 to 1, and this comes next."""

    def close(self) -> None:
        """The comparison is over."""


class Lines(Watcher):
    """A line for each event, with the time of day."""

    def __init__(self, out: Console, runs: int) -> None:
        self._out, self._runs, self._done = out, runs, 0
        self._title, self._told = "", 0.0
        self._measures = False

    def says(self, text: str) -> None:
        """As it is."""
        self._line(text)

    def starts(self, spec: HeadSpec, seed: int) -> None:
        """Its name."""
        self._title, self._told = f"{spec.label} seed {seed}", time.perf_counter()

    def moves(self, share: float, progress: Progress, loss: float | None) -> None:
        """Every few seconds."""
        if time.perf_counter() - self._told < _TOLD_SECONDS:
            return
        self._told = time.perf_counter()
        shown = "" if loss is None else f", loss {loss:.4g}"
        self._line(f"{self._title}: {share:.0%}, step {progress.step:,}{shown}")

    def ends(self, spec: HeadSpec, seed: int, result: dict[str, Any]) -> None:
        """What came out."""
        self._done += 1
        self._line(f"{self._done}/{self._runs} {spec.label} seed {seed}: {outcome(result)}")

    def measures(self, spec: HeadSpec, classes: int, share: float) -> None:
        """At the beginning, and every few seconds."""
        if not self._measures:
            self._line("Measuring the cost of each head against the number of classes")
        elif time.perf_counter() - self._told >= _TOLD_SECONDS:
            self._line(f"cost against classes: {share:.0%}, {spec.label} with {classes:,}")
        else:
            return
        self._measures, self._told = True, time.perf_counter()

    def _line(self, text: str) -> None:
        stamp = datetime.now().astimezone().strftime("%H:%M:%S")
        self._out.print(f"{stamp} {escape(text)}", highlight=False, soft_wrap=True)


class _Row:
    """What the table knows of one head."""

    def __init__(self) -> None:
        self.done, self.share = 0, 0.0
        self.loss: float | None = None
        self.step_ms: float | None = None
        self.results: list[dict[str, Any]] = []


class LiveTable(Watcher):
    """All heads with their progress, loss, quality so far and the time left."""

    def __init__(self, out: Console, specs: list[HeadSpec], seeds: list[int]) -> None:
        self._specs, self._n_seeds = specs, len(seeds)
        self._rows = {spec.slug: _Row() for spec in specs}
        self._current: _Row | None = None
        self._note, self._said, self._began = "", "", time.perf_counter()
        self._drawing = False
        self._drawn, self._draw_cost = 0.0, 0.0
        self._skipped = 0
        self._live = Live(self._table(), console=out, auto_refresh=False, transient=True)
        self._live.start()

    def says(self, text: str) -> None:
        """Below the table from now on. A signal may come while it is drawn."""
        self._said = text
        if not self._drawing:
            self._draw()

    def starts(self, spec: HeadSpec, seed: int) -> None:
        """Its row moves from here on."""
        self._current = self._rows[spec.slug]
        self._note = f"{spec.label}, seed {seed}"
        self._draw()

    def moves(self, share: float, progress: Progress, loss: float | None) -> None:
        """Drawn a few times a second."""
        row = self._current
        if row is None:
            return
        row.share, row.loss = share, loss
        if progress.step:
            row.step_ms = 1e3 * progress.seconds / progress.step
        waited = time.perf_counter() - self._drawn
        if waited > max(_REDRAWN_SECONDS, self._draw_cost / _DRAWING_SHARE):
            self._draw()

    def ends(self, spec: HeadSpec, _seed: int, result: dict[str, Any]) -> None:
        """Its row gets what came out."""
        row = self._rows[spec.slug]
        if row is not self._current:
            self._skipped += 1
        row.done, row.share = row.done + 1, 0.0
        row.results.append(result)
        row.step_ms = result.get("step_ms") or row.step_ms
        self._current = None
        self._draw()

    def measures(self, spec: HeadSpec, classes: int, share: float) -> None:
        """Below the table, with how far it is."""
        self._note = f"cost against classes: {share:.0%}, {spec.label} with {classes:,}"
        self._draw()

    def close(self) -> None:
        """Leaves the terminal as it was."""
        self._live.stop()

    def _draw(self) -> None:
        start = time.perf_counter()
        self._drawing = True
        self._live.update(self._table(), refresh=True)
        self._drawing = False
        self._drawn = time.perf_counter()
        self._draw_cost = self._drawn - start

    def _table(self) -> Table:
        note = self._said or f"{self._note}   {self._time_left()}"
        table = Table(caption=Text(note), caption_justify="left", box=box.SIMPLE_HEAD)
        # What came out has to fit into 80 columns too.
        table.add_column("head", no_wrap=True, max_width=_NAME_WIDTH, overflow="ellipsis")
        table.add_column("progress", width=_BAR_WIDTH)
        for name in ("runs", "loss", "step", "on test"):
            table.add_column(name, justify="right")
        for spec in self._specs:
            row = self._rows[spec.slug]
            share = (row.done + row.share) / self._n_seeds
            table.add_row(
                Text(spec.label),
                ProgressBar(total=1.0, completed=share, width=_BAR_WIDTH),
                f"{row.done}/{self._n_seeds}",
                "" if row.loss is None else f"{row.loss:.3f}",
                "" if row.step_ms is None else f"{row.step_ms:.3g} ms",
                Text(outcome(row.results[-1]) if row.results else ""),
            )
        return table

    def _time_left(self) -> str:
        rows = self._rows.values()
        total = len(self._specs) * self._n_seeds - self._skipped
        done = sum(row.done + row.share for row in rows) - self._skipped
        passed = time.perf_counter() - self._began
        if done <= 0 or total <= 0:
            return ""
        if done >= total:
            return f"{_clock(passed)} passed"
        return f"{_clock(passed)} passed, about {_clock(passed / done * (total - done))} left"


def outcome(result: dict[str, Any]) -> str:
    """A result in a few words."""
    test = result.get("test") or {}
    if result["status"] != "ok":
        return str(result["status"])
    if test.get("macro_f1") is not None:
        return f"accuracy {test['top1']:.1%}"
    if test.get("recall_at_1") is not None:
        return f"recall@1 {test['recall_at_1']:.1%}"
    if test.get("perplexity") is not None:
        return f"perplexity {_digits(test['perplexity'])}"
    if test.get("eps_perplexity") is not None:
        return f"ε-perplexity {_digits(test['eps_perplexity'])}, covers {test['coverage']:.1%}"
    if test.get("micro_f1") is not None:
        return f"micro-F1 {test['micro_f1']:.3f}"
    return "done"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.4g}"


def watcher(out: Console, specs: list[HeadSpec], seeds: list[int], *, quiet: bool) -> Watcher:
    """The one that suits the terminal."""
    if quiet:
        return Watcher()
    if out.is_terminal:
        return LiveTable(out, specs, seeds)
    return Lines(out, len(specs) * len(seeds))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
