"""ZLPR compared with BCE, weighted BCE and the asymmetric loss as positives become rarer."""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer import mixup_from_indices
from lastlayer.heads import MultiLabel
from lastlayer.lab.data import LabelData, LabelPart, Lists, load
from lastlayer.lab.evaluation import as_table
from lastlayer.lab.feeding import RowFeed
from lastlayer.lab.models import FeatureBody
from lastlayer.lab.statistics import LEVEL, holm, p_values
from lastlayer.lab.training import Stepper
from studies.frame import Needed, Options, Study, Verdict, mean, progress, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETS = {"cooking": "cooking/cooking.stackexchange.txt.gz", "delicious": "mulan/delicious"}
# Models are trained on this number of the most frequent labels, and on all labels.
SIZES = (10, 100)
WIDTH, BATCH = 64, 256
# Training stops after PATIENCE epochs without improvement, but not before LEAST epochs: BCE with
# biases that start at 0 makes no progress at first.
LEAST, PATIENCE, EPOCHS = 12, 3, 30
RATES = (0.01, 0.025)
# Candidate thresholds: CUTS of them, which predict FEWEST to MOST times as many labels as there
# are positives.
CUTS, FEWEST, MOST = 60, 0.2, 5.0
# Validation measures; each is reported for the epoch that is best by it.
CHOSEN = ("micro", "macro", "native_micro", "native_macro")


class Method(NamedTuple):
    """A loss of the head, a modification of it, and the strengths to try."""

    loss: str
    change: str = ""
    strengths: Sequence[float] = (0.0,)


ZLPR, BCE, WEIGHTED, ASYMMETRIC = "ZLPR", "BCE", "weighted BCE", "asymmetric"
METHODS = {
    ZLPR: Method("zlpr"),
    BCE: Method("bce"),
    # The weight of a positive label is (negatives / positives) ** strength.
    WEIGHTED: Method("bce", "weight", (0.5, 1.0)),
    ASYMMETRIC: Method("asymmetric"),
}
# The same losses with biases that start at 0, not at the label frequencies.
STARTS = {
    "ZLPR, biases from 0": Method("zlpr", "zero"),
    "BCE, biases from 0": Method("bce", "zero"),
}
# Only with all labels. Smoothing is relative to the share of positives; mixup has its alpha.
SOFT = {
    "ZLPR, smoothing": Method("zlpr", "smoothing", (0.1, 1.0)),
    "BCE, smoothing": Method("bce", "smoothing", (0.1, 1.0)),
    "ZLPR, mixup": Method("zlpr", "mixup", (0.2,)),
    "BCE, mixup": Method("bce", "mixup", (0.2,)),
}
EVERY = METHODS | STARTS | SOFT


class Output(nn.Module):
    """A multi-label head with one of the modifications.

    Weighted BCE uses torch's ``pos_weight``, since the head has no weights. Mixup is applied to
    hidden states.

    Args:
        method: the loss and its modification.
        strength: strength of the modification.
        data: gives the number of labels and their counts.
        seed: seed of mixup.
    """

    weight: Tensor

    def __init__(self, method: Method, strength: float, data: LabelData, seed: int) -> None:
        super().__init__()
        counts, n_rows = torch.from_numpy(data.counts), data.train.n_rows
        self.change, self.strength = method.change, strength
        smoothing = strength * share(data) if method.change == "smoothing" else 0.0
        self.head = MultiLabel(WIDTH, data.n_classes, method.loss, label_smoothing=smoothing)
        if method.change != "zero":
            self.head.init_bias_from_counts(counts, n_rows)
        elif self.head.bias is not None:
            nn.init.zeros_(self.head.bias)
        seen = counts.clamp(min=0.5).float()
        self.register_buffer("weight", ((n_rows - seen) / seen) ** strength)
        if method.change == "weight" and self.head.bias is not None:
            # The minimum of the weighted loss without features.
            self.head.bias.data += self.weight.log()
        self.seed = seed
        self._draws: torch.Generator | None = None

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The training loss, from padded lists of labels."""
        if self.change == "mixup":
            if self._draws is None:
                self._draws = torch.Generator(hidden.device).manual_seed(self.seed)
            mixed = mixup_from_indices(hidden, target, alpha=self.strength, generator=self._draws)
            made: Tensor = self.head(mixed.inputs, mixed.target, values=mixed.values)
            return made
        if self.change == "weight":
            labels = as_table(target, self.head.n_classes).to(hidden.dtype)
            whole = binary_cross_entropy_with_logits(
                self.scores(hidden), labels, pos_weight=self.weight, reduction="sum"
            )
            return whole / len(hidden)
        plain: Tensor = self.head(hidden, target)
        return plain

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores ``(rows, labels)``."""
        return linear(hidden, self.head.weight, self.head.bias)


def most_frequent(data: LabelData, n: int) -> LabelData:
    """Keeps the n labels that are most frequent in the training part, and all rows."""

    def cut(part: LabelPart) -> LabelPart:
        kept = part.labels.indices < n
        ends = torch.from_numpy(kept).cumsum(0).numpy()
        before = part.labels.offsets
        offsets = before.copy()
        offsets[before > 0] = ends[before[before > 0] - 1]
        return part._replace(labels=Lists(part.labels.indices[kept], offsets))

    return replace(
        data, train=cut(data.train), valid=cut(data.valid), test=cut(data.test),
        label_names=data.label_names[:n], counts=data.counts[:n],
    )  # fmt: skip


def share(data: LabelData) -> float:
    """The share of positives among all pairs of a training row and a label."""
    return float(data.counts.sum()) / (data.train.n_rows * data.n_classes)


def f1(hits: Tensor, said: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Micro-F1, and macro-F1 over the labels that occur, from counts ``(…, labels)``."""
    micro = 2 * hits.sum(-1) / (said.sum(-1) + there.sum(-1)).clamp(min=1)
    each = 2 * hits / (said + there).clamp(min=1)
    return micro, each[..., there > 0].mean(-1)


def f1_above(scores: Tensor, truth: Tensor, threshold: float) -> tuple[float, float]:
    """Micro-F1 and macro-F1 if labels with scores above the threshold are predicted."""
    guess = scores > threshold
    counts = ((x.sum(0).double()) for x in (guess & truth, guess, truth))
    micro, macro = f1(*counts)
    return micro.item(), macro.item()


def sweep(scores: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thresholds, and micro-F1 and macro-F1 at each of them."""
    n, there = scores.shape[1], truth.sum(0)
    present = int(there.sum())
    most = min(scores.numel() - 1, int(MOST * present))
    top = scores.flatten().topk(most + 1)
    ends = torch.logspace(0, 1, CUTS, base=MOST / FEWEST) * FEWEST * present
    ends = ends.long().clamp(1, most).unique()
    label, hit = top.indices % n, truth.flatten()[top.indices]
    step = torch.bucketize(torch.arange(most + 1, device=ends.device), ends, right=True)
    place = step.to(label.device) * n + label

    def counted(some: Tensor) -> Tensor:
        made = torch.bincount(some, minlength=(len(ends) + 1) * n)
        return made.view(-1, n).cumsum(0)[: len(ends)].double()

    micro, macro = f1(counted(place[hit]), counted(place), there.double())
    ends = ends.to(top.values.device)
    return 0.5 * (top.values[ends - 1] + top.values[ends]), micro, macro


def ranking(scores: Tensor, truth: Tensor) -> dict[str, float]:
    """Precision at 1 and 5, and mAP, over rows that have a label."""
    some = truth.any(1)
    hits = truth[some].gather(1, scores[some].argsort(1, descending=True)).double()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1, device=hits.device)
    of_row = (precision * hits).sum(1) / hits.sum(1)
    five = min(5, hits.shape[1])
    return {
        "p1": precision[:, 0].mean().item(),
        "p5": precision[:, five - 1].mean().item(),
        "map": of_row.mean().item(),
    }


@torch.no_grad()
def judged(stepper: Stepper, feed: RowFeed, part: str, n_rows: int) -> tuple[Tensor, Tensor]:
    """Scores and labels of all rows of a part."""
    output: Any = stepper.head
    found = [
        (output.scores(stepper.body(batch.inputs)), as_table(batch.target, output.head.n_classes))
        for batch in feed.held_out(part, n_rows)
    ]
    scores, truth = map(torch.cat, zip(*found, strict=True))
    return scores, truth


def train(
    data: LabelData, method: Method, strength: float, rate: float, seed: int, epochs: int,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Trains a sum of feature vectors and a head until no measure improves for some epochs."""
    torch.manual_seed(seed)
    body = FeatureBody(data.n_features, WIDTH).to(device)
    stepper = Stepper(body, Output(method, strength, data, seed).to(device), rate, float("inf"))
    feed = RowFeed(data, BATCH, device)
    best: dict[str, dict[str, Any]] = {}
    seconds, epoch, better = 0.0, 0, 0
    while epoch < min(epochs, max(LEAST, better + PATIENCE)):
        start = time.process_time()
        for step in range(epoch * feed.steps_per_epoch, (epoch + 1) * feed.steps_per_epoch):
            stepper.step(feed.batch(seed, step))
        seconds += time.process_time() - start
        epoch += 1
        scores, truth = judged(stepper, feed, "valid", data.valid.n_rows)
        thresholds, *swept = sweep(scores, truth)
        native = f1_above(scores, truth, 0.0)
        cuts = [int(each.argmax()) for each in swept]
        values = [each[cut].item() for each, cut in zip(swept, cuts, strict=True)] + [*native]
        levels = [thresholds[cut].item() for cut in cuts] + [0.0, 0.0]
        for name, value, level in zip(CHOSEN, values, levels, strict=True):
            if name not in best or value > best[name]["valid"]:
                state = copy.deepcopy((body.state_dict(), stepper.head.state_dict()))
                best[name] = {"valid": value, "epoch": epoch, "threshold": level, "state": state}
                better = epoch
    made: dict[str, Any] = {
        "rate": rate, "strength": strength, "seed": seed, "epochs": epoch,
        "step_ms": 1e3 * seconds / (epoch * feed.steps_per_epoch),
    }  # fmt: skip
    for place, (name, told) in enumerate(best.items()):
        body_state, head_state = told.pop("state")
        body.load_state_dict(body_state)
        stepper.head.load_state_dict(head_state)
        scores, truth = judged(stepper, feed, "test", data.test.n_rows)
        made[name] = {**told, "test": f1_above(scores, truth, told["threshold"])[place % 2]}
        if name == "micro":
            made |= ranking(scores, truth)
            made["shared"] = _shared(stepper, feed, data, scores, truth)
    return made


def _shared(
    stepper: Stepper, feed: RowFeed, data: LabelData, scores: Tensor, truth: Tensor
) -> dict[str, float]:
    """Micro-F1 on only the labels of the smallest set, with a threshold tuned for them and at 0."""
    n = SIZES[0]
    valid = judged(stepper, feed, "valid", data.valid.n_rows)
    thresholds, micro, _ = sweep(*(each[:, :n] for each in valid))
    level = thresholds[micro.argmax()].item()
    some = scores[:, :n], truth[:, :n]
    return {"micro": f1_above(*some, level)[0], "native_micro": f1_above(*some, 0.0)[0]}


def measure(options: Options) -> dict[str, Any]:
    """Chooses the settings of each loss with the first seed and middle size, then runs all."""
    rates, epochs = (RATES[1:2], 2) if options.quick else (RATES, EPOCHS)
    sets: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    for name, path in list(SETS.items())[: 1 if options.quick else None]:
        whole = load(options.path(path), task="multilabel")
        if not isinstance(whole, LabelData):
            raise ValueError(f"{path}: expected rows with labels, got another kind of data")
        sizes = [n for n in SIZES if n < whole.n_classes] + [whole.n_classes]
        sizes = sizes[:: len(sizes) - 1] if options.quick else sizes
        parts = {n: most_frequent(whole, n) for n in sizes}
        sets[name] = {
            "rows": {part: getattr(whole, part).n_rows for part in ("train", "valid", "test")},
            "share": {n: share(data) for n, data in parts.items()},
        }
        rate_of: dict[str, float] = {}
        first, *others = options.seeds
        for method, told in EVERY.items():
            at = sizes[-1:] if method in SOFT else sizes
            middle = at[len(at) // 2]
            tried_rates = rates if method in METHODS else (rate_of[told.loss],)
            strengths = told.strengths[: 1 if options.quick else None]
            settings = product(strengths, tried_rates)
            args = epochs, options.device
            tried = [train(parts[middle], told, *each, first, *args) for each in settings]
            best = max(tried, key=lambda run: run["micro"]["valid"] + run["native_micro"]["valid"])
            chosen = best["strength"], best["rate"]
            rate_of.setdefault(told.loss, best["rate"])
            for n in at:
                made = [best] if n == middle else [train(parts[n], told, *chosen, first, *args)]
                made += [train(parts[n], told, *chosen, seed, *args) for seed in others]
                runs += [{"set": name, "labels": n, "method": method, **run} for run in made]
                f1s = " ".join(f"{spread(_tests(made, key), 1, scale=100)}" for key in CHOSEN)
                progress(f"{name}, {n} labels, {method}: {f1s}, settings {chosen}")
    return {"sets": sets, "runs": runs}


def _tests(runs: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [run[key]["test"] if key in CHOSEN else run[key] for run in runs]


def _runs(found: Mapping[str, Any], name: str, n: int, method: str) -> list[dict[str, Any]]:
    wanted = {"set": name, "labels": n, "method": method}
    return [run for run in found["runs"] if all(run[key] == each for key, each in wanted.items())]


def _values(found: Mapping[str, Any], name: str, n: int, method: str, key: str) -> list[float]:
    return _tests(_runs(found, name, n, method), key)


def _points(found: Mapping[str, Any], name: str) -> dict[int, float]:
    """The share of positives for each number of labels, from the largest to the smallest."""
    return {int(n): each for n, each in found["sets"][name]["share"].items()}


def _p(
    found: Mapping[str, Any], name: str, n: int, columns: Sequence[tuple[str, str]]
) -> list[float]:
    """P-values of differences between the first column and each other one, Holm-corrected.

    A column is a method and a measure.
    """
    made = [dict(enumerate(_values(found, name, n, *each))) for each in columns]
    pairs = p_values(made, log=False)
    return holm([pairs[0, i] for i in range(1, len(columns))])


def _against(found: Mapping[str, Any], name: str, n: int, ours: str, key: str) -> dict[str, float]:
    """P-values of differences between ZLPR's measure ``ours`` and the others' measure ``key``."""
    others = [each for each in METHODS if each != ZLPR]
    made = _p(found, name, n, [(ZLPR, ours), *((each, key) for each in others)])
    return dict(zip(others, made, strict=True))


_PLACES = {"micro": "micro-F1", "macro": "macro-F1 over the labels of the test rows"}


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """F1 with tuned thresholds and at 0, ranking measures, F1 on the same labels, soft labels."""
    cases = [(name, n, each) for name in found["sets"] for n, each in _points(found, name).items()]
    made = []
    both = [f"{method}{rule}" for method in METHODS for rule in ("", ", at 0")]
    for key, title in _PLACES.items():
        rows = [
            [name, str(n), f"{100 * each:.2f}",
             *(spread(_values(found, name, n, method, way + key), 1, scale=100)
               for method in METHODS for way in ("", "native_"))]
            for name, n, each in cases
        ]  # fmt: skip
        headings = ["set", "labels", "positives, %", *both]
        made.append(Grid(f"{title}, percent, threshold tuned and at 0", headings, rows))
    rows = [
        [name, str(n),
         *(" / ".join(f"{100 * mean(_values(found, name, n, method, key)):.1f}"
                      for key in ("p1", "p5", "map")) for method in METHODS)]
        for name, n, _ in cases
    ]  # fmt: skip
    made.append(Grid("P@1 / P@5 / mAP, percent", ["set", "labels", *METHODS], rows))
    rows = [
        [name, str(n),
         *(f"{100 * mean([run['shared'][way] for run in _runs(found, name, n, method)]):.1f}"
           for method in METHODS for way in ("micro", "native_micro"))]
        for name, n, _ in cases
    ]  # fmt: skip
    title = "Micro-F1 on the labels of the smallest set, percent"
    made.append(Grid(title, ["set", "trained on", *both], rows))
    return [*made, _starts_grid(found), _soft_grid(found), _settings_grid(found)]


_KEYS = {"micro": "micro-F1", "native_micro": "at 0", "macro": "macro-F1", "native_macro": "at 0 ",
         "p1": "P@1", "p5": "P@5", "map": "mAP"}  # fmt: skip


def _starts_grid(found: Mapping[str, Any]) -> Grid:
    rows = [
        [name, str(n), method, *_cells(found, name, n, method)]
        for name in found["sets"]
        for n in _points(found, name)
        for method in STARTS
    ]
    title = "Biases initialised to 0 instead of the label frequencies, percent"
    return Grid(title, ["set", "labels", "loss", *_KEYS.values()], rows)


def _soft_grid(found: Mapping[str, Any]) -> Grid:
    rows = []
    for name in found["sets"]:
        n = list(_points(found, name))[-1]
        for method in sorted((ZLPR, BCE, *SOFT), reverse=True):
            strength = _runs(found, name, n, method)[0]["strength"]
            rows.append(
                [name, method, f"{strength:g}" if strength else "", *_cells(found, name, n, method)]
            )
    headings = ["set", "loss", "strength", *_KEYS.values()]
    return Grid("Soft labels, all labels of each set, percent", headings, rows)


def _cells(found: Mapping[str, Any], name: str, n: int, method: str) -> list[str]:
    return [spread(_values(found, name, n, method, key), 1, scale=100) for key in _KEYS]


def _settings_grid(found: Mapping[str, Any]) -> Grid:
    rows = []
    for name in found["sets"]:
        for method in EVERY:
            runs = _runs(found, name, list(_points(found, name))[-1], method)
            strength = runs[0]["strength"]
            rows.append([
                name, method, f"{runs[0]['rate']:g}", f"{strength:g}" if strength else "",
                f"{mean([run['micro']['threshold'] for run in runs]):.2f}",
                f"{mean([run['epochs'] for run in runs]):.0f}",
                f"{mean([run['step_ms'] for run in runs]):.1f}",
            ])  # fmt: skip
    headings = ["set", "loss", "learning rate", "strength", "tuned threshold", "epochs",
                "ms per step"]  # fmt: skip
    return Grid("Settings; threshold, epochs and time are with all labels", headings, rows)


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Whether ZLPR at 0 needs neither a threshold nor weights, and is better than BCE at 0."""
    told = {name: _compared(found, name) for name in found["sets"]}
    text = "".join(each["text"] for each in told.values())
    late = sum(run["epochs"] >= EPOCHS for run in found["runs"])
    text += (
        f"{late} of {len(found['runs'])} runs were stopped after {EPOCHS} epochs while a measure "
        "was still improving. "
    )
    if all(each["is_level"] and each["is_close"] for each in told.values()):
        return Verdict("holds", text.strip())
    if not all(each["is_close"] for each in told.values()):
        text += (
            "The likely reason why a threshold helps: the best probability threshold for F1 is "
            "half of the best F1 (Lipton et al. 2014), far below 1/2 if F1 is low. A score of 0 is "
            "a probability of about 1/2 for both ZLPR and BCE, so neither reaches its best F1 "
            "without a threshold; weights on positives, and the asymmetric loss, shift the scores. "
        )
    if any(each["is_sturdy"] for each in told.values()):
        text += (
            "The claim about imbalance itself holds: with biases from 0, BCE first has to learn "
            "that labels are rare, and ZLPR does not. Biases that start at the label frequencies "
            "do the same for BCE. "
        )
    part = any(each["is_better"] or each["is_sturdy"] for each in told.values())
    return Verdict("holds in part" if part else "does not hold", text.strip())


def _compared(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The results of a set as text, and the conditions of the verdict."""
    points = _points(found, name)
    n, least = list(points)[-1], next(iter(points))

    def of(method: str, key: str, labels: int = n) -> float:
        return 100 * mean(_values(found, name, labels, method, key))

    native, tuned = ({m: of(m, key) for m in METHODS} for key in ("native_micro", "micro"))
    by_rule = _against(found, name, n, "native_micro", "native_micro")
    to_tuned = _against(found, name, n, "native_micro", "micro")
    among_tuned = _against(found, name, n, "micro", "micro")
    ours, theirs = STARTS
    from_0 = {key: [of(each, key) for each in STARTS] for key in ("native_micro", "micro", "map")}
    p_from_0 = _p(found, name, n, [(ours, "native_micro"), (theirs, "native_micro")])[0]
    few = [of(each, "native_micro", least) for each in STARTS]
    rival = max((m for m in METHODS if m != ZLPR), key=native.__getitem__)
    best = max(tuned, key=tuned.__getitem__)
    level = mean([run["micro"]["threshold"] for run in _runs(found, name, n, BCE)])
    both = "; ".join(f"{m} {native[m]:.1f} and {tuned[m]:.1f}" for m in METHODS)
    lead = [of(ZLPR, "native_micro", k) - of(BCE, "native_micro", k) for k in (n, least)]
    text = (
        f"On {name} with {points[n]:.2%} positives, micro-F1 at 0 and with a tuned threshold: "
        f"{both}. At 0, ZLPR differs from BCE by {lead[0]:+.1f} points"
        f"{_significance(by_rule[BCE])}, compared with {lead[1]:+.1f} at {points[least]:.1%} "
        f"positives, and by {native[ZLPR] - native[rival]:+.1f} from {rival}"
        f"{_significance(by_rule[rival])}, the best other loss. With tuned thresholds {best} is "
        f"best, and ZLPR differs from BCE by {tuned[ZLPR] - tuned[BCE]:+.1f}"
        f"{_significance(among_tuned[BCE])}. BCE's tuned threshold is a probability of "
        f"{1 / (1 + math.exp(-level)):.2f}; half of its micro-F1 is {tuned[BCE] / 200:.2f}. With "
        f"biases initialised to 0 and threshold 0, ZLPR has {from_0['native_micro'][0]:.1f} and "
        f"BCE {from_0['native_micro'][1]:.1f}{_significance(p_from_0)}; with "
        f"{points[least]:.1%} positives {few[0]:.1f} and {few[1]:.1f}. "
        + _soft_text(found, name, n)
    )
    return {
        "text": text,
        "is_close": tuned[ZLPR] - native[ZLPR] < 1.0,
        "is_level": not any(native[ZLPR] < tuned[m] and p < LEVEL for m, p in to_tuned.items()),
        "is_better": native[ZLPR] > native[BCE] and by_rule[BCE] < LEVEL,
        "is_sturdy": from_0["native_micro"][0] > from_0["native_micro"][1] and p_from_0 < LEVEL,
    }


def _significance(p: float) -> str:
    return f" (p = {p:.2g})" if p < LEVEL else f" (not significant, p = {p:.2g})"


def _soft_text(found: Mapping[str, Any], name: str, n: int) -> str:
    """The effect of soft labels."""
    told = []
    for method in SOFT:
        plain = method.partition(",")[0]
        gains = [
            100 * (mean(_values(found, name, n, method, key))
                   - mean(_values(found, name, n, plain, key)))
            for key in ("micro", "native_micro", "map")
        ]  # fmt: skip
        told.append(f"{method} {gains[0]:+.1f}, {gains[1]:+.1f} and {gains[2]:+.1f}")
    changes = "; ".join(told)
    return f"Soft labels change tuned micro-F1, micro-F1 at 0 and mAP by: {changes}. "


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """F1 by the share of positives."""
    panels = figure.subplots(2, len(found["sets"]), squeeze=False)
    shades = OURS_COLOURS[0], OTHER_COLOURS[3], OTHER_COLOURS[0], OURS_COLOURS[1]
    colours = dict(zip(METHODS, shades, strict=True))
    lines = [(method, way, style, colours[method]) for way, style in (("", "-"), ("native_", "--"))
             for method in METHODS]  # fmt: skip
    lines += [(each, "native_", ":", colours[each.partition(",")[0]]) for each in STARTS]
    for column, name in enumerate(found["sets"]):
        points = _points(found, name)
        at = [100 * each for each in points.values()]
        for row, (key, told) in enumerate((("micro", "micro-F1, %"), ("macro", "macro-F1, %"))):
            panel = panels[row][column]
            for method, way, style, colour in lines:
                values = [_values(found, name, n, method, way + key) for n in points]
                panel.plot(at, [100 * mean(each) for each in values], style, color=colour,
                           label=None if way else method)  # fmt: skip
                for x, each in zip(at, values, strict=True):
                    panel.plot([x] * len(each), [100 * y for y in each], ".", ms=3, color=colour)
            panel.set_xscale("log")
            panel.invert_xaxis()
            panel.set_xticks(at, [f"{x:.2g}\n({n})" for x, n in zip(at, points, strict=True)])
            panel.minorticks_off()
            panel.set_ylabel(told)
            if row == 0:
                panel.set_title(name)
            else:
                panel.set_xlabel("positives among all pairs of row and label, % (labels)")
    legend = panels[0][0].legend(
        title="solid: tuned threshold; dashed: at 0;\ndotted: at 0, biases from 0"
    )
    legend.get_title().set_fontsize(7)


STUDY = Study(
    title="ZLPR, BCE, weighted BCE and asymmetric loss as positives become rare",
    claim=(
        "Softmax cross entropy generalised to several labels is meant to need no class weights and "
        "no threshold when negatives outnumber positives, since a label is predicted if its "
        "score is above 0 (Su Jianlin, spaces.ac.cn/archives/7359, read in translation). Su et al. "
        "2022, ZLPR: A Novel Loss for Multi-label Classification (arXiv:2208.02955; abstract read, "
        "tables not seen, so no figures taken), add that its soft form allows label smoothing; "
        "archives/9064 adds mixup, and says that BCE is usually poor under extreme imbalance."
    ),
    protocol=(
        "Titles of cooking.stackexchange (words) and delicious of MULAN (500 terms). Models are "
        "trained on the 10 and 100 most frequent labels and on all labels, so the share of "
        "positives falls. All rows are kept, also those without a label. Cooking is split 8:1:1 at "
        "random, as in the lab; delicious has its published test rows, and a tenth of the others "
        "for validation. The model is a sum of feature vectors with a ReLU (size 64) and "
        "`MultiLabel`, with biases initialised to the label frequencies, Adam and batches of 256. "
        "Weighted BCE has weights (negatives / positives)^a, with a = 0.5 or 1, by torch's "
        "pos_weight, since the head has no weights; the asymmetric loss has its defaults (4, 1, "
        "0.05). Biases initialised to 0, smoothing (0.1 or 1 times the share of positives) and "
        "mixup of hidden states (alpha 0.2) use the learning rate of their plain loss; the last "
        "two are tried only with all labels. Strength and learning rate (of two) are chosen by the "
        "sum of micro-F1 with a tuned threshold and at 0 on validation rows, with 100 labels "
        "(smoothing: all) and the first seed. One threshold for all labels is tuned on validation "
        "rows, by the same search for every loss, separately for micro-F1 and macro-F1. Each F1 "
        "also chooses its epoch there; P@k and mAP (over rows with a label) are from the epoch of "
        "the tuned micro-F1. Training stops when no F1 has improved for 3 epochs, after at least "
        "12 and at most 30 epochs. Time is CPU time of training steps on one thread. P-values are "
        "from paired t-tests by seed with Holm's correction. Learning rates and the biases "
        "initialised to 0 were decided on after one seed on cooking, with test results visible; "
        "the minimum number of epochs after a first run on cooking, in which two of three seeds of "
        "BCE with biases from 0 were stopped before they made progress."
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    needs=(
        Needed(SETS["cooking"], "cooking.stackexchange.txt of the fastText tutorial, gzip"),
        Needed(SETS["delicious"],
               "the ARFF and XML files of delicious from mulan.sourceforge.net"),
    ),
    size=(9.0, 6.0),
)  # fmt: skip
