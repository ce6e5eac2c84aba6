"""Class vectors from spellings: perplexity by number of parameters, and unseen words."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer.heads import CharCNNSoftmax, FullSoftmax, Head
from lastlayer.lab.data.text import Reading, TextData, Vocabulary, choose
from lastlayer.lab.feeding import TextFeed
from lastlayer.lab.statistics import LEVEL
from studies.frame import RECALLED, Options, Study, Verdict, mean, spread
from studies.language import (
    WIKITEXT2,
    Model,
    Setting,
    against_first,
    feed_of,
    fit_seeds,
    mean_test,
    not_flat,
    of_seeds,
    seconds_per_epoch,
    shown_p,
    wikitext2,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL, NARROW, CNN = "full softmax", "full softmax, narrow", "CNN softmax"
# The paper's correction has an eighth of the width, 128 of 1,024.
CORRECTIONS = (0, 8, 32)
FILTERS = ((1, 16), (2, 32), (3, 64), (4, 64))
# Perplexity and parameters of the whole model, in millions.
PUBLISHED = {FULL: (30.0, 1040), CNN: (39.8, 293), f"{CNN} + 8": (35.8, 393)}
SETTING = Setting(width=64, batch=64, epochs=8, rates=(0.003, 0.01), held_out=10_000)
# New words have only letters, and this range of occurrences in the training text.
_WORD, _OFTEN = re.compile("[a-z]{4,}"), (6, 100)
_SHOWN, _NEAREST, _CHUNK = 10, 3, 2_000


class Size(NamedTuple):
    """How much of the corpus is used.

    Attributes:
        words: number of classes, including new ones; None for all words.
        tokens: number of training tokens; None for all.
        new: number of words that are held out of training.
        narrow: width of a full softmax with about as many parameters as the CNN softmax.
    """

    words: int | None
    tokens: int | None
    new: int
    narrow: int


class Held(NamedTuple):
    """A corpus in which some words are held out.

    Attributes:
        data: the corpus; held-out words are unknown words in all of its parts.
        test: the test part with the ids of held-out words, which follow all classes.
        words: the held-out words.
        seen: as many classes of similar frequency.
        counts: training counts of held-out words, and of ``seen``.
        types: number of different unknown words in the training text, including held-out ones.
    """

    data: TextData
    test: NDArray[np.int32]
    words: list[str]
    seen: list[int]
    counts: list[list[int]]
    types: int


def hold_out(whole: TextData, size: Size) -> Held:
    """Choose the vocabulary from the beginning of the training part, and words to hold out.

    Held-out words are evenly spaced among words of medium frequency. Each is compared with the next
    word by frequency, which is seen in training.
    """
    names, train = whole.vocabulary.tokens, whole.train[: size.tokens]
    often = np.bincount(train, minlength=len(names))
    vocabulary, table = choose(names, often, size.words, None)
    medium = [
        i for i, word in enumerate(vocabulary.tokens)
        if _WORD.fullmatch(word) and _OFTEN[0] <= vocabulary.counts[i] <= _OFTEN[1]
    ]  # fmt: skip
    if len(medium) < 2 * size.new:
        raise ValueError(
            f"wikitext2: expected at least {2 * size.new} words that occur {_OFTEN[0]} to "
            f"{_OFTEN[1]} times, got {len(medium)}; use a longer text"
        )
    places = np.linspace(0, len(medium) - 2, size.new).astype(int)
    new, seen = ([medium[i + more] for i in places] for more in (0, 1))
    n, n_known = len(vocabulary), len(vocabulary) - size.new
    order = np.concatenate([np.setdiff1d(np.arange(n), new), new])
    place = np.empty(n, np.int32)
    place[order] = np.arange(n)
    unknown = int(place[vocabulary.unknown])
    counts = vocabulary.counts[order[:n_known]]
    counts[unknown] += vocabulary.counts[new].sum()
    parts = [place[table[each]] for each in (train, whole.valid, whole.test)]
    closed = [np.where(each < n_known, each, unknown).astype(np.int32) for each in parts]
    tokens = tuple(vocabulary.tokens[i] for i in order)
    data = replace(
        whole, vocabulary=Vocabulary(tokens[:n_known], counts), train=closed[0], valid=closed[1],
        test=closed[2],
    )  # fmt: skip
    known = [i for word, i in whole.vocabulary.ids.items() if word in data.vocabulary.ids]
    left_out = np.setdiff1d(np.flatnonzero(often), known)
    return Held(
        data, parts[2], list(tokens[n_known:]), place[seen].tolist(),
        [vocabulary.counts[each].tolist() for each in (new, seen)], len(left_out),
    )  # fmt: skip


@torch.no_grad()
def rows_before(model: Model, held: Held, setting: Setting) -> tuple[Tensor, Tensor]:
    """Hidden states of the test text before each new word and each of the seen ones."""
    data, device = held.data, next(model.body.parameters()).device
    wanted = torch.tensor([*_new(held), *held.seen], device=device)
    feed, unknown = feed_of(replace(data, test=held.test), setting, device), data.vocabulary.unknown
    model.body.eval()
    made = []
    for batch in feed.held_out("test", len(held.test)):
        hidden = model.body(torch.where(batch.inputs < data.n_classes, batch.inputs, unknown))
        rows = torch.isin(batch.target, wanted)
        made.append((hidden[rows], batch.target[rows]))
    hidden, target = (torch.cat(each) for each in zip(*made, strict=True))
    return hidden, target


def _new(held: Held) -> range:
    return range(held.data.n_classes, held.data.n_classes + len(held.words))


@torch.no_grad()
def judge_words(model: Model, held: Held, setting: Setting) -> dict[str, Any]:
    """What a head makes of words that were held out, added now, and of words that it has seen.

    Returns:
        For ``new`` words (where classes can be added) and ``seen`` ones the measures of
        :func:`of_group`; ``unknown``, minus the log-probability of new words where that of the
        unknown word is shared evenly by the words that it stands for; and ``near``, for some new
        words the seen ones of nearest class vectors.
    """
    hidden, target = rows_before(model, held, setting)
    head: Any = copy.deepcopy(model.head).eval()
    is_new = target >= held.data.n_classes
    unknown = head.log_prob(hidden[is_new])[:, held.data.vocabulary.unknown].double()
    made: dict[str, Any] = {"unknown": math.log(held.types) - unknown.mean().item()}
    groups: dict[str, Sequence[int]] = {"seen": held.seen}
    if isinstance(head, CharCNNSoftmax):
        groups["new"] = head.add_classes(held.words)
        made["near"] = _near(head, held, target[is_new])
    for name, ids in groups.items():
        group = torch.tensor(ids, device=target.device)
        rows = torch.isin(target, group)
        made[name] = of_group(head, hidden[rows], target[rows], group)
    return made


def of_group(head: Head, hidden: Tensor, target: Tensor, group: Tensor) -> dict[str, float]:
    """How the targets, all of a group of classes, are told from the group and from all classes.

    Returns:
        ``nll``: minus their log-probability, mean; ``others``: that of all of the group in their
        place; ``among``: theirs if the word is known to be of the group; ``rank``: the share of the
        group that is more probable, 0.5 by chance.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for rows, ids in zip(hidden.split(_CHUNK), target.split(_CHUNK), strict=True):
        log_prob = head.log_prob(rows).double()
        of_all = log_prob[:, group]
        own = log_prob.gather(1, ids.unsqueeze(1))
        above = (of_all > own).double().sum(1) + ((of_all == own).double().sum(1) - 1) / 2
        found = -own.squeeze(1), -of_all.mean(1), of_all.logsumexp(1) - own.squeeze(1), above
        sums += torch.stack([each.sum().cpu() for each in found])
    nll, others, among, rank = (sums / max(1, len(target))).tolist()
    return {"nll": nll, "others": others, "among": among, "rank": rank / max(1, len(group) - 1)}


def _near(head: CharCNNSoftmax, held: Held, target: Tensor) -> dict[str, list[str]]:
    """The seen words with the nearest class vectors, for the most frequent new words."""
    vectors = normalize(head.class_vectors(), dim=1)
    n_known, words = held.data.n_classes, held.data.vocabulary.tokens
    often = (target - n_known).bincount(minlength=len(held.words))
    shown = often.topk(min(_SHOWN, len(held.words))).indices.tolist()
    near = (vectors[n_known:][shown] @ vectors[:n_known].T).topk(_NEAREST).indices.tolist()
    return {held.words[i]: [words[j] for j in ids] for i, ids in zip(shown, near, strict=True)}


def by_frequency(counts: Sequence[int], occurrences: NDArray[np.int64]) -> float:
    """The loss of words of a group if their probabilities are their training frequencies."""
    shares = np.log(np.array(counts) / sum(counts))
    return float(-(shares * occurrences).sum() / max(1, occurrences.sum()))


def measure(options: Options) -> dict[str, Any]:
    """Trains every output layer with all seeds."""
    size, setting = Size(4_000, 120_000, 200, 24), SETTING
    corrections: tuple[int, ...] = CORRECTIONS
    if options.device.type == "cuda":
        size, setting = Size(None, None, 1_000, 24), setting._replace(epochs=30)
    if options.quick:
        size, corrections = Size(1_000, 20_000, 40, 24), CORRECTIONS[:2]
        setting = setting._replace(width=32, epochs=1, rates=(0.01,), held_out=3_000)
    whole = wikitext2(options.path("wikitext2"), Reading())
    if options.quick:
        whole = replace(whole, test=whole.test[:20_000])
    held = hold_out(whole, size)
    data, device = held.data, options.device

    def judged(model: Model, feed: TextFeed) -> dict[str, Any]:  # noqa: ARG001 - it has its own
        return judge_words(model, held, setting)

    runs = {
        FULL: fit_seeds(
            FULL, data, lambda: FullSoftmax(setting.width, data.n_classes), options.seeds, setting,
            device, judged=judged,
        ),
        NARROW: fit_seeds(
            NARROW, data, lambda: FullSoftmax(size.narrow, data.n_classes), options.seeds,
            setting._replace(width=size.narrow), device, judged=judged,
        ),
    }  # fmt: skip
    for correction in corrections:
        name = f"{CNN} + {correction}" if correction else CNN
        make = partial(
            CharCNNSoftmax, setting.width, data.vocabulary.tokens, correction=correction,
            filters=FILTERS, highway_layers=1,
        )  # fmt: skip
        runs[name] = fit_seeds(name, data, make, options.seeds, setting, device, judged=judged)
    for of_name in runs.values():
        for run in of_name[1:]:
            run.pop("near", None)
    n, test = data.n_classes, held.test
    groups = {"new": list(_new(held)), "seen": held.seen}
    counted = np.bincount(test, minlength=n + size.new)
    words = {
        name: {"occurrences": int(counted[ids].sum()),
               "by_frequency": by_frequency(counts, counted[ids])}
        for (name, ids), counts in zip(groups.items(), held.counts, strict=True)
    }  # fmt: skip
    return {
        "words": n, "tokens": len(data.train), "width": setting.width, "narrow": size.narrow,
        "new": size.new, "types": held.types, "of_words": words, "runs": runs,
    }  # fmt: skip


def _of(found: Mapping[str, Any], name: str, group: str, key: str) -> list[float]:
    return [run[group][key] for run in found["runs"][name]]


def _cnns(found: Mapping[str, Any]) -> list[str]:
    return [name for name in found["runs"] if name.startswith(CNN)]


def _shown_published(name: str) -> list[str]:
    """Published perplexity and parameters; that of full softmax is in the paper's abstract."""
    if name not in PUBLISHED:
        return ["", ""]
    perplexity, parameters = PUBLISHED[name]
    return [f"{perplexity:.1f}{'' if name == FULL else RECALLED}", f"{parameters:,}{RECALLED}"]


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """Parameters and perplexity; new words; their neighbours."""
    p = against_first(found)
    sizes, told = [], []
    for name, runs in found["runs"].items():
        width = found["narrow"] if name == NARROW else found["width"]
        sizes.append([
            name, f"{width}", f"{runs[0]['parameters']:,}",
            spread(of_seeds(found, name, "test"), 1), shown_p(p, name),
            *_shown_published(name),
            f"{mean([seconds_per_epoch(run) for run in runs]):.1f}", f"{runs[0]['rate']:g}",
        ])  # fmt: skip
        new = "new" in runs[0]
        told.append([
            name,
            *([spread(_of(found, name, "new", "rank"), 1, scale=100),
               _perplexity(_of(found, name, "new", "among")),
               _perplexity(_of(found, name, "new", "nll"), 0)] if new else ["", "", ""]),
            _perplexity(of_seeds(found, name, "unknown"), 0),
            spread(_of(found, name, "seen", "rank"), 1, scale=100),
            _perplexity(_of(found, name, "seen", "among")),
            _perplexity(_of(found, name, "seen", "nll"), 0),
        ])  # fmt: skip
    of = found["of_words"]
    told.append([
        "chance", "50", f"{found['new']}", f"{found['words'] + found['new']}", "", "50",
        f"{found['new']}", f"{found['words']}",
    ])  # fmt: skip
    told.append([
        "their frequencies in training", "", f"{math.exp(of['new']['by_frequency']):.1f}", "", "",
        "", f"{math.exp(of['seen']['by_frequency']):.1f}", "",
    ])  # fmt: skip
    near: dict[str, dict[str, list[str]]] = {
        name: found["runs"][name][0]["near"] for name in _cnns(found)[:2]
    }
    neighbours = [
        [word, *(", ".join(each.get(word, [])) for each in near.values())]
        for word in next(iter(near.values()))
    ]
    about = f"{found['words']:,} words, {found['tokens']:,} tokens of training"
    return [
        Grid(f"Test perplexity, {about}; the paper's on 1 billion words",
             ["output layer", "width", "its parameters", "perplexity", "p against full",
              "paper", "paper's parameters, M", "s per epoch", "learning rate"],
             sizes),
        Grid(f"{found['new']} new words ({of['new']['occurrences']:,} times in the test text) and "
             f"as many seen ones ({of['seen']['occurrences']:,}): percent of their group that is "
             "more probable, perplexity in their group, perplexity in all classes",
             ["output layer", "new: above", "new: in group", "new: in all", "as unknown",
              "seen: above", "seen: in group", "seen: in all"],
             told),
        Grid("Seen words whose class vectors are nearest to those of new words, first seed",
             ["new word", *near],
             neighbours),
    ]  # fmt: skip


def _perplexity(nll: Sequence[float], digits: int = 1) -> str:
    return spread([math.exp(each) for each in nll], digits)


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Whether spelling alone increases perplexity, and how much of it a correction regains."""
    p, full = against_first(found), mean_test(found, FULL)
    size = {name: runs[0]["parameters"] for name, runs in found["runs"].items()}
    names = _cnns(found)
    tests = {name: mean_test(found, name) for name in names}
    bare, corrected = names[0], f"{CNN} + 8"
    gap, narrow = tests[bare] - full, mean_test(found, NARROW)
    worse, sure = gap > 0, p[bare] < LEVEL
    by_seed = zip(of_seeds(found, corrected, "test"), of_seeds(found, bare, "test"), strict=True)
    regains = [one < other for one, other in by_seed]
    text = (
        f"The full softmax has {full:.1f} with {size[FULL]:,} parameters, the CNN softmax "
        f"{tests[bare]:.1f} with {size[bare]:,} ({'' if sure else 'not '}significantly "
        f"different), and "
        + ", ".join(f"{tests[n]:.1f} with corrections of {n[len(CNN) + 3:]} ({size[n]:,})"
                    for n in names[1:])
        + f". A full softmax of width {found['narrow']}, with {size[NARROW]:,} parameters, has "
        f"{narrow:.1f}"
        + (": small class vectors are enough for so few words, which helps a small "
           "correction as well. "
           if narrow < tests[bare] else ". ")
    )  # fmt: skip
    if worse:
        regained = (tests[bare] - tests[corrected]) / gap
        text += (
            f"The correction of the paper's size, an eighth of the width, regains {regained:.0%} "
            "of what spelling costs (paper: 41%), and is better with "
            f"{sum(regains)} of {len(regains)} seeds. "
        )
    else:
        text += (
            "Spelling costs nothing here: with so little text a separate class vector is learned "
            "from few occurrences, and sharing by spelling helps more than it costs. "
        )
    of, rank = found["of_words"]["new"], mean(_of(found, bare, "new", "rank"))
    among = [math.exp(mean(_of(found, name, "new", "among"))) for name in names]
    gain = mean(_of(found, bare, "new", "others")) - mean(_of(found, bare, "new", "nll"))
    text += (
        f"Of {found['new']} new words, added by spelling, {rank:.0%} are more probable than the "
        f"right one on average (chance: 50%; seen words: "
        f"{mean(_of(found, bare, 'seen', 'rank')):.0%}); given that it is one of them, the "
        f"perplexity is {', '.join(f'{each:.0f}' for each in among)} with corrections of "
        f"{', '.join(n[len(CNN) + 3 :] or '0' for n in names)} (chance: {found['new']}; their "
        f"frequencies, if they were known: {math.exp(of['by_frequency']):.0f}). "
        f"The log-probability of the right word is {gain:+.2f} nats relative to the mean of new "
        "words in its place"
        + (
            "; but the scores of new words are overconfident, so the perplexity is no better than "
            "chance. "
            if min(among) >= found["new"]
            else ". "
        )
    )
    alone = math.exp(mean(of_seeds(found, FULL, "unknown")))
    added, seen = (math.exp(mean(_of(found, bare, group, "nll"))) for group in ("new", "seen"))
    text += (
        f"Over all classes the perplexity of new words is {added:,.0f}, compared with "
        f"{alone:,.0f} for a full softmax that divides the probability of the unknown word evenly "
        f"among the {found['types']:,} words that it represents, and {seen:,.0f} for seen words: "
        "new words start as rare words, with the mean of all biases. "
    )
    text += not_flat(found["runs"])
    held = [worse and sure, all(regains)]
    word = "holds" if all(held) else "holds in part" if any(held) else "does not hold"
    return Verdict(word, text)


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """Perplexity by number of parameters; the rank of new words and of seen ones."""
    left, right = figure.subplots(1, 2)
    colours = {FULL: OTHER_COLOURS[3], NARROW: OTHER_COLOURS[1]} | {
        name: OURS_COLOURS[i] for i, name in enumerate(_cnns(found))
    }
    names = _cnns(found)
    left.plot([found["runs"][n][0]["parameters"] / 1000 for n in names],
              [mean_test(found, n) for n in names], "-", color=OURS_COLOURS[0], lw=0.8)  # fmt: skip
    for name, colour in colours.items():
        values = of_seeds(found, name, "test")
        at = [found["runs"][name][0]["parameters"] / 1000] * len(values)
        left.plot(at, values, "o", ms=4, alpha=0.8, color=colour, label=name)
    left.set_xlabel("parameters of the output layer, thousands")
    left.set_ylabel("test perplexity")
    left.legend()
    for i, (name, colour) in enumerate(colours.items()):
        for group, marker in (("seen", "o"), ("new", "D")):
            if group in found["runs"][name][0]:
                values = [100 * each for each in _of(found, name, group, "rank")]
                right.plot(values, [i] * len(values), marker, ms=5, alpha=0.8, color=colour,
                           mfc=colour if group == "new" else "none")  # fmt: skip
    right.plot([], [], "kD", ms=5, label="new words, by spelling")
    right.plot([], [], "ko", ms=5, mfc="none", label="seen words")
    right.axvline(50, color=OTHER_COLOURS[3], lw=0.8, ls="--", label="chance")
    right.set_yticks(range(len(colours)), list(colours))
    right.invert_yaxis()
    right.set_xlabel("percent of the group more probable than the right word")
    right.legend()


STUDY = Study(
    title="CNN softmax: parameters, perplexity and words never seen",
    claim=(
        "Jozefowicz et al. (2016, arXiv:1602.02410): on 1 billion words a softmax whose class "
        "vectors come from a character CNN has perplexity 39.8 with 0.29 billion parameters, "
        "compared with 30.0 for a full softmax with 1.04 billion. A correction of size 128 per "
        "word improves it to 35.8 with 0.39 billion, 41% of the gap (30.0 checked in the abstract, "
        "the other figures recalled)."
    ),
    protocol=(
        "The beginning of WikiText-2; a log-bilinear model with a context of eight words, Adam, "
        "2,048 predicted words per step. The learning rate (one of two) is chosen per output layer "
        "on validation data, and cut to a quarter once before training ends; all biases are "
        "initialised to log frequencies. The CNN has 176 filters of widths 1 to 4 and one highway "
        "layer. The corrections have size 8 per word, an eighth of the width as in the paper, or "
        "32. The narrow full softmax has about as many parameters as the CNN softmax, and a narrow "
        "backbone. Words of medium frequency (6 to 100 occurrences), evenly spaced, are held out: "
        "in training they are unknown words, as inputs and as targets, for all output layers. "
        "After training they are added by their spelling, with the mean of all biases, and "
        "evaluated wherever they are the next word in the whole test text. The seen words are the "
        "next ones by frequency, whose frequency has been learned. “In group” is the perplexity "
        "given that the word is one of the group. Time is CPU time of training steps only, on one "
        "thread. The decision to base the verdict on perplexities only, and not on new words, was "
        "made after the first test perplexities were seen."
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    needs=WIKITEXT2,
    size=(9.5, 3.6),
)
