"""Language models with several kinds of trees: perplexity and time, compared with flat softmax."""

import gzip
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer.heads import FullSoftmax, Head, HierarchicalSoftmax
from lastlayer.lab.data.text import Reading, TextData
from lastlayer.lab.feeding import TextFeed
from lastlayer.lab.statistics import LEVEL, holm, p_values
from lastlayer.trees import Tree, balanced, cluster, from_codes, huffman, wordnet
from studies.frame import RECALLED, Needed, Options, Study, Verdict, log_x, mean, progress, spread
from studies.language import (
    BROWN,
    WIKITEXT2,
    Model,
    Setting,
    brown,
    choose_rate,
    feed_of,
    fit,
    geometric_mean,
    not_flat,
    seconds_per_epoch,
    wikitext2,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDNET = Needed(
    "wordnet/glosses.tsv.gz",
    "WordNet 3.0 as a table, gzip: synset id, lexicographer file, words, hypernym ids, gloss",
)
TOKENS, WORDS = 120_000, 5_000
OVERLAP = 0.4
FLAT, RANDOM, WORDNET_TREE = "flat softmax", "random", "WordNet"
LEARNED, HALVES = "learned", "learned, in halves"
OVERLAPPING, TWO_TREES = f"learned, overlap {OVERLAP}", f"two learned, overlap {OVERLAP}"
# Perplexity on APNews and minutes per epoch by Mnih and Hinton, recalled.
PUBLISHED = {
    RANDOM: (151.2, 4), HALVES: (131.3, 4), LEARNED: (127.0, 4), OVERLAPPING: (123.3, 7),
    TWO_TREES: (115.7, 16), FLAT: (117.0, 6420),
}  # fmt: skip


class Synsets:
    """A :class:`lastlayer.trees.WordNetReader` for a table of synsets.

    The table has no sense frequencies. The sense of a word is the synset that lists the word
    earliest; ties go to the synset with the most hyponyms.

    Args:
        path: lines of synset id, lexicographer file, words, hypernym ids and gloss.
    """

    _PARTS: Mapping[str, str] = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}
    # Base forms by replacing endings; irregular forms are not listed.
    _ENDINGS = (
        ("ies", "y"), ("es", "e"), ("es", ""), ("s", ""), ("ied", "y"), ("ed", "e"), ("ed", ""),
        ("ing", "e"), ("ing", ""), ("er", "e"), ("er", ""), ("est", ""),
    )  # fmt: skip
    _SHORTEST = 3

    def __init__(self, path: Path) -> None:
        lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
        self._above: dict[str, str | None] = {}
        self._area: dict[str, str] = {}
        self._name: dict[str, str] = {}
        places: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for line in lines:
            synset, file, words, hypernyms, _ = line.split("\t")
            names = [word.partition("(")[0].lower() for word in words.split(",")]
            self._name[synset] = names[0].replace("_", " ")
            self._above[synset] = hypernyms.partition(",")[0] or None
            self._area[synset] = f"{self._PARTS[synset[-1]]}.{file}"
            for place, name in enumerate(names):
                places[name].append((place, synset))
        below = Counter(self._above.values())
        parts = "".join(self._PARTS)
        self._sense = {
            name: min(senses, key=lambda each: (each[0], -below[each[1]], parts.find(each[1][-1])))
            for name, senses in places.items()
        }

    def sense(self, word: str) -> str | None:
        """The sense of the word itself, or else of one of its base forms."""
        form = word.lower().replace(" ", "_")
        found = self._sense.get(form) or min(
            (self._sense[base] for base in self._base_forms(form) if base in self._sense),
            default=None,
        )
        return found and found[1]

    def _base_forms(self, form: str) -> Iterator[str]:
        for ending, instead in self._ENDINGS:
            base = form.removesuffix(ending) + instead
            if form.endswith(ending) and len(base) >= self._SHORTEST:
                yield base

    def above(self, synset: str) -> str | None:
        """Its first hypernym; adjectives and adverbs have none in the table."""
        return self._above[synset]

    def name(self, synset: str) -> str:
        """Its first word."""
        return self._name[synset]

    def area(self, synset: str) -> str:
        """Its part of speech and the number of its lexicographer file."""
        return self._area[synset]


class Known(NamedTuple):
    """The inputs of tree builders: the corpus, WordNet, the seed, and word vectors."""

    data: TextData
    synsets: Synsets
    seed: int
    vectors: Tensor | None = None


def _random(known: Known) -> Tree:
    n = known.data.n_classes
    return balanced(n, order=np.random.default_rng(known.seed).permutation(n))


def _learned(known: Known, copy: int = 0, **how: Any) -> Tree:
    seed = 10 * known.seed + copy
    return cluster(known.vectors, seed=seed, progress=False, **how)


def two_trees(known: Known) -> Tree:
    """Two overlapping trees with a common root; each class has its paths in both."""
    both = [_learned(known, copy, kind="adaptive", overlap=OVERLAP) for copy in range(2)]
    return from_codes([
        [[side, *code] for side, tree in enumerate(both) for code in tree.codes(c)]
        for c in range(known.data.n_classes)
    ])  # fmt: skip


# Class ids are in order of decreasing frequency.
TREES: dict[str, Callable[[Known], Tree]] = {
    RANDOM: _random,
    "balanced, by frequency": lambda known: balanced(known.data.n_classes),
    "Huffman": lambda known: huffman(known.data.counts),
    WORDNET_TREE: lambda known: wordnet(
        known.data.vocabulary.tokens, known.data.counts, reader=known.synsets
    ),
    HALVES: partial(_learned, kind="balanced"),
    LEARNED: partial(_learned, kind="adaptive"),
    OVERLAPPING: partial(_learned, kind="adaptive", overlap=OVERLAP),
    TWO_TREES: two_trees,
}


@torch.no_grad()
def mean_states(model: Model, feed: TextFeed) -> Tensor:
    """For each word, the mean of the hidden states that precede it in the training part."""
    n, width = model.head.n_classes, model.head.in_features
    device = next(model.head.parameters()).device
    sums, counts = torch.zeros(n, width, device=device), torch.zeros(n, 1, device=device)
    for step in range(feed.steps_per_epoch):
        batch = feed.batch(0, step)
        hidden, target = model.body(batch.inputs).flatten(0, -2), batch.target.flatten()
        sums.index_add_(0, target, hidden)
        counts.index_add_(0, target, torch.ones(len(target), 1, device=device))
    return sums / counts.clamp(min=1)


def described(tree: Tree, data: TextData) -> dict[str, float]:
    """Number of choices over all paths of a word, and of paths, weighted by frequency."""
    share = data.counts / data.counts.sum()
    paths = np.diff(tree.class_start)
    lengths = np.add.reduceat(np.diff(tree.path_start), tree.class_start[:-1])
    return {"choices": float(share @ lengths), "paths": float(share @ paths)}


def measure_corpus(
    data: TextData, synsets: Synsets, setting: Setting, options: Options
) -> dict[str, Any]:
    """Trains all trees and flat softmax with all seeds; learned trees use models of random ones."""
    runs: dict[str, list[dict[str, Any]]] = {}
    vectors: dict[int, Tensor] = {}
    feed = feed_of(data, setting, options.device)
    # Compile first, so that the time of clustering excludes compilation.
    cluster(torch.randn(64, setting.width), kind="adaptive", overlap=OVERLAP, progress=False)
    for name in (*TREES, FLAT):
        rate, runs[name] = None, []
        for seed in options.seeds:
            make: Callable[[], Head] = partial(FullSoftmax, setting.width, data.n_classes)
            about: dict[str, float] = {}
            if name != FLAT:
                began = time.process_time()
                tree = TREES[name](Known(data, synsets, seed, vectors.get(seed)))
                about = {"build": time.process_time() - began, **described(tree, data)}
                make = partial(HierarchicalSoftmax, setting.width, tree, sparse=True)
            if rate is None:
                rate = choose_rate(data, make, seed, setting, options.device)
            run, model = fit(data, make, rate, seed, setting, options.device)
            if name == RANDOM:
                began = time.process_time()
                vectors[seed] = mean_states(model, feed).cpu()
                about["vectors"] = time.process_time() - began
            runs[name].append(run | about)
            progress(
                f"{data.name}, {name}, seed {seed}: test perplexity {run['test']:.1f}, rate "
                f"{rate:g}, {len(run['valid']) - 1} epochs of {seconds_per_epoch(run):.1f} s"
            )
    known = [synsets.sense(word) is not None for word in data.vocabulary.tokens]
    return {
        "classes": data.n_classes, "tokens": data.description["tokens"], "runs": runs,
        "in_wordnet": {"words": float(np.mean(known)),
                       "occurrences": float(data.counts[known].sum() / data.counts.sum())},
    }  # fmt: skip


def measure(options: Options) -> dict[str, Any]:
    """Runs both corpora, all of them on a GPU."""
    reading, setting = Reading(vocab_size=WORDS, limit=TOKENS), Setting(
        rates=(0.003, 0.01), held_out=10_000
    )  # fmt: skip
    if options.quick:
        reading = Reading(vocab_size=1_000, limit=30_000)
        setting = Setting(width=32, epochs=2, rates=(0.01,), held_out=2_000)
    elif options.device.type == "cuda":
        reading = Reading()
    synsets = Synsets(options.path(WORDNET.path))
    corpora = (
        brown(options.path(BROWN.path), reading),
        wikitext2(options.path(WIKITEXT2[0].path).parent, reading),
    )
    return {
        "device": options.device.type,
        "corpora": {data.name: measure_corpus(data, synsets, setting, options) for data in corpora},
    }


def _values(corpus: Mapping[str, Any], name: str) -> list[float]:
    return [run["test"] for run in corpus["runs"][name]]


def _seconds(corpus: Mapping[str, Any], name: str) -> list[float]:
    return [seconds_per_epoch(run) for run in corpus["runs"][name]]


def _p_values(corpus: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """P-values of differences in perplexity between all pairs, Holm-corrected."""
    names = list(corpus["runs"])
    pairs = p_values([dict(enumerate(_values(corpus, name))) for name in names], log=True)
    found: dict[tuple[str, str], float] = {}
    for (i, j), p in zip(pairs, holm([*pairs.values()]), strict=True):
        found[names[i], names[j]] = found[names[j], names[i]] = p
    return found


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """One table per corpus, with the published figures for APNews."""
    made = []
    for title, corpus in found["corpora"].items():
        p, flat = _p_values(corpus), mean(_seconds(corpus, FLAT))
        rows = []
        for name, runs in corpus["runs"].items():
            seconds = mean(_seconds(corpus, name))
            theirs = PUBLISHED.get(name)
            rows.append([
                name, spread(_values(corpus, name), 1),
                "" if name == FLAT else f"{p[name, FLAT]:.2g}",
                f"{seconds:.2f}", f"{flat / seconds:.1f}",
                "" if name == FLAT else f"{mean([run['choices'] for run in runs]):.1f}",
                "" if name == FLAT else f"{mean([run['paths'] for run in runs]):.2f}",
                "" if name == FLAT else f"{mean([run['build'] for run in runs]):.2f}",
                f"{runs[0]['rate']:g}",
                f"{theirs[0]}{RECALLED}" if theirs else "",
                f"{theirs[1]:,}{RECALLED}" if theirs else "",
            ])  # fmt: skip
        headings = ["tree", "test perplexity", "p against flat", "s per epoch", "times faster",
                    "choices per word", "paths per word", "s to build", "learning rate",
                    "APNews perplexity", "APNews min per epoch"]  # fmt: skip
        size = f"{corpus['tokens']['train']:,} tokens, {corpus['classes']:,} words"
        made.append(Grid(f"{title}, {size}", headings, rows))
    return made


class Claim(NamedTuple):
    """The claim that one is better than another, or at least not worse."""

    better: str
    worse: str
    or_alike: bool = False


CLAIMS = (
    Claim(LEARNED, RANDOM), Claim(HALVES, RANDOM), Claim(LEARNED, HALVES),
    Claim(OVERLAPPING, LEARNED), Claim(FLAT, LEARNED), Claim(TWO_TREES, FLAT, or_alike=True),
    Claim(FLAT, WORDNET_TREE),
)  # fmt: skip


def _judged(corpus: Mapping[str, Any], claim: Claim) -> tuple[bool, bool]:
    """Whether the claim holds, and whether the difference is significant."""
    one, other = (geometric_mean(_values(corpus, name)) for name in claim[:2])
    sure = _p_values(corpus)[claim[:2]] < LEVEL
    return one < other or (claim.or_alike and not sure), sure


def verdict(found: Mapping[str, Any]) -> Verdict:
    """How many of the published comparisons are reproduced, and the speed-up of trees."""
    told, right, reversed_, total = list[str](), 0, 0, 0
    shown: set[Claim] = {claim for claim in CLAIMS if claim.or_alike}
    for title, corpus in found["corpora"].items():
        same, other = list[str](), list[str]()
        for claim in CLAIMS:
            holds, sure = _judged(corpus, claim)
            text = f"{claim.better} {'≤' if claim.or_alike else '<'} {claim.worse}"
            (same if holds else other).append(text if sure else f"{text} (not significant)")
            total, right, reversed_ = total + 1, right + holds, reversed_ + (sure and not holds)
            shown |= {claim} if holds and sure else set()
        flat = mean(_seconds(corpus, FLAT))
        faster = {name: flat / mean(_seconds(corpus, name)) for name in corpus["runs"]}
        text = f"On {title} perplexities agree with the paper for {'; '.join(same) or 'no pair'}"
        text += f"; not for {'; '.join(other)}" if other else ""
        text += (
            f". An epoch is {faster[LEARNED]:.0f} times faster with a learned tree than with the "
            f"flat softmax, {faster[OVERLAPPING]:.1f} times with overlap and "
            f"{faster[TWO_TREES]:.1f} times with two such trees, "
        )
        first = [run["seconds"][-1] + run["vectors"] for run in corpus["runs"][RANDOM]]
        text += (
            f"after {mean(first):.0f} s for the model with the random tree that they are learned "
            f"from. WordNet contains {corpus['in_wordnet']['words']:.0%} of the words and "
            f"{corpus['in_wordnet']['occurrences']:.0%} of their occurrences; the others have "
            f"Huffman's tree. {not_flat(corpus['runs'])}"
        )
        told.append(text)
    told.append(
        "Published speed-ups are larger since their vocabulary is: a flat step grows with the "
        "number of words, a tree's with its logarithm."
    )
    open_ = [f"{claim.better} < {claim.worse}" for claim in CLAIMS if claim not in shown]
    told.insert(0, f"Of {total} comparisons {right} have the published sign.")
    if open_:
        told.append(f"Not significant on any corpus, with so few seeds: {'; '.join(open_)}.")
    why = " ".join(told)
    if right == total and not open_:
        return Verdict("holds", why)
    most = right > total / 2 and (not reversed_ or right > 0.7 * total)
    return Verdict("holds in part" if most else "does not hold", why)


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """Perplexity against the time of an epoch, a panel per corpus."""
    panels = figure.subplots(1, len(found["corpora"]))
    colours = (OTHER_COLOURS[3], OTHER_COLOURS[1], OTHER_COLOURS[0], OURS_COLOURS[3],
               OURS_COLOURS[2], OURS_COLOURS[0], OURS_COLOURS[1], OURS_COLOURS[4])  # fmt: skip
    for panel, (title, corpus) in zip(panels, found["corpora"].items(), strict=True):
        for name, colour in zip(TREES, colours, strict=True):
            panel.plot(_seconds(corpus, name), _values(corpus, name), "o", ms=4, color=colour,
                       label=name)  # fmt: skip
        panel.plot(_seconds(corpus, FLAT), _values(corpus, FLAT), "k*", ms=7, label=FLAT)
        panel.axhline(geometric_mean(_values(corpus, FLAT)), color="k", lw=0.6)
        log_x(panel)
        panel.set_title(title)
        panel.set_xlabel("seconds per epoch" + (" (CPU)" if found["device"] == "cpu" else ""))
        panel.set_ylabel("test perplexity")
    panels[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


STUDY = Study(
    title="trees of words for language models: random, WordNet, learned, overlapping",
    claim=(
        "Mnih and Hinton (NIPS 2008): in a log-bilinear language model a tree learned from the "
        "data is better than a random one, one that splits freely better than one that splits in "
        "halves, and one with overlap better still; several overlapping trees beat the flat "
        "model, which a single tree without overlap does not (APNews, 17,964 words, figures "
        "recalled). Morin and Bengio (AISTATS 2005): with a tree from WordNet training is about "
        "200 times faster than flat, and perplexity is worse (abstract read)."
    ),
    protocol=(
        f"The log-bilinear model of the lab (8 words, width 64) on the first {TOKENS:,} training "
        f"tokens of each corpus with the {WORDS:,} most frequent words (on a GPU: all), 10,000 "
        "held-out tokens each for validation and test. Biases are initialised to the frequencies. "
        "The learning rate is 0.003 or 0.01 (no higher one was tried), chosen with the first seed "
        "after one epoch; it is cut to a quarter when validation stops improving, and the run ends "
        "when it stops improving again. The best epoch is used. Learned trees cluster, for each "
        "seed, the mean hidden state before each word in the model with the random tree. “In "
        "halves” is "
        "the BALANCED of the paper, “learned” its ADAPTIVE. “Balanced, by frequency” is no "
        "tree of the paper: neighbours are words of similar frequency. Neither is Huffman's. The "
        "WordNet table has no sense frequencies, irregular forms or adjective clusters: a word has "
        "the sense whose synset lists it earliest, then the one with the most hyponyms, and nodes "
        "with many children are split by a Huffman tree; Morin and Bengio clustered them "
        "(recalled). Time is CPU time of the training steps only, on one thread, with row-sparse "
        "gradients for trees and dense ones for flat softmax. P-values are from paired t-tests of "
        "log-perplexities by seed with Holm's correction over all pairs. Settings were chosen on "
        "validation after one epoch on Brown; both corpora were then truncated to fit the "
        "available time, before any full run."
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    needs=(BROWN, *WIKITEXT2, WORDNET),
    size=(10.5, 3.6),
)  # fmt: skip
