"""The lab on real data until it has converged: ``python -m benchmarks study NAME DATA``.

A comparison can take several sittings: stop it with Ctrl-C and call it again. What is kept of one
is a JSON file of its settings, results and curves, from which the page of the docs is made;
remarks about it are in a Markdown file beside it.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from lastlayer.heads import FullSoftmax
from lastlayer.lab import comparison
from lastlayer.lab.metrics import Metric
from lastlayer.lab.options import CompareOptions
from lastlayer.lab.results import HeadSummary, Results, quality_of, read_results
from lastlayer.lab.statistics import estimate
from lastlayer.lab.verdict import budget_text, in_sentence, joined, verdict

_NORMALISED = (
    "full", "adaptive", "hierarchical:tree=two_level", "hierarchical:tree=huffman", "sampled",
    "nce", "importance", "negative", "differentiated", "self_normalized", "char_cnn", "topk",
    "entmax", "sparsemax", "adaptive_importance",
)  # fmt: skip
_LABELS = ("zlpr", "bce", "asymmetric", "sparsemax_labels")
# Columns of the page, by task, as far as they were measured; times only from an idle machine.
_COLUMNS = {
    "lm": ("perplexity", "eps_perplexity", "top1", "top10", "calibration_error"),
    "classification": ("top1", "top5", "macro_f1", "perplexity", "coverage", "calibration_error"),
    "multilabel": (
        "micro_f1", "mean_average_precision", "native_micro_f1", "precision_at_1", "precision_at_5"
    ),
}  # fmt: skip
_OF_ALL, _TIMES = ("gain", "lr"), ("step_ms",)
# A gain over the last quarter of the steps that counts as none.
_CONVERGED = 0.01

_OPENING = """\
# Study: the heads on real data

The lab trained every head on real data until validation no longer improved, or hardly (each part
says how far it came), with three seeds. Everything but the head is the same: backbone, batches,
number of steps. Each head has the learning rate that was best on validation data in short runs, and
is judged on test data with its best model by validation. Means over seeds have 95% confidence
intervals in parentheses. All parts but the first are small enough for a CPU.
"""
_AGAIN = """\
## How to run it again

```bash
python -m benchmarks study NAME DATA --out FOLDER
python -m benchmarks page    # makes this page from what was kept
```

`NAME` is `wikitext2`, `wikitext2-part`, `cooking-first-tag`, `cooking` or `start`. Stop it with
Ctrl-C and start it again: it goes on where it was. `DATA` is a folder with
`wikitext2/` (the train, valid and test files of WikiText-2), `cooking.txt` (the questions of
fastText's tutorial, one per line after their `__label__` tags) and `cooking-first-tag.txt` (the
same with the first tag of each line alone). Settings, results and curves are kept in
`benchmarks/results/study`.
"""
_NOT_YET = """\
All heads on WikiText-2 with its 33,278 words need a GPU. One command makes the comparison
(`python -m benchmarks study wikitext2 DATA --out FOLDER`), but it has not been run yet.
"""


@dataclass(frozen=True)
class Study:
    """A data set, and how it is learned.

    Attributes:
        data: below the folder of the data sets.
        title: of its part of the page.
        about: what the page says of the data.
        options: of ``lastlayer compare``.
    """

    data: str
    title: str
    about: str
    options: CompareOptions


class ColdSoftmax(FullSoftmax):
    """Starts at random biases, to see what the class frequencies are worth."""

    def init_bias_from_counts(self, _counts: Any) -> None:
        raise NotImplementedError("starts at random biases on purpose")


STUDIES = {
    "wikitext2": Study(
        "wikitext2", "A language model: WikiText-2", "33,278 words, two million tokens.",
        CompareOptions(
            heads=_NORMALISED, task="lm", budget="6epochs", batch=256, length=32, width=128)),
    "wikitext2-part": Study(
        "wikitext2", "A language model: a part of WikiText-2",
        "The first 300,000 tokens of WikiText-2 with its 10,000 most frequent words.",
        CompareOptions(
            heads=_NORMALISED, task="lm", budget="4epochs", batch=16, length=32, width=64,
            vocab_size=10_000, limit=300_000, threads=1)),
    "cooking-first-tag": Study(
        "cooking-first-tag.txt", "One class of many: the first tag of a question",
        "15,404 titles of questions about cooking; the class is the first tag, one of 533.",
        CompareOptions(heads=_NORMALISED, task="classification", budget="10epochs")),
    "cooking": Study(
        "cooking.txt", "Several labels: all tags of the same questions",
        "736 tags, 2.3 for each title.",
        CompareOptions(heads=_LABELS, task="multilabel", budget="20epochs")),
    "start": Study(
        "wikitext2", "What a start at the class frequencies is worth",
        "A language model on the first 200,000 tokens of WikiText-2 with its 8,000 most frequent "
        "words. The lab starts the biases of all heads at the class frequencies; `ColdSoftmax` is "
        "the full softmax with random biases.",
        CompareOptions(
            heads=("full", "benchmarks.study:ColdSoftmax"), task="lm", budget="6epochs", batch=16,
            length=32, width=64, vocab_size=8_000, limit=200_000)),
}  # fmt: skip


def run(data: Path, name: str, out: Path, kept: Path) -> bool:
    """Makes the runs that are not there yet, one after the other, and keeps what they gave.

    Args:
        data: the folder of the data sets.
        name: of the study.
        out: the folder of the comparison, which is gone on with.
        kept: the folder of the JSON files.

    Returns:
        Whether all runs are there.
    """
    torch.set_float32_matmul_precision("high")
    study = STUDIES[name]
    options = replace(study.options, data=str(data / study.data))
    made = comparison.compare(
        options, out, resume=(out / "compare.json").is_file(), quiet=False, console=Console(),
    )  # fmt: skip
    text = json.dumps(pack(out)).replace(str(data), "DATA")
    (kept / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return not made.interrupted


def pack(folder: Path) -> dict[str, Any]:
    """What a folder of the lab says, without its models, examples and training losses."""

    def read(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8"))

    compared = read(folder / "compare.json")
    runs = {}
    for path in sorted((folder / "runs").glob("*/result.json")):
        result = {k: each for k, each in read(path).items() if k not in ("explorer", "traceback")}
        curve = path.parent / "metrics.jsonl"
        # A run that was stopped at once has none.
        lines = curve.read_text(encoding="utf-8").splitlines() if curve.is_file() else []
        points = [point for each in lines if (point := json.loads(each))["kind"] == "valid"]
        runs[path.parent.name] = {"result": result, "metrics": points}
    rates = folder / "rates.json"
    return {"compare": compared, "rates": read(rates) if rates.is_file() else {}, "runs": runs}


def unpack(kept: dict[str, Any], folder: Path) -> None:
    """The folder again, as far as the lab's reports read it."""
    files: dict[str, Any] = {"compare.json": kept["compare"], "rates.json": kept["rates"]}
    for name, made in kept["runs"].items():
        files[f"runs/{name}/config.json"] = {**kept["compare"], **made["result"]}
        files[f"runs/{name}/result.json"] = {**made["result"], "explorer": []}
        files[f"runs/{name}/metrics.jsonl"] = made["metrics"]
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = value if name.endswith("l") else [value]
        path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")


def write_page(kept: Path, docs: Path) -> list[Path]:
    """docs/study.md and its pictures, from the files that :func:`run` kept; what was written."""
    parts, written = [_OPENING], []
    for name, study in STUDIES.items():
        path = kept / f"{name}.json"
        if not path.is_file():
            parts += [f"## {study.title}\n", _NOT_YET] if name == "wikitext2" else []
            continue
        with TemporaryDirectory() as place:
            unpack(json.loads(path.read_text(encoding="utf-8")), Path(place))
            results = read_results(Path(place))
        picture = docs / "pictures" / f"study-{name}.png"
        _draw(results, picture)
        parts += _section(study, results, picture.name)
        remarks = kept / f"{name}.md"
        if remarks.is_file():
            parts.append(remarks.read_text(encoding="utf-8"))
        written.append(picture)
    page = docs / "study.md"
    page.write_text("\n".join([*parts, _AGAIN]), encoding="utf-8")
    return [*written, page]


def _section(study: Study, results: Results, picture: str) -> list[str]:
    """One comparison: what was run, how far it came, what was found."""
    from lastlayer.lab.report import tables

    asked, metric = results.comparison, results.metric
    device, model = asked.device, asked.model
    busy = any(each.disturbed for each in results.summaries)
    wanted = (*_COLUMNS[asked.task], *_OF_ALL, *(() if busy else _TIMES))
    known = {each.key: each for each in tables.columns(results)}
    columns = [known[key] for key in wanted if key in known]
    findings = verdict(results).findings
    run = (
        f"{study.about} Backbone: {model['kind']}, hidden size {model['width']}; "
        f"{budget_text(results)} of {asked.settings['batch']:,} targets; {device['name']}, torch "
        f"{asked.versions['torch']}."
    )
    caption = f"Validation {metric.label} over steps, means and 95% confidence intervals of 3 seeds"
    return [
        f"## {study.title}\n", run + "\n", f"![{caption}](pictures/{picture})\n",
        " ".join([_maturity(results), *(findings[:1] if busy else findings)]) + "\n",
        *([_lead(results)] if len(results.ranked) == 2 and metric.log else []),
        tables.markdown_table(results, columns),
        *(["Other programs ran on the machine meanwhile, so that times are left out.\n"] * busy),
    ]  # fmt: skip


def _lead(results: Results) -> str:
    """Validation perplexity of two heads along the way, and how far the better one is ahead."""
    metric, (one, other) = results.metric, results.ranked
    rows = [["steps", one.title, other.title, "lead"], ["--:"] * 4]
    for step in (point.step for point in one.finished[0].valid):
        ours, theirs = (_validated(each, metric, step) for each in (one, other))
        shown = [metric.format(each) for each in (ours, theirs)]
        rows.append([f"{step:,}", *shown, f"{theirs / ours - 1:.0%}"])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _validated(summary: HeadSummary, metric: Metric, step: int) -> float:
    """The mean over seeds after so many steps."""
    points = [point for run in summary.finished for point in run.valid if point.step == step]
    found = estimate([quality_of(each, metric) or 0.0 for each in points], log=metric.log)
    if found is None:
        raise ValueError(f"step: expected one with validations of {summary.title}, got {step}")
    return found.mean


def _draw(results: Results, path: Path) -> None:
    """The learning curves over steps."""
    from lastlayer.lab.report import figures, look

    (view,) = (each for each in figures.curves(results) if each.key == "steps")
    chart = view.chart(look.looks(results.comparison.heads), in_page=False)
    look.write_picture(chart, path.with_suffix(""), title="", subtitle="")
    path.with_suffix(".svg").unlink()


def _maturity(results: Results) -> str:
    """Whether the runs have converged."""
    runs = [run for each in results.summaries for run in each.finished]
    early = sum(run.numbers["best_step"] < run.numbers["steps"] for run in runs)
    told = f"{early} of {len(runs)} runs were best on validation data before their last step"
    rising = [s for s in results.ranked if (s.gain or 0.0) > _CONVERGED]
    if rising:
        listed = joined(f"{in_sentence(s)} ({s.gain:.1%})" for s in rising)
        return f"Not all converged: {told}; over the last quarter of the steps {listed} gained."
    most = f"{_CONVERGED:.0%} over the last quarter of the steps"
    return f"Converged: {told}, and no head gained more than {most}."
