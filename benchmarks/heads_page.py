"""What the page says of the structured heads."""

from collections.abc import Callable
from itertools import groupby

from heads_targets import heads_targets
from page import Part, markdown, timed
from targets import Results

from lastlayer.bench.heads import builders, draws, plot, top
from lastlayer.bench.heads.cases import AGAINST, DRAWS, SECTIONS, STEP, TOP, TREES
from lastlayer.bench.heads.problem import WIDE
from lastlayer.bench.heads.record import HeadRecord
from lastlayer.bench.heads.replay import LONGEST_MS
from lastlayer.bench.heads.tables import REPLAYED, faster, megabytes, millions
from lastlayer.bench.table import EMPTY, gemm_limit, milliseconds, rank, small

MEASURED = f"""\
### Heads

- A shape is rows × hidden width × classes. Hidden states are N(0, 1), and targets follow Zipf's law
  with the exponent 1: the class of rank r is drawn with p ∝ 1/r. The seed is fixed, so that every
  run has the same.
- A *step* is forward and backward, with gradients of the hidden states and of all parameters, which
  are None before each call. Nothing is timed before it is verified: the loss and all gradients are
  compared with float64, computed by plain formulas from the same numbers. The columns loss and dX
  are |loss − truth| / |truth| and ‖gradient − truth‖ / ‖truth‖ of the hidden states, dW the same of
  the parameter where it is largest.
- All times are wall clock, with competitors in turn and inputs that rotate; the median. On a GPU
  that is consecutive plain calls from Python, from an idle device to an idle device, divided by
  their number: what a user sees in eager mode, where sparse gradients and sizes that depend on the
  data make the host wait. The host prepares a step while the device is busy with the one before,
  as in training. `torch.compile` is not used.
- *Replayed* is, on a GPU, the time of the same forward and backward without the host: a CUDA graph
  that has several of them on different inputs, captured once and replayed, divided by their number.
  There is none (·) where the host waits for the device within a step, since such a step cannot be
  captured, and for steps longer than {LONGEST_MS:g} ms, which hide the host. Targets for a GPU are
  judged by it where it is there, and else by plain calls.
- *+ RowAdagrad* means that each timed step ends with one of that optimiser; errors and memory are
  those of forward and backward.
- *Faster* is the time of the first method of the table over that of the row.
- MB (10⁶ bytes) are the most memory held at once beyond inputs and parameters, gradients included:
  on a GPU what torch has allocated, on a CPU the peak of the resident memory of the process.
  Parameters are in millions.
- *Sparse* heads have row-sparse gradients. Trees are built from counts by Zipf's law: Huffman's,
  the same collapsed to {WIDE} children a node, `two_level`, and √V equal groups. *Gathered paths*
  is the plain way to a hierarchical softmax in torch: two embeddings with sparse gradients,
  gathered along padded paths. torch's adaptive softmax has the cutoffs of ours of the same name.
- The classes of char_cnn have made-up spellings, and are few: it makes the vectors of all of them
  in every step.
- *Top {top.K}* is the exact `topk({top.K})` of heads of trained shape. In the tree the bias of a
  node is the log-odds of the Zipf counts below its two children, and its vector is random, such
  that scores deviate from that with a standard deviation of s, the *spread*. In the adaptive head
  the biases at the top are the logs of the counts of a class or cluster, and all vectors have that
  spread. The linear layer has a spread of 1; it makes all scores and calls `torch.topk`. Verified:
  the classes are those of a sort of all log-probabilities in float64, except where two differ by
  less than rounding does; *error* is the largest such difference. Compared are
  {top.COMPARED["cpu"]} rows on a CPU and {top.COMPARED["cuda"]} on a GPU.
- *Draws* are {draws.DRAWN:,} classes with replacement and their log-probabilities (torch's has
  none), from counts by Zipf's law in random order, or from the distribution of that name; what they
  are drawn from is ready. Verified: of {draws.VERIFIED:,} draws, {draws.GROUPS} groups of classes
  come as often as they should, by a χ² test; *log q* is the largest error of a log-probability.
- *Trees* are built from counts by Zipf's law in random order, clusters from {builders.NUMBERS}
  random numbers a class, and the taxonomy from names in {builders.GROUPS} groups. Verified: even
  choices give every class a probability, in sum 1.
"""

Column = Callable[[HeadRecord], str]
_MEMORY: dict[str, Column] = {"MB": lambda r: megabytes(r.peak_bytes)}
_PARAMETERS: dict[str, Column] = {"parameters": lambda r: millions(r.parameters)}
_FASTER: dict[str, Column] = {"faster": lambda r: faster(r.times_faster)}
_SETTINGS: dict[str, Column] = {"": lambda r: r.settings}
_COLUMNS: dict[str, dict[str, Column]] = {
    STEP: {
        **REPLAYED,
        **_FASTER,
        **_MEMORY,
        **_PARAMETERS,
        "loss": lambda r: small(r.loss_error),
        "dX": lambda r: small(r.hidden_error),
        "dW": lambda r: small(r.weight_error),
        **_SETTINGS,
    },
    TOP: {
        **REPLAYED,
        **_FASTER,
        **_MEMORY,
        **_PARAMETERS,
        "error": lambda r: small(r.value_error),
        "other classes": lambda r: EMPTY if r.classes_differ is None else str(r.classes_differ),
        **_SETTINGS,
    },
    DRAWS: {
        **REPLAYED,
        **_FASTER,
        **_MEMORY,
        "log q": lambda r: small(r.value_error),
    },
    TREES: {**_MEMORY, **_SETTINGS},
}


def _tables(results: Results[HeadRecord]) -> list[str]:
    def case(record: HeadRecord) -> str:
        return f"{record.section.capitalize()}, {record.case}"

    ordered = sorted(results.records, key=_place)
    blocks = []
    for title, group in groupby((r for r in ordered if r.section in _COLUMNS), key=case):
        blocks.append(f"### {title}\n\n{_table(sorted(group, key=rank))}")
    against = [r for r in ordered if r.section == AGAINST]
    if against:
        blocks.append(_against(against))
    return blocks


def _place(record: HeadRecord) -> tuple[object, ...]:
    # In the order of the plan: by section, large problems first.
    size = [-extent for extent in record.shape]
    return SECTIONS.index(record.section), size[-1] if record.section != AGAINST else -size[-1]


def _table(found: list[HeadRecord]) -> str:
    columns = dict(_COLUMNS[found[0].section])
    if found[0].device_type == "cpu":
        columns.pop("replayed", None)
    rows = [
        [
            record.label,
            timed(record, milliseconds(record.median_ms)),
            *(show(record) for show in columns.values()),
        ]
        for record in found
    ]
    return markdown(["", "ms", *columns], rows)


def _against(found: list[HeadRecord]) -> str:
    rows, width, _ = found[0].shape
    labels = list(dict.fromkeys(record.label for record in found))
    lines = []
    for classes, group in groupby(found, key=lambda record: record.shape[-1]):
        ms = {r.label: timed(r, milliseconds(r.median_ms)) for r in group}
        lines.append([f"{classes:,}", *(ms.get(label, EMPTY) for label in labels)])
    title = f"### Cost against the number of classes, {rows} rows of {width}, {found[0].dtype}"
    return f"{title}\n\nmilliseconds of a step\n\n{markdown(['classes', *labels], lines)}"


def _pictured(results: Results[HeadRecord]) -> list[HeadRecord]:
    return [r for r in results.records if r.section == AGAINST and r.median_ms is not None]


HEADS = Part(
    title="Heads",
    kind=HeadRecord,
    limit=lambda record: gemm_limit(record.gemm_tflop_per_s),
    targets=heads_targets,
    tables=_tables,
    picture="heads.png",
    caption="Cost against the number of classes",
    pictured=_pictured,
    draw=plot.time_against_classes,
)
