"""Retrieve the premise of a hypothesis: InfoNCE with a bag-of-words encoder on SNLI pairs.

    python examples/snli_retrieval.py FOLDER [--epochs 20] [--seed 0]

FOLDER has pairs of SNLI (nlp.stanford.edu/projects/snli, CC BY-SA 4.0; not part of this project):
files with ``train`` in their name for training, and files with ``dev`` for evaluation, optionally
compressed with gzip. They are JSON lines with ``premise``, ``hypothesis`` and ``label`` (or
``sentence1``, ``sentence2`` and ``gold_label``, as in SNLI itself), or lines of label, label,
premise and hypothesis, separated by tabs, where 3 is entailment. Only entailment pairs are used.

The loss classifies the premise of each hypothesis among all premises of the batch, and vice versa.
A premise may have several hypotheses, and "A man is outside" follows from many premises: such pairs
are one group, whose members are not used as negatives of each other. The encoder is a weighted sum
of word vectors. Initially these are random vectors weighted by rarity, which already matches common
words; training learns related words, and better weights. With a sample of 6,015 pairs of SNLI, and
3,329 of its dev set, recall@1 over the held-out premises increases from 0.32 to 0.36, and recall@10
from 0.56 to 0.62, in less than a minute on two cores; more pairs help.
"""

import argparse
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lastlayer.losses.contrastive import InfoNCELoss

BATCH = 1024
ENTAILMENT = ("entailment", "3")

Pair = tuple[str, str]


def lines_of(path: Path) -> Iterator[str]:
    """The non-empty lines of a file, which may be compressed."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        yield from (line for line in lines if line.strip())


def pairs_of(folder: Path, part: str) -> list[Pair]:
    """(premise, hypothesis) of each entailment pair in the files of a split."""
    files = sorted(path for path in folder.iterdir() if part in path.name)
    if not files:
        raise SystemExit(f"{folder}: expected an SNLI file with {part!r} in its name, got none")
    found = []
    for path in files:
        for line in lines_of(path):
            if ".json" in path.name:
                record = json.loads(line)
                label = record.get("label", record.get("gold_label"))
                premise = record.get("premise", record.get("sentence1"))
                hypothesis = record.get("hypothesis", record.get("sentence2"))
            else:
                label, _, premise, hypothesis = line.rstrip("\n").split("\t")
            if label in ENTAILMENT:
                found.append((premise, hypothesis))
    return found


def words_of(text: str) -> list[str]:
    """Lower-cased words."""
    return re.findall(r"[a-z0-9]+", text.lower())


def groups_of(pairs: list[Pair]) -> Tensor:
    """Group ids: connected components of pairs that share a premise or a hypothesis."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(text: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(text, text)
        while parent[text] != text:
            parent[text] = text = parent[parent[text]]
        return text

    for premise, hypothesis in pairs:
        parent[root(("premise", premise))] = root(("hypothesis", hypothesis))
    numbers: dict[tuple[str, str], int] = {}
    roots = [root(("premise", premise)) for premise, _ in pairs]
    return torch.tensor([numbers.setdefault(each, len(numbers)) for each in roots])


class Encoder(torch.nn.Module):
    """A weighted sum of the word vectors of a text, with one learned weight per word."""

    def __init__(self, counts: Counter[str], n_texts: int, width: int = 256) -> None:
        super().__init__()
        self.ids = {word: place for place, word in enumerate(sorted(counts))}
        self.vectors = torch.nn.EmbeddingBag(len(counts), width, mode="sum")
        rarity = torch.log(n_texts / torch.tensor([counts[word] for word in self.ids]))
        self.log_weight = torch.nn.Parameter(rarity.clamp(min=0.1).log())

    def packed(self, texts: list[str]) -> list[Tensor]:
        """The ids of the known words of each text."""
        ids = self.ids
        return [
            torch.tensor([ids[word] for word in words_of(text) if word in ids], dtype=torch.long)
            for text in texts
        ]

    def forward(self, packed: list[Tensor]) -> Tensor:
        words = torch.cat(packed)
        starts = torch.tensor([0, *map(len, packed[:-1])]).cumsum(0)
        vectors: Tensor = self.vectors(
            words, starts, per_sample_weights=self.log_weight[words].exp()
        )
        return vectors


@torch.no_grad()
def recall(encoder: Encoder, pairs: list[Pair]) -> tuple[float, float]:
    """Recall@1 and recall@10 of the premise of each hypothesis, among all premises."""
    premises = {premise: place for place, premise in enumerate(dict.fromkeys(p for p, _ in pairs))}
    keys = torch.nn.functional.normalize(encoder(encoder.packed(list(premises))))
    queries = torch.nn.functional.normalize(encoder(encoder.packed([h for _, h in pairs])))
    own = torch.tensor([premises[premise] for premise, _ in pairs])
    hits = []
    for rows in torch.arange(len(pairs)).split(1024):
        best = (queries[rows] @ keys.T).topk(min(10, len(keys))).indices
        hits.append(best == own[rows, None])
    found = torch.cat(hits)
    return float(found[:, 0].double().mean()), float(found.any(1).double().mean())


def main() -> None:
    """Train, and print recall after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with pairs of SNLI: train and dev")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    train, held_out = pairs_of(options.folder, "train"), pairs_of(options.folder, "dev")
    counts = Counter(word for pair in train for text in pair for word in {*words_of(text)})
    encoder = Encoder(counts, 2 * len(train))
    premises, hypotheses = (encoder.packed([pair[side] for pair in train]) for side in (0, 1))
    groups = groups_of(train)
    print(
        f"{len(train)} pairs in {int(groups.max()) + 1} groups, {len(counts)} words; "
        f"{len(held_out)} pairs held out"
    )

    loss_of = InfoNCELoss(0.05, symmetric=True, same_group="ignore", learn_temperature=True)
    optimiser = torch.optim.Adam([*encoder.parameters(), *loss_of.parameters()], 1e-2)
    steps = options.epochs * -(-len(train) // BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, steps)
    at_1, at_10 = recall(encoder, held_out)
    print(f"before training: held-out recall@1 {at_1:.3f}, recall@10 {at_10:.3f}")

    began = time.perf_counter()
    for epoch in range(options.epochs):
        total = 0.0
        for rows in torch.randperm(len(train)).split(BATCH):
            query = encoder([hypotheses[row] for row in rows.tolist()])
            key = encoder([premises[row] for row in rows.tolist()])
            loss = loss_of(query, key, groups=groups[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item() * len(rows)
        at_1, at_10 = recall(encoder, held_out)
        print(
            f"epoch {epoch + 1}: loss {total / len(train):.3f}, held-out recall@1 {at_1:.3f}, "
            f"recall@10 {at_10:.3f}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
