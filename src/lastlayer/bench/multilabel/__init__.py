"""``lastlayer bench multilabel``: losses of many labels beside torch and the peers."""

from pathlib import Path

import torch
from rich.console import Console

from lastlayer.bench import session
from lastlayer.bench.multilabel import cases, plot, tables
from lastlayer.bench.multilabel.family import Multilabel


def run(
    *,
    device: str,
    quick: bool,
    peers: bool,
    only: str,
    json_path: Path | None,
    plot_path: Path | None,
    out: Console,
) -> int:
    """Verify every loss, time it beside torch and the peers, print the tables.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        quick: small shapes and few repeats: seconds instead of a minute.
        peers: compare with the other packages that are installed.
        only: measure the cases whose title contains this.
        json_path: a file that every measurement is appended to as soon as it is made.
        plot_path: where a PNG of times and memory goes.
        out: where the tables go; a terminal gets a progress bar too.

    Returns:
        0, or 1 when a result of ours was wrong, or 2 when it could not be run as asked.
    """
    problem = session.problem(device, (), json_path, plot_path)
    if problem is not None:
        return session.refuse(problem, out)
    place = torch.device(device)
    planned = cases.plan(place.type, quick=quick, peers=peers, only=only)
    if not planned:
        titles = "; ".join(c.title() for c in cases.plan(place.type, quick=quick, peers=peers))
        return session.refuse(f"only: expected part of one of [{titles}], got {only!r}", out)
    family = Multilabel()
    bench = session.measure(
        family, planned, device=place, quick=quick, json_path=json_path, out=out
    )
    code = session.show(
        bench,
        tables.all_of(bench.records),
        out,
        limit=tables.limit(bench.limit, family.copy_tb_per_s),
        legend=tables.LEGEND,
    )
    if plot_path is not None:
        plot.times_and_memory(bench.records, plot_path)
        session.tell_plot(plot_path, out)
    return code
