"""Differentiated and adaptive softmax compared with the full one, by word frequency."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer.heads import (
    AdaptiveSoftmax,
    DifferentiatedSoftmax,
    FullSoftmax,
    Head,
    bands_from_counts,
)
from lastlayer.lab.data.text import Reading, TextData
from lastlayer.lab.evaluation import DECILES, by_decile, deciles_of
from lastlayer.lab.feeding import TextFeed
from lastlayer.lab.statistics import LEVEL, holm, p_values
from studies.frame import RECALLED, Options, Study, Verdict, mean, spread
from studies.language import (
    WIKITEXT2,
    Model,
    Setting,
    feed_of,
    fit_seeds,
    geometric_mean,
    judge,
    not_flat,
    seconds_per_epoch,
    states,
    wikitext2,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS, WORDS = 100_000, 10_000
ROWS, REPEATS = 256, 12
FULL, ADAPTIVE = "full softmax", "adaptive"
SLICES, FEWER = "differentiated, 1/2", "differentiated, 1/4"
PROJECTIONS = "differentiated, projections, 1/4"
# Perplexity and training minutes on text8 by Grave et al., checked.
TEXT8 = {FULL: (144, 83), SLICES: (195, 53), PROJECTIONS: (147, 54), ADAPTIVE: (147, 30)}
# Test perplexities of Chen et al. after a week of training; recalled except for 91.2.
CHEN = {
    "Penn Treebank, 10,000 words": (123.8, 121.1),
    "Gigaword, 100,000 words": (56.5, 52.0),
    "billion words, 800,000 words": (108.3, 91.2),
}


def _differentiated(
    counts: Any, width: int, share: float, variant: str = "slices"
) -> DifferentiatedSoftmax:
    most = int(share * len(counts) * width)
    bands = bands_from_counts(counts, width, most, variant=variant)
    return DifferentiatedSoftmax(width, bands, variant=variant)


# Class ids are in order of decreasing frequency.
HEADS: dict[str, Callable[[Any, int], Head]] = {
    FULL: lambda counts, width: FullSoftmax(width, len(counts)),
    SLICES: partial(_differentiated, share=0.5),
    FEWER: partial(_differentiated, share=0.25),
    PROJECTIONS: partial(_differentiated, share=0.25, variant="projections"),
    ADAPTIVE: lambda counts, width: AdaptiveSoftmax(width, counts=counts, head_bias=True),
    "adaptive, wider": lambda counts, width: AdaptiveSoftmax(
        width, counts=counts, div_value=2.0, head_bias=True
    ),
}


def layout(head: Head) -> list[tuple[int, int]]:
    """Classes and width of each band or cluster, the most frequent first."""
    if isinstance(head, DifferentiatedSoftmax):
        return [(classes, width) for classes, width in head.bands]
    if isinstance(head, AdaptiveSoftmax):
        tails = [(each.shape[0], each.shape[1]) for each in head.tails]
        return [(len(head.head_weight) - len(tails), head.in_features), *tails]
    return [(head.n_classes, head.in_features)]


@torch.no_grad()
def prediction_times(
    heads: Mapping[str, Head], hidden: Mapping[str, Tensor], target: Tensor, repeats: int
) -> dict[str, dict[str, float]]:
    """Smallest time in ms of ``topk(10)`` and of the targets' ``log_prob``, heads in turn."""
    on_gpu = target.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    best = {name: {"topk": math.inf, "log_prob": math.inf} for name in heads}
    for turn in range(repeats + 1):
        for name, head in heads.items():
            calls: dict[str, Callable[[], Any]] = {
                "topk": partial(head.topk, hidden[name], min(10, head.n_classes)),
                "log_prob": partial(head.log_prob, hidden[name], target),
            }
            for what, call in calls.items():
                began = clock()
                call()
                if on_gpu:
                    torch.cuda.synchronize()
                # The first turn compiles and allocates.
                took = 1000 * (clock() - began) if turn else math.inf
                best[name][what] = min(best[name][what], took)
    return best


def measure(options: Options) -> dict[str, Any]:
    """Trains all output layers with all seeds, then times the predictions of all of them."""
    reading = Reading(vocab_size=WORDS, limit=TOKENS)
    setting, repeats = Setting(rates=(0.003, 0.01), held_out=10_000), REPEATS
    if options.quick:
        reading, repeats = Reading(vocab_size=2_000, limit=20_000), 3
        setting = Setting(epochs=2, rates=(0.01,), held_out=2_000)
    elif options.device.type == "cuda":
        reading = Reading()
    data = wikitext2(options.path(WIKITEXT2[0].path).parent, reading)
    decile = deciles_of(data.counts)
    models: dict[str, list[Model]] = {name: [] for name in HEADS}

    def judged(model: Model, feed: TextFeed, name: str) -> dict[str, Any]:
        models[name].append(model)
        parts = by_decile(judge(model, feed, "test", setting), decile, data.n_classes)
        return {"deciles": [part["nll"] for part in parts],
                "layout": layout(model.head)}  # fmt: skip

    runs = {}
    for name, make in HEADS.items():
        make_head = partial(make, data.counts, setting.width)
        runs[name] = fit_seeds(
            name, data, make_head, options.seeds, setting, options.device,
            judged=partial(judged, name=name),
        )  # fmt: skip
    for seed in range(len(options.seeds)):
        at_seed = {name: models[name][seed] for name in HEADS}
        for name, times in _times_of(at_seed, data, setting, options.device, repeats).items():
            runs[name][seed] |= times
    return {
        "device": options.device.type, "classes": data.n_classes,
        "tokens": data.description["tokens"], "runs": runs,
        "words_per_decile": torch.bincount(torch.from_numpy(decile), minlength=DECILES).tolist(),
    }  # fmt: skip


def _times_of(
    models: Mapping[str, Model], data: TextData, setting: Setting, device: torch.device,
    repeats: int,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Prediction times; all heads predict the same words from their own models' hidden states."""
    feed = feed_of(data, setting, device)
    made = {name: [*states(model, feed, "test", ROWS)] for name, model in models.items()}
    hidden = {name: torch.cat([h for h, _ in each])[:ROWS] for name, each in made.items()}
    target = torch.cat([y for _, y in made[FULL]])[:ROWS]
    return prediction_times({n: m.head for n, m in models.items()}, hidden, target, repeats)


def _values(found: Mapping[str, Any], name: str, key: str = "test") -> list[float]:
    return [run[key] for run in found["runs"][name]]


def _seconds(found: Mapping[str, Any], name: str) -> float:
    return mean([seconds_per_epoch(run) for run in found["runs"][name]])


def within(run: Mapping[str, Any], seconds: float) -> float:
    """The lowest validation perplexity after ``seconds`` of training, interpolated."""
    best = np.minimum.accumulate(np.log(run["valid"]))
    return float(np.exp(np.interp(seconds, run["seconds"], best)))


def _in_time_of_full(found: Mapping[str, Any], name: str) -> list[float]:
    """:func:`within` the time of the full softmax's first epoch, for each seed."""
    pairs = zip(found["runs"][name], found["runs"][FULL], strict=True)
    return [within(run, full["seconds"][1]) for run, full in pairs]


def _against_full(found: Mapping[str, Any]) -> dict[str, float]:
    """P-values of differences in test perplexity to the full softmax, Holm-corrected."""
    names = list(found["runs"])
    pairs = p_values([dict(enumerate(_values(found, name))) for name in names], log=True)
    return dict(zip(names[1:], holm([pairs[0, i] for i in range(1, len(names))]), strict=True))


def differences(found: Mapping[str, Any], name: str) -> list[list[float]]:
    """For each decile, the loss minus that of the full softmax, in nats, for each seed."""
    pairs = zip(found["runs"][name], found["runs"][FULL], strict=True)
    by_seed = [
        [a - b if a is not None and b is not None else math.nan
         for a, b in zip(run["deciles"], full["deciles"], strict=True)]
        for run, full in pairs
    ]  # fmt: skip
    return [list(each) for each in zip(*by_seed, strict=True)]


def _shown(bands: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{classes:,}×{width}" for classes, width in bands)


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """Overall, by decile, layouts, and the results of Chen et al."""
    p, overall = _against_full(found), []
    for name, runs in found["runs"].items():
        theirs = TEXT8.get(name)
        overall.append([
            name, spread(_values(found, name), 1), f"{p[name]:.2g}" if name in p else "",
            spread(_in_time_of_full(found, name), 1), f"{_seconds(found, name):.2f}",
            spread(_values(found, name, "topk"), 2), spread(_values(found, name, "log_prob"), 2),
            f"{runs[0]['parameters'] / 1e6:.2f}", f"{runs[0]['rate']:g}",
            *(map(str, theirs) if theirs else ("", "")),
        ])  # fmt: skip
    headings = ["output layer", "test perplexity", "p against full",
                "validation perplexity in the time of an epoch of full softmax", "s per epoch",
                "topk(10), ms", "log_prob, ms", "million parameters", "learning rate",
                "text8 perplexity", "text8 min"]  # fmt: skip
    size = f"{found['tokens']['train']:,} tokens, {found['classes']:,} words"
    deciles = [
        [str(i + 1), f"{words:,}", spread([run["deciles"][i] for run in found["runs"][FULL]
                                           if run["deciles"][i] is not None], 2),
         *(spread(differences(found, name)[i], 2) for name in list(found["runs"])[1:])]
        for i, words in enumerate(found["words_per_decile"])
    ]  # fmt: skip
    chen = [
        [name, f"{full}{RECALLED}", f"{bands}{'' if bands == 91.2 else RECALLED}"]
        for name, (full, bands) in CHEN.items()
    ]
    return [
        Grid(f"WikiText-2, {size}; prediction per {ROWS} rows", headings, overall),
        Grid("By tenths of all occurrences, the most frequent words first: loss of full softmax in "
             "nats, and differences of the others to it",
             ["tenth", "words", *found["runs"]], deciles),
        Grid("Classes × width of each band or cluster", ["output layer", "layout"],
             [[name, _shown(runs[0]["layout"])] for name, runs in found["runs"].items()]),
        Grid("Published by Chen, Grangier and Auli: test perplexity after a week",
             ["corpus", "softmax", "differentiated"], chen),
    ]  # fmt: skip


def _loses(found: Mapping[str, Any], name: str) -> list[int]:
    """Deciles, from 1, in which all seeds have a higher loss than the full softmax."""
    return [i + 1 for i, each in enumerate(differences(found, name)) if all(v > 0 for v in each)]


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Adaptive: as good in less time. Differentiated: better in equal time, rare words worse."""
    ppl = {name: geometric_mean(_values(found, name)) for name in found["runs"]}
    p, full = _against_full(found), ppl[FULL]
    seconds = {name: _seconds(found, name) for name in found["runs"]}
    early = {name: geometric_mean(_in_time_of_full(found, name)) for name in found["runs"]}

    def beside(name: str) -> str:
        sure = "" if p[name] < LEVEL else ", not significant"
        return f"{ppl[name]:.1f} ({ppl[name] / full - 1:+.1%}{sure})"

    cheap = seconds[ADAPTIVE] < seconds[FULL] / 2
    as_good = ppl[ADAPTIVE] < 1.05 * full
    better_early = early[SLICES] < early[FULL]
    rare_pay = all(_loses(found, name)[-1:] == [DECILES] for name in (SLICES, FEWER))
    orders = ppl[SLICES] > ppl[PROJECTIONS]
    text = (
        f"Full softmax has a test perplexity of {full:.1f}. Grave et al.: adaptive softmax has "
        f"{beside(ADAPTIVE)} in {seconds[ADAPTIVE] / seconds[FULL]:.0%} of the time per epoch "
        f"(published +2% in 36%). Differentiated softmax with slices has {beside(SLICES)}, with "
        f"projections and half as many parameters {beside(PROJECTIONS)} (published +35% and +2%). "
        f"Chen et al.: in the time of one epoch of full softmax, differentiated softmax reaches a "
        f"validation perplexity of {early[SLICES]:.1f} and full softmax {early[FULL]:.1f}; the "
        f"adaptive one {early[ADAPTIVE]:.1f}. "
    )
    part = seconds[SLICES] / seconds[FULL]
    text += f"An epoch of differentiated softmax takes {part:.0%} of the time of full softmax. "
    if part > 0.8 and found["device"] == "cpu":
        text += (
            "Narrow vectors save products but not exponentials: every class still has a score in "
            "every row, and at width 64 both take about as long on a CPU. This would give about "
            "three quarters of the time; why it is more was not found. "
        )
    for name in (SLICES, FEWER, ADAPTIVE):
        worse = ", ".join(map(str, _loses(found, name))) or "none"
        gap = [mean(each) for each in differences(found, name)]
        text += (
            f"Tenths of occurrences in which {name} is worse with all seeds: {worse} "
            f"({gap[0]:+.2f} nats in the first, {gap[-1]:+.2f} in the last). "
        )
    last = mean([run["deciles"][-1] for run in found["runs"][FULL]])
    if last > math.log(found["classes"]):
        text += (
            f"The rarest tenth has a loss of {last:.1f} nats with full softmax, more than the "
            f"{math.log(found['classes']):.1f} of a uniform distribution: rare words are "
            "overfitted, so less capacity does not necessarily make them worse. "
        )
    for what, told in (("topk", "topk(10)"), ("log_prob", "log_prob of the targets")):
        times = {name: mean(_values(found, name, what)) for name in found["runs"]}
        fastest = min(times, key=times.__getitem__)
        text += (
            f"Fastest at {told}: {fastest}, {times[fastest]:.2f} ms for {ROWS} rows, full softmax "
            f"{times[FULL]:.2f} ms, {SLICES} {times[SLICES]:.2f} ms. "
        )
    text += not_flat(found["runs"])
    right = [cheap and as_good, better_early, rare_pay, orders]
    if not all(right):
        names = (
            "adaptive as good in less than half of the time", "differentiated better in equal time",
            "rare words pay for it", "projections better than slices",
        )  # fmt: skip
        missed = "; ".join(name for name, each in zip(names, right, strict=True) if not each)
        text += f" Not as published: {missed}."
    word = "holds" if all(right) else "holds in part" if sum(right) >= 2 else "does not hold"
    return Verdict(word, text)


COLOURS = dict(zip(HEADS, (OTHER_COLOURS[1], OURS_COLOURS[0], OURS_COLOURS[2], OURS_COLOURS[1],
                           OTHER_COLOURS[0], OURS_COLOURS[3]), strict=True))  # fmt: skip


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """Loss beyond full softmax by decile; perplexity on validation against time; prediction."""
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    names = list(found["runs"])
    for name in names[1:]:
        values = [mean(each) for each in differences(found, name)]
        left.plot(range(1, len(values) + 1), values, "o-", ms=3, color=COLOURS[name])
    left.axhline(0, color=COLOURS[FULL], lw=0.8)
    left.set_xlabel("tenth of occurrences, frequent words first")
    left.set_ylabel("loss beyond full softmax, nats")
    for name in names:
        for i, run in enumerate(found["runs"][name]):
            middle.plot(run["seconds"][1:], run["valid"][1:], ".-", color=COLOURS[name], lw=0.9,
                        label=name if i == 0 else None)  # fmt: skip
    middle.set_xscale("log")
    cpu = "CPU " if found["device"] == "cpu" else ""
    middle.set_xlabel(f"{cpu}seconds of training")
    middle.set_ylabel("validation perplexity")
    for place, name in enumerate(names):
        for shift, what in ((-0.2, "topk"), (0.2, "log_prob")):
            right.barh(place + shift, mean(_values(found, name, what)), 0.38, color=COLOURS[name],
                       alpha=1.0 if what == "topk" else 0.45)  # fmt: skip
    right.set_yticks(range(len(names)), [name.replace(", ", "\n", 1) for name in names])
    right.invert_yaxis()
    right.set_xlabel(f"{cpu}ms per {ROWS} rows: topk(10), log_prob (light)")
    left.legend(*middle.get_legend_handles_labels(), fontsize=6, loc="lower left")


STUDY = Study(
    title="differentiated and adaptive softmax by word frequency",
    claim=(
        "Chen, Grangier and Auli (ACL 2016): with the same training time differentiated softmax is "
        "better than full softmax on large vocabularies, is faster at test time too, and gives "
        "rare words less capacity (all recalled except for 91.2). Grave et al. (ICML 2017): on "
        "text8 adaptive softmax has nearly the perplexity of full softmax in 36% of its time; "
        "differentiated softmax is as good with projections, and much worse with slices of the "
        "hidden state (checked)."
    ),
    protocol=(
        f"The log-bilinear model of the lab (8 words, width 64) on the first {TOKENS:,} training "
        f"tokens of WikiText-2 with the {WORDS:,} most frequent words (on a GPU: all), 10,000 "
        "held-out tokens each for validation and test. Biases are initialised to the frequencies. "
        "The learning rate is 0.003 or 0.01 (no higher one was tried), chosen with the first seed "
        "after one epoch; it is cut to a quarter when validation stops improving, and the run ends "
        "when it stops improving again. The best epoch is used. 1/2 and 1/4 are the parameters of "
        "the class vectors relative to full softmax; the bands are those of `bands_from_counts`, "
        "the clusters those of `cutoffs_from_counts` (each a quarter as wide as the previous one; "
        "“wider”: half). Deciles are tenths of all occurrences in the training part. Time is CPU "
        "time on one thread: of training steps only, and for predictions the fastest of 12 calls, "
        "output layers in turn. P-values are from paired t-tests of log-perplexities by seed with "
        "Holm's correction. Chen et al. gave no time for a corpus of this size, so the time of one "
        "epoch of full softmax is used, and log-perplexities are interpolated between epochs. This "
        "rule, and the rule that rare words are worse if both sizes with slices are worse in the "
        "last tenth with all seeds, were chosen after a first look at the results: without "
        "interpolation, an epoch that was 2% slower did not count."
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    needs=WIKITEXT2,
    size=(11.0, 3.6),
)  # fmt: skip
