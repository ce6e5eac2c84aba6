"""``lastlayer bench contrastive``: InfoNCE over a batch of pairs beside torch and the peers."""

from pathlib import Path

import torch
from rich.console import Console

from lastlayer.bench import session
from lastlayer.bench.contrastive import cases, plot, tables
from lastlayer.bench.contrastive.family import Contrastive


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
    """Verify the loss, time it with its gradients beside torch and the peers, print one table.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        quick: small batches and few repeats: seconds instead of minutes.
        peers: compare with the other packages that are installed.
        only: measure the cases whose title contains this.
        json_path: a file that every measurement is appended to as soon as it is made.
        plot_path: where a PNG of times and memory against the batch goes.
        out: where the table goes; a terminal gets a progress bar too.

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
    bench = session.measure(
        Contrastive(), planned, device=place, quick=quick, json_path=json_path, out=out
    )
    code = session.show(
        bench,
        [tables.comparison(bench.records)],
        out,
        limit=tables.limit(bench.limit),
        legend=tables.LEGEND,
    )
    if plot_path is not None:
        plot.against_batch(bench.records, plot_path)
        session.tell_plot(plot_path, out)
    return code
