"""Sparse attention on real text: ``python -m benchmarks snli DATA``.

Does a hypothesis follow from a premise, contradict it, or neither? As in the sparsemax paper's
inference experiment (Martins & Astudillo, 2016, section 4.3), the last state of a GRU that has
read the hypothesis looks at the states of the premise. Softmax, entmax and sparsemax attention are
trained side by side, seed by seed: runs of one seed start at the same parameters and see the same
batches. Where the network differs from the paper's, docs/attention.md says so.

The runs can take several sittings: stop with Ctrl-C and call it again. What is kept is one JSON
file, from which a part of docs/attention.md and its pictures are made.
"""

import gzip
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import record
from benchmarks.plot import OURS_COLOURS
from benchmarks.table import Grid, console
from lastlayer import vectors
from lastlayer.attention import AttentionPooling, plot_attention
from lastlayer.lab.statistics import LEVEL, estimate, holm, p_values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = ("entailment", "neutral", "contradiction")
FILES = ("subset_train.tsv.gz", "dev.jsonl.gz", "test.txt.gz")
PADDING, UNKNOWN = 0, 1
# Words that have this much weight together hold most of it.
MOST = 0.95
# Premises in the picture: the first ones of so many words that come with all three labels.
SHOWN, SHOWN_WORDS = 2, range(8, 13)
PAGE, WORDS_PICTURE, PICTURE = "attention_snli.inc", "attention-words.png", "study-snli.png"
_WORD = re.compile(r"[a-z0-9]+(?=n't)|n't|'[a-z]+|[a-z0-9]+(?:-[a-z0-9]+)*")


@dataclass(frozen=True)
class Settings:
    """How the runs are made, the same for every kind of attention.

    Attributes:
        width: size of word vectors and states.
        batch: pairs per step.
        epochs: passes over the training pairs, of which the best one counts.
        lr: learning rate of Adam.
        dropout: on word vectors and before the output.
        min_count: words that occur less often in the training pairs are unknown.
        vector_epochs: passes of skip-gram, which makes the word vectors to start at.
    """

    width: int = 64
    batch: int = 64
    epochs: int = 10
    lr: float = 1e-3
    dropout: float = 0.2
    min_count: int = 2
    vector_epochs: int = 10


@dataclass(frozen=True)
class Method:
    """How a premise becomes one vector.

    Attributes:
        title: of its row.
        alpha: of the attention; None for the last state of the premise instead.
        learn_alpha: whether training moves it.
        reads_premise: False to see what the hypothesis alone gives away.
    """

    title: str
    alpha: float | None = None
    learn_alpha: bool = False
    reads_premise: bool = True


METHODS = {
    "hypothesis": Method("hypothesis alone", reads_premise=False),
    "last": Method("no attention (last state)"),
    "softmax": Method("softmax", 1.0),
    "entmax": Method("entmax 1.5", 1.5),
    "sparsemax": Method("sparsemax", 2.0),
    "learned": Method("entmax, learned α", 1.5, learn_alpha=True),
}


class Text(NamedTuple):
    """One pair as words."""

    premise: list[str]
    hypothesis: list[str]
    label: int


class Pairs(NamedTuple):
    """Pairs as word ids, padded with 0 to the longest: two matrices, and a vector of labels."""

    premise: Tensor
    hypothesis: Tensor
    label: Tensor

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator["Pairs"]:
        """All pairs once: in their order, or shuffled, with premises of similar length together."""
        n, lengths = len(self.label), (self.premise != PADDING).sum(1)
        rows = list(torch.arange(n).split(size))
        if generator is not None:
            # Sorted within blocks of 50 batches only, so that no two epochs have the same batches.
            blocks = torch.randperm(n, generator=generator).split(50 * size)
            rows = [each for x in blocks for each in x[lengths[x].argsort(stable=True)].split(size)]
            rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
        for each in rows:
            premise, hypothesis, label = (values[each] for values in self)
            yield Pairs(_trimmed(premise), _trimmed(hypothesis), label)

    def to(self, device: torch.device) -> "Pairs":
        """On that device."""
        return Pairs(*(each.to(device) for each in self))


def _trimmed(ids: Tensor) -> Tensor:
    return ids[:, : int((ids != PADDING).sum(1).max())]


class Reader(nn.Module):
    """A GRU, attention of the hypothesis's last state over the premise's states, a classifier.

    Attention pools over pairs of a premise state and the hypothesis's last state. Keys are
    ``tanh(W [state; last] + b)``, so that what is looked at depends on the hypothesis; the result
    is the weighted premise beside the hypothesis, since the weights sum to 1.

    Args:
        vectors: of the words, ``(n_words, width)``, to start at.
        method: how the premise becomes one vector.
        dropout: on word vectors and before the output.
    """

    def __init__(self, vectors: Tensor, method: Method, dropout: float) -> None:
        super().__init__()
        width = vectors.shape[1]
        self.reads_premise = method.reads_premise
        self.embed = nn.Embedding.from_pretrained(
            vectors.clone(), freeze=False, padding_idx=PADDING
        )
        self.gru = nn.GRU(width, width, batch_first=True)
        self.hidden = nn.Linear(4 * width, width)
        self.out = nn.Linear(width, len(LABELS))
        self.drop = nn.Dropout(dropout)
        # Last, so that all methods draw the same values for what they share.
        self.pool = None
        if method.alpha is not None:
            self.pool = AttentionPooling(
                2 * width, alpha=method.alpha, learn_alpha=method.learn_alpha
            )

    def forward(self, pairs: Pairs) -> Tensor:
        """Scores of the three labels, ``(batch, 3)``."""
        both, mask = self._read(pairs)
        joined = _last(both, mask) if self.pool is None else self.pool(both, mask)
        premise, hypothesis = joined.chunk(2, -1)
        compared = [joined, premise * hypothesis, (premise - hypothesis).abs()]
        made: Tensor = self.out(self.drop(torch.tanh(self.hidden(torch.cat(compared, -1)))))
        return made

    def weights(self, pairs: Pairs) -> Tensor:
        """Weights of the premise words, ``(batch, words)``; 0 for padding."""
        if self.pool is None:
            raise ValueError("method: expected one with attention, got one without")
        both, mask = self._read(pairs)
        found = self.pool.weights(both, mask)
        # Places behind the last weight, -1, go to a column that is cut off.
        made = both.new_zeros(len(both), both.shape[1] + 1)
        return made.scatter_(1, found.keys % made.shape[1], found.values)[:, :-1]

    def _read(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Premise states, each beside the hypothesis's last state, and which of them exist."""
        mask = pairs.premise != PADDING
        states, _ = self.gru(self.drop(self.embed(pairs.premise)))
        if not self.reads_premise:
            states = torch.zeros_like(states)
        heard, _ = self.gru(self.drop(self.embed(pairs.hypothesis)))
        last = _last(heard, pairs.hypothesis != PADDING)
        return torch.cat([states, last.unsqueeze(1).expand_as(states)], -1), mask


def _last(states: Tensor, mask: Tensor) -> Tensor:
    return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]


def read(folder: Path) -> dict[str, list[Text]]:
    """Training, development and test pairs.

    Raises:
        ValueError: a file is missing; the message names it.
    """
    for name in FILES:
        if not (folder / "snli" / name).is_file():
            raise ValueError(f"data: expected a folder with snli/{name}, got '{folder}'")
    train, dev, test = (_lines(folder / "snli" / name) for name in FILES)
    by_tabs = [line.split("\t") for line in train], [line.split("\t") for line in test]
    parsed = [json.loads(line) for line in dev]
    return {
        # Their 1, 2 and 3 are neutral, contradiction and entailment.
        "train": [Text(words(x[2]), words(x[3]), int(x[0]) % len(LABELS)) for x in by_tabs[0]],
        "dev": [
            Text(words(x["premise"]), words(x["hypothesis"]), LABELS.index(x["label"]))
            for x in parsed
        ],
        "test": [Text(words(x[0]), words(x[1]), int(x[2])) for x in by_tabs[1]],
    }


def _lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation, split as the test file is."""
    return _WORD.findall(text.lower())


def learn_words(texts: Sequence[Text], settings: Settings) -> tuple[dict[str, int], Tensor]:
    """Ids and vectors of words from these pairs alone; padding and unknown words start at 0."""
    sentences = [sentence for text in texts for sentence in (text.premise, text.hypothesis)]
    corpus = vectors.encode(sentences, min_count=settings.min_count)
    made = vectors.train(
        corpus.tokens, words=corpus.words, dim=settings.width, epochs=settings.vector_epochs,
        threads=1, progress=False,
    )  # fmt: skip
    ids = {word: i for i, word in enumerate(made.words, start=UNKNOWN + 1)}
    return ids, torch.cat([made.input.new_zeros(2, settings.width), made.input / made.input.std()])


def encode(texts: Sequence[Text], ids: Mapping[str, int]) -> Pairs:
    """Word ids; a text without words is one unknown word."""

    def padded(sentences: list[list[str]]) -> Tensor:
        made = [torch.tensor([ids.get(x, UNKNOWN) for x in s] or [UNKNOWN]) for s in sentences]
        return nn.utils.rnn.pad_sequence(made, batch_first=True, padding_value=PADDING)

    labels = torch.tensor([x.label for x in texts])
    return Pairs(padded([x.premise for x in texts]), padded([x.hypothesis for x in texts]), labels)


def train(
    parts: Mapping[str, Pairs], start: Tensor, method: Method, seed: int, settings: Settings,
    device: torch.device,
) -> tuple[Reader, dict[str, Any]]:  # fmt: skip
    """The model of the epoch that was best on development pairs, and loss and accuracy of all."""
    torch.manual_seed(seed)
    model = Reader(start, method, settings.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    order = torch.Generator().manual_seed(seed)
    losses, dev, best = [], [], {}
    for _ in range(settings.epochs):
        model.train()
        total = torch.zeros((), device=device)
        for each in parts["train"].batches(settings.batch, order):
            batch = each.to(device)
            loss = cross_entropy(model(batch), batch.label)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.detach() * len(batch.label)
        losses.append(float(total) / len(parts["train"].label))
        dev.append(_mean(predict(model, parts["dev"], device) == parts["dev"].label))
        if dev[-1] > max(dev[:-1], default=-1.0):
            best = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)
    return model.eval(), {"loss": losses, "dev": dev}


def predict(model: Reader, pairs: Pairs, device: torch.device) -> Tensor:
    """The most likely label of each pair."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(x.to(device)).argmax(1).cpu() for x in pairs.batches(512)])


def focus(weights: Tensor, premise: Tensor) -> dict[str, Tensor]:
    """How few words of each premise are looked at, and where they are.

    Args:
        weights: ``(batch, words)``.
        premise: the ids.

    Returns:
        Of each premise ``kept``, the share of its words with a weight above 0; ``most``, the
        smallest share of its words that has 95% of the weight; ``place``, the mean place by weight,
        0 for the first word and 1 for the last, where even weights have 0.5; ``moved``, the share
        of the weight that is elsewhere for the hypothesis of the row before (NaN where that has
        another premise).
    """
    n = (premise != PADDING).sum(1)
    sums = weights.double().sort(1, descending=True).values.cumsum(1)
    few = (sums < MOST).sum(1) + 1
    at = torch.arange(weights.shape[1], device=weights.device) / (n - 1).clamp(min=1).unsqueeze(1)
    moved = (weights - weights.roll(1, 0)).abs().sum(1) / 2
    other = (premise != premise.roll(1, 0)).any(1)
    other[:1] = True
    return {
        "kept": (weights > 0).sum(1) / n,
        "most": few / n,
        "place": (weights * at).sum(1),
        "moved": moved.masked_fill(other, float("nan")),
    }


def measure(model: Reader, pairs: Pairs, device: torch.device) -> dict[str, dict[str, float]]:
    """Accuracy and focus on test pairs: of all, and of each label."""
    values = {"accuracy": (predict(model, pairs, device) == pairs.label).double()}
    if model.pool is not None:
        found: dict[str, list[Tensor]] = {}
        with torch.no_grad():
            for each in pairs.batches(512):
                batch = each.to(device)
                for name, value in focus(model.weights(batch), batch.premise).items():
                    found.setdefault(name, []).append(value.cpu())
        values |= {name: torch.cat(each) for name, each in found.items()}
    groups = {"all": pairs.label >= 0}
    groups |= {label: pairs.label == i for i, label in enumerate(LABELS)}
    return {
        name: {
            group: _mean(value[rows])
            for group, rows in groups.items()
            if not value[rows].isnan().all()
        }
        for name, value in values.items()
    }


def _mean(values: Tensor) -> float:
    return float(values.double().nanmean())


def shown(texts: Sequence[Text]) -> list[Text]:
    """Pairs in the picture: a pair of each label for the first premises of a handy length."""
    made: list[Text] = []
    for premise, group in groupby(texts, key=lambda text: text.premise):
        by_label = {text.label: text for text in reversed(list(group))}
        if len(premise) in SHOWN_WORDS and len(by_label) == len(LABELS):
            made += [by_label[i] for i in range(len(LABELS))]
    return made[: SHOWN * len(LABELS)]


def run(
    data: Path, json_path: Path, *, seeds: int, settings: Settings, device: torch.device,
    commit: str | None = None,
) -> int:  # fmt: skip
    """Make the runs that are not in the file yet, and write it after each.

    Returns:
        0, or 1 where it was stopped by Ctrl-C.
    """
    texts = read(data)
    kept: dict[str, Any] = {"settings": asdict(settings), "runs": []}
    if json_path.is_file():
        kept = json.loads(json_path.read_text(encoding="utf-8"))
        if kept["settings"] != asdict(settings):
            raise ValueError(
                f"--json: expected a file of runs with {asdict(settings)}, got {kept['settings']}; "
                "give another file"
            )
    done = {(each["method"], each["seed"]) for each in kept["runs"]}
    todo = [(m, s) for s in range(1, seeds + 1) for m in METHODS if (m, s) not in done]
    if device.type == "cpu":
        torch.set_num_threads(1)
    environment = record.environment(device, quick=False, at=commit)
    ids, start = learn_words(texts["train"], settings)
    parts = {part: encode(each, ids) for part, each in texts.items()}
    examples = shown(texts["test"])
    kept["data"] = {"words": len(ids)} | {part: len(each) for part, each in texts.items()}
    kept["examples"] = [example._asdict() for example in examples]
    try:
        for number, (name, seed) in enumerate(todo, start=1):
            began = time.process_time()
            model, curves = train(parts, start, METHODS[name], seed, settings, device)
            made = {"method": name, "seed": seed, **curves}
            made |= {"test": measure(model, parts["test"], device), "environment": environment}
            if model.pool is not None:
                made["alpha"] = float(torch.as_tensor(model.pool.alpha()).detach())
            if model.pool is not None and seed == 1 and examples:
                pairs = encode(examples, ids).to(device)
                with torch.no_grad():
                    made["weights"] = [
                        row[: len(text.premise)].tolist()
                        for row, text in zip(model.weights(pairs).cpu(), examples, strict=True)
                    ]
                made["predicted"] = predict(model, pairs, device).tolist()
            made["cpu_seconds"] = time.process_time() - began
            kept["runs"].append(made)
            json_path.write_text(json.dumps(_rounded(kept)) + "\n", encoding="utf-8")
            accuracy = made["test"]["accuracy"]["all"]
            print(
                f"{number} of {len(todo)}: {METHODS[name].title}, seed {seed}: best dev "
                f"{max(curves['dev']):.1%}, test {accuracy:.1%}; {made['cpu_seconds']:.0f} CPU s",
                flush=True,
            )
    except KeyboardInterrupt:
        print(f"stopped; the runs so far are in {json_path}: call it again to go on")
        return 1
    for grid in grids(kept["runs"]):
        console().print(grid.rich())
    return 0


def _rounded(value: Any) -> Any:
    """Six digits are enough for what is kept; exact zeros stay exact, and nothing else is 0."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def grids(runs: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Accuracy and focus of each method, then the focus for each label."""
    found = _by_method(runs)
    first, second = [], []
    for name, mine in found.items():
        accuracy = {seed: each["test"]["accuracy"]["all"] for seed, each in mine.items()}
        base = {seed: each["test"]["accuracy"]["all"] for seed, each in found["softmax"].items()}
        gaps = [accuracy[seed] - base[seed] for seed in accuracy.keys() & base.keys()]
        has_focus = METHODS[name].alpha is not None
        parts = [_shown(_values(mine, key), 0) if has_focus else "" for key in _FOCUS]
        gap = "" if name == "softmax" else _shown(gaps, 1, sign="+")
        dev = _shown([max(each["dev"]) for each in mine.values()], 1)
        test = _shown([*accuracy.values()], 1)
        first.append([METHODS[name].title, dev, test, gap, *parts])
        if has_focus:
            second.append([
                METHODS[name].title,
                *(_shown(_values(mine, key, x), 1, interval=False)
                  for key in ("accuracy", "kept") for x in LABELS),
            ])  # fmt: skip
    return [
        Grid("SNLI: percent, means over seeds and 95% confidence intervals",
             ["premise by", "dev", "test", "test minus softmax", *_FOCUS.values()], first),
        Grid("SNLI by label: percent, means over seeds",
             ["premise by", *(f"{key}: {x}" for key in ("accuracy", "weight > 0") for x in LABELS)],
             second),
    ]  # fmt: skip


_FOCUS = {"kept": "words with weight > 0", "most": "words with 95% of the weight",
          "place": "mean place", "moved": "moved by the hypothesis"}  # fmt: skip


def _by_method(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    found = {name: {x["seed"]: x for x in runs if x["method"] == name} for name in METHODS}
    return {name: mine for name, mine in found.items() if mine}


def _values(runs: Mapping[int, Mapping[str, Any]], key: str, group: str = "all") -> list[float]:
    return [each["test"][key][group] for each in runs.values()]


def _shown(values: Sequence[float], digits: int, sign: str = "", interval: bool = True) -> str:
    """A share as percent: the mean, and half the interval."""
    made = estimate(values)
    if made is None:
        return ""
    text = f"{100 * made.mean:{sign}.{digits}f}"
    if interval and made.high is not None:
        text += f" ± {100 * (made.high - made.mean):.{digits}f}"
    return text


def render(kept: Path) -> str:
    """The part of docs/attention.md that is made from what was kept."""
    path = kept / "snli.json"
    if not path.is_file():
        return "No measurements have been recorded yet.\n"
    found = json.loads(path.read_text(encoding="utf-8"))
    runs, data, settings = found["runs"], found["data"], found["settings"]
    accuracy, by_label = grids(runs)
    last = runs[-1]["environment"]
    seeds = len({each["seed"] for each in runs})
    commits = ", ".join(dict.fromkeys(str(each["environment"]["commit"]) for each in runs))
    about = (
        f"{data['train']:,} training, {data['dev']:,} dev and {data['test']:,} test pairs, "
        f"{data['words']:,} words; width {settings['width']}, batch size {settings['batch']}, Adam "
        f"at {settings['lr']:g}, the best of {settings['epochs']} epochs by dev accuracy, {seeds} "
        f"seeds; {last['device']}, torch {last['torch']}, "
        f"{sum(each['cpu_seconds'] for each in runs) / 60:.0f} minutes of one core for all "
        f"{len(runs)} runs; at {commits}."
    )
    remarks = kept / "snli.md"
    parts = [
        accuracy.markdown(), _NOTE, about, _verdict(runs), f"![{_CAPTION}](pictures/{PICTURE})",
        "By label:", by_label.markdown(), f"![{_WORDS_CAPTION}](pictures/{WORDS_PICTURE})",
        f"{_WORDS_CAPTION}. {_WORDS_NOTE}",
        *([remarks.read_text(encoding="utf-8").strip()] if remarks.is_file() else []),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


_NOTE = """\
In percent: means over seeds ± half of their 95% confidence interval. *Test minus softmax* is paired
by seed. The other columns are means over test pairs: the share of premise words with a weight above
0; the smallest share that has 95% of the weight; where the weight is (0 the first word, 100 the
last, even weights 50); and how much of it goes to other words for another hypothesis of the same
premise."""
_CAPTION = "Test accuracy of each seed, and the share of premise words that are looked at"
_WORDS_CAPTION = "Weights of premise words under softmax, entmax and sparsemax"
_WORDS_NOTE = """\
Two premises with a hypothesis of each label, first seed. A grey 0 is a weight of exactly zero, .00
one that rounds to it. The pairs were not picked by hand: they are the first of the test set with 8
to 12 premise words and all three labels. The label that each model chose is behind its name where
it is wrong."""


def _verdict(runs: Sequence[Mapping[str, Any]]) -> str:
    """Which methods differ from softmax by more than seeds do."""
    found = _by_method(runs)
    names = list(found)
    accuracy = [{s: x["test"]["accuracy"]["all"] for s, x in found[m].items()} for m in names]
    pairs = p_values(accuracy, log=False)
    others = [name for name in names if name != "softmax"]
    at = names.index("softmax")
    ps = [pairs[min(at, i), max(at, i)] for i in (names.index(name) for name in others)]
    adjusted = dict(zip(others, holm(ps), strict=True))
    told = [
        f"{METHODS[m].title} (p {'< 0.001' if p < 0.001 else f'= {p:.2g}'})"
        for m, p in adjusted.items()
        if p < LEVEL
    ]
    level = "; ".join(METHODS[m].title for m, p in adjusted.items() if p >= LEVEL)
    return (
        f"Significantly different from softmax: {'; '.join(told) or 'none'}. Not significantly "
        f"different: {level or 'none'}. By paired t-tests over {len(accuracy[at])} seeds, their "
        "variance pooled over all pairs of rows, with Holm's correction."
    )


def write_page(kept: Path, docs: Path) -> list[Path]:
    """The part of docs/attention.md and its pictures, from the file that :func:`run` wrote."""
    page = docs / PAGE
    page.write_text(render(kept), encoding="utf-8")
    if not (kept / "snli.json").is_file():
        return [page]
    found = json.loads((kept / "snli.json").read_text(encoding="utf-8"))
    pictures = docs / "pictures"
    for name, figure in ((PICTURE, _chart(found)), (WORDS_PICTURE, _words_chart(found))):
        figure.savefig(pictures / name, format="png", metadata={"Software": None})
    return [pictures / PICTURE, pictures / WORDS_PICTURE, page]


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _chart(found: Mapping[str, Any]) -> "Figure":
    """Accuracy of each seed beside the shares of words."""
    methods = _by_method(found["runs"])
    names = list(methods)
    figure = _figure(9.5, 0.45 * len(names) + 0.9)
    left, right = figure.subplots(1, 2, sharey=True)
    for row, name in enumerate(names):
        values = [100 * x for x in _values(methods[name], "accuracy")]
        left.plot(values, [row] * len(values), "o", color=OURS_COLOURS[0], alpha=0.45, ms=5)
        made = estimate(values)
        if made is not None:
            left.plot([made.mean] * 2, [row - 0.3, row + 0.3], color="black", lw=1.5)
        if METHODS[name].alpha is None:
            continue
        for shift, key in ((-0.2, "kept"), (0.2, "most")):
            share = 100 * sum(_values(methods[name], key)) / len(values)
            colour = OURS_COLOURS[0 if key == "kept" else 3]
            label = _FOCUS[key] if name == "softmax" else None
            right.barh(row + shift, share, height=0.36, color=colour, label=label)
            right.text(share + 1, row + shift, f"{share:.0f}%", va="center", fontsize=7)
    left.set_yticks(range(len(names)), [METHODS[name].title for name in names], fontsize=8)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set_xlabel("test accuracy, %: seeds, and their mean", fontsize=8)
    right.set_xlabel("share of premise words, %", fontsize=8)
    right.set_xlim(0, 112)
    right.legend(fontsize=7, frameon=False, loc="upper left")
    for panel in (left, right):
        panel.grid(visible=True, axis="x", alpha=0.3)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _words_chart(found: Mapping[str, Any]) -> "Figure":
    """A column of panels for each premise, a panel for each of its hypotheses."""
    maps = ("softmax", "entmax", "sparsemax")
    first = [x for x in found["runs"] if x["seed"] == 1 and x["method"] in maps]
    examples = found["examples"]
    n_columns = len(examples) // len(LABELS)
    figure = _figure(5.6 * n_columns, 6.4)
    panels = figure.subplots(len(LABELS), n_columns, squeeze=False)
    for i, example in enumerate(examples):
        row, premise = i % len(LABELS), example["premise"]
        panel = panels[row, i // len(LABELS)]
        told = [
            METHODS[x["method"]].title
            + ("" if x["predicted"][i] == example["label"] else f" ({LABELS[x['predicted'][i]]})")
            for x in first
        ]
        weights = torch.tensor([x["weights"][i] for x in first])
        plot_attention(
            weights, told, premise if row + 1 == len(LABELS) else [""] * len(premise), panel
        )
        for at in (weights == 0).nonzero().tolist():
            panel.text(*reversed(at), "0", ha="center", va="center", fontsize=7, color="#AAAAAA")
        title = f"{LABELS[example['label']]}: {' '.join(example['hypothesis'])}"
        panel.set_title("\n".join(wrap(title, 60)), loc="left", fontsize=8.5)
        panel.tick_params(length=0, labelsize=8)
        panel.spines[:].set_color("#CCCCCC")
    return figure
