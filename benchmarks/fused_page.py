"""What the page says of the fused losses."""

from itertools import groupby

from fused_targets import fused_targets
from page import Part, loss_table
from targets import Results

from lastlayer.bench.fused import plot
from lastlayer.bench.fused.cases import KINDS, SPARSE
from lastlayer.bench.fused.methods import CHUNK_ROWS
from lastlayer.bench.fused.record import FusedRecord
from lastlayer.bench.fused.scores import TRAINED
from lastlayer.bench.fused.tables import COLUMNS, supports
from lastlayer.bench.table import gemm_limit, rank

_SCORES = "\n".join(f"  - *{kind.name}*: {kind.made}." for kind in KINDS)

MEASURED = f"""\
### Fused losses

- A shape is rows × hidden width × classes. A time is of forward and backward together, with
  gradients of hidden states and class vectors, set to None before each call.
- Nothing is timed before it is verified: the loss and both gradients are compared with float64,
  computed from the same inputs for the whole problem. The columns loss, dX and dW are
  |loss − truth| / |truth| and ‖gradient − truth‖ / ‖truth‖.
- How the inputs are made:
{_SCORES}
- On a GPU all competitors take turns, as its clocks fall while it gets hot: device events around
  plain calls, the L2 cache cleared before each; the median. On a CPU it is wall clock, in turns
  too.
- TFLOP/s are 6·rows·width·classes over the time, the three products that a linear layer needs,
  whatever a method does; the limit is a product of two square matrices in the same run (8192 wide
  in bfloat16 on a GPU, 2048 wide in float32 on a CPU).
- GB (10⁹ bytes) are the most memory held at once beyond inputs and the two gradients: on a GPU what
  torch has allocated, on a CPU the peak of the resident memory of the process (`VmHWM`, reset
  before the call, after a first call that warms up).
- torch eager is `cross_entropy(linear(hidden, weight).float(), target)`, compiled is
  `torch.compile` of the same; on chunks it is called for {CHUNK_ROWS} rows at a time, each with
  its backward. *Stored scores* are our losses on the result of `linear`. Peers run at their default
  settings; Cut Cross-Entropy leaves out parts of the gradient by default. A method is left out
  where the scores it stores would not fit.
"""


def _tables(results: Results[FusedRecord]) -> list[str]:
    def case(record: FusedRecord) -> str:
        return f"{record.section.capitalize()}, {record.case}"

    blocks = []
    for title, group in groupby(sorted(results.records, key=_place), key=case):
        found = sorted(group, key=rank)
        sizes = supports(found)
        known = f"\n\nMean support of a row: {sizes}." if sizes else ""
        blocks.append(f"### {title}{known}\n\n{loss_table(found, COLUMNS)}")
    return blocks


def _place(record: FusedRecord) -> tuple[object, ...]:
    names = [kind.name for kind in KINDS]
    known = names.index(record.scores) if record.scores in names else len(names)
    # In the order of the plan: by section, then by the work a shape is.
    work = record.shape[0] * record.shape[1] * record.shape[2]
    return record.section, -work, record.shape, known, record.scores


def _pictured(results: Results[FusedRecord]) -> list[FusedRecord]:
    """All cases but the less usual kinds of scores, and on a CPU the one with a goal."""

    def is_shown(record: FusedRecord) -> bool:
        if record.section == SPARSE:
            return record.scores == TRAINED.name and record.device_type != "cpu"
        return True

    timed_ones = (r for r in results.records if r.median_ms is not None and is_shown(r))
    return sorted(timed_ones, key=_place)


FUSED = Part(
    title="Fused losses",
    kind=FusedRecord,
    limit=lambda record: gemm_limit(record.gemm_tflop_per_s),
    targets=fused_targets,
    tables=_tables,
    picture="fused.png",
    caption="Time and memory",
    pictured=_pictured,
    draw=plot.times_and_memory,
)
