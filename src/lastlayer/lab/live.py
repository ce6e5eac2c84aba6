"""Progress of a comparison: a live table in a terminal, lines elsewhere, or nothing."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
_LINE_SECONDS = 5.0
_NAME_WIDTH, _BAR_WIDTH = 22, 10
_SEARCHES = "short runs to find its learning rate"


class Watcher:
    """Receives the progress of a comparison; the base class shows nothing."""

    def says(self, text: str) -> None:
        """A general message."""

    def starts(self, spec: HeadSpec, seed: int) -> None:
        """A run begins."""

    def searches(self, spec: HeadSpec) -> None:
        """The search for the learning rate of a head begins, before its first run."""

    def moves(self, share: float, progress: Progress, loss: float | None) -> None:
        """Progress of the current run; ``share`` is the completed part, from 0 to 1."""

    def ends(self, spec: HeadSpec, seed: int, result: dict[str, Any]) -> None:
        """A run is finished, or was before a resume."""

    def measures(self, spec: HeadSpec, classes: int, share: float) -> None:
        """Progress of measuring costs after the runs: the completed share, and the next head."""

    def close(self) -> None:
        """The comparison is over."""


class Forecast:
    """Estimates the time left from the times of finished runs.

    The estimate for a run is the mean time of the finished runs of its head, also from before a
    resume. For the current run its own speed counts more the further it is. For a head without runs
    the estimate is the mean over the other heads, plus a search for its learning rate.
    """

    def __init__(self, specs: Sequence[HeadSpec], seeds: int) -> None:
        self._open = {spec.slug: seeds for spec in specs}
        self._finished: dict[str, list[float]] = {spec.slug: [] for spec in specs}
        # Seconds of each search; None for heads that found their learning rate before a resume.
        self._searches: dict[str, float | None] = {}
        self._began = time.perf_counter()
        # The current run: its head, its start time, and time and share at the start of training.
        self._current, self._since = "", self._began
        self._first: tuple[float, float] | None = None
        self._share = 0.0
        # Estimated time of the current run at its speed so far.
        self._seconds: float | None = None

    def starts(self, slug: str) -> None:
        """A run begins; the first of a head begins with the search for its learning rate."""
        self._current, self._since = slug, time.perf_counter()
        self._first, self._share, self._seconds = None, 0.0, None

    def moves(self, share: float) -> None:
        """The completed share of training, from 0 to 1; a resumed run does not begin at 0."""
        now, self._share = time.perf_counter(), share
        if self._first is None:
            self._first = now, share
            self._searches.setdefault(self._current, now - self._since)
        elif share > self._first[1]:
            self._seconds = (now - self._first[0]) / (share - self._first[1])

    def ends(self, slug: str, seconds: float | None = None) -> None:
        """A run is over; ``seconds`` is its time if it was finished before a resume."""
        self._open[slug] -= 1
        if slug == self._current:
            if self._first is not None:
                self.moves(1.0)
            seconds = self._seconds
        else:
            self._searches.setdefault(slug, None)
        if seconds:
            self._finished[slug].append(seconds)
        self._current, self._share = "", 0.0

    def _expected(self, slug: str) -> float | None:
        """Estimated seconds of a run of this head; None if it has no runs yet."""
        finished = self._finished[slug]
        usual = statistics.fmean(finished) if finished else None
        if slug != self._current or self._first is None or self._seconds is None:
            return usual
        done = self._share - self._first[1]
        return self._seconds if usual is None else done * self._seconds + (1 - done) * usual

    def left(self) -> float | None:
        """Seconds left; None until a run has made progress."""
        expected = {slug: self._expected(slug) for slug in self._open}
        known = [each for each in expected.values() if each is not None]
        if not known:
            return None
        usual = statistics.fmean(known)
        searches = [each for each in self._searches.values() if each is not None]
        search = statistics.fmean(searches) if searches else 0.0
        total = 0.0
        for slug, runs in self._open.items():
            seconds = expected[slug]
            begun = self._share if slug == self._current else 0.0
            total += (runs - begun) * (usual if seconds is None else seconds)
            total += search if runs and slug not in self._searches else 0.0
        return max(0.0, total)

    def __str__(self) -> str:
        passed, left = time.perf_counter() - self._began, self.left()
        if left is None:
            return f"{_clock(passed)} passed"
        return f"{_clock(passed)} passed, about {_clock(left)} left of {_clock(passed + left)}"


class EventLines(Watcher):
    """Prints a line for each event, with the time of day."""

    def __init__(self, out: Console, specs: Sequence[HeadSpec], seeds: int) -> None:
        self._out, self._runs, self._done = out, len(specs) * seeds, 0
        self._forecast = Forecast(specs, seeds)
        self._title, self._told = "", 0.0
        self._measures = False

    def says(self, text: str) -> None:
        stamp = datetime.now().astimezone().strftime("%H:%M:%S")
        self._out.print(f"{stamp} {escape(text)}", highlight=False, soft_wrap=True)
        self._told = time.perf_counter()

    def starts(self, spec: HeadSpec, seed: int) -> None:
        self._title, self._told = f"{spec.label} seed {seed}", time.perf_counter()
        self._forecast.starts(spec.slug)

    def searches(self, spec: HeadSpec) -> None:
        self.says(f"{spec.label}: {_SEARCHES}")

    def moves(self, share: float, progress: Progress, loss: float | None) -> None:
        self._forecast.moves(share)
        if self._is_due():
            shown = "" if loss is None else f", loss {loss:.4g}"
            self.says(
                f"{self._title}: {share:.0%}, step {progress.step:,}{shown}; {self._forecast}"
            )

    def ends(self, spec: HeadSpec, seed: int, result: dict[str, Any]) -> None:
        self._done += 1
        self._forecast.ends(spec.slug, result.get("seconds"))
        run, shown = f"{spec.label} seed {seed}", ""
        # No time left after runs from before a resume, since not all of them are counted yet.
        if result["status"] == "ok" and run == self._title and (left := self._forecast.left()):
            shown = f" (about {_clock(left)} left)"
        told = f"{run}: {outcome(result)}{failure(result)}{shown}"
        self.says(f"{self._done}/{self._runs} {told}")

    def measures(self, spec: HeadSpec, classes: int, share: float) -> None:
        if not self._measures:
            self._measures = True
            self.says("Measuring the cost of each head against the number of classes")
        elif self._is_due():
            self.says(f"cost against classes: {share:.0%}, {spec.label} with {classes:,}")

    def _is_due(self) -> bool:
        return time.perf_counter() - self._told >= _LINE_SECONDS


@dataclass
class _Row:
    """The state of one head in the table."""

    done: int = 0
    share: float = 0.0
    loss: float | None = None
    step_ms: float | None = None
    outcome: str = ""


class LiveTable(Watcher):
    """Shows a live table of all heads with progress, loss, test quality and the time left."""

    def __init__(self, out: Console, specs: list[HeadSpec], seeds: list[int]) -> None:
        self._specs, self._n_seeds = specs, len(seeds)
        self._rows = {spec.slug: _Row() for spec in specs}
        self._current: _Row | None = None
        self._title, self._note, self._message = "", "", ""
        self._forecast = Forecast(specs, len(seeds))
        self._drawing = False
        self._drawn, self._draw_cost = 0.0, 0.0
        self._live = Live(self._table(), console=out, auto_refresh=False, transient=True)
        self._live.start()

    def says(self, text: str) -> None:
        """Show a message below the table; may be called by a signal handler during drawing."""
        self._message = text
        if not self._drawing:
            self._draw()

    def starts(self, spec: HeadSpec, seed: int) -> None:
        self._current = self._rows[spec.slug]
        self._title = self._note = f"{spec.label}, seed {seed}"
        self._forecast.starts(spec.slug)
        self._draw()

    def searches(self, spec: HeadSpec) -> None:
        self._note = f"{spec.label}: {_SEARCHES}"
        self._draw()

    def moves(self, share: float, progress: Progress, loss: float | None) -> None:
        row = self._current
        if row is None:
            return
        row.share, row.loss, self._note = share, loss, self._title
        self._forecast.moves(share)
        if progress.step:
            row.step_ms = 1e3 * progress.seconds / progress.step
        waited = time.perf_counter() - self._drawn
        if waited > max(_REDRAWN_SECONDS, self._draw_cost / _DRAWING_SHARE):
            self._draw()

    def ends(self, spec: HeadSpec, seed: int, result: dict[str, Any]) -> None:
        row = self._rows[spec.slug]
        self._forecast.ends(spec.slug, result.get("seconds"))
        row.done, row.share, row.outcome = row.done + 1, 0.0, outcome(result)
        row.step_ms = result.get("step_ms") or row.step_ms
        if why := failure(result):
            # Printed above the table, where it remains after the table is removed.
            text = f"{spec.label}, seed {seed}: {row.outcome}{why}"
            self._live.console.print(Text(text, style="red"), soft_wrap=True)
        self._current = None
        self._draw()

    def measures(self, spec: HeadSpec, classes: int, share: float) -> None:
        self._note = f"cost against classes: {share:.0%}, {spec.label} with {classes:,}"
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        start = time.perf_counter()
        self._drawing = True
        self._live.update(self._table(), refresh=True)
        self._drawing = False
        self._drawn = time.perf_counter()
        self._draw_cost = self._drawn - start

    def _table(self) -> Table:
        note = self._message or f"{self._note}   {self._forecast}"
        table = Table(caption=Text(note), caption_justify="left", box=box.SIMPLE_HEAD)
        # The table has to fit into 80 columns.
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
                Text(row.outcome),
            )
        return table


def outcome(result: dict[str, Any]) -> str:
    """A result as a short text."""
    test = result.get("test") or {}
    if result["status"] != "ok":
        return str(result["status"])
    if test.get("macro_f1") is not None:
        return f"accuracy {test['top1']:.1%}"
    if test.get("recall_at_1") is not None:
        return f"recall@1 {test['recall_at_1']:.1%}"
    if math.isfinite(test.get("perplexity") or math.inf):
        return f"perplexity {_digits(test['perplexity'])}"
    if test.get("eps_perplexity") is not None:
        return f"ε-perplexity {_digits(test['eps_perplexity'])}, covers {test['coverage']:.1%}"
    if test.get("micro_f1") is not None:
        return f"micro-F1 {test['micro_f1']:.3f}"
    return "done"


def failure(result: dict[str, Any]) -> str:
    """The reason of a failed run, as a suffix of its status; empty for other runs."""
    reason = str(result.get("reason") or "")
    return f": {reason}" if reason and result["status"] not in ("ok", "interrupted") else ""


def _digits(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.4g}"


def watcher(out: Console, specs: list[HeadSpec], seeds: list[int]) -> Watcher:
    """The watcher that suits the console."""
    if out.quiet:
        return Watcher()
    if out.is_terminal:
        return LiveTable(out, specs, seeds)
    return EventLines(out, specs, len(seeds))


def _clock(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"
