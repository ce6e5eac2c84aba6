"""Importance sampling with a fixed and an adaptive proposal, compared with the exact softmax."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer.heads import (
    AdaptiveImportanceSampling,
    FullSoftmax,
    Head,
    ImportanceSampling,
    SampledSoftmax,
)
from lastlayer.lab.data.text import Reading, TextData
from lastlayer.lab.feeding import TextFeed
from lastlayer.lab.training import WARM_UP, words_before
from lastlayer.samplers import Unigram
from studies.frame import RECALLED, Options, Study, Verdict, mean, spread
from studies.language import (
    BROWN,
    Model,
    Setting,
    brown,
    fit_seeds,
    not_flat,
    seconds_per_epoch,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIN_COUNT = 4
SETTING = Setting(epochs=8, rates=(0.003, 0.01), held_out=8_000)
TOKENS = 200_000
LOOKS = 4
TARGET_ESS, BLOCK, MAX_SAMPLES = 50.0, 50, 2_000
SAMPLES = 500
EXACT, SAMPLED = "exact softmax", "sampled softmax"
UNIGRAM, ADAPTIVE = "importance sampling, unigram", "adaptive importance sampling"
SHARED = f"{UNIGRAM}, shared draws"
NAMES = (EXACT, UNIGRAM, ADAPTIVE, SHARED, SAMPLED)
PUBLISHED = {UNIGRAM: "19 (2003)", ADAPTIVE: "100 (2008)"}
# Perplexity within this factor of the exact softmax's best one counts as equal.
_CLOSE = 1.01
_LEVELS = {"epoch": "after one epoch", "best": f"its best × {_CLOSE:g}"}
# Number of training rows on which model and proposal are compared over all classes.
_COMPARED = 256


class UnigramImportanceSampling(AdaptiveImportanceSampling):
    """Importance sampling with a fixed unigram proposal and separate draws for each row.

    With one context the adaptive proposal stays the unigram. This is the method of the authors;
    :class:`ImportanceSampling` has draws that all rows share.
    """

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        """The estimated loss, from draws of each row."""
        return super().forward(hidden, target)


def make_head(name: str, data: TextData) -> Head:
    """The output layer of that name."""
    size = SETTING.width, data.n_classes
    # With few classes, a row computes the exact softmax after draws of a quarter of the classes.
    stop: dict[str, Any] = {"target_ess": TARGET_ESS, "max_samples": most_samples(data.n_classes)}
    if name == UNIGRAM:
        return UnigramImportanceSampling(*size, data.counts, n_samples=BLOCK, contexts=1, **stop)
    if name == SHARED:
        return ImportanceSampling(*size, Unigram(data.counts), BLOCK, **stop)
    if name == ADAPTIVE:
        stop["contexts"] = 2 * data.n_classes
        return AdaptiveImportanceSampling(*size, data.counts, n_samples=BLOCK, **stop)
    if name == SAMPLED:
        return SampledSoftmax(*size, Unigram(data.counts), SAMPLES)
    return FullSoftmax(*size)


def most_samples(n_classes: int) -> int:
    """Number of draws after which a row uses all classes."""
    return min(MAX_SAMPLES, max(2 * BLOCK, n_classes // 4))


class Watcher:
    """Counts the scores computed in training, and compares model and proposal at each look."""

    def __init__(self, name: str, data: TextData) -> None:
        self._name, self._data = name, data
        self._unigram = Unigram(data.counts)
        self._head: nn.Module | None = None

    def make(self) -> Head:
        """A head whose training steps are counted."""
        self._head = head = make_head(self._name, self._data)
        self._clear()
        head.register_forward_hook(self._count)
        return head

    def _clear(self) -> None:
        self._words, self._drawn, self._gave_up = 0, list[Tensor](), list[Tensor]()

    def _count(self, head: nn.Module, given: tuple[Tensor, ...], _loss: Tensor) -> None:
        # Copies of the head have the same hook, but the copy for the warm-up does not count.
        if head is not self._head or not torch.is_grad_enabled():
            return
        self._words += given[1].numel()
        if (
            isinstance(head, ImportanceSampling)
            and head.n_drawn is not None
            and head.took_all is not None
        ):
            self._drawn.append(head.n_drawn.sum())
            self._gave_up.append(head.took_all.sum())

    def __call__(self, model: Model, feed: TextFeed) -> dict[str, float]:
        """Means per word since the last look, and the divergence of model and proposal."""
        words = max(1, self._words)
        drawn, gave_up = (
            float(torch.stack(each).sum()) / words if each else 0.0
            for each in (self._drawn, self._gave_up)
        )
        scores = scores_per_word(model.head, drawn, gave_up)
        found = {"words": float(self._words), "drawn": drawn, "all": gave_up, "scores": scores}
        self._clear()
        return found | self._proposal(model, feed)

    @torch.no_grad()
    def _proposal(self, model: Model, feed: TextFeed) -> dict[str, float]:
        """KL(model ‖ proposal), and the draws needed for the target ESS: ESS · Σ p² / q."""
        for module in model:
            module.eval()
        self._unigram.to(next(model.head.parameters()).device)
        found: dict[str, list[Tensor]] = {}
        for batch in feed.held_out("train", _COMPARED):
            log_p = model.head.log_prob(model.body(batch.inputs).flatten(0, -2)).double()
            every = torch.arange(log_p.shape[1], device=log_p.device)
            log_q = {"unigram": self._unigram.log_prob(every, dtype=torch.float64)}
            if type(model.head) is AdaptiveImportanceSampling:
                sampler = model.head.sampler
                context = words_before(batch.inputs, sampler.order - 1).flatten(0, 1)
                every = every.expand(len(context), -1).contiguous()
                log_q["own"] = sampler.log_prob(every, context, dtype=torch.float64)
            for name, each in log_q.items():
                kl, worth = divergence(log_p, each)
                found.setdefault(f"kl_{name}", []).append(kl)
                found.setdefault(f"needed_{name}", []).append(TARGET_ESS * worth)
        whole = {name: torch.cat(each) for name, each in found.items()}
        return {
            name: (each.median() if name.startswith("needed") else each.mean()).item()
            for name, each in whole.items()
        }


def divergence(log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q) of each row, and Σ p² / q, the ratio of draws to effective sample size."""
    ratio = log_p - log_q
    return (log_p.exp() * ratio).sum(-1), (log_p + ratio).exp().sum(-1)


def scores_per_word(head: Head, drawn: float, gave_up: float) -> float:
    """Number of scores per hidden state in training, including the target's."""
    if isinstance(head, ImportanceSampling):
        return 1 + drawn + gave_up * head.n_classes
    return 1.0 + head.n_samples if isinstance(head, SampledSoftmax) else float(head.n_classes)


def exact_ns(data: TextData, rows: int, device: torch.device, *, steps: int) -> float:
    """Time per score of the exact softmax and its gradients, with ``rows`` words per step."""
    torch.manual_seed(0)
    head = make_head(EXACT, data).to(device)
    hidden = torch.randn(rows, SETTING.width, device=device, requires_grad=True)
    target = torch.randint(data.n_classes, (rows,), device=device)
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    began = 0.0
    for step in range(-WARM_UP, steps):
        if step == 0:
            if on_gpu:
                torch.cuda.synchronize()
            began = clock()
        head(hidden, target).backward()
        head.zero_grad(set_to_none=True)
    if on_gpu:
        torch.cuda.synchronize()
    return 1e9 * (clock() - began) / (steps * rows * data.n_classes)


def measure(options: Options) -> dict[str, Any]:
    """Trains all output layers on the beginning of Brown; on a GPU on all of it."""
    limit = None if options.device.type == "cuda" else TOKENS
    setting, looks = SETTING, LOOKS
    if options.quick:
        limit, looks = 40_000, 2
        setting = setting._replace(epochs=2, rates=setting.rates[-1:], held_out=2_000)
    data = brown(options.path(BROWN.path), Reading(min_count=MIN_COUNT, limit=limit))
    runs = {}
    for name in NAMES:
        watcher = Watcher(name, data)
        runs[name] = fit_seeds(
            name, data, watcher.make, options.seeds, setting, options.device, watch=watcher,
            looks=looks,
        )  # fmt: skip
    batch = setting.batch * setting.length
    return {
        "classes": data.n_classes, "tokens": len(data.train), "looks": looks,
        "most": most_samples(data.n_classes), "batch": batch, "runs": runs,
        "exact_ns": {
            str(rows): exact_ns(data, rows, options.device, steps=10 if rows > 1 else 500)
            for rows in (1, batch)
        },
    }  # fmt: skip


class Point(NamedTuple):
    """The state of a run at a look."""

    seconds: float
    scores: float  # total number computed so far
    perplexity: float


def points(run: Mapping[str, Any]) -> list[Point]:
    """Time, scores and perplexity at each look, including the start."""
    scores, made = 0.0, []
    for (seconds, perplexity), watched in zip(run["curve"], [None, *run["watched"]], strict=True):
        scores += watched["scores"] * watched["words"] if watched else 0.0
        made.append(Point(seconds, scores, perplexity))
    return made


def reached(run: Mapping[str, Any], level: float) -> Point | None:
    """When perplexity first reaches a level, log-linear between looks; None if it never does."""
    before = None
    for point in points(run):
        if point.perplexity <= level:
            if before is None:
                return point
            fall = math.log(before.perplexity / point.perplexity)
            share = math.log(before.perplexity / level) / fall if fall > 0 else 1.0
            between = [a + share * (b - a) for a, b in zip(before[:2], point[:2], strict=True)]
            return Point(between[0], between[1], level)
        before = point
    return None


def levels(exact: Mapping[str, Any]) -> dict[str, float]:
    """Perplexities of the exact softmax that the others should reach."""
    return {"epoch": exact["valid"][1], "best": _CLOSE * min(exact["valid"])}


def speed_ups(found: Mapping[str, Any], name: str, level: str) -> list[tuple[float, float] | None]:
    """Speed-ups over the exact softmax in time and scores, per seed; None if not reached."""
    made: list[tuple[float, float] | None] = []
    for run, exact in zip(found["runs"][name], found["runs"][EXACT], strict=True):
        goal = levels(exact)[level]
        ours, theirs = reached(run, goal), reached(exact, goal)
        both = ours is not None and theirs is not None and ours.seconds > 0
        made.append(
            (theirs.seconds / ours.seconds, theirs.scores / ours.scores)
            if both and ours and theirs else None
        )  # fmt: skip
    return made


def _told(values: Sequence[tuple[float, float] | None], place: int) -> str:
    """The mean over the seeds that reached the level."""
    there = [each[place] for each in values if each is not None]
    if not there:
        return "not reached"
    missing = f", {len(there)} of {len(values)} seeds" if len(there) < len(values) else ""
    return spread(there, 1) + missing


def _watched(found: Mapping[str, Any], name: str, key: str, look: int) -> list[float]:
    """A value of all runs at a look; -1 is the end of the best epoch."""
    return [
        run["watched"][_best_look(found, run) if look == -1 else look][key]
        for run in found["runs"][name]
    ]


def _best_look(found: Mapping[str, Any], run: Mapping[str, Any]) -> int:
    best: int = run["valid"].index(min(run["valid"]))
    return max(1, best) * int(found["looks"]) - 1


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """Perplexity and cost; speed-ups; draws and divergence over training."""
    cost, speed = [], []
    for name in NAMES:
        made = found["runs"][name]
        per_word = [mean([each["scores"] for each in run["watched"]]) for run in made]
        cost.append([
            name, f"{made[0]['rate']:g}", spread([min(run["valid"]) for run in made], 1),
            spread([run["test"] for run in made], 1),
            "/".join(str(len(run["valid"]) - 1) for run in made),
            spread([seconds_per_epoch(run) for run in made], 1), spread(per_word, 0),
            spread([_ns_per_score(run) for run in made], 2),
        ])  # fmt: skip
        if name != EXACT:
            ups = {level: speed_ups(found, name, level) for level in _LEVELS}
            published = PUBLISHED.get(name)
            speed.append([
                name, *(_told(ups[level], place) for level in _LEVELS for place in (0, 1)),
                f"{published}{RECALLED}" if published else "",
            ])  # fmt: skip
    kinds = {"draws per word": "drawn", "rows that took all": "all"}
    steps = {f"first 1/{found['looks']} epoch": 0, "first epoch": int(found["looks"]) - 1,
             "best epoch": -1}  # fmt: skip
    over: list[list[str]] = []
    for name, own in ((UNIGRAM, "unigram"), (ADAPTIVE, "own"), (SHARED, "unigram")):
        told = {**kinds, "KL(model ‖ proposal)": f"kl_{own}",
                f"draws for ESS {TARGET_ESS:g} by p and q, median": f"needed_{own}"}  # fmt: skip
        for what, key in told.items():
            digits = 0 if "draws" in what else 3 if key == "all" else 2
            cells = [spread(_watched(found, name, key, look), digits) for look in steps.values()]
            over.append([name, what, *cells])
    exact = [spread(_watched(found, EXACT, "kl_unigram", look), 2) for look in steps.values()]
    over.append([EXACT, "KL(model ‖ unigram)", *exact])
    headings = [f"{kind}, {told}" for told in _LEVELS.values() for kind in ("time", "scores")]
    return [
        Grid(
            f"Brown, {found['tokens']:,} training tokens, {found['classes']:,} words",
            ["output layer", "rate", "validation perplexity", "test perplexity", "epochs by seed",
             "s per epoch", "scores per word", "ns per score"], cost,
        ),
        Grid("Speed-up to the perplexity of the exact softmax", ["output layer", *headings,
             "published"], speed),
        Grid("Over training", ["output layer", "", *steps], over),
    ]  # fmt: skip


def _ns_per_score(run: Mapping[str, Any]) -> float:
    last = points(run)[-1]
    return 1e9 * last.seconds / last.scores


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Same perplexity faster; a fixed proposal needs more and more draws, an adaptive one not."""
    looks, text = int(found["looks"]), ""
    faster, missed = dict[str, float](), 0
    for name in (UNIGRAM, ADAPTIVE):
        told = []
        for level, where in (
            ("epoch", "what the exact softmax has after one epoch"),
            ("best", "within 1% of its best"),
        ):
            every = speed_ups(found, name, level)
            made = [each for each in every if each is not None]
            missed += (len(every) - len(made)) * (level == "best")
            text_of = f"{where} in {len(made)} of {len(every)} runs"
            if made:
                faster[name], scores = (mean([each[place] for each in made]) for place in (0, 1))
                text_of += f", {_times(faster[name])} and with {_fewer(scores)}"
            told.append(text_of)
        text += (
            f"{name.capitalize()} brings validation perplexity to {', and to '.join(told)} "
            f"(published: {PUBLISHED[name]}, recalled). "
        )
    growth = {
        name: [mean(_watched(found, name, "drawn", look)) for look in (0, looks - 1, -1)]
        for name in (UNIGRAM, ADAPTIVE)
    }
    kl = {
        name: [mean(_watched(found, name, f"kl_{own}", look)) for look in (0, -1)]
        for name, own in ((UNIGRAM, "unigram"), (ADAPTIVE, "own"))
    }
    for name, (first, epoch, last) in growth.items():
        text += (
            f"{name.capitalize()} draws {first:.0f} words per prediction in the first 1/{looks} "
            f"epoch, {epoch:.0f} at the end of the first and {last:.0f} at the end of the best; "
            f"KL between model and proposal goes from {kl[name][0]:.2f} to {kl[name][1]:.2f}. "
        )
    grows = growth[UNIGRAM][-1] > 1.1 * growth[UNIGRAM][0]
    few = growth[ADAPTIVE][-1] < growth[UNIGRAM][-1] / 1.5 and kl[ADAPTIVE][-1] < kl[UNIGRAM][-1]
    quick = {name for name, clock in faster.items() if clock > 1.5}
    text += _reason(found, faster) + _losses(found)
    text += not_flat(found["runs"])
    curves = [run["valid"] for runs in found["runs"].values() for run in runs]
    rose = sum(valid[-1] > _CLOSE * min(valid) for valid in curves)
    if rose:
        text += (
            f" In {rose} of {len(curves)} validation perplexity rose again after its best epoch."
        )
    if not missed and len(quick) == 2 and grows and few:
        return Verdict("holds", text)
    part = grows or few or quick
    return Verdict("holds in part" if part else "does not hold", text)


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times as fast" if ratio >= 1 else f"{1 / ratio:.1f} times as slowly"


def _fewer(ratio: float) -> str:
    return f"{ratio:.1f} times fewer scores" if ratio >= 1 else f"{1 / ratio:.1f} times the scores"


def _reason(found: Mapping[str, Any], faster: Mapping[str, float]) -> str:
    """The time per score, which relates the speed-up in scores to the speed-up in time."""
    cost = {name: mean([_ns_per_score(run) for run in found["runs"][name]]) for name in NAMES}
    batch = str(found["batch"])
    alone, together = (found["exact_ns"][rows] for rows in ("1", batch))
    text = (
        f"With backbone and optimiser a score costs {cost[EXACT]:.1f} ns in the exact softmax, "
        f"{cost[UNIGRAM]:.1f} ns with a unigram and {cost[ADAPTIVE]:.1f} ns with an adaptive "
        "proposal and draws of each row"
    )
    if min(faster.values(), default=0.0) < 19:
        batched = alone / together
        text += (
            f". The exact softmax is one matrix product for {int(batch):,} words: its loss and "
            f"gradients cost {together:.1f} ns per score, and {alone:.1f} ns with one word per "
            f"step, as the authors trained (recalled)"
            + (f"; batching alone gains a factor of {batched:.1f}" if batched > 1.5 else "")
            + ". The vocabulary is smaller than theirs as well "
            f"({found['classes']:,} of 14,847 words)" * (found["classes"] < 14_000)
        )
    return text + ". "


def _losses(found: Mapping[str, Any]) -> str:
    """How far perplexity is above that of the exact softmax, and why."""
    exact = [min(run["valid"]) for run in found["runs"][EXACT]]
    above = {}
    for name in (UNIGRAM, ADAPTIVE, SHARED, SAMPLED):
        best = [min(run["valid"]) for run in found["runs"][name]]
        pairs = zip(best, exact, strict=True)
        above[name] = 100 * mean([ours / theirs - 1 for ours, theirs in pairs])
    told = ", ".join(f"{_percent(each)} with {name}" for name, each in above.items())
    text = f"Relative to the exact softmax the best validation perplexity is {told}. "
    if max(above[UNIGRAM], above[ADAPTIVE]) > 1:
        text += (
            "The likely cause is a remaining bias of the estimate: a row stops drawing when the "
            "weights of its draws are even, which also happens if it has missed a word that is "
            "probable for the model but not for the proposal. "
        )
    test = {name: mean([run["test"] for run in found["runs"][name]]) for name in (UNIGRAM, SHARED)}
    # On validation alone a gap may be chance.
    if above[SHARED] > above[UNIGRAM] + 1 and test[SHARED] > test[UNIGRAM]:
        text += (
            "Shared draws add noise: the effective sample size of a row does not say how noisy the "
            "gradient of a whole batch is, and separate draws of the rows average out. "
        )
    return text


def _percent(above: float) -> str:
    return f"{abs(above):.1f}% {'above' if above >= 0 else 'below'}"


_COLOURS = dict(
    zip(
        NAMES,
        (OTHER_COLOURS[1], OTHER_COLOURS[0], *OURS_COLOURS[:2], OTHER_COLOURS[3]),
        strict=True,
    )
)


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """Perplexity by time and by scores; draws and KL by epoch."""
    panels = figure.subplots(2, 2).flatten()
    for name, runs in found["runs"].items():
        for place, run in enumerate(runs):
            made, label = points(run), name if place == 0 else None
            perplexity = [each.perplexity for each in made[1:]]
            style: dict[str, Any] = {"color": _COLOURS[name], "label": label, "lw": 1.0}
            panels[0].plot([each.seconds for each in made[1:]], perplexity, ".-", ms=3, **style)
            panels[1].plot([each.scores for each in made[1:]], perplexity, ".-", ms=3, **style)
            epochs = [(i + 1) / found["looks"] for i in range(len(run["watched"]))]
            if name in (UNIGRAM, ADAPTIVE, SHARED):
                drawn = [each["drawn"] for each in run["watched"]]
                panels[2].plot(epochs, drawn, ".-", ms=3, **style)
            key = "kl_own" if name == ADAPTIVE else "kl_unigram"
            panels[3].plot(epochs, [each[key] for each in run["watched"]], ".-", ms=3, **style)
    _shape(panels, found)


def _shape(panels: Sequence[Any], found: Mapping[str, Any]) -> None:
    best = min(min(run["valid"]) for runs in found["runs"].values() for run in runs)
    most = max(points(run)[1].perplexity for runs in found["runs"].values() for run in runs)
    for panel in panels[:2]:
        panel.set_ylabel("validation perplexity")
        panel.set_ylim(0.97 * best, min(1.05 * most, 2.5 * best))
    panels[0].set_xlabel("seconds of training steps")
    panels[1].set_xscale("log")
    panels[1].set_xlabel("scores computed in training")
    panels[2].set_ylabel(f"draws per word for ESS {TARGET_ESS:g}")
    panels[2].set_ylim(bottom=0)
    panels[3].set_ylabel("KL(model ‖ proposal)")
    panels[3].set_title("fixed: from the unigram; adaptive: from its own")
    for panel in panels[2:]:
        panel.set_xlabel("epochs")
    panels[0].legend(fontsize=7)


STUDY = Study(
    title="importance sampling with a fixed and an adaptive proposal",
    claim=(
        "Bengio and Senécal: importance sampling reaches the perplexity of the exact softmax many "
        "times faster on Brown: 19 times (AISTATS 2003), and 100 times with a proposal that "
        "adapts (IEEE Transactions on Neural Networks 2008; both recalled). A fixed proposal needs "
        "more and more samples as the network learns; one that adapts keeps them few."
    ),
    protocol=(
        "The beginning of the training part of Brown, words that occur three times or fewer there "
        "merged (the authors: 800,000 tokens, 14,847 words); log-bilinear model of eight words, "
        f"width {SETTING.width}, Adam, batches of 1,024 words; the best of {len(SETTING.rates)} "
        "learning rates by validation after one epoch with the first seed, cut to a quarter after "
        f"the first epoch without improvement. Each row draws blocks of {BLOCK} until its "
        f"effective sample size is {TARGET_ESS:g}, and uses all words after {MAX_SAMPLES:,} draws, "
        "or after a quarter of the number of words. The adaptive proposal mixes unigram and bigram "
        "and starts as the unigram. With shared draws the rows of a batch share blocks, and each "
        "uses as many as it needs; separate draws were added after a first run on 12,000 tokens, "
        f"in which shared draws were worse. Sampled softmax draws {SAMPLES} words for all rows. "
        f"Validation runs {LOOKS} times per epoch, with the exact softmax for every output layer. "
        "Time is CPU time of training steps on one thread. Scores are the products of a hidden "
        "state and a class vector, which the authors' factor effectively counts. Speed-ups are "
        "computed for each seed, log-linear in perplexity between looks. KL and the draws needed "
        f"for p and q are measured on {_COMPARED} words of the training text."
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    needs=(BROWN,),
    size=(9.0, 6.2),
)
