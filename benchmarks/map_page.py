"""What the page says of the maps."""

from map_targets import map_targets
from page import Part, markdown, timed
from targets import Results

from lastlayer.bench.maps import plot
from lastlayer.bench.maps.record import MapRecord
from lastlayer.bench.maps.tables import limit
from lastlayer.bench.table import milliseconds, percent, ratio, small

MEASURED = """\
### Maps

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


def _tables(results: Results[MapRecord]) -> list[str]:
    blocks = []
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
    return blocks


def _shapes_table(found: list[MapRecord]) -> str:
    shapes = list(dict.fromkeys(record.size for record in found))
    cells = {(record.label, record.size): _cell(record) for record in found}
    rows = [
        [label, *(cells.get((label, shape), "·") for shape in shapes)] for label in _labels(found)
    ]
    return markdown(["", *shapes], rows)


def _scales_table(found: list[MapRecord]) -> str:
    labels = _labels(found)
    cases = dict.fromkeys((r.size, r.dtype, r.scale) for r in found)
    cells = {
        (r.label, r.size, r.dtype, r.scale): timed(
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
    return markdown(["shape", "scale", *labels], rows)


def _labels(found: list[MapRecord]) -> list[str]:
    """Softmax, then ours, then the others."""

    def rank(record: MapRecord) -> int:
        return 0 if record.computes == "softmax" else 1 if record.is_ours else 2

    return list(dict.fromkeys(record.label for record in sorted(found, key=rank)))


def _cell(record: MapRecord) -> str:
    text = f"{milliseconds(record.median_ms)} {percent(record.fraction_of_copy)}"
    if record.ratio_to_softmax is not None:
        text += f" ({ratio(record.ratio_to_softmax)})"
    return timed(record, text)


def _limit(record: MapRecord) -> str:
    name, _, rest = limit(record.copy_tb_per_s).partition(" ")
    return f"{name.capitalize()} bandwidth {rest}"


MAPS = Part(
    title="Maps",
    kind=MapRecord,
    limit=_limit,
    targets=map_targets,
    tables=_tables,
    picture="bandwidth.png",
    caption="Bandwidth against columns",
    pictured=lambda results: results.of("widths"),
    draw=plot.bandwidth_against_width,
)
