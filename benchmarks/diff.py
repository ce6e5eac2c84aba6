"""Two sets of records, case by case: which method became slower."""

import statistics
from pathlib import Path

from benchmarks import table
from benchmarks.record import Record, newest, read
from benchmarks.table import Grid, console, milliseconds, ratio


def compare(old: list[Record], new: list[Record]) -> list[tuple[Record, Record]]:
    """Pairs of the same method on the same case and kind of device, the newest of each."""
    before = {_key(r): r for r in newest(old) if r.median_ms is not None}
    after = {_key(r): r for r in newest(new) if r.median_ms is not None}
    return [(before[key], after[key]) for key in after if key in before]


def _key(record: Record) -> tuple[object, ...]:
    return record.device_type, *record.case, record.label


def report(old: Path, new: Path, *, limit: float, everything: bool) -> int:
    """Print ratios of times, new over old, the worst first.

    ``beside others`` is the ratio over the median ratio of the other packages in the same case: it
    leaves out that one machine is faster than another.

    Returns:
        1 where a method of ours became slower than ``limit`` allows, else 0.

    Raises:
        ValueError: no method is in both.
    """
    before, after = read(old), read(new)
    pairs = compare(before, after)
    if not pairs:
        raise ValueError(f"{new}: expected a full run of a method that {old} has too, got none")
    others: dict[object, list[float]] = {}
    for was, now in pairs:
        if not now.is_ours:
            others.setdefault((now.device_type, now.case), []).append(_ratio(was, now))
    drift = {case: statistics.median(found) for case, found in others.items()}
    shown = sorted((p for p in pairs if everything or p[1].is_ours), key=lambda p: -_ratio(*p))
    rows = []
    for was, now in shown:
        beside = drift.get((now.device_type, now.case))
        rows.append([
            now.title, now.label, milliseconds(was.median_ms), milliseconds(now.median_ms),
            ratio(_ratio(was, now)), ratio(beside and _ratio(was, now) / beside),
            milliseconds(was.replayed_ms), milliseconds(now.replayed_ms),
            ratio(table.over(now, was, "replayed_ms")),
        ])  # fmt: skip
    times = ["old ms", "new ms", "new ÷ old", "beside others"]
    replayed = ["old replayed", "new replayed", "new ÷ old"]
    grid = Grid(f"{old} → {new}", ["case", "method", *times, *replayed], rows)
    console().print(grid.rich())
    slower = [now for was, now in pairs if now.is_ours and _ratio(was, now) > limit]
    absent = len({_key(r) for r in newest(before) if r.is_ours} - {_key(r) for r in newest(after)})
    print(f"{len(slower)} of {sum(now.is_ours for _, now in pairs)} methods of ours are more than "
          f"{limit:g} times as slow; {absent} were not measured again")  # fmt: skip
    return 1 if slower else 0


def _ratio(was: Record, now: Record) -> float:
    found = table.over(now, was)
    if found is None:
        raise ValueError(f"{now.title} {now.label}: expected two times, got none")
    return found
