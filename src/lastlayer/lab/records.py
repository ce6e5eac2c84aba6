"""compare.json: everything that a comparison was made with, written once."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lastlayer.lab import environment
from lastlayer.lab.data import Data, LabelData, TextData, Vocabulary
from lastlayer.lab.errors import LabError
from lastlayer.lab.evaluation import EPSILON, rows_for
from lastlayer.lab.feeding import Feed
from lastlayer.lab.files import read_json, write_json
from lastlayer.lab.models import ModelSettings
from lastlayer.lab.options import CompareOptions, Settled
from lastlayer.lab.runs import CLIP
from lastlayer.lab.specs import HeadSpec
from lastlayer.lab.training import WARM_UP

SCHEMA = 1


def frozen_record(
    settled: Settled,
    specs: list[HeadSpec],
    data: Data,
    feed: Feed,
    model: ModelSettings,
    device: torch.device,
    options: CompareOptions,
    budget: dict[str, Any],
    baseline: dict[str, Any],
) -> dict[str, Any]:
    """What compare.json holds."""
    if isinstance(data, TextData):
        sizes = {part: len(getattr(data, part)) for part in ("train", "valid", "test")}
    else:
        sizes = {part: getattr(data, part).n_rows for part in ("train", "valid", "test")}
    return {
        "schema": SCHEMA,
        "command": options.command(),
        "created": environment.now(),
        "data": {
            "name": data.name,
            "task": data.task,
            "classes": data.n_classes,
            "tokens" if data.task == "lm" else "rows": sum(sizes.values()),
            **{f"{part}_size": size for part, size in sizes.items()},
            "fingerprint": data.fingerprint,
            "description": data.description,
        },
        "model": model.as_json(),
        "budget": budget,
        "baseline": baseline,
        "heads": [spec.as_json() for spec in specs],
        "seeds": settled.seeds,
        "device": environment.device_record(device),
        "versions": environment.versions(),
        "git": environment.git_commit(),
        "settings": {
            "batch": feed.batch_size,
            "steps_per_epoch": feed.steps_per_epoch,
            "lr": settled.lr,
            "lr_of_each_head": settled.finds_rate,
            "tolerance": settled.tolerance,
            "optimizer": "Adam, and RowAdam for row-sparse gradients",
            "clip": CLIP,
            "warm_up_steps": WARM_UP,
            "valid_rows": rows_for("valid", data.n_classes),
            "test_rows": rows_for("test", data.n_classes),
            "epsilon": EPSILON,
        },
        "options": options.as_json(),
    }


def write_once(out: Path, record: dict[str, Any], data: Data) -> None:
    """compare.json is frozen: a resumed comparison has to be the same one."""
    path = out / "compare.json"
    if path.is_file():
        before = read_json(path)
        _check_same(before, record, out)
        return
    vocabulary = data.vocabulary if isinstance(data, TextData) else _labels(data)
    vocabulary.save(out / "vocabulary.json")
    if tokenizer := data.description.get("tokenizer"):
        shutil.copyfile(tokenizer, out / "tokenizer.json")
    if not isinstance(data, TextData):
        write_json(out / "features.json", list(data.feature_names))
    write_json(path, record)


def _labels(data: Data) -> Vocabulary:
    """Names of classes and their counts; pairs have none."""
    if not isinstance(data, LabelData):
        return Vocabulary((), np.zeros(0, np.int64))
    return Vocabulary(tuple(data.label_names), np.asarray(data.counts, np.int64))


def _check_same(before: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    parts = [
        ("data", before["data"].get("fingerprint"), now["data"]["fingerprint"]),
        ("classes", before["data"].get("classes"), now["data"]["classes"]),
        ("heads", *([each["spec"] for each in side["heads"]] for side in (before, now))),
        *((name, before.get(name), now[name]) for name in ("seeds", "budget", "model")),
        *((f"settings.{name}", before["settings"].get(name), value)
          for name, value in now["settings"].items()),
        ("device", before["device"].get("name"), now["device"]["name"]),
    ]  # fmt: skip
    other = [f"{name} was {then} and is {new}" for name, then, new in parts if then != new]
    if other:
        raise LabError(
            f"--resume: expected what '{out}' was made with, got something else: "
            f"{'; '.join(other)}; choose another --out"
        )
