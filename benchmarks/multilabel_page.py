"""What the page says of losses of many labels."""

from itertools import groupby

from multilabel_targets import multilabel_targets
from page import Part, loss_table
from targets import Results

from lastlayer.bench.maps.tables import limit as copy_limit
from lastlayer.bench.multilabel import plot
from lastlayer.bench.multilabel.cases import SECTIONS
from lastlayer.bench.multilabel.family import MADE
from lastlayer.bench.multilabel.record import MultilabelRecord
from lastlayer.bench.multilabel.tables import LINEAR_COLUMNS, dense_columns, is_dense
from lastlayer.bench.table import gemm_limit, rank

MEASURED = f"""\
### Many labels

- A shape is rows × hidden width × labels where a linear layer is part of the work, with gradients
  of hidden states and label vectors; it is rows × labels where scores are the input, with labels as
  one byte each. Inputs: {MADE}.
- Nothing is timed before it is verified: the loss and all gradients are compared with float64,
  computed from the same inputs for the whole problem.
- Times, TFLOP/s and GB of a linear layer are as for the fused losses. Losses of scores are short,
  and on a GPU timed as maps are. Their bytes are scores and labels once, with backward once more,
  and the gradient.
- torch eager stores all scores, in float32, and for ZLPR takes the positives out by their indices;
  compiled is `torch.compile` of the same. Peers run at their default settings.
"""


def _tables(results: Results[MultilabelRecord]) -> list[str]:
    def case(record: MultilabelRecord) -> str:
        return f"{record.section[0].upper()}{record.section[1:]}, {record.case}"

    blocks = []
    for title, group in groupby(sorted(results.records, key=_place), key=case):
        found = sorted(group, key=rank)
        dense = is_dense(found[0])
        columns = dense_columns(found[0].copy_tb_per_s) if dense else LINEAR_COLUMNS
        blocks.append(f"### {title}\n\n{loss_table(found, columns)}")
    return blocks


def _place(record: MultilabelRecord) -> tuple[object, ...]:
    known = SECTIONS.index(record.section) if record.section in SECTIONS else len(SECTIONS)
    return known, record.section, record.shape, record.direction


def _pictured(results: Results[MultilabelRecord]) -> list[MultilabelRecord]:
    return sorted((r for r in results.records if r.median_ms is not None), key=_place)


MULTILABEL = Part(
    title="Many labels",
    kind=MultilabelRecord,
    limit=lambda record: (
        f"{gemm_limit(record.gemm_tflop_per_s)}, {copy_limit(record.copy_tb_per_s)}"
    ),
    targets=multilabel_targets,
    tables=_tables,
    picture="multilabel_times.png",
    caption="Time and memory of losses of many labels",
    pictured=_pictured,
    draw=plot.times_and_memory,
)
