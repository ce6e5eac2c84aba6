"""What a goal is, which records count, and whether they meet it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lastlayer.bench.record import Record
from lastlayer.bench.table import ratio

MET, MISSED, NOT_MEASURED = "met", "**missed**", "not measured"

RecordT = TypeVar("RecordT", bound=Record)


class Results(Generic[RecordT]):
    """The records of one device, each part of them from the newest full run."""

    def __init__(self, records: Iterable[RecordT]) -> None:
        by_age = sorted(records, key=lambda record: record.date)
        newest = {record.part: record.run for record in by_age}
        self.records = [record for record in by_age if record.run == newest[record.part]]
        self.last = self.records[-1]

    def of(self, section: str, direction: str = "forward") -> list[RecordT]:
        """The records of a section in one direction."""
        return [r for r in self.records if (r.section, r.direction) == (section, direction)]


@dataclass(frozen=True)
class Target:
    """A goal set before the measurement: in words, where, what came out, whether it is met."""

    goal: str
    where: str
    measured: str
    verdict: str


def judge(
    goal: str,
    where: str,
    found: Sequence[RecordT | None],
    value: Callable[[RecordT], float | None],
    is_met: Callable[[float], bool],
    show: Callable[[float], str],
) -> Target:
    """Hold the largest value of all records against a goal; all of them must be there."""
    wrong = [r for r in found if r is not None and r.is_ours and not r.verified]
    if wrong:
        return Target(goal, where, wrong[0].status, MISSED)
    values = [None if record is None else value(record) for record in found]
    known = [number for number in values if number is not None]
    if not known or len(known) < len(values):
        return Target(goal, where, "·", NOT_MEASURED)
    return Target(goal, where, show(max(known)), MET if is_met(max(known)) else MISSED)


def times(value: float) -> str:
    """A ratio of times."""
    return f"{ratio(value)}×"
