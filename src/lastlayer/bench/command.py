"""What ``lastlayer bench FAMILY`` does: plan, measure, show, draw."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import torch
from rich.console import Console
from rich.table import Table

from lastlayer.bench import session
from lastlayer.bench.cases import CaseT, Family, PlanError, RecordT, VerdictT


@dataclass(frozen=True, kw_only=True)
class Command(Generic[CaseT, VerdictT, RecordT]):
    """Runs of one family, from what is asked for to an exit code.

    Attributes:
        family: makes what is measured, anew for each run.
        plan: all cases of a run, from the device, ``quick``, and options of its own.
        tables: what was found, for a terminal; ``legend`` says what the columns mean.
        notes: what else is told of it, in lines.
        draw: writes the picture as a PNG.
        drawn: the section that the picture shows; None where it shows all.
        plan_to_draw: options of the plan where a picture is wanted.
        seed: what inputs are drawn with, so that every run has the same; None for new ones.
    """

    family: Callable[[], Family[CaseT, VerdictT, RecordT]]
    plan: Callable[..., list[CaseT]]
    tables: Callable[[list[RecordT]], list[Table]]
    legend: str
    draw: Callable[[list[RecordT], Path], None]
    notes: Callable[[list[RecordT]], list[str]] = lambda _: []
    drawn: str | None = None
    plan_to_draw: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __call__(
        self,
        *,
        device: str,
        quick: bool,
        json_path: Path | None,
        plot_path: Path | None,
        out: Console,
        only: str = "",
        **options: Any,
    ) -> int:
        """Verify, then time; print the tables.

        Args:
            device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
            quick: small sizes and few repeats: seconds instead of minutes.
            json_path: a file that every measurement is appended to as soon as it is made.
            plot_path: where the picture goes.
            out: where the tables go; a terminal gets a progress bar too.
            only: measure the cases whose title contains this.
            **options: the plan's own, such as ``peers``: whether to compare with other packages
                that are installed.

        Returns:
            0, or 1 when a result of ours was wrong, or 2 when it could not be run as asked.
        """
        options |= self.plan_to_draw if plot_path is not None else {}
        try:
            session.check(device, json_path, plot_path)
            place = torch.device(device)
            cases = chosen(self.plan(place, quick=quick, **options), only)
            if plot_path is not None:
                self._check_drawn(cases, only)
        except PlanError as error:
            return session.refuse(str(error), out)
        family = self.family()
        bench = session.measure(
            family, cases, device=place, quick=quick, json_path=json_path, out=out, seed=self.seed
        )
        bench.notes += self.notes(bench.records)
        shown = self.tables(bench.records)
        limit = family.in_words(bench.limit)
        code = session.show(bench, shown, out, limit=limit, legend=self.legend)
        if plot_path is not None:
            self.draw(bench.records, plot_path)
            session.tell_plot(plot_path, out)
        return code

    def _check_drawn(self, cases: Sequence[CaseT], only: str) -> None:
        if self.drawn is None or any(case.section == self.drawn for case in cases):
            return
        expected = f"cases of {self.drawn!r}, which the plot shows"
        raise PlanError(f"only: expected {expected}, got {only!r}")


def chosen(cases: Sequence[CaseT], only: str) -> list[CaseT]:
    """The cases whose title contains this.

    Raises:
        PlanError: there are none.
    """
    found = [case for case in cases if only.lower() in case.title().lower()]
    if not found:
        titles = "; ".join(case.title() for case in cases)
        raise PlanError(f"only: expected part of one of [{titles}], got {only!r}")
    return found
