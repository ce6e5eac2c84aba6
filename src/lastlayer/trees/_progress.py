"""How far a long piece of work is."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

# Work that is done before that needs no bar.
_SECONDS_WITHOUT_BAR = 2.0


@contextmanager
def telling(what: str, wanted: bool) -> Iterator[Callable[[float], None]]:
    """A function that is told which share is done, and shows it once that takes long."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(what, total=1.0)
    shows, since = wanted and console.is_terminal, time.perf_counter()

    def tell(share: float) -> None:
        bar.update(task, completed=share)
        late = time.perf_counter() - since > _SECONDS_WITHOUT_BAR
        if shows and late and not bar.live.is_started:
            bar.start()

    try:
        yield tell
    finally:
        if bar.live.is_started:
            bar.stop()
