"""The lab on real data until it has converged: ``python -m benchmarks study DATA``.

A comparison can take several sittings: stop it with Ctrl-C and call it again. What is kept of one
is a JSON file of its settings, results and curves, from which the page of the docs is made.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from lastlayer.lab import comparison
from lastlayer.lab.options import CompareOptions

_NORMALISED = (
    "full", "adaptive", "hierarchical:tree=two_level", "hierarchical:tree=huffman", "sampled",
    "nce", "importance", "negative", "differentiated", "self_normalized", "char_cnn", "topk",
    "entmax", "sparsemax", "adaptive_importance",
)  # fmt: skip
_FIRST_TAG = """## One class of many: the first tag of cooking questions

15,404 titles of questions about cooking, 533 tags; the class is the first tag of a title."""
_ALL_TAGS = """## Several labels: all tags of the same questions

736 tags, 2.3 for each title."""
_LABELS = ("zlpr", "bce", "asymmetric", "sparsemax_labels")


_OPENING = """# Study

Every head on real data until it has converged, by the lab itself (`python -m benchmarks study`).
Each head gets the learning rate that was best on validation data in a short search, three seeds,
and the same number of steps; the best model by validation is judged on test data. What follows each
heading is the lab's own summary.
"""


@dataclass(frozen=True)
class Study:
    """A data set, and how it is learned.

    Attributes:
        data: below the folder of the data sets.
        about: what the page says of it.
        options: of ``lastlayer compare``.
    """

    data: str
    about: str
    options: CompareOptions


STUDIES = {
    "wikitext2": Study("wikitext2", "## Language model: WikiText-2, 33,278 words", CompareOptions(
        heads=_NORMALISED, task="lm", budget="6epochs", batch=128, length=32, width=128)),
    "cooking-first-tag": Study("cooking-first-tag.txt", _FIRST_TAG, CompareOptions(
        heads=_NORMALISED, task="classification", budget="10epochs")),
    "cooking": Study("cooking.txt", _ALL_TAGS, CompareOptions(
        heads=_LABELS, task="multilabel", budget="20epochs")),
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
    """What a folder of the lab says, without its models and examples."""

    def read(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8"))

    compared = read(folder / "compare.json")
    runs = {}
    for path in sorted((folder / "runs").glob("*/result.json")):
        result = {k: each for k, each in read(path).items() if k not in ("explorer", "traceback")}
        lines = (path.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        runs[path.parent.name] = {"result": result, "metrics": [json.loads(each) for each in lines]}
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
    """docs/study.md and its pictures, from the files that :func:`run` kept."""
    from lastlayer.lab.report import write_report

    pages, written = [_OPENING], []
    for name, study in STUDIES.items():
        path = kept / f"{name}.json"
        if not path.is_file():
            continue
        with TemporaryDirectory() as place:
            folder = Path(place)
            unpack(json.loads(path.read_text(encoding="utf-8")), folder)
            write_report(folder)
            pages.append(f"{study.about}\n")
            for picture in ("curves-steps", "tradeoff-step_ms"):
                shown = docs / "pictures" / f"study-{name}-{picture}.png"
                shutil.copyfile(folder / "plots" / f"{picture}.png", shown)
                pages.append(f"![{name}: {picture}](pictures/{shown.name})\n")
                written.append(shown)
            pages.append((folder / "summary.md").read_text(encoding="utf-8"))
    page = docs / "study.md"
    page.write_text("\n".join(pages), encoding="utf-8")
    return [*written, page]
