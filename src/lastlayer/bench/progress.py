"""How far a run is: a bar in a terminal, lines with the time of day elsewhere, or nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from lastlayer.bench.record import Record

# What takes longer than this is told, so that a run that takes long says why.
_LONG_S = 1.0


@dataclass(frozen=True)
class Reporter:
    """Tells what is being measured and, line by line, what came out."""

    out: Console
    bar: Progress | None = None
    task: TaskID | None = None
    lines: bool = False

    def started(self, title: str) -> None:
        """A case begins."""
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=title)

    def verified(self, method: str, seconds: float) -> None:
        """A method was verified, and compiled before that where it has to be."""
        if self.lines and seconds >= _LONG_S:
            self._line(f"verified {method} in {seconds:.1f} s")

    def measured(self, record: Record) -> None:
        """A method was measured."""
        if self.lines:
            result = "-" if record.median_ms is None else f"{record.median_ms:.3f} ms"
            self._line(f"{record.section} {record.case} {record.label}: {result} {record.status}")

    def finished(self) -> None:
        """A case is done."""
        if self.bar is not None and self.task is not None:
            self.bar.advance(self.task)

    def _line(self, text: str) -> None:
        stamp = datetime.now().astimezone().strftime("%H:%M:%S")
        self.out.print(f"{stamp} {escape(text)}", highlight=False, soft_wrap=True)


@contextmanager
def reporting(out: Console, cases: int, *, quick: bool) -> Iterator[Reporter]:
    """A reporter for a run of so many cases.

    Outside a terminal a quick run is silent; a full one writes a line for every measurement, so
    that a run that is cut off still leaves what it found.
    """
    if not out.is_terminal:
        yield Reporter(out, lines=not quick)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True) as bar:
        yield Reporter(out, bar=bar, task=bar.add_task("drawing inputs", total=cases))
