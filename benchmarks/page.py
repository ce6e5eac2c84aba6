"""Generates docs/performance.md and its figures from the records, missed targets included."""

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    attention,
    contrastive,
    fused,
    heads,
    llama,
    maps,
    multilabel,
    plain,
    plot,
    sweep,
    table,
)
from benchmarks.driver import Family
from benchmarks.record import ROOT, Record, newest, read
from benchmarks.table import EMPTY, Grid, data_size, milliseconds, ratio
from benchmarks.targets import FIGURES, MET, NOT_MEASURED, TARGETS, Figure

PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "pictures"
FAMILIES = [
    module.FAMILY
    for module in (fused, multilabel, contrastive, heads, maps, attention, plain, llama, sweep)
]

OPENING = """\
# Performance

Every time is that of a plain eager call in a loop, host time included; *replayed* is the same call
in a CUDA graph, without host time. *Compared with* is the fastest method of another package that
computes the same function in the same run, unless the row names another. A ratio above 1 means that
ours is slower.
"""
HOW = """\
## How it is measured

`python -m benchmarks page` generates this page from the records in `benchmarks/results`. To measure
your own machine, run `python -m benchmarks fused`, or `multilabel`, `contrastive`, `heads`, `maps`,
`attention`, `plain`, `llama`, `sweep`.

- **Verified first.** Each result is compared with a float64 reference on the same inputs. If one of
  our results is wrong, it is not timed; a wrong result of a peer is timed and marked *inexact*.
- **Eager time.** The median wall-clock time of consecutive plain calls, from an idle device to an
  idle device. The competitors of a case take turns in random order, on rotating inputs.
- **Replayed time.** Several calls captured as one CUDA graph, timed by device events. It is not
  measured for calls in which the host waits for the device, nor for calls longer than 20 ms.
- **Memory.** The peak beyond inputs and results: on a GPU the memory that torch allocates, on a CPU
  the resident memory of the process.
- **Targets** apply to the eager time; *replayed only* means that the replayed time meets the target
  and the eager time does not. If a target covers several shapes, the worst one counts.
- Records without a commit are older. Those of fused, multi-label and contrastive losses were timed
  on a GPU by device events around plain calls, after a pause that lets the device catch up, so they
  include less host time; the eager times of maps are device events around each call.
"""


def render(results: Path) -> str:
    """The whole page as Markdown.

    Args:
        results: a folder of ``*.jsonl`` files of records.
    """
    records = newest(read(results))
    if not records:
        return OPENING + "\nNo measurements have been recorded yet.\n"
    notes = [f"### {family.title}\n\n{family.notes}" for family in FAMILIES]
    blocks = [OPENING, _figures(records) + "\n", HOW, *notes]
    for family in FAMILIES:
        blocks += _family_blocks(family, [r for r in records if r.family == family.name])
    remarks = results / "remarks.md"
    if remarks.exists():
        blocks.append(remarks.read_text(encoding="utf-8"))
    return "\n".join(blocks)


def write(results: Path) -> list[Path]:
    """Write the page, and the figures if matplotlib is installed; returns the written paths."""
    PAGE.write_text(render(results), encoding="utf-8")
    written = [PAGE]
    records = newest(read(results))
    for family in FAMILIES if plot.is_available() else ():
        shown = _pictured(family, [r for r in records if r.family == family.name])
        if shown:
            written.append(PICTURES / _picture(family))
            plot.draw(shown, written[-1], family.sweeps)
    return written


def _picture(family: Family) -> str:
    return f"{family.name}_times.png"


def _pictured(family: Family, records: Sequence[Record]) -> list[Record]:
    """The timed records for the figure of a family, those of GPUs first.

    If every case has its own panel, only those of GPUs, if there are any. A family with its own
    table has no figure.
    """
    if family.shown is not None:
        return []
    timed = [r for r in records if r.median_ms is not None]
    on_gpu = [r for r in timed if r.device_type == "cuda"]
    if not family.pictured:
        return on_gpu or timed
    ordered = sorted(timed, key=lambda r: r.device_type != "cuda")
    return [r for r in ordered if r.section in family.pictured]


def _figures(records: Sequence[Record]) -> str:
    headings = [
        "", "device, case", "ms", "replayed", "compared with", "ms", "ratio", "memory",
        "least other memory",
    ]  # fmt: skip
    rows = [_figure(figure, table.by_case(records)) for figure in FIGURES]
    return Grid("", headings, rows).markdown()


def _figure(figure: Figure, cases: Sequence[Sequence[Record]]) -> list[str]:
    found = [(r, case) for case in cases for r in case if figure.which(r)]
    if not found:
        return [figure.what, NOT_MEASURED, *[EMPTY] * 7]
    ours, case = found[-1]
    timed = [r for r in case if r.median_ms is not None]
    if figure.beside:
        others = [r for r in timed if r.label == figure.beside]
    else:
        others = [r for r in timed if not r.is_ours and r.computes == ours.computes]
    where = f"{ours.device}, {ours.title}"
    mine = [milliseconds(ours.median_ms), milliseconds(ours.replayed_ms)]
    if not others:
        return [figure.what, where, *mine, EMPTY, EMPTY, EMPTY, data_size(ours.peak_bytes), EMPTY]
    fastest = min(others, key=lambda r: r.median_ms or 0.0)
    least = min(others, key=lambda r: math.inf if r.peak_bytes is None else r.peak_bytes)
    times = table.over(ours, fastest) or 0.0
    return [
        figure.what, where, *mine, _named(fastest), milliseconds(fastest.median_ms),
        f"**{ratio(times)}**" if times > 1 else ratio(times), data_size(ours.peak_bytes),
        EMPTY if least.peak_bytes is None else f"{data_size(least.peak_bytes)}, {_named(least)}",
    ]  # fmt: skip


def _named(record: Record) -> str:
    return record.label if record.verified else f"{record.label} (inexact)"


def _family_blocks(family: Family, records: Sequence[Record]) -> list[str]:
    devices = dict.fromkeys((r.device_type, r.device) for r in records)
    ordered = sorted(devices, key=lambda device: (device[0] != "cuda", device[1]))
    blocks = [
        _device(family, [r for r in records if (r.device_type, r.device) == device])
        for device in ordered
    ]
    if _pictured(family, records):
        picture = f"![{family.title}](pictures/{_picture(family)})"
        blocks.insert(0, f"## {family.title}: figure\n\n{picture}\n")
    return blocks


def _device(family: Family, records: Sequence[Record]) -> str:
    last = records[-1]
    threads = "" if last.threads is None else f", {last.threads} threads"
    versions = {
        "Python": last.python,
        "torch": last.torch,
        "Triton": last.triton if last.device_type == "cuda" else None,
        "Numba": last.numba if last.device_type == "cpu" else None,
        "lastlayer": last.lastlayer,
    }
    peers = (r for r in records if r.source not in ("torch", "lastlayer"))
    versions |= {r.source: r.source_version for r in peers}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    commits = ", ".join(dict.fromkeys(r.commit for r in records if r.commit))
    limits = [
        f"{last.gemm_tflop_per_s:.3g} TFLOP/s (matrix product)" if last.gemm_tflop_per_s else "",
        f"{1000 * last.copy_tb_per_s:.0f} GB/s (copy)" if last.copy_tb_per_s else "",
    ]
    at = f"at {commits}" if commits else "(commit not recorded)"
    said = f"Measured {last.date[:10]} {at} with {listed}."
    opening = [
        f"## {family.title}: {last.device}{threads}",
        f"{said} Limits: {', '.join(filter(None, limits))}.",
    ]
    if family.shown is not None:
        grids = family.shown(records, misses=True)
        blocks = opening + [f"{grid.title}.\n\n{grid.markdown()}" for grid in grids]
        return "\n\n".join(blocks) + "\n"
    blocks = [
        *opening,
        _targets(family, last.device_type, records),
        *(f"### {grid.title}\n\n{grid.markdown()}" for grid in table.grids(records, family.sweeps)),
    ]
    return "\n\n".join(blocks) + "\n"


def _targets(family: Family, device_type: str, records: Sequence[Record]) -> str:
    cases = table.by_case(records)
    wanted = (family.name, device_type)
    mine = [t for t in TARGETS if (t.which.family, t.which.device_type) == wanted]
    rows = [target.judge(cases) for target in mine]
    met = sum(row[-1] == MET for row in rows)
    grid = Grid("", ["target", "worst case", "measured", "replayed", ""], rows)
    return f"### Targets\n\n{met} of {len(rows)} met.\n\n{grid.markdown()}"
