"""The report of a comparison: an HTML page that works offline, pictures, and tables."""

from pathlib import Path
from typing import TYPE_CHECKING

from lastlayer.lab.errors import require
from lastlayer.lab.records import write_text
from lastlayer.lab.results import Results, read_results
from lastlayer.lab.verdict import verdict

if TYPE_CHECKING:
    from lastlayer.lab.report.figures import Figure

__all__ = ["write_report"]


def write_report(out: Path, *, pictures: bool = True) -> Path:
    """Write the report of a comparison into its folder.

    ``report.html`` holds everything and needs no network. The same charts are written as PNG and
    SVG to ``plots/``, and the summary as ``summary.md`` and ``summary.csv``. The report of an
    unfinished comparison, or one with failed runs, has the results so far.

    Args:
        out: the folder of ``lastlayer compare --out``.
        pictures: write the PNG and SVG files as well.

    Returns:
        The path of the page.

    Raises:
        LabError: ``out`` is not the folder of a comparison, a file in it is broken, or a package is
            missing.
    """
    require("altair", "jinja2", "vl_convert")
    from lastlayer.lab.report import figures, page, tables

    out = Path(out)
    results = read_results(out)
    found = verdict(results)
    shown = figures.all_figures(results)
    html = page.render(results, found, shown)
    write_text(out / "summary.md", tables.markdown(results, found))
    write_text(out / "summary.csv", tables.comma_separated(results))
    if pictures:
        _draw(out / "plots", shown, results)
    # The page is written last: if it exists, so do all other files.
    write_text(out / "report.html", html)
    return out / "report.html"


def _draw(folder: Path, shown: tuple["Figure", ...], results: Results) -> None:
    from lastlayer.lab.report import look

    folder.mkdir(exist_ok=True)
    looks = look.looks(results.comparison.heads)
    for figure in shown:
        for view in figure.views:
            several = len(figure.views) > 1
            stem = folder / (f"{figure.key}-{view.key}" if several else figure.key)
            label = view.label if several else ""
            chart = view.chart(looks, in_page=False)
            look.write_picture(chart, stem, title=figure.title, subtitle=label)
