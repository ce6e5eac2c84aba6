"""What a comparison found, in a terminal."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from lastlayer.lab.results import read_results
from lastlayer.lab.show import results_table
from lastlayer.lab.verdict import verdict

# A file has no width of its own, and rich would take 80 columns.
_FILE_WIDTH = 140


def print_summary(out: Path, console: Console) -> None:
    """The table of all heads, the best first, and the verdict."""
    results = read_results(out)
    if not console.is_terminal:
        console = Console(file=console.file, width=_FILE_WIDTH)
    console.print(results_table(results, console.width))
    found = verdict(results)
    console.print(Text(found.sentence), soft_wrap=True)
    for each in (*found.findings, *found.notes):
        console.print(Text(f"- {each}"), soft_wrap=True)
