"""What each head makes of the same contexts or rows, ready to be shown."""

from collections.abc import Mapping
from typing import Any

from lastlayer.lab.report import label_explorer, text_explorer
from lastlayer.lab.results import HeadSummary, Results


def contexts(results: Results) -> list[dict[str, Any]]:
    """Those of the first finished run of each head; all heads have the same ones."""
    found: dict[int, dict[str, Any]] = {}
    for summary in results.ranked:
        for index, entry in enumerate(_entries(summary)):
            kind = label_explorer if "labels" in entry else text_explorer
            seen = kind.seen(entry)
            shown = found.setdefault(index, {**seen, "heads": []})
            if all(shown.get(key) == value for key, value in seen.items()):
                shown["heads"].append({"head": summary.title, **kind.said(entry)})
    return [found[index] for index in sorted(found)]


def _entries(summary: HeadSummary) -> tuple[Mapping[str, Any], ...]:
    return next((run.explorer for run in summary.finished if run.explorer), ())
