"""What the page says of contrastive losses."""

from itertools import groupby

from contrastive_targets import contrastive_targets
from page import Part, loss_table
from targets import Results

from lastlayer.bench.contrastive import plot
from lastlayer.bench.contrastive.cases import SECTIONS
from lastlayer.bench.contrastive.family import MADE
from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.contrastive.tables import COLUMNS
from lastlayer.bench.contrastive.truth import SYMMETRIC
from lastlayer.bench.table import gemm_limit, rank

MEASURED = f"""\
### Contrastive losses

- A shape is pairs × width of their vectors. A time is of forward and backward together, with
  gradients of queries, keys and the temperature. Inputs: {MADE}.
- Nothing is timed before it is verified: the loss and all gradients are compared with float64,
  computed from the same inputs for the whole batch.
- TFLOP/s are 6·pairs²·width over the time, the three products that a loss with stored similarities
  needs, whatever a method does. Times, the limit and GB are as for the fused losses.
- torch eager is `cross_entropy` on all cosines over the temperature, for the symmetric loss on
  their transpose too; compiled is `torch.compile` of the same. A method is left out where what it
  stores would not fit.
"""


def _tables(results: Results[ContrastiveRecord]) -> list[str]:
    def case(record: ContrastiveRecord) -> str:
        return f"{record.section.capitalize()}, {record.case}"

    return [
        f"### {title}\n\n{loss_table(sorted(group, key=rank), COLUMNS)}"
        for title, group in groupby(sorted(results.records, key=_place), key=case)
    ]


def _place(record: ContrastiveRecord) -> tuple[object, ...]:
    known = SECTIONS.index(record.section) if record.section in SECTIONS else len(SECTIONS)
    return known, record.section, record.shape


def _pictured(results: Results[ContrastiveRecord]) -> list[ContrastiveRecord]:
    """The symmetric loss on a GPU, whose batches are large enough to differ."""
    if results.last.device_type != "cuda":
        return []
    shown = (r for r in results.records if r.median_ms is not None and r.section == SYMMETRIC)
    return sorted(shown, key=_place)


CONTRASTIVE = Part(
    title="Contrastive losses",
    kind=ContrastiveRecord,
    limit=lambda record: gemm_limit(record.gemm_tflop_per_s),
    targets=contrastive_targets,
    tables=_tables,
    picture="contrastive_times.png",
    caption="Time and memory against the batch",
    pictured=_pictured,
    draw=plot.against_batch,
)
