"""The page: one HTML file with everything in it."""

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lastlayer.lab import metrics
from lastlayer.lab.families import REFERENCES
from lastlayer.lab.metrics import Metric
from lastlayer.lab.records import read_rates
from lastlayer.lab.report import explorer, look, tables
from lastlayer.lab.report.charts import Charts
from lastlayer.lab.report.figures import Figure, left_out
from lastlayer.lab.results import HeadSummary, Results
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
    code, library = _asset("report.js"), look.bundle()
    looks = look.looks(results.comparison.heads)
    names = [each.name for each in looks]
    charts = Charts(looks)
    chosen = tables.columns(results)
    contexts = explorer.contexts(results)
    embedded = {
        "heads": names,
        "config": look.chart_config(),
        "charts": {
            figure.key: {view.key: look.compiled(view.chart(charts)) for view in figure.views}
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
        heads=[_mark(each) for each in looks],
        position={name: i for i, name in enumerate(names)},
        columns=chosen,
        rows=[
            (summary, [tables.cell(column, summary, results) for column in chosen])
            for summary in results.summaries
        ],
        runs_text=tables.runs_text,
        baseline=tables.baseline(results, chosen),
        note=tables.note(results, "in small type"),
        failures=[run for run in asked.runs if not run.finished and run.status != "not started"],
        left_out=left_out(results),
        rates=_rates(results),
        contexts=contexts,
        settings=_settings(results),
        command=shlex.join(asked.command),
        epsilon=tables.plain(asked.settings.get("epsilon", _EPSILON)),
        references=_references(results),
        exchanges=look.exchanges(),
        colours=list(zip(look.LIGHT_COLOURS, look.DARK_COLOURS, strict=True)),
        light=look.LIGHT_INK,
        dark=look.DARK_INK,
        css=_asset("report.css"),
        code=code,
        library=library,
        policy=content_policy([library, code]),
        embedded=json_for_script(jsonable(embedded)),
        everything=json_for_script(everything(results, verdict)),
    )


def _asset(name: str) -> str:
    return files(_HERE).joinpath("templates", name).read_text(encoding="utf-8")


def _mark(head: look.Look) -> dict[str, Any]:
    """What the legend draws of a head."""
    return {
        "name": head.name,
        "colour": head.colour,
        "path": look.SHAPE_PATHS[head.shape],
        "dash": "" if head.dash == (1, 0) else " ".join(str(d) for d in head.dash),
    }


def _tiles(results: Results, verdict: Verdict) -> list[dict[str, Any]]:
    """The recommended head in a few numbers, beside the runner-up and the full softmax."""
    chosen, full = verdict.recommended, full_softmax(results)
    if chosen is None:
        return []
    others = [("runner-up", verdict.runner_up)]
    if full is not None and full not in (chosen, verdict.runner_up):
        others.append(("full softmax", full))
    shown: list[tuple[Metric, str]] = [
        (results.metric, "on test data, with the best model by validation"),
        (metrics.STEP_MS, "median of the training steps"),
        (metrics.SECONDS, "training alone, without warm-up and evaluation"),
        (metrics.STEPS, "the same for every head"),
        (metrics.MEMORY, "peak while it was trained"),
    ]
    made = []
    for metric, help_ in shown:
        value = chosen.mean(metric.key)
        if value is None:
            continue
        if metric is metrics.STEPS:
            epochs = chosen.mean(metrics.EPOCHS.key)
            beside = [] if epochs is None else [f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"]
            beside.append("equal for all heads")
        else:
            beside = [
                f"{name}: {metric.format(other)}"
                for name, head in others
                if head is not None and (other := head.mean(metric.key)) is not None
            ]
        text = f"{value:,.0f}" if metric is metrics.STEPS else metric.format(value)
        made.append({"label": metric.label, "value": text, "beside": beside, "help": help_})
    return made


def _rates(results: Results) -> list[dict[str, Any]]:
    """Heads with the learning rates that were tried for them."""
    found = read_rates(results.comparison.folder)
    made = []
    for head in results.comparison.heads:
        entry = found.get(head.slug) or {}
        tried = [each for each in entry.get("tried") or () if isinstance(each, Mapping)]
        if tried:
            made.append({
                "head": head.title, "steps": entry.get("steps"),
                "tried": [
                    {"lr": tables.plain(each.get("lr")), "taken": each.get("lr") == entry.get("lr"),
                     "score": _score(each.get("score"))}
                    for each in tried
                ],
            })  # fmt: skip
    return made


def _score(value: Any) -> str:
    return metrics.three_digits(value) if isinstance(value, int | float) else "not finite"


def _settings(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """Everything that was recorded of the comparison, in groups."""
    asked = results.comparison
    groups: list[tuple[str, Mapping[str, Any]]] = [
        ("Data", asked.data),
        ("Backbone", asked.model),
        (
            "Training",
            {"budget": budget_text(results), "seeds": list(asked.seeds), **asked.settings},
        ),
        ("Machine", asked.device),
        ("Versions", {**asked.versions, "git": _short_commit(asked.git)}),
    ]
    return [
        (
            name,
            [(tables.named(key), tables.plain(value)) for key, value in tables.flat(group).items()],
        )
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


def everything(results: Results, verdict: Verdict) -> dict[str, Any]:
    """What was asked, what each run gave, and what the page makes of it."""
    asked = results.comparison
    made: dict[str, Any] = jsonable({
        "schema": 1,
        "verdict": verdict.sentence,
        "findings": list(verdict.findings),
        "notes": list(verdict.notes),
        "recommended": _title(verdict.recommended),
        "runner_up": _title(verdict.runner_up),
        "steps_needed": verdict.needed,
        "baseline": asked.baseline,
        "ranked_by": results.metric.key,
        "equal_seconds": results.equal_seconds,
        "equal_steps": results.equal_steps,
        "command": list(asked.command),
        "created": asked.created,
        "data": asked.data,
        "model": asked.model,
        "budget": asked.budget,
        "settings": asked.settings,
        "device": asked.device,
        "versions": asked.versions,
        "git": asked.git,
        "seeds": list(asked.seeds),
        "heads": [
            {
                "rank": s.rank, "head": s.title, "spec": s.head.spec, "family": s.head.family,
                "status": s.status, "gain": s.gain,
                "means": {key: asdict(found) for key, found in s.estimates.items()},
                "at_equal_time": None if s.at_equal_seconds is None else asdict(s.at_equal_seconds),
                "at_equal_steps": None if s.at_equal_steps is None else asdict(s.at_equal_steps),
            }
            for s in results.summaries
        ],
        "runs": [
            {
                "head": run.head.title, "seed": run.seed, "status": run.status,
                "reason": run.reason, **run.numbers, "test": run.test,
                "by_decile": run.by_decile, "calibration": run.calibration,
                "valid": [point.values for point in run.valid],
            }
            for run in asked.runs
        ],
        "costs": None if results.costs is None else asdict(results.costs),
    })  # fmt: skip
    return made


def _title(summary: HeadSummary | None) -> str | None:
    return None if summary is None else summary.title


def jsonable(value: Any) -> Any:
    """The same value as JSON can hold it: no NaN, no infinity, no other types."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)


# Inside <script> only these could end it, open a comment, or end a line of older JavaScript.
_ESCAPES = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def json_for_script(value: Any) -> Markup:
    r"""JSON for a ``<script type="application/json">``, the same value and without any markup.

    Example:
        >>> print(json_for_script({"token": "</script>"}))
        {"token":"\u003c/script\u003e"}
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A lone surrogate is no text: a file could not be written with it.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return Markup(text.translate(_ESCAPES))


def script_hash(code: str) -> str:
    """What a content security policy knows an inline script by."""
    digest = hashlib.sha256(code.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def content_policy(scripts: list[str]) -> str:
    """Only these scripts run, and nothing is ever fetched."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(script_hash(code) for code in scripts)}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
