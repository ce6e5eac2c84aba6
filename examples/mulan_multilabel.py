"""Which loss for many labels: ZLPR, binary cross entropy, asymmetric and sparsemax on a MULAN set.

    python examples/mulan_multilabel.py FOLDER [--steps 600] [--seed 0]

FOLDER has a multi-label set as MULAN gives it out (github.com/tsoumakas/mulan, data/multi-label):
``name-train.arff`` and ``name-test.arff``, or one ``.arff`` file, packed with gzip or not, and
``name.xml`` with the names of the labels. The sets are not part of this project. Good ones to start
with are emotions, scene, yeast and bibtex; all take less than a minute on two cores.

For each loss a linear layer is trained on the training part in the same way, with the weight decay
that is best on the validation part. Labels are then predicted in two ways: by the rule that comes
with the loss (a score above 0; for sparsemax a probability above 0), and by a threshold that is
chosen on the validation part. Expect the losses mostly within a few hundredths of each other once
thresholds are chosen, and further apart by their own rules: asymmetric and sparsemax predict more
labels, which may help macro-F1 where labels are rare and costs micro-F1. Which one leads differs
from set to set, on small ones from seed to seed.
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
    """Features (rows, width), and labels as lists in CSR and as 0 and 1."""

    features: Tensor
    indices: Tensor
    offsets: Tensor
    labels: Tensor

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features and lists of some rows."""
        counts = self.offsets.diff()[rows]
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        shift = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], counts)
        return self.features[rows], self.indices[torch.arange(len(shift)) + shift], offsets


class Result(NamedTuple):
    """Micro- and macro-F1 by the rule of the loss, and with a threshold; its F1 on validation."""

    rule: tuple[float, float]
    chosen: tuple[float, float]
    valid: float


def rows_of(part: LabelPart, n_labels: int) -> Rows:
    """A part as tensors."""
    features = part.features.dense() if isinstance(part.features, SparseRows) else part.features
    features = torch.from_numpy(np.ascontiguousarray(features))
    indices, offsets = (torch.from_numpy(each) for each in part.labels)
    labels = torch.zeros(len(features), n_labels, dtype=torch.bool)
    labels[torch.repeat_interleave(offsets.diff()), indices] = True
    return Rows(features, indices, offsets, labels)


def scaled(data: dict[str, Rows]) -> dict[str, Rows]:
    """Features of mean 0 and deviation 1; words, which are 0 or 1, as rows of length 1."""
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
    """A linear layer after some steps of AdamW."""
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
    """What a threshold is put to: scores, or the probabilities of sparsemax."""
    scores = torch.nn.functional.linear(data.features, head.weight, head.bias)
    return sparsemax(scores) if head.loss == "sparsemax" else scores


def best_threshold(values: Tensor, labels: Tensor) -> float:
    """Of some thresholds the one with the best micro-F1."""
    tried = values.flatten().quantile(torch.linspace(0.3, 0.999, 80)).unique().tolist()
    return max(tried, key=lambda threshold: f1(values > threshold, labels)[0])


def compare(data: dict[str, Rows], loss: str, steps: int, seed: int) -> Result:
    """With the weight decay that is best on the validation part."""
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
    parser.add_argument("folder", type=Path, help="a MULAN set: .arff files and an .xml file")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    found = load(options.folder, task="multilabel")
    parts = ("train", "valid", "test")
    data = scaled({part: rows_of(getattr(found, part), found.n_classes) for part in parts})
    print(
        f"{found.name}: {', '.join(f'{len(each.features)} {part}' for part, each in data.items())} "
        f"rows, {found.n_features} features, {found.n_classes} labels, "
        f"{data['train'].labels.sum(1).double().mean():.2f} a row\n"
    )
    print(f"{'':12}{'rule of the loss':^20}{'chosen threshold':^20}")
    print(f"{'loss':12}{'micro-F1':>10}{'macro-F1':>10}{'micro-F1':>10}{'macro-F1':>10}")
    began = time.perf_counter()
    for loss in LOSSES:
        result = compare(data, loss, options.steps, options.seed)
        numbers = (*result.rule, *result.chosen)
        print(f"{loss:12}" + "".join(f"{each:10.3f}" for each in numbers), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
