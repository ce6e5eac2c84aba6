"""The page: one HTML file with everything in it."""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from lastlayer.lab import metrics
from lastlayer.lab.records import finite, read_rates
from lastlayer.lab.report import explorer, look, tables
from lastlayer.lab.report.figures import Figure, first_capital, left_out
from lastlayer.lab.results import Results
from lastlayer.lab.verdict import Verdict, budget_text

_HERE = "lastlayer.lab.report"
# Default of the smoothed perplexity, if the comparison did not record it.
_EPSILON = 1e-4
# Parts of a sentence that are not broken across lines.
_WHOLE = re.compile(r"--[a-z]+ \w+|\d[\d.,]*%?–\d[\d.,]*%?|ε-\w+")
# Characters that could end a <script>, open a comment, or end a line in older JavaScript.
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def render(results: Results, verdict: Verdict, figures: tuple[Figure, ...]) -> str:
    """The HTML of the page."""
    environment = Environment(
        loader=PackageLoader(_HERE, "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["unbroken"] = unbroken
    code, library = _asset("report.js"), look.bundle()
    asked, looks = results.comparison, look.looks(results.comparison.heads)
    chosen, contexts = tables.columns(results), explorer.contexts(results)
    name = str(asked.data.get("name", "comparison"))
    embedded = {
        "heads": [each.name for each in looks],
        "config": look.chart_config(),
        "charts": {
            figure.key: {view.key: look.compiled(view.chart(looks)) for view in figure.views}
            for figure in figures
        },
        "contexts": contexts,
        "csv": tables.comma_separated(results),
        "name": name,
    }
    return environment.get_template("report.html.j2").render(
        name=name,
        results=results,
        asked=asked,
        verdict=verdict,
        budget=budget_text(results),
        quality=first_capital(results.metric.label),
        seconds=metrics.seconds,
        tiles=_tiles(results, verdict),
        figures={figure.key: figure for figure in figures},
        heads={each.name: _mark(each) for each in looks},
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
        embedded=json_for_script(finite(embedded)),
        everything=json_for_script(everything(results, verdict)),
    )


def unbroken(text: str) -> Markup:
    """Escape a text, and keep its options, ranges of numbers and ``ε-smoothed`` on one line.

    Example:
        >>> print(unbroken("repeat with --budget 900steps"))
        repeat with <span class="whole">--budget 900steps</span>
    """
    return Markup(_WHOLE.sub(r'<span class="whole">\g<0></span>', str(escape(text))))


def _asset(name: str) -> str:
    return files(_HERE).joinpath("templates", name).read_text(encoding="utf-8")


def _mark(head: look.Look) -> dict[str, Any]:
    """The symbol of a head in the legend."""
    dash = "" if head.dash == (1, 0) else " ".join(map(str, head.dash))
    path = look.SHAPE_PATHS[look.SHAPES[head.shape]]
    return {"colour": head.colour, "path": path, "dash": dash}


def _tiles(results: Results, verdict: Verdict) -> list[dict[str, Any]]:
    """Main metrics of the recommended head, with those of the runner-up and the full softmax."""
    chosen = verdict.recommended
    full = next((s for s in results.ranked if s.head.family == "full"), None)
    if chosen is None:
        return []
    best = verdict.runner_up is verdict.best
    others = {"best in quality" if best else "runner-up": verdict.runner_up}
    if full not in (chosen, verdict.runner_up):
        others["full softmax"] = full
    shown = (
        (results.metric, "on test data, with the best model by validation"),
        (metrics.STEP_MS, "median of the training steps"),
        (metrics.SECONDS, "training alone, without warm-up and evaluation"),
        (metrics.STEPS, "the same for every head"),
        (metrics.MEMORY, "peak while it was trained"),
    )
    made = []
    for metric, help_ in shown:
        value = chosen.mean(metric.key)
        if value is None:
            continue
        text, beside = metric.format(value), []
        for name, head in others.items():
            if head is not None and (other := head.mean(metric.key)) is not None:
                # Keep a number and its unit on one line.
                number = metric.format(other).replace(" ", "\N{NO-BREAK SPACE}")
                beside.append(f"{name}: {number}")
        if metric is metrics.STEPS:
            epochs = chosen.mean(metrics.EPOCHS.key)
            passes = [] if epochs is None else [f"{epochs:.3g} epoch{'' if epochs == 1 else 's'}"]
            text, beside = f"{value:,.0f}", [*passes, "equal for all heads"]
        made.append({"label": metric.label, "value": text, "beside": beside, "help": help_})
    return made


def _rates(results: Results) -> list[dict[str, Any]]:
    """The learning rates that were tried for each head."""
    found = read_rates(results.comparison.folder)
    made = []
    for head in results.comparison.heads:
        entry = found.get(head.slug) or {}
        tried = [each for each in entry.get("tried") or () if isinstance(each, Mapping)]
        if tried:
            rates = [
                {"lr": tables.plain(each.get("lr")), "taken": each.get("lr") == entry.get("lr"),
                 "score": _score(each.get("score"))}
                for each in tried
            ]  # fmt: skip
            made.append({"head": head.title, "steps": entry.get("steps"), "tried": rates})
    return made


def _score(value: Any) -> str:
    return metrics.three_digits(value) if isinstance(value, int | float) else "not finite"


def _settings(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """All recorded settings of the comparison, in groups."""
    asked = results.comparison
    # The commit's first twelve digits, and + if there were uncommitted changes.
    commit = asked.git and asked.git[:12] + "+" * asked.git.endswith("+")
    budget = {"budget": budget_text(results), "seeds": list(asked.seeds)}
    groups: dict[str, Mapping[str, Any]] = {
        "Data": asked.data,
        "Backbone": asked.model,
        "Training": {**budget, **asked.settings},
        "Machine": asked.device,
        "Versions": {**asked.versions, "git": commit},
    }
    return [
        (name, [(tables.named(k), tables.plain(v)) for k, v in tables.flat(group).items()])
        for name, group in groups.items()
        if group
    ]


def _references(results: Results) -> list[tuple[str, Any]]:
    """The papers of the compared heads, once per family."""
    titles: dict[str, str] = {}
    for head in results.comparison.heads:
        titles.setdefault(head.family, head.title.split(" (")[0])
    papers = references()
    return [(title, papers[each]) for each, title in titles.items() if each in papers]


def references() -> dict[str, list[dict[str, str]]]:
    """Papers by family: text and link, if any."""
    held: dict[str, list[dict[str, str]]] = json.loads(_asset("references.json"))
    return held


def everything(results: Results, verdict: Verdict) -> dict[str, Any]:
    """Settings, results of all runs and the summary, as JSON values."""
    asked, chosen, second = results.comparison, verdict.recommended, verdict.runner_up
    made: dict[str, Any] = finite({
        "schema": 1,
        "verdict": verdict.sentence,
        "findings": verdict.findings,
        "notes": verdict.notes,
        "recommended": chosen and chosen.title,
        "runner_up": second and second.title,
        "steps_needed": verdict.needed,
        "ranked_by": results.metric.key,
        "equal_seconds": results.equal_seconds,
        "equal_steps": results.equal_steps,
        **{k: v for k, v in vars(asked).items() if k not in ("folder", "heads", "runs")},
        "heads": [
            {
                "rank": s.rank, "head": s.title, "spec": s.head.spec, "family": s.head.family,
                "status": s.status, "gain": s.gain,
                "means": {key: asdict(found) for key, found in s.estimates.items()},
                "at_equal_time": s.at_equal_seconds and asdict(s.at_equal_seconds),
                "at_equal_steps": s.at_equal_steps and asdict(s.at_equal_steps),
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
        "costs": results.costs and asdict(results.costs),
    })  # fmt: skip
    return made


def json_for_script(value: Any) -> Markup:
    r"""JSON for a ``<script type="application/json">``, with markup characters escaped.

    Example:
        >>> print(json_for_script({"token": "</script>"}))
        {"token":"\u003c/script\u003e"}
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # UTF-8 does not support lone surrogates.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return Markup(text.translate(_ESCAPES))


def content_policy(scripts: list[str]) -> str:
    """A content security policy that allows only these scripts, and no requests."""
    digests = (hashlib.sha256(code.encode("utf-8")).digest() for code in scripts)
    known = " ".join(f"'sha256-{base64.b64encode(each).decode('ascii')}'" for each in digests)
    return (
        f"default-src 'none'; script-src {known}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
