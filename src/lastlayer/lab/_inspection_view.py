"""An inspection as tables for a terminal."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lastlayer.lab._inspection import Inspection, LabelInspection, TextInspection

Line = tuple[str, str]


def render(found: Inspection, console: Console) -> None:
    """Print what was found, then what to try. What comes from the data is printed as it is."""
    console.print(Text.assemble((found.name, "bold"), f"  {found.source}"))
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in _lines(found):
        table.add_row(name, Text(value))
    console.print(table)
    console.print(Text("Try first", style="bold"))
    for number, each in enumerate(found.suggestions, 1):
        console.print(Text.assemble(f"{number}. ", (each.head, "cyan"), f"  {each.why}"))


def _lines(found: Inspection) -> Iterator[Line]:
    unit = "tokens" if found.task == "lm" else "rows"
    yield f"{unit}, train / valid / test", " / ".join(f"{n:,}" for n in found.sizes.values())
    if isinstance(found, TextInspection):
        yield from _text_lines(found)
    elif isinstance(found, LabelInspection):
        yield from _label_lines(found)


def _text_lines(found: TextInspection) -> Iterator[Line]:
    yield "classes", f"{found.classes:,}"
    yield "Zipf slope", _slope(found)
    yield "entropy of the frequencies", f"{found.entropy_bits:.2f} bits"
    yield "as many classes as likely", f"{found.effective_classes:,.0f}"
    yield "perplexity of the frequencies, valid", f"{found.unigram_perplexity:,.0f}"
    yield "classes with half of the targets", f"{found.half:,}"
    yield "targets outside the top 1,000", f"{found.tail_1k:.1%}"
    yield "targets outside the top 10,000", f"{found.tail_10k:.1%}"
    yield "classes seen once", f"{found.seen_once:.1%}"
    if found.task == "lm":
        yield (
            "targets that are <unk>, train / valid",
            f"{found.unknown:.1%} / {found.unknown_valid:.1%}",
        )
    yield "choices a target, Huffman's tree", f"{found.huffman_bits:.2f}"
    yield "choices a target, balanced tree", f"{found.balanced_bits:.2f}"
    cutoffs = ", ".join(f"{each:,}" for each in found.cutoffs) or "none: a full softmax is as fast"
    yield f"adaptive cutoffs, width {found.hidden}", cutoffs


def _label_lines(found: LabelInspection) -> Iterator[Line]:
    yield "labels", f"{found.classes:,}"
    yield "features", f"{found.features:,}, {found.filled:.1%} of them not 0"
    yield "labels a row (cardinality)", f"{found.cardinality:.2f}, at most {found.most}"
    yield "density", f"{found.density:.2%}"
    yield "rows without a label", f"{found.without:.1%}"
    yield "different sets of labels", f"{found.distinct:,}"
    shares = (found.most_frequent, found.median_frequent, found.least_frequent)
    yield "rows with a label, most / median / least", " / ".join(f"{s:.2%}" for s in shares)
    yield "Zipf slope", _slope(found)
    yield "labels in fewer than 10 rows", f"{found.rare:.1%}"
    yield "labels in no row", f"{found.unseen:.1%}"
    yield "labels of test rows never seen", f"{found.unseen_in_test:.1%}"


def _slope(found: Inspection) -> str:
    if found.zipf is None:
        return "too few frequent classes"
    return f"{found.zipf.slope:.2f} (R² {found.zipf.r_squared:.2f}, {found.zipf.ranks:,} ranks)"
