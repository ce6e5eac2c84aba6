"""Make docs/performance.md and its pictures from the records in benchmarks/results.

    python benchmarks/render.py

The page is made whole from these records and the texts beside this file, so it is never edited by
hand.
"""

from pathlib import Path
from typing import Any

import contrastive_page
import fused_page
import heads_page
import map_page
import multilabel_page
from page import Part

from lastlayer.bench.record import Record
from lastlayer.bench.results import read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "pictures"

PARTS: tuple[Part[Any], ...] = (
    fused_page.FUSED,
    multilabel_page.MULTILABEL,
    contrastive_page.CONTRASTIVE,
    heads_page.HEADS,
    map_page.MAPS,
)

INTRODUCTION = f"""\
# Performance

This page is made by `python benchmarks/render.py` from the measurements in `benchmarks/results`,
the misses as well as the hits. To measure your own machine: `lastlayer bench fused`,
`lastlayer bench multilabel`, `lastlayer bench contrastive`, `lastlayer bench heads` and
`lastlayer bench maps`.

## How it is measured

{fused_page.MEASURED}
{multilabel_page.MEASURED}
{contrastive_page.MEASURED}
{heads_page.MEASURED}
{map_page.MEASURED}"""

NOTHING_YET = """
No measurements have been recorded yet.
"""


def render(results_dir: Path) -> str:
    """The whole page as Markdown.

    Args:
        results_dir: a folder of ``*.jsonl`` files of records.
    """
    records = _read_all(results_dir)
    blocks = [block for part in PARTS for block in part.render(records)]
    if not blocks:
        return INTRODUCTION + NOTHING_YET
    remarks = results_dir / "remarks.md"
    if remarks.exists():
        blocks.append(remarks.read_text(encoding="utf-8"))
    return "\n".join([INTRODUCTION, *blocks])


def _read_all(results_dir: Path) -> list[Record]:
    return [record for path in sorted(results_dir.glob("*.jsonl")) for record in read(path)]


def main() -> None:
    """Write the page, and the pictures that there is something to draw for."""
    PAGE.write_text(render(RESULTS), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    records = _read_all(RESULTS)
    for part in PARTS:
        shown = part.in_picture(records)
        if shown:
            PICTURES.mkdir(exist_ok=True)
            part.draw(shown, PICTURES / part.picture)
            print(f"wrote {(PICTURES / part.picture).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
