"""Entities as spans: GlobalPointer with ZLPR and with binary cross entropy on CLUENER."""

import copy
import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import glu, pad
from torch.nn.utils.rnn import pad_sequence

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer import bce_loss
from lastlayer.heads import GlobalPointer
from lastlayer.lab.feeding import Batch
from lastlayer.lab.statistics import LEVEL, holm, p_values
from lastlayer.lab.training import WARM_UP, Stepper
from studies.frame import RECALLED, Needed, Options, Study, Verdict, mean, progress, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAIN, DEV = "cluener/train.json.gz", "cluener/dev.json.gz"
VALID = 1_000
PADDING, UNKNOWN, NO_SPAN = 0, 1, -100
THRESHOLDS = [0.25 * n for n in range(-24, 9)]
ZERO, TUNED = "at 0", "tuned"


@dataclass(frozen=True)
class Settings:
    """Settings of the runs, the same for every loss.

    Attributes:
        width: size of character vectors and hidden states.
        pairs: rows of the hashed embedding of pairs of neighbouring characters.
        head_size: size of start and end vectors.
        batch: sentences per step.
        epochs: passes over the training sentences; the best one is used.
        rates: initial learning rates of Adam to choose from.
        dropout: dropout of whole features of vectors and states.
    """

    width: int = 64
    pairs: int = 1 << 14
    head_size: int = 32
    batch: int = 32
    epochs: int = 5
    rates: tuple[float, ...] = (0.01, 0.03)
    dropout: float = 0.3


QUICK = Settings(width=32, head_size=16, epochs=2, rates=(0.01,))
QUICK_SENTENCES = 2_000


@dataclass(frozen=True)
class Method:
    """A loss, and the initial biases of the head.

    Attributes:
        loss: "ZLPR" or "BCE".
        from_counts: whether biases are initialised to the frequencies of the types.
    """

    loss: str
    from_counts: bool = False


METHODS = {
    "ZLPR": Method("ZLPR"),
    "BCE": Method("BCE"),
    "ZLPR from frequencies": Method("ZLPR", from_counts=True),
    "BCE from frequencies": Method("BCE", from_counts=True),
}
# ZLPR and BCE with the same initial biases.
PAIRS = [
    (zlpr, bce)
    for zlpr, one in METHODS.items()
    for bce, other in METHODS.items()
    if one.loss == "ZLPR" and other == replace(one, loss="BCE")
]


class Text(NamedTuple):
    """A sentence and its spans: (type, start, end), the end included."""

    text: str
    spans: list[tuple[str, int, int]]


class Sentences(NamedTuple):
    """Character ids ``(texts, n)`` and spans ``(texts, m, 3)``, both padded."""

    characters: Tensor
    spans: Tensor


def read(path: Path) -> list[Text]:
    """All sentences of a file."""
    texts = []
    for line in gzip.decompress(path.read_bytes()).decode("utf-8").splitlines():
        record = json.loads(line)
        spans = [
            (kind, start, end)
            for kind, names in record["label"].items()
            for places in names.values()
            for start, end in places
        ]
        texts.append(Text(record["text"], spans))
    return texts


class Encoder(NamedTuple):
    """Ids of characters and types."""

    characters: dict[str, int]
    types: list[str]

    def __call__(self, texts: Sequence[Text]) -> Sentences:
        """Encodes sentences as one batch."""
        ids = [torch.tensor([self.characters.get(c, UNKNOWN) for c in x.text]) for x in texts]
        kinds = {kind: i for i, kind in enumerate(self.types)}
        spans = [
            torch.tensor([(kinds[kind], start, end) for kind, start, end in x.spans])
            .reshape(-1, 3)
            .long()
            for x in texts
        ]
        return Sentences(
            pad_sequence(ids, batch_first=True, padding_value=PADDING),
            pad_sequence(spans, batch_first=True, padding_value=NO_SPAN),
        )

    def batches(
        self, texts: Sequence[Text], size: int, generator: torch.Generator | None = None
    ) -> Iterator[Sentences]:
        """Batches of sentences of similar length; shuffled if a generator is given."""
        order = torch.arange(len(texts))
        if generator is not None:
            order = torch.randperm(len(texts), generator=generator)
        lengths = torch.tensor([len(x.text) // 4 for x in texts])
        rows = order[lengths[order].argsort(stable=True)].split(size)
        if generator is not None:
            rows = tuple(rows[i] for i in torch.randperm(len(rows), generator=generator).tolist())
        for each in rows:
            yield self([texts[i] for i in each.tolist()])


class Reader(nn.Module):
    """Embeddings of characters and of pairs of neighbours, then gated convolutions.

    Like ``Reader`` of examples/cluener_spans.py, but smaller, and convolutions see no padding.
    """

    def __init__(self, n_characters: int, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.single = nn.Embedding(n_characters, width, sparse=True)
        self.pair = nn.Embedding(settings.pairs, width, sparse=True)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=reach, dilation=reach) for reach in (1, 2)
        )
        # Drops whole features of a sentence, which needs few random numbers.
        self.drop = nn.Dropout1d(settings.dropout)
        nn.init.normal_(self.single.weight, std=0.3)
        # Pairs that are not in the training data add nothing.
        nn.init.zeros_(self.pair.weight)

    def forward(self, characters: Tensor) -> tuple[Tensor, Tensor]:
        """States ``(texts, n, width)``, and the mask of characters, False for padding."""
        mask = characters != PADDING
        before = pad(characters, (1, 0))[:, :-1]
        pairs = (before * 7919 + characters) % self.pair.num_embeddings
        states = self.drop((self.single(characters) + self.pair(pairs)).mT)
        for layer in self.layers:
            states = states * mask.unsqueeze(1)
            states = states + glu(layer(states), 1)
        return self.drop(states).mT, mask


class SpanLoss(nn.Module):
    """A head and its loss. For both losses a row is one type in one sentence."""

    def __init__(self, head: GlobalPointer, loss: str) -> None:
        super().__init__()
        self.head, self.loss = head, loss

    def forward(self, states_and_mask: tuple[Tensor, Tensor], spans: Tensor) -> Tensor:
        """The mean loss over types and sentences; BCE is summed over the spans of a row."""
        states, mask = states_and_mask
        if self.loss == "ZLPR":
            made: Tensor = self.head(states, spans, mask)
            return made
        scores = self.head.scores(states, mask).flatten(-2)
        right = dense(spans, self.head.n_types, states.shape[1]).flatten(-2)
        return bce_loss(scores, right, mask=scores > -torch.inf)


def dense(spans: Tensor, n_types: int, n: int) -> Tensor:
    """Converts lists of spans to bools ``(texts, types, n, n)``."""
    made = torch.zeros(len(spans), n_types, n, n, dtype=torch.bool, device=spans.device)
    text, place = (spans[..., 0] != NO_SPAN).nonzero(as_tuple=True)
    kind, start, end = spans[text, place].unbind(-1)
    made[text, kind, start, end] = True
    return made


class Counts(NamedTuple):
    """Counts of spans by threshold and type, ``(thresholds, types)``.

    ``hits`` are true positives, ``said`` predicted spans and ``there`` spans in the data.
    """

    hits: Tensor
    said: Tensor
    there: Tensor

    def f1(self) -> Tensor:
        """Micro-F1 at each threshold."""
        hits, said, there = (each.sum(1).double() for each in self)
        return 2 * hits / (said + there).clamp(min=1)

    def told(self, threshold: float) -> dict[str, Any]:
        """Precision, recall and F1 at a threshold, and F1 by type."""
        hits, said, there = (each[THRESHOLDS.index(threshold)].double() for each in self)
        return {
            "threshold": threshold,
            "precision": (hits.sum() / said.sum().clamp(min=1)).item(),
            "recall": (hits.sum() / there.sum().clamp(min=1)).item(),
            "f1": (2 * hits.sum() / (said.sum() + there.sum()).clamp(min=1)).item(),
            "by_type": (2 * hits / (said + there).clamp(min=1)).tolist(),
        }


@torch.no_grad()
def count(
    reader: Reader, head: GlobalPointer, texts: Sequence[Text], encode: Encoder,
    device: torch.device,
) -> Counts:  # fmt: skip
    """Counts spans at all thresholds; a hit has the right type, start and end."""
    reader.eval()
    # Histograms by type of the number of thresholds that a score exceeds.
    n_bins = len(THRESHOLDS) + 1
    said, hits = torch.zeros(2, head.n_types, n_bins, dtype=torch.int64).unbind()
    there = torch.zeros(head.n_types, dtype=torch.int64)
    limits = torch.tensor(THRESHOLDS)
    for each in encode.batches(texts, 64):
        states, mask = reader(each.characters.to(device))
        scores = head.scores(states, mask).cpu()
        right = dense(each.spans, head.n_types, scores.shape[-1])
        there += right.sum((0, 2, 3))
        first = torch.arange(head.n_types).view(-1, 1, 1) * n_bins
        bins = torch.bucketize(scores, limits) + first
        for some, counts in ((scores > THRESHOLDS[0], said), (right, hits)):
            counts.add_(bins[some].bincount(minlength=counts.numel()).view_as(counts))
    hits, said = (x.flip(1).cumsum(1).flip(1)[:, 1:].T for x in (hits, said))
    return Counts(hits, said, there.expand(len(THRESHOLDS), -1))


def start_from_counts(head: GlobalPointer, shares: Tensor) -> None:
    """Initialises scores near the log-odds of the share of right spans of each type."""
    if head.type_bias is None or head.type_bias.bias is None:
        raise ValueError("head: expected an efficient one with biases, got one without")
    with torch.no_grad():
        # The score adds a bias for the start and one for the end.
        head.type_bias.bias.copy_((torch.logit(shares) / 2).repeat(2))


def shares(texts: Sequence[Text], types: Sequence[str]) -> Tensor:
    """For each type, the share of right spans among all spans of these sentences."""
    counts = Counter(kind for x in texts for kind, _, _ in x.spans)
    n_spans = sum(len(x.text) * (len(x.text) + 1) // 2 for x in texts)
    return torch.tensor([counts[kind] / n_spans for kind in types])


def train(
    parts: Mapping[str, Sequence[Text]], encode: Encoder, method: Method, rate: float, seed: int,
    settings: Settings, device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Trains a head; validation F1 of each epoch and dev results of the best, by both thresholds.

    Each threshold (0 and the tuned one) chooses its epoch.
    """
    torch.manual_seed(seed)
    reader = Reader(len(encode.characters) + 2, settings).to(device)
    head = GlobalPointer(
        settings.width, len(encode.types), settings.head_size, efficient=True, ignore_index=NO_SPAN
    )
    if method.from_counts:
        start_from_counts(head, shares(parts["train"], encode.types))
    stepper = Stepper(reader, SpanLoss(head, method.loss).to(device), rate, clip=5.0)
    per_epoch = -(-len(parts["train"]) // settings.batch)
    falling = [
        torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.02, settings.epochs * per_epoch)
        for each in stepper.optimizers.values()
    ]
    order = torch.Generator().manual_seed(seed)
    curves: dict[str, list[float]] = {ZERO: [], TUNED: []}
    kept: dict[str, tuple[float, list[dict[str, Tensor]]]] = {}
    times: list[float] = []
    for _ in range(settings.epochs):
        reader.train()
        for each in encode.batches(parts["train"], settings.batch, order):
            inputs, target = each.characters.to(device), each.spans.to(device)
            began = time.process_time()
            stepper.step(Batch(inputs, target, len(inputs)))
            for schedule in falling:
                schedule.step()
            times.append(time.process_time() - began)
        f1 = count(reader, head, parts["valid"], encode, device).f1()
        for way, threshold in ((ZERO, 0.0), (TUNED, THRESHOLDS[int(f1.argmax())])):
            curves[way].append(float(f1[THRESHOLDS.index(threshold)]))
            if curves[way][-1] > max(curves[way][:-1], default=-1.0):
                kept[way] = threshold, [copy.deepcopy(x.state_dict()) for x in (reader, head)]
    judged = {}
    for way, (threshold, states) in kept.items():
        for module, state in zip((reader, head), states, strict=True):
            module.load_state_dict(state)
        judged[way] = count(reader, head, parts["dev"], encode, device).told(threshold)
    return {
        "rate": rate,
        "valid": curves,
        "dev": judged,
        "step_ms": 1000 * mean(times[WARM_UP:] or times),
    }


def measure(options: Options) -> dict[str, Any]:
    """Chooses the learning rate on validation with the first seed, then trains all seeds."""
    settings = QUICK if options.quick else Settings()
    whole, dev = read(options.path(TRAIN)), read(options.path(DEV))
    if options.quick:
        whole, dev = whole[:QUICK_SENTENCES], dev[: QUICK_SENTENCES // 4]
    n_valid = min(VALID, len(whole) // 5)
    # A random split, in case the order of the file matters; the same for all seeds.
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0)).tolist()
    mixed = [whole[i] for i in order]
    parts = {"train": mixed[n_valid:], "valid": mixed[:n_valid], "dev": dev}
    counts = Counter(c for each in parts["train"] for c in each.text)
    characters = {c: i for i, (c, n) in enumerate(counts.most_common(), 2) if n > 1}
    encode = Encoder(characters, sorted({kind for x in whole for kind, _, _ in x.spans}))
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, method in METHODS.items():
        first, *others = options.seeds

        def one(rate: float, seed: int, name: str = name, method: Method = method) -> Any:
            made = train(parts, encode, method, rate, seed, settings, options.device)
            best = ", ".join(f"{way} {max(curve):.1%}" for way, curve in made["valid"].items())
            progress(f"{name}, rate {rate:g}, seed {seed}: validation F1 {best}")
            return made

        tried = [one(rate, first) for rate in settings.rates]
        best = max(tried, key=lambda run: max(run["valid"][TUNED]))
        best["tried"] = {f"{run['rate']:g}": max(run["valid"][TUNED]) for run in tried}
        runs[name] = [best, *(one(best["rate"], seed) for seed in others)]
    spans = Counter(kind for x in dev for kind, _, _ in x.spans)
    return {
        "settings": asdict(settings), "types": encode.types,
        "sizes": {part: len(each) for part, each in parts.items()},
        "characters": len(characters),
        "spans": [spans[kind] for kind in encode.types],
        "share": shares(parts["train"], encode.types).mean().item(),
        "runs": runs,
    }  # fmt: skip


def _values(found: Mapping[str, Any], name: str, way: str, key: str = "f1") -> list[float]:
    return [run["dev"][way][key] for run in found["runs"][name]]


def _tests(found: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
    """Holm-corrected p-values of differences in dev F1 between ZLPR and BCE, same start."""
    names = list(found["runs"])
    keys, raw = [], []
    for way in (ZERO, TUNED):
        pairs = p_values([dict(enumerate(_values(found, x, way))) for x in names], log=False)
        for zlpr, bce in PAIRS:
            keys.append((way, zlpr, bce))
            raw.append(pairs[tuple(sorted((names.index(zlpr), names.index(bce))))])  # type: ignore[index]
    return dict(zip(keys, holm(raw), strict=True))


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """Results of each method, and F1 by type."""
    tests = _tests(found)
    rows = []
    for name, runs in found["runs"].items():
        p = {way: [x for (w, _, bce), x in tests.items() if (w, bce) == (way, name)]
             for way in (ZERO, TUNED)}  # fmt: skip
        cells = [name]
        for way in (ZERO, TUNED):
            cells += [spread(_values(found, name, way, key), 1, scale=100)
                      for key in ("precision", "recall", "f1")]  # fmt: skip
            cells.append(f"{p[way][0]:.2g}" if p[way] else "")
        cells.append(" ".join(f"{x:g}" for x in _values(found, name, TUNED, "threshold")))
        cells += [f"{runs[0]['rate']:g}", spread([run["step_ms"] for run in runs], 1)]
        rows.append(cells)
    published = ["ZLPR, with BERT, as published", *[""] * 2, f"80.03{RECALLED}", *[""] * 8]
    ways = [f"{key} {way}" for way in (ZERO, TUNED)
            for key in ("precision", "recall", "F1", "p against ZLPR")]  # fmt: skip
    headings = ["loss", *ways, "tuned thresholds", "learning rate", "ms per step"]
    title = f"Spans of CLUENER's {found['sizes']['dev']:,} dev sentences, percent"
    by_type = [
        [kind, f"{found['spans'][i]:,}",
         *(spread([100 * run["dev"][TUNED]["by_type"][i] for run in runs], 1)
           for runs in found["runs"].values())]
        for i, kind in enumerate(found["types"])
    ]  # fmt: skip
    return [
        Grid(title, headings, [published, *rows]),
        Grid("F1 by type with the tuned threshold, percent",
             ["type", "spans in dev", *found["runs"]], by_type),
    ]  # fmt: skip


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Whether ZLPR is better than BCE at the threshold 0 and at a tuned threshold."""
    tests = _tests(found)
    parts, won = [], {ZERO: [], TUNED: []}  # type: tuple[list[str], dict[str, list[bool]]]
    for way in (ZERO, TUNED):
        for zlpr, bce in PAIRS:
            gap = 100 * (mean(_values(found, zlpr, way)) - mean(_values(found, bce, way)))
            is_sure = tests[way, zlpr, bce] < LEVEL
            won[way].append(is_sure and gap > 0)
            sure = "significantly" if is_sure else "not significantly"
            parts.append(f"{gap:+.1f} to {bce} {way} ({sure} different)")
    best = {name: mean(_values(found, name, TUNED)) for name in found["runs"]}
    top = max(best, key=best.__getitem__)
    text = (
        f"For each type, one span in {1 / found['share']:,.0f} is right on average. Difference in "
        f"F1 of ZLPR with the same initial biases, in points: {', '.join(parts)}. "
    )
    costs = {
        name: 100 * (mean(_values(found, name, TUNED)) - mean(_values(found, name, ZERO)))
        for name in found["runs"]
    }
    text += (
        "The native threshold 0 costs, compared with a tuned one: "
        + ", ".join(f"{name} {cost:.1f} points" for name, cost in costs.items())
        + ". "
    )
    (is_worse, is_still_worse) = ([won[way][i] for way in won] for i in range(len(PAIRS)))
    if any(is_worse) and not any(is_still_worse):
        text += (
            "So the imbalance hurts BCE through its initial biases, with which every span has a "
            "probability of about 1/2: from the frequencies it is not worse than ZLPR. "
        )
    elif all(is_worse) and all(is_still_worse):
        text += "Biases that start at the frequencies do not remove the difference. "
    elif not any(is_worse):
        text += (
            "BCE is not significantly worse. A likely reason: at the best learning rates for this "
            "encoder, scores fall to the level of the frequencies within an epoch. At lower rates, "
            "as in fine-tuning, that takes longer: at 0.003 BCE is behind ZLPR (one run). "
        )
    first = {
        name: 100 * mean([run["valid"][TUNED][0] for run in found["runs"][name]])
        for name in found["runs"]
    }
    text += (
        "Validation F1 with the tuned threshold after one epoch: "
        + ", ".join(f"{name} {value:.0f}" for name, value in first.items())
        + f". The best is {top} with {100 * best[top]:.1f}, below the 80 of BERT{RECALLED}: this "
        "encoder is small and not pretrained. "
    )
    gains = [run["valid"][TUNED][-1] - run["valid"][TUNED][-2]
             for runs in found["runs"].values() for run in runs]  # fmt: skip
    is_flat = abs(mean(gains)) < 0.005
    text += (
        f"The last epoch, in which the learning rate falls to 2%, changes validation F1 by "
        f"{100 * mean(gains):+.2f} points on average: the curves are "
        f"{'flat' if is_flat else 'not flat'}."
    )
    if all(won[ZERO]) and all(won[TUNED]):
        return Verdict("holds", text)
    if any(won[ZERO]) or any(won[TUNED]):
        return Verdict("holds in part", text)
    return Verdict("does not hold", text)


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """F1 by epoch at both thresholds, and F1 by type."""
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.5])
    shades = OURS_COLOURS[0], OTHER_COLOURS[0], OURS_COLOURS[2], OURS_COLOURS[3]
    colours = dict(zip(METHODS, shades, strict=True))
    for panel, way in ((left, ZERO), (middle, TUNED)):
        for name, runs in found["runs"].items():
            for i, run in enumerate(runs):
                curve = [100 * each for each in run["valid"][way]]
                panel.plot(range(1, len(curve) + 1), curve, ".-", ms=3, lw=1, color=colours[name],
                           alpha=0.7, label=name if i == 0 else None)  # fmt: skip
        panel.set_xlabel("epoch")
        panel.set_ylabel(f"validation F1 {way}, %")
        panel.set_xticks(range(1, found["settings"]["epochs"] + 1))
    left.legend(fontsize=6.5, loc="lower right")
    order = sorted(range(len(found["types"])), key=lambda i: -found["spans"][i])
    for column, (name, runs) in enumerate(found["runs"].items()):
        for row, i in enumerate(order):
            values = [100 * run["dev"][TUNED]["by_type"][i] for run in runs]
            at = row + 0.2 * (column - 1.5)
            right.bar(at, mean(values), 0.18, color=colours[name])
            right.plot([at] * len(values), values, "k.", ms=1.5)
    names = [f"{found['types'][i]}\n{found['spans'][i]}" for i in order]
    right.set_xticks(range(len(order)), names, fontsize=6, rotation=45)
    right.set_ylabel("dev F1 tuned, %")
    right.set_xlabel("type and number of its spans in the dev part")


STUDY = Study(
    title="entities as spans: GlobalPointer with ZLPR and with BCE",
    claim=(
        "Su Jianlin, GlobalPointer (spaces.ac.cn/archives/8373; Su et al., arXiv:2208.03054): "
        "scoring all spans as n(n+1)/2 binary decisions suffers from extreme imbalance, which ZLPR "
        "does not (recalled; the paper's abstract, checked, says that its loss is better than "
        "“softmax and entropy alternatives”). With BERT it has an F1 of 80.03 on CLUENER's dev "
        "part (recalled; another implementation, github.com/gaohongkui/GlobalPointer_pytorch, "
        "says 79.66 in its README, checked)."
    ),
    protocol=(
        "CLUENER's training sentences, with 1,000 held out for validation; its dev part is the "
        "test part here, since the labels of its test part are not public. Embeddings of "
        "characters and of pairs of neighbours (size 64, the pairs hashed to 16,384 rows), two "
        "gated convolutions with kernel size 3 (dilation 1 and 2), dropout 0.3 of whole features, "
        "nothing pretrained; batches of 32, Adam with a learning rate that falls linearly to 2%, "
        "{epochs} epochs, of which each of the two thresholds uses its best one by validation F1. "
        "The initial learning rate, {rates}, is chosen per row of the table with the first seed by "
        "validation F1 at the best threshold. The head is the efficient GlobalPointer, with start "
        "and end vectors of size 32 and a bias per type; the full one, with vectors for each type, "
        "was left out, since it takes longer. Biases are initialised at random near 0, as in the "
        "paper, or “from frequencies”, so that a span has the probability of its type. The latter "
        "was added for ZLPR too after a trial on 2,000 training sentences, which showed dev "
        "results, in which it helped BCE. A lower learning rate was tried first and rejected by "
        "validation F1: at 0.003, in one run each that is not in the tables, ZLPR has 59.3 and BCE "
        "57.2 at the end with a tuned threshold, 34.5 and 31.9 after one epoch, and after one "
        "epoch at 0 20.2 and 11.4. A span is predicted if its score is above 0, or above a "
        "threshold tuned on the validation sentences, from -6 to 2 in steps of 0.25. Both losses "
        "are means over types and sentences; BCE is summed over the spans of a sentence. P-values "
        "are from paired t-tests by seed with Holm's correction over all of them; ms per step is "
        "CPU time."
    ).format(
        epochs=Settings.epochs, rates=" or ".join(f"{rate:g}" for rate in Settings.rates)
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    needs=(
        Needed(TRAIN, "train.json of CLUENER2020 (github.com/CLUEbenchmark/CLUENER2020), gzip"),
        Needed(DEV, "dev.json of CLUENER2020 (github.com/CLUEbenchmark/CLUENER2020), gzip"),
    ),
    size=(12.0, 4.0),
)  # fmt: skip
