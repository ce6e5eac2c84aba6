"""Compare multi-label losses on a MULAN dataset: ZLPR, BCE, asymmetric and sparsemax.

    python examples/mulan_multilabel.py FOLDER [--steps 600] [--seed 0]

FOLDER has a multi-label dataset as distributed by MULAN (github.com/tsoumakas/mulan,
data/multi-label): ``name-train.arff`` and ``name-test.arff``, or a single ``.arff`` file, may be
compressed with gzip; ``name.xml`` has the names of the labels. The datasets are not part of this
project. emotions, scene, yeast and bibtex are good ones to start with; each takes less than a
minute on two cores.

For each loss a linear layer is trained in the same way, with the weight decay that is best on the
validation split. Labels are then predicted in two ways: by the default rule of the loss (a score
above 0; for sparsemax a probability above 0), and by a threshold chosen on the validation split.
With chosen thresholds, the losses mostly differ by a few hundredths only. They differ more with
their default rules: asymmetric and sparsemax predict more labels, which may improve macro-F1 for
rare labels, but reduces micro-F1. Which loss is best depends on the dataset, and for small ones on
the seed.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lastlayer.heads.multi_label import MultiLabel
from lastlayer.lab.data import LabelPart, SparseRows, load
from lastlayer.maps.sparsemax import sparsemax

LOSSES = ("zlpr", "bce", "asymmetric", "sparsemax")
WEIGHT_DECAYS = (0.03, 0.3)
BATCH = 128


class Rows(NamedTuple):
    """Features (rows, d), and labels both as lists in CSR and as a bool matrix."""

    features: Tensor
    indices: Tensor
    offsets: Tensor
    labels: Tensor

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features and label lists of the given rows."""
        counts = self.offsets.diff()[rows]
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        shift = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], counts)
        return self.features[rows], self.indices[torch.arange(len(shift)) + shift], offsets


class Result(NamedTuple):
    """Micro- and macro-F1 by the default rule and with a chosen threshold; validation micro-F1."""

    rule: tuple[float, float]
    chosen: tuple[float, float]
    valid: float


def rows_of(part: LabelPart, n_labels: int) -> Rows:
    """A split as tensors."""
    features = part.features.dense() if isinstance(part.features, SparseRows) else part.features
    features = torch.from_numpy(np.ascontiguousarray(features))
    indices, offsets = (torch.from_numpy(each) for each in part.labels)
    labels = torch.zeros(len(features), n_labels, dtype=torch.bool)
    labels[torch.repeat_interleave(offsets.diff()), indices] = True
    return Rows(features, indices, offsets, labels)


def scaled(data: dict[str, Rows]) -> dict[str, Rows]:
    """Standardise features; features that are all 0 or 1, such as words, get rows of length 1."""
    known = data["train"].features
    if bool(((known == 0) | (known == 1)).all()):
        return {p: r._replace(features=normalize(r.features)) for p, r in data.items()}
    mean, deviation = known.mean(0), known.std(0).clamp(min=1e-6)
    return {p: r._replace(features=(r.features - mean) / deviation) for p, r in data.items()}


def f1(predicted: Tensor, labels: Tensor) -> tuple[float, float]:
    """Micro-F1 over all labels of all rows, and the mean of the F1 of each label."""
    right = (predicted & labels).sum(0).double()
    size = predicted.sum(0).double() + labels.sum(0).double()
    micro = 2 * right.sum() / size.sum().clamp(min=1)
    macro = (2 * right / size.clamp(min=1)).mean()
    return float(micro), float(macro)


def train(data: Rows, loss: str, weight_decay: float, steps: int, seed: int) -> MultiLabel:
    """Train a linear layer with AdamW."""
    torch.manual_seed(seed)
    head = MultiLabel(data.features.shape[1], data.labels.shape[1], loss)
    optimiser = torch.optim.AdamW(head.parameters(), 0.05, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.01, steps)
    order: list[Tensor] = []
    for _ in range(steps):
        order = order or list(torch.randperm(len(data.features)).split(BATCH))
        features, indices, offsets = data.batch(order.pop())
        optimiser.zero_grad()
        head(features, indices, offsets).backward()
        optimiser.step()
        schedule.step()
    return head


@torch.no_grad()
def certainty(head: MultiLabel, data: Rows) -> Tensor:
    """The values to threshold: scores, or the probabilities of sparsemax."""
    scores = torch.nn.functional.linear(data.features, head.weight, head.bias)
    return sparsemax(scores) if head.loss == "sparsemax" else scores


def best_threshold(values: Tensor, labels: Tensor) -> float:
    """The threshold with the best micro-F1."""
    tried = values.flatten().quantile(torch.linspace(0.3, 0.999, 80)).unique().tolist()
    return max(tried, key=lambda threshold: f1(values > threshold, labels)[0])


def compare(data: dict[str, Rows], loss: str, steps: int, seed: int) -> Result:
    """Evaluate a loss, with the weight decay that is best on the validation split."""
    results = []
    for weight_decay in WEIGHT_DECAYS:
        head = train(data["train"], loss, weight_decay, steps, seed)
        on = {part: certainty(head, data[part]) for part in ("valid", "test")}
        threshold = best_threshold(on["valid"], data["valid"].labels)
        results.append(
            Result(
                f1(on["test"] > 0, data["test"].labels),
                f1(on["test"] > threshold, data["test"].labels),
                f1(on["valid"] > threshold, data["valid"].labels)[0],
            )
        )
    return max(results, key=lambda result: result.valid)


def main() -> None:
    """Train with each loss and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a MULAN dataset: .arff files and an .xml file")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    found = load(options.folder, task="multilabel")
    parts = ("train", "valid", "test")
    data = scaled({part: rows_of(getattr(found, part), found.n_classes) for part in parts})
    print(
        f"{found.name}: {', '.join(f'{len(each.features)} {part}' for part, each in data.items())} "
        f"rows, {found.n_features} features, {found.n_classes} labels, "
        f"{data['train'].labels.sum(1).double().mean():.2f} per row\n"
    )
    print(f"{'':12}{'default rule':^20}{'chosen threshold':^20}")
    print(f"{'loss':12}{'micro-F1':>10}{'macro-F1':>10}{'micro-F1':>10}{'macro-F1':>10}")
    began = time.perf_counter()
    for loss in LOSSES:
        result = compare(data, loss, options.steps, options.seed)
        numbers = (*result.rule, *result.chosen)
        print(f"{loss:12}" + "".join(f"{each:10.3f}" for each in numbers), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
