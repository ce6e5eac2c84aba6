"""What the parts of the page have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from targets import MET, RecordT, Results, Target

from lastlayer.bench.baseline_record import LossRecord
from lastlayer.bench.record import Record


@dataclass(frozen=True)
class Part(Generic[RecordT]):
    """What the page says of one family.

    Attributes:
        title: what the family is called.
        kind: its records.
        limit: the limit of a device in words, from one of its records.
        targets: the goals for a device, with what was measured.
        tables: everything that was measured on a device, as blocks of Markdown.
        picture: the name of its picture, and ``caption`` what that shows.
        pictured: those of the records that the picture shows.
        draw: makes the picture of them.
    """

    title: str
    kind: type[RecordT]
    limit: Callable[[RecordT], str]
    targets: Callable[[Results[RecordT]], list[Target]]
    tables: Callable[[Results[RecordT]], list[str]]
    picture: str
    caption: str
    pictured: Callable[[Results[RecordT]], list[RecordT]]
    draw: Callable[[list[RecordT], Path], None]

    def by_device(self, records: Iterable[Record]) -> list[Results[RecordT]]:
        """Full runs only, one entry a device, GPUs first."""
        devices: dict[tuple[str, str], list[RecordT]] = {}
        for record in records:
            if isinstance(record, self.kind) and not record.quick:
                devices.setdefault((record.device_type, record.device), []).append(record)
        ordered = sorted(devices.items(), key=lambda item: (item[0][0] != "cuda", item[0][1]))
        return [Results(found) for _, found in ordered]

    def in_picture(self, records: Iterable[Record]) -> list[RecordT]:
        """What the picture shows; nothing where there is nothing to draw."""
        return [r for results in self.by_device(records) for r in self.pictured(results)]

    def render(self, records: Iterable[Record]) -> list[str]:
        """The picture, then one block a device."""
        records = list(records)
        blocks = [self._device(results) for results in self.by_device(records)]
        if self.in_picture(records):
            shown = f"![{self.caption}](pictures/{self.picture})"
            blocks.insert(0, f"## {self.title}: {self.caption.lower()}\n\n{shown}\n")
        return blocks

    def _device(self, results: Results[RecordT]) -> str:
        last = results.last
        cores = "" if last.threads is None else f", {last.threads} threads"
        versions = {
            "Python": last.python,
            "torch": last.torch,
            "Triton": last.triton if last.device_type == "cuda" else None,
            "Numba": last.numba if last.device_type == "cpu" else None,
            "lastlayer": last.lastlayer,
        }
        for record in results.records:
            if record.source not in ("torch", "lastlayer"):
                versions[record.source] = record.source_version
        listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        blocks = [
            f"## {self.title}: {last.device}{cores}",
            f"Measured {last.date[:10]} with {listed}. {self.limit(last)}.",
            _targets_block(self.targets(results)),
            *self.tables(results),
        ]
        return "\n\n".join(blocks) + "\n"


def _targets_block(found: list[Target]) -> str:
    met = sum(target.verdict == MET for target in found)
    rows = [[target.goal, target.where, target.measured, target.verdict] for target in found]
    table = markdown(["target", "where", "measured", ""], rows)
    return f"### Targets\n\n{met} of {len(found)} met.\n\n{table}"


def timed(record: Record, text: str) -> str:
    """What was measured, or why it was not."""
    if record.median_ms is None:
        return record.status.replace("|", "\\|")
    return text if record.verified else f"{text} *inexact*"


def loss_table(found: Sequence[LossRecord], columns: Mapping[str, Callable[[Any], str]]) -> str:
    """A table of one case, the baseline by its name."""
    shown = dict(columns)
    of_time = shown.pop("ms")
    baseline = found[0].baseline or "baseline"
    headings = ["", "ms", *(f"÷ {baseline}" if name == "÷ base" else name for name in shown)]
    rows = [
        [record.label, timed(record, of_time(record)), *(show(record) for show in shown.values())]
        for record in found
    ]
    return markdown(headings, rows)


def markdown(headings: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
