"""Word vectors, ours and gensim's: words per CPU second, held-out loss, similarities, analogies.

Both train on the same text with the same settings and number of threads, one after the other for
each seed. Time is CPU time of the whole process, since the machine may be shared. Ours includes
converting the text to word ids; gensim's does not include building its vocabulary.
"""

import gzip
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import record
from benchmarks.table import Grid, console
from lastlayer import trees, vectors

Floats = NDArray[np.float64]
WINDOW, NEGATIVES, SUBSAMPLE, MIN_COUNT, EPOCHS = 5, 5, 1e-3, 5, 3
HELD_OUT = 40_000
SIMILARITIES = ("EN-WS-353-ALL", "EN-SIMLEX-999", "EN-MEN-TR-3k", "EN-MTurk-771")
INSTALL_COMMAND = "pip install gensim"
PAGE = "word_vectors_figures.inc"


@dataclass(frozen=True)
class Case:
    """A training task, and the target for the speed-up over gensim; None for no target."""

    title: str
    dim: int
    model: str = "skipgram"
    objective: str = "negative"
    target: float | None = None


CASES = (
    Case("skip-gram, negative sampling, 100", 100, target=6.0),
    Case("skip-gram, negative sampling, 300", 300, target=4.0),
    Case("skip-gram, hierarchical, 100", 100, objective="hierarchical", target=2.0),
    Case("CBOW, negative sampling, 100", 100, "cbow"),
)
METRICS = ("loss", "similarity", "analogy")


class Trained(NamedTuple):
    """Trained word vectors."""

    input: Floats
    output: Floats
    path: Callable[[int], tuple[NDArray[Any], NDArray[Any]]] | None
    """Output rows of a word's path, and for each step 1 if its probability is sigmoid(score)."""
    seconds: float


class Text:
    """The data sets in the folder: training sentences, similarities and analogies."""

    def __init__(self, folder: Path, quick: bool) -> None:
        for name in ("wikitext2", "brown", "wordeval"):
            if not (folder / name).is_dir():
                raise ValueError(f"data: expected a folder with {name}/, got '{folder}'")
        self.sentences = _lines(folder / "wikitext2" / "train.txt.gz")
        self.sentences += _lines(folder / "brown" / "brown.txt.gz")
        self.sentences = self.sentences[:: 20 if quick else 1]
        self.n_words = sum(map(len, self.sentences))
        corpus = vectors.encode(self.sentences, min_count=MIN_COUNT)
        self.words = corpus.words
        self.counts = np.bincount(corpus.tokens[corpus.tokens >= 0], minlength=len(self.words))
        self.ids = {word: i for i, word in enumerate(self.words)}
        self._hold_out(_lines(folder / "wikitext2" / "test.txt.gz"))
        self._similar = [self._pairs(folder / "wordeval" / f"{name}.txt") for name in SIMILARITIES]
        lines = (folder / "wordeval" / "questions-words.txt").read_text().lower().splitlines()
        rows = [self._known(line.split()) for line in lines if not line.startswith(":")]
        self._questions = np.array([row for row in rows if row is not None]).reshape(-1, 4)

    def _known(self, words: Sequence[str]) -> list[int] | None:
        found = [self.ids.get(word) for word in words]
        return None if None in found else [i for i in found if i is not None]

    def _hold_out(self, sentences: list[list[str]]) -> None:
        """Samples centre words of held-out text, with their context words and negatives."""
        draw = np.random.default_rng(0)
        windows = []
        for sentence in sentences:
            ids = [self.ids[word] for word in sentence if word in self.ids]
            for i, centre in enumerate(ids):
                near = ids[max(0, i - WINDOW) : i] + ids[i + 1 : i + 1 + WINDOW]
                if near:
                    windows.append((centre, near))
        chosen = draw.choice(len(windows), min(HELD_OUT, len(windows)), replace=False)
        self.windows = [windows[i] for i in chosen]
        self.one_near = [near[draw.integers(len(near))] for _, near in self.windows]
        share = self.counts**0.75
        size = len(self.windows), NEGATIVES
        self.negatives = draw.choice(len(self.words), size, p=share / share.sum())

    def _pairs(self, path: Path) -> tuple[NDArray[Any], Floats]:
        """Pairs of words, and human judgements of their similarity."""
        lines = [line.lower().split() for line in path.read_text().splitlines()]
        known = [(self._known(line[:2]), float(line[2])) for line in lines]
        kept = [(pair, score) for pair, score in known if pair is not None]
        return np.array([pair for pair, _ in kept]), np.array([score for _, score in kept])

    def loss(self, made: Trained, model: str) -> float:
        """Mean held-out loss of centre words, from one context word or, for CBOW, their mean."""
        if model == "cbow":
            hidden = np.stack([made.input[near].mean(0) for _, near in self.windows])
        else:
            hidden = made.input[self.one_near]
        total = 0.0
        for i, (centre, _) in enumerate(self.windows):
            if made.path is None:
                rows = np.append(centre, self.negatives[i])
                right = np.append(1, np.zeros(NEGATIVES))
            else:
                rows, right = made.path(centre)
            scores = made.output[rows] @ hidden[i]
            total += float(np.logaddexp(0.0, np.where(right == 1, -scores, scores)).sum())
        return total / len(self.windows)

    def similarity(self, made: Trained) -> float:
        """Mean rank correlation with human judgements, over four data sets."""
        from scipy.stats import spearmanr

        unit = made.input / np.linalg.norm(made.input, axis=1, keepdims=True)
        found = []
        for pairs, scores in self._similar:
            cosine = (unit[pairs[:, 0]] * unit[pairs[:, 1]]).sum(1)
            found.append(float(spearmanr(cosine, scores).statistic))
        return statistics.fmean(found)

    def analogy(self, made: Trained) -> float:
        """Accuracy on Google's analogy questions whose words are all in the vocabulary."""
        unit = made.input / np.linalg.norm(made.input, axis=1, keepdims=True)
        right = 0
        for first in range(0, len(self._questions), 256):
            a, b, c, d = self._questions[first : first + 256].T
            scores = (unit[b] - unit[a] + unit[c]) @ unit.T
            for known in (a, b, c):
                scores[np.arange(len(known)), known] = -np.inf
            right += int((scores.argmax(1) == d).sum())
        return right / max(1, len(self._questions))


def _lines(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        # A line of Brown that begins with # names a file.
        lines = (line.lower().split() for line in file if not line.startswith("# "))
        return [words for words in lines if words]


def _ours(text: Text, case: Case, seed: int, epochs: int, threads: int) -> Trained:
    began = time.process_time()
    corpus = vectors.encode(text.sentences, min_count=MIN_COUNT)
    n_negatives = None if case.objective == "hierarchical" else NEGATIVES
    made = vectors.train(
        corpus.tokens, words=corpus.words, dim=case.dim, window=WINDOW, model=case.model,
        objective=case.objective, subsample=SUBSAMPLE, epochs=epochs, threads=threads, seed=seed,
        progress=False, n_negatives=n_negatives,
    )  # fmt: skip
    seconds = time.process_time() - began
    path = None
    if case.objective == "hierarchical":
        path = partial(_path, trees.huffman(text.counts))
    assert made.output is not None  # noqa: S101 — trained vectors have output vectors
    return Trained(made.input.double().numpy(), made.output.double().numpy(), path, seconds)


def _path(tree: trees.Tree, word: int) -> tuple[NDArray[Any], NDArray[Any]]:
    on_path = slice(tree.path_start[word], tree.path_start[word + 1])
    return tree.path_node[on_path], tree.path_position[on_path]


def _gensim(text: Text, case: Case, seed: int, epochs: int, threads: int) -> Trained:
    from gensim.models import Word2Vec

    hierarchical = case.objective == "hierarchical"
    model = Word2Vec(
        vector_size=case.dim, window=WINDOW, min_count=MIN_COUNT, sg=int(case.model == "skipgram"),
        hs=int(hierarchical), negative=0 if hierarchical else NEGATIVES, sample=SUBSAMPLE,
        workers=threads, seed=seed + 1,
    )  # fmt: skip
    model.build_vocab(text.sentences)
    began = time.process_time()
    model.train(text.sentences, total_examples=len(text.sentences), epochs=epochs)
    seconds = time.process_time() - began
    rows = [model.wv.key_to_index[word] for word in text.words]
    codes = [model.wv.get_vecattr(word, "code") for word in text.words] if hierarchical else []
    points = [model.wv.get_vecattr(word, "point") for word in text.words] if hierarchical else []
    output = model.syn1 if hierarchical else model.syn1neg[rows]
    return Trained(
        model.wv.vectors[rows].astype(np.float64), output.astype(np.float64),
        (lambda word: (points[word], 1 - codes[word])) if hierarchical else None, seconds,
    )  # fmt: skip


def run(folder: Path, *, only: str, quick: bool, threads: int, seeds: int,
        json_path: Path | None, commit: str | None) -> int:  # fmt: skip
    """Measure, print and append one line of JSON for each case."""
    cases = [case for case in CASES if only in case.title]
    if not cases:
        titles = "; ".join(case.title for case in CASES)
        raise ValueError(f"--only: expected part of one of: {titles}; got {only!r}")
    text, epochs = Text(folder, quick), 1 if quick else EPOCHS
    methods = {"gensim": _gensim, record.OURS: _ours}
    if record.version("gensim") is None:
        print(f"gensim: not installed, so only ours is measured; {INSTALL_COMMAND}")
        del methods["gensim"]
    # Compile, or load from Numba's cache, before timing.
    vectors.train(np.array([0, 1, 0, 1]), dim=2, epochs=1, threads=1, progress=False)
    environment = record.environment(torch.device("cpu"), quick=quick, at=commit)
    environment |= {"threads": threads, "gensim": record.version("gensim")}
    lines = []
    for case in cases:
        found: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
        for seed in range(seeds):
            for name, method in list(methods.items())[:: 1 if seed % 2 == 0 else -1]:
                made = method(text, case, seed, epochs, threads)
                values = {
                    "words_per_second": epochs * text.n_words / made.seconds,
                    "loss": text.loss(made, case.model),
                    "similarity": text.similarity(made),
                    "analogy": text.analogy(made),
                }
                for key, value in values.items():
                    found[name].setdefault(key, []).append(value)
        about = {"n_words": text.n_words, "vocabulary": len(text.words), "epochs": epochs}
        line = {"family": "vectors", "date": record.now(), **environment, **about,
                "case": asdict(case), "found": found}  # fmt: skip
        lines.append(line)
        console().print(grid([line]).rich())
        if json_path is not None:
            with json_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return 0


def grid(lines: Sequence[dict[str, Any]]) -> Grid:
    """One row per case and method: means over seeds, with standard errors."""
    headings = ["", "threads", "", "words per CPU second", "ratio", "target", "held-out loss",
                "similarity", "analogies"]  # fmt: skip
    rows = []
    for line in lines:
        found = line["found"]
        for name, values in found.items():
            is_ours = name == record.OURS and "gensim" in found
            speed = statistics.median(values["words_per_second"])
            ratios = [
                a / b
                for a, b in zip(
                    values["words_per_second"],
                    found.get("gensim", values)["words_per_second"],
                    strict=True,
                )
            ]
            target = line["case"]["target"]
            rows.append([
                line["case"]["title"], str(line["threads"]), name, f"{speed / 1000:,.0f}k",
                f"{statistics.median(ratios):.1f}" if is_ours else "",
                f"{target:g}" if is_ours and target else "",
                *(_mean(values[metric], 100 if metric == "analogy" else 1) for metric in METRICS),
            ])  # fmt: skip
    return Grid("word vectors", headings, rows)


def _mean(values: Sequence[float], factor: float) -> str:
    digits = 1 if factor == 100 else 3
    text = f"{factor * statistics.fmean(values):.{digits}f}"
    if len(values) > 1:
        error = factor * statistics.stdev(values) / math.sqrt(len(values))
        text += f" ± {error:.{digits}f}"
    return text + (" %" if factor == 100 else "")


def read(results: Path) -> list[dict[str, Any]]:
    """The newest full run of each case, device and number of threads, in the order of CASES."""
    lines = [
        json.loads(line)
        for path in sorted(results.glob("vectors*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    newest = {
        (each["case"]["title"], each["device"], each["threads"]): each
        for each in sorted(lines, key=lambda line: str(line["date"]))
        if not each["quick"]
    }
    order = [case.title for case in CASES]
    return sorted(newest.values(), key=lambda x: (order.index(x["case"]["title"]), x["threads"]))


def render(results: Path) -> str:
    """The table of docs/word_vectors.md, and the environment of the measurement."""
    lines = read(results)
    if not lines:
        return "No measurements have been recorded yet.\n"
    last = lines[-1]
    seeds = len(last["found"][record.OURS]["loss"])
    commits = ", ".join(dict.fromkeys(str(line["commit"]) for line in lines))
    about = (
        f"{last['device']}; Python {last['python']}, Numba {last['numba']}, gensim "
        f"{last['gensim']}; WikiText-2 and Brown, lower case, {last['n_words']:,} words, "
        f"vocabulary of {last['vocabulary']:,}; {last['epochs']} epochs, "
        f"{seeds} seeds; at {commits}."
    )
    return f"{grid(lines).markdown()}\n\n{about}\n"


def write_page(results: Path, docs: Path) -> list[Path]:
    """Write the table that docs/word_vectors.md includes."""
    (docs / PAGE).write_text(render(results), encoding="utf-8")
    return [docs / PAGE]
