"""The lab on real data, trained to convergence: ``python -m benchmarks study NAME DATA``.

A comparison can be stopped with Ctrl-C and resumed by the same command. Its settings, results and
curves are saved as a JSON file, from which the page of the docs is generated; remarks are in a
Markdown file of the same name.
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
# Columns of the page by task, if they were measured; times are shown only for an idle machine.
_COLUMNS = {
    "lm": ("perplexity", "eps_perplexity", "top1", "top10", "calibration_error"),
    "classification": ("top1", "top5", "macro_f1", "perplexity", "coverage", "calibration_error"),
    "multilabel": (
        "micro_f1", "mean_average_precision", "native_micro_f1", "precision_at_1", "precision_at_5"
    ),
}  # fmt: skip
_OF_ALL, _TIMES = ("gain", "lr"), ("step_ms",)
# A head has converged if it gained no more than this over the last quarter of the steps.
_CONVERGED = 0.01

_OPENING = """\
# Study: the heads on real data

The lab trained every head on real data with three seeds, until validation had almost stopped
improving; each part says whether the runs converged. Backbone, batches and number of steps are the
same for all heads. The learning rate of each head is the best on validation data in short runs.
Test results are those of the best checkpoint on validation data. Means over seeds have 95%
confidence intervals in parentheses. All parts but the first are small enough for a CPU.
"""
_AGAIN = """\
## How to run it again

```bash
python -m benchmarks study NAME DATA --out FOLDER
python -m benchmarks page    # generates this page from the saved results
```

`NAME` is `wikitext2`, `wikitext2-part`, `cooking-first-tag`, `cooking` or `start`. Stop it with
Ctrl-C and run the same command to resume. `DATA` is a folder with `wikitext2/` (the train, valid
and test files of WikiText-2), `cooking.txt` (the questions of fastText's tutorial, one per line
after their `__label__` tags) and `cooking-first-tag.txt` (the same with only the first tag of each
line). Settings, results and curves are saved in `benchmarks/results/study`.
"""


@dataclass(frozen=True)
class Study:
    """A data set, and the options of its comparison.

    Attributes:
        data: path in the folder of the data sets.
        title: title of its section of the page.
        about: description of the data on the page.
        options: options of ``lastlayer compare``.
    """

    data: str
    title: str
    about: str
    options: CompareOptions


class ColdSoftmax(FullSoftmax):
    """A full softmax with random initial biases, to measure the effect of class frequencies."""

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
        "cooking-first-tag.txt", "Classification: the first tag of a question",
        "15,404 titles of questions about cooking; the class is the first tag (533 classes).",
        CompareOptions(heads=_NORMALISED, task="classification", budget="10epochs")),
    "cooking": Study(
        "cooking.txt", "Multi-label: all tags of the same questions",
        "736 tags, 2.3 per title on average.",
        CompareOptions(heads=_LABELS, task="multilabel", budget="20epochs")),
    "start": Study(
        "wikitext2", "Initialising biases to the class frequencies",
        "A language model on the first 200,000 tokens of WikiText-2 with its 8,000 most frequent "
        "words. The lab initialises the biases of all heads to the class frequencies; "
        "`ColdSoftmax` is the full softmax with random biases.",
        CompareOptions(
            heads=("full", "benchmarks.study:ColdSoftmax"), task="lm", budget="6epochs", batch=16,
            length=32, width=64, vocab_size=8_000, limit=200_000)),
}  # fmt: skip


def run(data: Path, name: str, out: Path, kept: Path) -> bool:
    """Runs a comparison, or resumes it, and saves its results.

    Args:
        data: the folder of the data sets.
        name: name of the study.
        out: the folder of the comparison.
        kept: the folder of the JSON files.

    Returns:
        Whether all runs are finished.
    """
    torch.set_float32_matmul_precision("high")
    study = STUDIES[name]
    options = replace(study.options, data=str(data / study.data))
    made = comparison.compare(
        options, out, resume=(out / "compare.json").is_file(), console=Console(),
    )  # fmt: skip
    text = json.dumps(pack(out)).replace(str(data), "DATA")
    (kept / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return not made.interrupted


def pack(folder: Path) -> dict[str, Any]:
    """The contents of a folder of the lab, without models, examples and training losses.

    Add ``"disturbed": true`` if other programs used the GPU, which the lab does not notice.
    """

    def read(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8"))

    compared = read(folder / "compare.json")
    runs = {}
    for path in sorted((folder / "runs").glob("*/result.json")):
        result = {k: each for k, each in read(path).items() if k not in ("explorer", "traceback")}
        curve = path.parent / "metrics.jsonl"
        # A run that was stopped immediately has no curve.
        lines = curve.read_text(encoding="utf-8").splitlines() if curve.is_file() else []
        points = [point for each in lines if (point := json.loads(each))["kind"] == "valid"]
        runs[path.parent.name] = {"result": result, "metrics": points}
    rates = folder / "rates.json"
    return {"compare": compared, "rates": read(rates) if rates.is_file() else {}, "runs": runs}


def unpack(kept: dict[str, Any], folder: Path) -> None:
    """Restores the files of the folder that the lab's reports read."""
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
    """Writes docs/study.md and its figures from the saved files; returns the written paths."""
    parts, written = [_OPENING], []
    for name, study in STUDIES.items():
        path = kept / f"{name}.json"
        if not path.is_file():
            continue
        saved = json.loads(path.read_text(encoding="utf-8"))
        with TemporaryDirectory() as place:
            unpack(saved, Path(place))
            results = read_results(Path(place))
        picture = docs / "pictures" / f"study-{name}.png"
        _draw(results, picture)
        busy = saved.get("disturbed", False)
        parts += _section(study, results, picture.name, busy=busy)
        remarks = kept / f"{name}.md"
        if remarks.is_file():
            parts.append(remarks.read_text(encoding="utf-8"))
        written.append(picture)
    page = docs / "study.md"
    page.write_text("\n".join([*parts, _AGAIN]), encoding="utf-8")
    return [*written, page]


def _section(study: Study, results: Results, picture: str, *, busy: bool) -> list[str]:
    """The section of one comparison: its setup, convergence and findings.

    Times are left out if the machine was ``busy``, or if the lab noticed that it was.
    """
    from lastlayer.lab.report import tables

    asked, metric = results.comparison, results.metric
    device, model = asked.device, asked.model
    busy = busy or any(each.disturbed for each in results.summaries)
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
        *(["Times are left out: other programs ran on the machine at the same time.\n"] * busy),
    ]  # fmt: skip


def _lead(results: Results) -> str:
    """A table of the validation perplexity of two heads by step, and the lead of the better one."""
    metric, (one, other) = results.metric, results.ranked
    rows = [["steps", one.title, other.title, "lead"], ["--:"] * 4]
    for step in (point.step for point in one.finished[0].valid):
        ours, theirs = (_validated(each, metric, step) for each in (one, other))
        shown = [metric.format(each) for each in (ours, theirs)]
        rows.append([f"{step:,}", *shown, f"{theirs / ours - 1:.0%}"])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _validated(summary: HeadSummary, metric: Metric, step: int) -> float:
    """The mean over seeds after ``step`` steps."""
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
    """A sentence on whether the runs have converged."""
    runs = [run for each in results.summaries for run in each.finished]
    early = sum(run.numbers["best_step"] < run.numbers["steps"] for run in runs)
    told = f"{early} of {len(runs)} runs were best on validation data before their last step"
    rising = [s for s in results.ranked if (s.gain or 0.0) > _CONVERGED]
    if rising:
        listed = joined(f"{in_sentence(s)} ({s.gain:.1%})" for s in rising)
        return f"Not all converged: {told}; over the last quarter of the steps {listed} gained."
    most = f"{_CONVERGED:.0%} over the last quarter of the steps"
    return f"Converged: {told}, and no head gained more than {most}."
