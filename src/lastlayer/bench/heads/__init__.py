"""``lastlayer bench heads``: structured heads beside the full softmax and torch's own."""

from pathlib import Path

import torch
from rich.console import Console

from lastlayer.bench import session
from lastlayer.bench.heads import cases, plot, tables
from lastlayer.bench.heads.family import Heads
from lastlayer.bench.heads.problem import SEED


def run(
    *,
    device: str,
    quick: bool,
    only: str,
    json_path: Path | None,
    plot_path: Path | None,
    out: Console,
) -> int:
    """Verify every head, time its training step and its best classes, print one table a section.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        quick: small shapes and few repeats: seconds instead of minutes.
        only: measure the cases whose title contains this.
        json_path: a file that every measurement is appended to as soon as it is made.
        plot_path: where a PNG of the cost against the number of classes goes.
        out: where the tables go; a terminal gets a progress bar too.

    Returns:
        0, or 1 when a result of ours was wrong, or 2 when it could not be run as asked.
    """
    problem = session.problem(device, (), json_path, plot_path)
    if problem is not None:
        return session.refuse(problem, out)
    place = torch.device(device)
    planned = cases.plan(place, quick=quick, only=only)
    if not planned:
        titles = "; ".join(case.title() for case in cases.plan(place, quick=quick))
        return session.refuse(f"only: expected part of one of [{titles}], got {only!r}", out)
    if plot_path is not None and not any(case.section == cases.AGAINST for case in planned):
        expected = f"cases of {cases.AGAINST!r}, which the plot shows"
        return session.refuse(f"only: expected {expected}, got {only!r}", out)
    bench = session.measure(
        Heads(), planned, device=place, quick=quick, json_path=json_path, out=out, seed=SEED
    )
    of = {name: [r for r in bench.records if r.section == name] for name in cases.SECTIONS}
    shown = {
        cases.STEP: tables.steps,
        cases.TOP: tables.best,
        cases.AGAINST: tables.against_classes,
        cases.TREES: tables.built,
    }
    code = session.show(
        bench,
        [show(of[name]) for name, show in shown.items() if of[name]],
        out,
        limit=tables.limit(bench.limit),
        legend=tables.LEGEND,
    )
    if plot_path is not None:
        plot.time_against_classes(bench.records, plot_path)
        session.tell_plot(plot_path, out)
    return code
