"""Named entity recognition in Chinese news with GlobalPointer on a small character network.

    python examples/cluener_spans.py FOLDER [--full] [--epochs 4]

FOLDER has ``train.json`` and ``dev.json`` of CLUENER2020, or the same with ``.gz``: one text per
line, with inclusive ends of spans, as in this library::

    {"text": "彭小军认为…", "label": {"name": {"彭小军": [[0, 2]]}}}

The data is not part of this project; it is available at github.com/CLUEbenchmark/CLUENER2020.
There are ten types of spans. The network is not pretrained, and training takes less than a minute
on two idle cores; for results like published ones replace ``Reader`` by a pretrained encoder.
"""

import argparse
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lastlayer.heads import GlobalPointer

PAD, UNKNOWN = 0, 1
PAIRS, WIDTH = 1 << 14, 128


class Text(NamedTuple):
    """A text and its spans: (type, start, end), with inclusive ends."""

    text: str
    spans: list[tuple[str, int, int]]


class Batch(NamedTuple):
    """A batch of texts: character ids (texts, n), spans (texts, m, 3), mask (texts, n)."""

    characters: Tensor
    spans: Tensor
    mask: Tensor


def read(folder: Path, part: str) -> list[Text]:
    """Read the texts of ``part.json`` or ``part.json.gz``."""
    path = folder / f"{part}.json"
    packed = path.with_suffix(".json.gz")
    texts = []
    with (
        gzip.open(packed, "rt", encoding="utf-8")
        if packed.exists()
        else path.open(encoding="utf-8") as lines
    ):
        for line in lines:
            record = json.loads(line)
            spans = [
                (kind, start, end)
                for kind, names in record["label"].items()
                for places in names.values()
                for start, end in places
            ]
            texts.append(Text(record["text"], spans))
    return texts


def batches(texts: list[Text], ids: dict[str, int], types: list[str], size: int) -> Iterator[Batch]:
    """Batches of texts, in the given order."""
    kinds = {kind: place for place, kind in enumerate(types)}
    for first in range(0, len(texts), size):
        some = texts[first : first + size]
        characters = pad_sequence(
            [torch.tensor([ids.get(c, UNKNOWN) for c in each.text]) for each in some],
            batch_first=True, padding_value=PAD,
        )  # fmt: skip
        spans = pad_sequence(
            [
                torch.tensor([(kinds[kind], start, end) for kind, start, end in each.spans])
                .reshape(-1, 3)
                .long()
                for each in some
            ],
            batch_first=True, padding_value=-100,
        )  # fmt: skip
        yield Batch(characters, spans, characters != PAD)


class Reader(torch.nn.Module):
    """Encoder: embeddings of characters and character pairs, followed by convolutions."""

    def __init__(self, n_characters: int, width: int = WIDTH) -> None:
        super().__init__()
        self.single = torch.nn.Embedding(n_characters, width, padding_idx=PAD)
        self.pair = torch.nn.Embedding(PAIRS, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv1d(width, 2 * width, 3, padding=reach, dilation=reach) for reach in (1, 2)
        )
        self.dropout = torch.nn.Dropout(0.3)
        # Pairs that do not occur in training keep a zero embedding.
        torch.nn.init.normal_(self.single.weight, std=0.3)
        torch.nn.init.zeros_(self.pair.weight)

    def forward(self, characters: Tensor) -> Tensor:
        # Pairs of neighbouring characters are hashed to the rows of the embedding.
        before = torch.nn.functional.pad(characters, (1, 0))[:, :-1]
        pairs = (before * 7919 + characters) % PAIRS
        states = self.dropout(self.single(characters) + self.pair(pairs)).mT
        for layer in self.layers:
            states = states + torch.nn.functional.glu(layer(self.dropout(states)), 1)
        return self.dropout(states).mT


@torch.no_grad()
def evaluate(reader: Reader, head: GlobalPointer, data: list[Batch]) -> tuple[float, float, float]:
    """Precision, recall and F1 of spans; type, start and end must all be correct."""
    reader.eval()
    right = found = there = 0
    for batch in data:
        predicted = head.decode(reader(batch.characters), batch.mask)
        for spans, known in zip(predicted, batch.spans.tolist(), strict=True):
            ours = {span[:3] for span in spans}
            wanted = {tuple(span) for span in known if span[0] >= 0}
            right += len(ours & wanted)
            found += len(ours)
            there += len(wanted)
    reader.train()
    return right / max(1, found), right / max(1, there), 2 * right / max(1, found + there)


def main() -> None:
    """Train, and print precision, recall and F1 after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with train.json and dev.json of CLUENER2020")
    parser.add_argument("--full", action="store_true", help="separate vectors for each type")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)

    train, dev = read(options.folder, "train"), read(options.folder, "dev")
    counts = Counter(c for each in train for c in each.text)
    ids = {c: place for place, (c, count) in enumerate(counts.most_common(), 2) if count > 1}
    types = sorted({kind for each in train for kind, _, _ in each.spans})
    print(f"{len(train)} texts, {len(ids)} characters, types: {', '.join(types)}")

    reader = Reader(len(ids) + 2)
    head = GlobalPointer(WIDTH, len(types), 32, efficient=not options.full)
    parameters = [*reader.parameters(), *head.parameters()]
    optimiser = torch.optim.Adam(parameters, 3e-3, fused=True)
    size = 32
    steps = options.epochs * -(-len(train) // size)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.02, steps)
    held_out = list(batches(dev, ids, types, 64))

    began = time.perf_counter()
    for epoch in range(options.epochs):
        # Texts of similar length are in the same batch; batches are in random order.
        random.shuffle(train)
        train.sort(key=lambda each: len(each.text) // 8)
        order = list(batches(train, ids, types, size))
        random.shuffle(order)
        total = 0.0
        for batch in order:
            optimiser.zero_grad()
            loss = head(reader(batch.characters), batch.spans, batch.mask)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 5.0)
            optimiser.step()
            schedule.step()
            total += loss.item()
        precision, recall, f1 = evaluate(reader, head, held_out)
        print(
            f"epoch {epoch + 1}: loss {total / len(order):.3f}, dev precision {precision:.3f}, "
            f"recall {recall:.3f}, F1 {f1:.3f}, {time.perf_counter() - began:.0f} s",
            flush=True,
        )

    text = dev[0].text
    (spans,) = head.decode(reader.eval()(held_out[0].characters[:1]), held_out[0].mask[:1])
    print(text)
    for kind, start, end, score in spans:
        print(f"  {types[kind]}: {text[start : end + 1]}, score {score:.1f}")


if __name__ == "__main__":
    main()
