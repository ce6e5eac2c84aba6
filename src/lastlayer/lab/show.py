"""Comparisons and runs side by side in a terminal: settings, then results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastlayer.lab.errors import LabError
from lastlayer.lab.records import Comparison, finite, read_comparison, read_json
from lastlayer.lab.report import tables
from lastlayer.lab.report.tables import flat, named, plain
from lastlayer.lab.results import Results, read_results, summarise
from lastlayer.lab.verdict import verdict

_LONGEST_NAME = 30
# Width of the space between two columns.
_GAP = 3
# Settings that repeat the spec of the head, and the schema, are not shown.
_REPEATED = ("label", "slug", "family", "schema")
_GROUPS = ("data", "model", "budget", "settings", "device", "versions")
_MISSING = "–"
# Width of output to a file, for which rich would use 80 columns.
_FILE_WIDTH = 140

# The name of a folder, and all settings of its comparison or run.
Settings = tuple[str, Mapping[str, Any]]


def show(
    paths: Sequence[Path | str], *, as_json: bool = False, console: Console | None = None
) -> None:
    """Print the settings of comparisons or runs side by side, then results with intervals.

    Given runs of one comparison are summarised together, without its other runs.
    """
    console = console or Console()
    settings, found = _load([Path(path) for path in paths])
    if as_json:
        console.file.write(json.dumps(_as_json(settings, found), indent=2) + "\n")
        return
    console.print(settings_table(settings))
    for results in found:
        console.print(results_table(results, console.width))
        console.print(Text(verdict(results).sentence), soft_wrap=True)
        console.print()


def print_summary(out: Path, console: Console) -> None:
    """Print the results of a comparison: the table of all heads, the verdict, and failures."""
    results = read_results(out)
    if not console.is_terminal:
        console = Console(file=console.file, width=_FILE_WIDTH)
    console.print(results_table(results, console.width))
    found = verdict(results)
    console.print(Text(found.sentence), soft_wrap=True)
    for each in (*found.findings, *found.notes, *failures(results)):
        console.print(Text(f"- {each}"), soft_wrap=True)


def failures(results: Results) -> list[str]:
    """Failed runs with their reasons; seeds of a head with the same reason are grouped."""
    alike: dict[tuple[str, str], list[str]] = {}
    for run in results.comparison.runs:
        if run.failed:
            why = f"{run.status}: {run.reason}" if run.reason else run.status
            alike.setdefault((run.head.title, why), []).append(str(run.seed))
    return [
        f"{head}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}: {why}"
        for (head, why), seeds in alike.items()
    ]


def settings_table(shown: Sequence[Settings]) -> Table:
    """A table with a row per setting and a column per folder; differences are marked."""
    table = _table("Settings")
    table.add_column("setting", no_wrap=True)
    for name, _ in shown:
        table.add_column(Text(name), overflow="fold")
    for key in dict.fromkeys(key for _, own in shown for key in own):
        values = [plain(own[key]) if key in own else _MISSING for _, own in shown]
        differs = len(set(values)) > 1
        style = "bold yellow" if differs else ("dim" if len(shown) > 1 else "")
        # A sign in addition to the colour, for colour-blind readers and for files.
        mark = "≠ " if differs else "  " if len(shown) > 1 else ""
        table.add_row(Text(mark + named(key), style=style), *(Text(v, style=style) for v in values))
    return table


def results_table(results: Results, width: int = 80) -> Table:
    """A table with a row per head, best first, with intervals, and as many columns as fit."""
    table = _table(f"Results · {results.comparison.folder}")
    table.caption = tables.note(results, "below them")
    names = [summary.title for summary in results.summaries]
    table.add_column("#", justify="right", no_wrap=True)
    name_width = min(_LONGEST_NAME, max(map(len, names), default=0))
    table.add_column("head", overflow="fold", width=name_width)
    fates = [tables.runs_text(summary) for summary in results.summaries]
    left = width - name_width - min(_LONGEST_NAME, max(map(len, fates), default=4)) - 4 * _GAP
    rows: list[list[Text]] = [[] for _ in names]
    for column in tables.columns(results):
        cells = [tables.cell(column, summary, results) for summary in results.summaries]
        words = [*column.label.split(), *(w for c in cells for w in (c.text, c.span))]
        left -= _GAP + max(map(len, words))
        if left < 0:
            break
        table.add_column(column.label, justify="right", width=max(map(len, words)))
        for row, c in zip(rows, cells, strict=True):
            text = "\n".join(filter(None, (c.text, c.span)))
            row.append(Text(text, style="bold" if c.best else ""))
    table.add_column("runs", overflow="fold")
    for summary, row, fate in zip(results.summaries, rows, fates, strict=True):
        rank = _MISSING if summary.rank is None else str(summary.rank)
        style = "" if summary.status == "ok" else "red"
        table.add_row(rank, Text(summary.title), *row, Text(fate, style=style))
    return table


def _load(paths: Sequence[Path]) -> tuple[list[Settings], list[Results]]:
    """The settings of each folder, and the results of each comparison."""
    if not paths:
        raise LabError("RUN: expected at least one folder of a run or a comparison, got none")
    settings: list[Settings] = []
    # Names of the runs to show of each comparison; empty for all of them.
    chosen: dict[Path, set[str]] = {}
    for path in (each.resolve() for each in paths):
        if (path / "compare.json").is_file():
            found = read_comparison(path)
            shown = {group: getattr(found, group) for group in _GROUPS}
            heads, seeds = [head.spec for head in found.heads], list(found.seeds)
            own = flat({**shown, "heads": heads, "seeds": seeds, "git": found.git})
            chosen[path] = set()
        elif (path / "config.json").is_file():
            own = flat(read_json(path / "config.json"))
            own = {key: value for key, value in own.items() if key not in _REPEATED}
            if chosen.get(path.parent.parent) != set():
                chosen.setdefault(path.parent.parent, set()).add(path.name)
        else:
            raise LabError(
                f"RUN: expected the folder of a run, with config.json, or of a comparison, with "
                f"compare.json, got '{path}'"
            )
        settings.append((path.name, own))
    return settings, [summarise(_only(read_comparison(p), names)) for p, names in chosen.items()]


def _only(comparison: Comparison, names: set[str]) -> Comparison:
    """The comparison with only the named runs, or with all if there are no names."""
    runs = tuple(run for run in comparison.runs if not names or run.name in names)
    slugs = {run.head.slug for run in runs}
    heads = tuple(head for head in comparison.heads if not names or head.slug in slugs)
    return replace(comparison, runs=runs, heads=heads)


def _as_json(settings: Sequence[Settings], found: Sequence[Results]) -> Any:
    from lastlayer.lab.report.page import everything

    return finite(
        {
            "settings": [{"name": name, "settings": own} for name, own in settings],
            "results": [everything(results, verdict(results)) for results in found],
        }
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
