"""The page: one HTML file with everything in it."""

import shlex
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from lastlayer.lab import metrics
from lastlayer.lab._settings import flat, plain
from lastlayer.lab.report import explorer, tables, theme, vega
from lastlayer.lab.report.charts import Charts
from lastlayer.lab.report.cost_figures import left_out
from lastlayer.lab.report.data import everything, jsonable
from lastlayer.lab.report.embed import content_policy, json_for_script
from lastlayer.lab.report.figure import Figure
from lastlayer.lab.report.references import REFERENCES
from lastlayer.lab.results import Results
from lastlayer.lab.verdict import Verdict, budget_text, full_softmax

_HERE = "lastlayer.lab.report"
# Of the smoothed perplexity, where the comparison did not say.
_EPSILON = 1e-4


def render(results: Results, verdict: Verdict, figures: tuple[Figure, ...]) -> str:
    """The HTML of the page."""
    environment = Environment(
        loader=PackageLoader(_HERE, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    code, library = _asset("report.js"), vega.bundle()
    names = [head.title for head in results.comparison.heads]
    charts = Charts(names)
    chosen = tables.columns(results)
    contexts = explorer.contexts(results)
    embedded = {
        "heads": names,
        "config": theme.chart_config(),
        "charts": {
            figure.key: {view.key: vega.compiled(view.chart(charts)) for view in figure.views}
            for figure in figures
        },
        "contexts": contexts,
        "csv": tables.comma_separated(results),
        "name": str(results.comparison.data.get("name", "comparison")),
    }
    asked = results.comparison
    return environment.get_template("report.html.j2").render(
        name=embedded["name"],
        results=results,
        asked=asked,
        verdict=verdict,
        budget=budget_text(results),
        tiles=_tiles(results, verdict),
        figures={figure.key: figure for figure in figures},
        heads=[_mark(i, name) for i, name in enumerate(names)],
        position={name: i for i, name in enumerate(names)},
        columns=chosen,
        rows=[
            (summary, [tables.cell(column, summary, results) for column in chosen])
            for summary in results.summaries
        ],
        runs_text=tables.runs_text,
        baseline=tables.baseline(results, chosen),
        note=tables.note(results, "in small"),
        failures=[run for run in asked.runs if not run.finished and run.status != "not started"],
        left_out=left_out(results),
        contexts=contexts,
        settings=_settings(results),
        command=shlex.join(asked.command),
        epsilon=plain(asked.settings.get("epsilon", _EPSILON)),
        references=_references(results),
        exchanges=theme.exchanges(),
        colours=list(zip(theme.LIGHT_COLOURS, theme.DARK_COLOURS, strict=True)),
        light=theme.LIGHT_INK,
        dark=theme.DARK_INK,
        css=_asset("report.css"),
        code=code,
        library=library,
        policy=content_policy([library, code]),
        embedded=json_for_script(jsonable(embedded)),
        everything=json_for_script(everything(results, verdict)),
    )


def _asset(name: str) -> str:
    return files(_HERE).joinpath("templates", name).read_text(encoding="utf-8")


def _mark(position: int, name: str) -> dict[str, Any]:
    """What the legend draws of a head."""
    dashes = theme.dash(position)
    return {
        "name": name,
        "colour": theme.colour_index(position),
        "path": theme.SHAPE_PATHS[position % len(theme.SHAPES)],
        "dash": "" if dashes == (1, 0) else " ".join(str(d) for d in dashes),
    }


def _tiles(results: Results, verdict: Verdict) -> list[dict[str, str]]:
    """The recommended head in a few numbers, beside those of the full softmax."""
    if verdict.recommended is None:
        return []
    best, full = verdict.recommended, full_softmax(results)
    made = []
    shown = (results.metric, metrics.STEP_MS, metrics.SECONDS, metrics.STEPS, metrics.EPOCHS,
             metrics.MEMORY)  # fmt: skip
    for metric in shown:
        value = best.mean(metric.key)
        if value is None:
            continue
        other = None if full is None or full is best else full.mean(metric.key)
        made.append({
            "label": metric.label,
            "value": metric.format(value),
            "beside": "" if other is None else f"full softmax: {metric.format(other)}",
        })  # fmt: skip
    return made


def _settings(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """Everything that was recorded of the comparison, in groups."""
    asked = results.comparison
    groups: list[tuple[str, Mapping[str, Any]]] = [
        ("Data", asked.data),
        ("Model", asked.model),
        (
            "Training",
            {"budget": budget_text(results), "seeds": list(asked.seeds), **asked.settings},
        ),
        ("Machine", asked.device),
        ("Versions", {**asked.versions, "git": _short_commit(asked.git)}),
    ]
    return [
        (name, [(key, plain(value)) for key, value in flat(group).items()])
        for name, group in groups
        if group
    ]


def _short_commit(commit: str | None) -> str | None:
    """Its first twelve digits, and the sign that there were changes."""
    return commit if commit is None else commit[:12] + ("+" if commit.endswith("+") else "")


def _references(results: Results) -> list[tuple[str, Any]]:
    """The papers of the heads that were compared, each family once."""
    families = dict.fromkeys(head.family for head in results.comparison.heads)
    by_family = {head.family: head for head in reversed(results.comparison.heads)}
    return [
        (by_family[family].title.split(" (")[0], REFERENCES[family])
        for family in families
        if family in REFERENCES
    ]
