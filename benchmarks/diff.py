"""Compares two sets of records case by case, to find methods that became slower."""

import statistics
from pathlib import Path

from benchmarks import table
from benchmarks.record import Record, newest, read
from benchmarks.table import Grid, console, milliseconds, ratio


def _ratios(old: list[Record], new: list[Record]) -> list[tuple[float, Record, Record]]:
    """New time over old, for the same method on the same case and type of device."""
    before = {_key(r): r for r in old}
    pairs = ((before.get(_key(r)), r) for r in new)
    found = ((table.over(now, was), was, now) for was, now in pairs)
    return [(ratio, was, now) for ratio, was, now in found if ratio is not None and was is not None]


def _key(record: Record) -> tuple[object, ...]:
    return record.device_type, *record.case, record.label


def report(old: Path, new: Path, *, limit: float, everything: bool) -> int:
    """Print ratios of times, new over old, the worst first.

    ``relative`` is the ratio divided by the median ratio of the other packages in the same case, to
    account for differences between machines.

    Returns:
        1 if one of our methods became slower than ``limit`` allows, else 0.

    Raises:
        ValueError: if no method is in both.
    """
    before, after = newest(read(old)), newest(read(new))
    found = _ratios(before, after)
    if not found:
        raise ValueError(f"{new}: expected a full run of a method that is in {old} too, got none")
    others: dict[object, list[float]] = {}
    for times, _, now in found:
        if not now.is_ours:
            others.setdefault((now.device_type, now.case), []).append(times)
    rows = []
    for times, was, now in sorted(found, key=lambda each: -each[0]):
        if not (everything or now.is_ours):
            continue
        beside = others.get((now.device_type, now.case))
        rows.append([
            now.title, now.label, milliseconds(was.median_ms), milliseconds(now.median_ms),
            ratio(times), ratio(times / statistics.median(beside) if beside else None),
            milliseconds(was.replayed_ms), milliseconds(now.replayed_ms),
            ratio(table.over(now, was, "replayed_ms")),
        ])  # fmt: skip
    times_of = ["old ms", "new ms", "new ÷ old", "relative"]
    replayed = ["old replayed", "new replayed", "new ÷ old"]
    grid = Grid(f"{old} → {new}", ["case", "method", *times_of, *replayed], rows)
    console().print(grid.rich())
    ours = [times for times, _, now in found if now.is_ours]
    slower = sum(times > limit for times in ours)
    absent = len({_key(r) for r in before if r.is_ours} - {_key(r) for r in after})
    print(f"{slower} of {len(ours)} of our methods take more than {limit:g} times as long; "
          f"{absent} were not measured again")  # fmt: skip
    return 1 if slower else 0
