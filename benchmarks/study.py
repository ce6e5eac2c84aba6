"""The lab on real data until it has converged: ``python -m benchmarks study``.

Each head trains at two or three learning rates with the first seed, over the whole number of steps;
the best on validation data is what the other seeds take. Many runs share the GPU, so the time of a
step is measured afterwards, one head at a time.
"""

import json
import math
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lastlayer.lab import comparison
from lastlayer.lab.data import load
from lastlayer.lab.options import CompareOptions, Settled
from lastlayer.lab.runs import Subject

SEEDS = (1, 2, 3)
_TIMED = "120steps"
# The slowest first: all runs end at about the same time.
_NORMALISED = (
    "adaptive_importance", "char_cnn", "full", "self_normalized", "entmax", "sparsemax", "topk",
    "hierarchical:tree=huffman", "hierarchical:tree=two_level", "adaptive", "differentiated",
    "sampled", "importance", "nce", "negative",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A data set, and how it is learned.

    Attributes:
        name: of the study, and of its file of results.
        data: below the folder of the data sets.
        heads: specs of the lab.
        budget: of each run.
        rates: learning rates that each head tries.
        options: further ones of ``lastlayer compare``.
    """

    name: str
    data: str
    heads: tuple[str, ...]
    budget: str
    rates: tuple[float, ...]
    options: dict[str, Any]


SETTINGS = (
    Setting("wikitext2", "wikitext2", _NORMALISED, "4epochs", (2e-3, 6e-3),
            {"task": "lm", "batch": 128, "length": 32, "width": 128}),
    Setting("cooking-first-tag", "cooking-first-tag.txt", _NORMALISED, "8epochs",
            (1e-3, 3e-3, 9e-3), {"task": "classification"}),
    Setting("cooking", "cooking.txt", ("zlpr", "bce", "asymmetric", "sparsemax_labels"), "12epochs",
            (1e-3, 3e-3, 9e-3), {"task": "multilabel"}),
)  # fmt: skip
# What validation is compared by, and whether less or more of it is better.
_CHOSEN_BY = {
    "lm": ("eps_perplexity", 1), "classification": ("top1", -1),
    "multilabel": ("mean_average_precision", -1),
}  # fmt: skip
_read: dict[str, Any] = {}
_stopping_at = float("inf")


def run(data: Path, out: Path, *, only: str, workers: int, seconds: float, commit: str) -> None:
    """Makes the runs, those of the slowest heads first, and writes a file for each data set.

    Args:
        data: the folder of the data sets.
        out: the folder of the results.
        only: settings whose name has this.
        workers: runs at a time.
        seconds: after which no further run begins.
        commit: of the source.
    """
    global _stopping_at  # noqa: PLW0603 — the workers are forked with it
    _stopping_at = time.monotonic() + seconds
    settings = [each for each in SETTINGS if only in each.name]
    for setting in settings:
        _read[setting.name] = load(data / setting.data, task=setting.options["task"])
    tasks = [(setting, data, head) for setting in settings for head in setting.heads]
    made: dict[str, list[dict[str, Any]]] = {each.name: [] for each in settings}
    # Forked before the first use of a GPU: the data is read once.
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        for name, records in pool.imap_unordered(_head, tasks, chunksize=1):
            made[name] += records
            for each in records:
                print(name, each["head"], each["seed"], each["lr"], each["status"],
                      each["best_step"], each["steps"], flush=True)  # fmt: skip
    for setting in settings:
        where, alone = _compare(setting, data, setting.heads, setting.rates[-1], SEEDS[0], _TIMED)
        compared = json.loads((where / "compare.json").read_text(encoding="utf-8"))
        record = {
            "commit": commit,
            "workers": workers,
            "budget": setting.budget,
            "rates": list(setting.rates),
            "compare": {**compared, "seeds": list(SEEDS)},
            "alone": {each["slug"]: {"step_ms": each["step_ms"]} for each in alone},
            "runs": sorted(made[setting.name], key=lambda each: (each["slug"], each["seed"])),
        }
        path = out / f"{setting.name}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print("wrote", path, flush=True)


def _head(task: tuple[Setting, Path, str]) -> tuple[str, list[dict[str, Any]]]:
    """All runs of a head: every rate with the first seed, and the best with the others."""
    setting, _, head = task
    try:
        return setting.name, _runs(*task)
    except Exception as error:  # noqa: BLE001 — what is wrong with one head leaves the others
        print(f"{setting.name} {head}: {type(error).__name__}: {error}", flush=True)
        return setting.name, []


def _runs(setting: Setting, data: Path, head: str) -> list[dict[str, Any]]:
    first, *others = SEEDS
    tried = [_run(setting, data, head, rate, first) for rate in setting.rates]
    best = min(filter(None, tried), key=_score, default=None)
    if best is None:
        return []
    runs = [best, *(_run(setting, data, head, best["lr"], seed) for seed in others)]
    kept = [each for each in runs if each is not None]
    best["tried"] = [{"lr": each["lr"], "score": _score(each)} for each in tried if each]
    return kept


def _score(run: dict[str, Any]) -> float:
    """Of the best model on validation data, lower is better."""
    return min((each["score"] for each in run["curve"]), default=math.inf)


def _run(setting: Setting, data: Path, head: str, rate: float, seed: int) -> dict[str, Any] | None:
    """One run with its curve of validation; None where the time is over."""
    if time.monotonic() > _stopping_at:
        return None
    where, (result,) = _compare(setting, data, (head,), rate, seed, setting.budget)
    path = where / "runs" / f"{result['slug']}-s{seed}" / "metrics.jsonl"
    name, sign = _CHOSEN_BY[setting.options["task"]]
    points = [
        {**point, "score": sign * point[name]}
        for point in map(json.loads, path.read_text().splitlines())
        if point["kind"] == "valid" and point[name] is not None
    ]
    kept = {name: each for name, each in result.items() if name not in ("explorer", "traceback")}
    return {**kept, "curve": points}


def _compare(
    setting: Setting, data: Path, heads: tuple[str, ...], rate: float, seed: int, budget: str
) -> tuple[Path, list[dict[str, Any]]]:
    """The lab's comparison of these heads with one seed; its folder and its results."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    where = Path(tempfile.mkdtemp()) / "out"
    options = CompareOptions(
        data=str(data / setting.data), heads=heads, budget=budget, seeds=1, seed=seed,
        lr=str(rate), **setting.options,
    )  # fmt: skip

    def make(settled: Settled, device: torch.device) -> Subject:
        return comparison.subject_of(_read[setting.name], settled, device)

    made = comparison.conduct(options, where, make, quiet=True, console=Console(), with_costs=False)
    return where, made.results
