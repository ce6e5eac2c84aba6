"""``lastlayer bench maps``: sparsemax, entmax and top-k softmax beside torch and the peers."""

from pathlib import Path

import torch
from rich.console import Console

from lastlayer.bench import session
from lastlayer.bench.maps import cases, plot, tables
from lastlayer.bench.maps.family import Maps


def run(
    *,
    device: str,
    dtypes: tuple[str, ...],
    quick: bool,
    peers: bool,
    json_path: Path | None,
    plot_path: Path | None,
    out: Console,
) -> int:
    """Verify every map, time it beside torch and the peers, and print one table.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        dtypes: names of torch dtypes; none means those that the device is judged by.
        quick: few shapes and repeats: seconds instead of minutes.
        peers: compare with the packages of the extra ``peers`` that are installed.
        json_path: a file that every measurement is appended to as soon as it is made.
        plot_path: where a PNG of bandwidth against width goes.
        out: where the table goes; a terminal gets a progress bar too.

    Returns:
        0, or 1 when a result of ours was wrong, or 2 when it could not be run as asked.
    """
    problem = session.problem(device, dtypes, json_path, plot_path)
    if problem is not None:
        return session.refuse(problem, out)
    place = torch.device(device)
    planned = cases.plan(
        place.type, dtypes, quick=quick, peers=peers, widths=not quick or plot_path is not None
    )
    bench = session.measure(
        Maps(), planned, device=place, quick=quick, json_path=json_path, out=out
    )
    of = {name: [r for r in bench.records if r.section == name] for name in cases.SECTIONS}
    shown = [tables.comparison(of["shapes"], "maps: verified, then timed")]
    if of["scales"]:
        shown.append(tables.by_scale(of["scales"]))
    if of["widths"]:
        shown.append(tables.by_width(of["widths"]))
    code = session.show(bench, shown, out, limit=tables.limit(bench.limit), legend=tables.LEGEND)
    if plot_path is not None:
        plot.bandwidth_against_width(bench.records, plot_path)
        session.tell_plot(plot_path, out)
    return code
