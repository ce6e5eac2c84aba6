"""Make docs/performance.md and its picture from the records in benchmarks/results.

    python benchmarks/render.py

The page is made whole from these records and the text below, so it is never edited by hand.
"""

from collections.abc import Iterable
from pathlib import Path

from targets import MET, Results, Target, targets

from lastlayer.bench import plot
from lastlayer.bench.record import Record, read
from lastlayer.bench.table import label_of, milliseconds, percent, ratio, size_of, small, unit_for

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "bandwidth.png"

INTRODUCTION = """\
# Performance

This page is made by `python benchmarks/render.py` from the measurements in `benchmarks/results`,
the misses as well as the hits. To measure your own machine: `lastlayer bench maps`.

## How it is measured

- Nothing is timed before it is verified: on fresh random scores, a sample of rows is compared with
  the float64 reference and the sum of every row with 1. Peers are checked the same way; a peer that
  misses the tolerance is marked *inexact* and timed all the same.
- Scores are drawn as 2·N(0, 1) unless a scale is given.
- On a GPU a time is the median of `triton.testing.do_bench`: device events around each call, the
  L2 cache cleared before it. A call of less than two milliseconds is captured as a CUDA graph and
  replayed, so that a time says what the device needs; its record keeps the time of plain calls,
  the host's work included, as `eager_ms`. On a CPU it is the median of wall-clock samples taken in
  turn from all competitors, so that noise hits all of them alike, over inputs that are rotated.
- Bytes are the fewest that the work must move: forward reads and writes one matrix; backward reads
  two more and writes one. The limit is a copy of a large buffer, bytes read plus bytes written,
  measured in the same run.
- Forward + backward is the map and `torch.autograd.grad` with a ready-made gradient.
- Peers run at their default settings; AdaSplash tunes its forward kernel once a dtype, on the first
  shape it sees. The entmax package gets `k=512` on rows longer than that.
"""

NOTHING_YET = """
No measurements have been recorded yet.
"""


def by_device(records: Iterable[Record]) -> list[Results]:
    """Full runs only, one entry a device, GPUs first."""
    devices: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.family == "maps" and not record.quick:
            devices.setdefault((record.device_type, record.device), []).append(record)
    ordered = sorted(devices.items(), key=lambda item: (item[0][0] != "cuda", item[0][1]))
    return [Results(found) for _, found in ordered]


def render(results_dir: Path) -> str:
    """The whole page as Markdown.

    Args:
        results_dir: a folder of ``*.jsonl`` files of records.
    """
    devices = by_device(_read_all(results_dir))
    if not devices:
        return INTRODUCTION + NOTHING_YET
    parts = [INTRODUCTION]
    if any(results.of("widths") for results in devices):
        parts.append(
            f"## Bandwidth against width\n\n![Bandwidth against columns](pictures/{PICTURE.name})\n"
        )
    parts += [_device_part(results) for results in devices]
    remarks = results_dir / "remarks.md"
    if remarks.exists():
        parts.append(remarks.read_text(encoding="utf-8"))
    return "\n".join(parts)


def _read_all(results_dir: Path) -> list[Record]:
    return [record for path in sorted(results_dir.glob("*.jsonl")) for record in read(path)]


def _device_part(results: Results) -> str:
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
    unit = unit_for(last.copy_tb_per_s)
    copy = f"{unit.show(last.copy_tb_per_s)} {unit.name}"
    blocks = [
        f"## {last.device}{cores}",
        f"Measured {last.date[:10]} with {listed}. Copy bandwidth {copy}.",
        _targets_block(targets(results)),
    ]
    dtypes = dict.fromkeys(record.dtype for record in results.of("shapes"))
    for dtype in dtypes:
        for direction, words in (
            ("forward", "Forward"),
            ("forward+backward", "Forward + backward"),
        ):
            found = [r for r in results.of("shapes", direction) if r.dtype == dtype]
            if found:
                note = "milliseconds, percent of copy bandwidth, and (time ÷ torch.softmax's)"
                blocks.append(f"### {words}, {dtype}\n\n{note}\n\n{_shapes_table(found)}")
    if results.of("scales"):
        blocks.append(
            "### Other scales of the scores\n\nmilliseconds, and the largest |row sum − 1|\n\n"
            + _scales_table(results.of("scales"))
        )
    return "\n\n".join(blocks) + "\n"


def _targets_block(found: list[Target]) -> str:
    met = sum(target.verdict == MET for target in found)
    rows = [[target.goal, target.where, target.measured, target.verdict] for target in found]
    table = _markdown(["target", "where", "measured", ""], rows)
    return f"### Targets\n\n{met} of {len(found)} met.\n\n{table}"


def _shapes_table(found: list[Record]) -> str:
    shapes = list(dict.fromkeys(size_of(record) for record in found))
    cells = {(label_of(record), size_of(record)): _cell(record) for record in found}
    rows = [
        [label, *(cells.get((label, shape), "·") for shape in shapes)] for label in _labels(found)
    ]
    return _markdown(["", *shapes], rows)


def _scales_table(found: list[Record]) -> str:
    labels = _labels(found)
    cases = dict.fromkeys((size_of(r), r.dtype, r.scale) for r in found)
    cells = {
        (label_of(r), size_of(r), r.dtype, r.scale): _timed(
            r, f"{milliseconds(r.median_ms)}, {small(r.row_sum_error)}"
        )
        for r in found
    }
    rows = [
        [
            f"{size} {dtype}",
            f"{scale:g}",
            *(cells.get((label, size, dtype, scale), "·") for label in labels),
        ]
        for size, dtype, scale in cases
    ]
    return _markdown(["shape", "scale", *labels], rows)


def _labels(found: list[Record]) -> list[str]:
    """Softmax, then ours, then the others."""

    def rank(record: Record) -> int:
        return 0 if record.computes == "softmax" else 1 if record.source == "lastlayer" else 2

    return list(dict.fromkeys(label_of(record) for record in sorted(found, key=rank)))


def _cell(record: Record) -> str:
    text = f"{milliseconds(record.median_ms)} {percent(record.fraction_of_copy)}"
    if record.ratio_to_softmax is not None:
        text += f" ({ratio(record.ratio_to_softmax)})"
    return _timed(record, text)


def _timed(record: Record, text: str) -> str:
    if record.median_ms is None:
        return record.status.replace("|", "\\|")
    return text if record.verified else f"{text} *inexact*"


def _markdown(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Write the page, and the picture where there are widths to draw."""
    PAGE.write_text(render(RESULTS), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    widths = [r for results in by_device(_read_all(RESULTS)) for r in results.of("widths")]
    if widths:
        PICTURE.parent.mkdir(exist_ok=True)
        plot.bandwidth_against_width(widths, PICTURE)
        print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
