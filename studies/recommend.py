"""Recommendation over 41 thousand items: quality and training time of output layers."""

import gzip
import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from benchmarks.plot import OTHER_COLOURS, OURS_COLOURS
from benchmarks.table import Grid
from lastlayer import samplers
from lastlayer.heads import (
    FullSoftmax,
    NoiseContrastive,
    SampledSoftmax,
    in_batch_softmax_loss,
)
from lastlayer.lab.evaluation import deciles_of
from lastlayer.lab.feeding import Batch
from lastlayer.lab.statistics import LEVEL, estimate, holm, p_values
from lastlayer.lab.training import Stepper
from studies.frame import (
    RECALLED,
    Needed,
    Options,
    Study,
    Verdict,
    log_x,
    mean,
    progress,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES = {part: f"gowalla/{part}.txt.gz" for part in ("train", "valid", "test")}
WIDTH, BATCH, TARGETS, SAMPLES, CLIP = 64, 512, 4, 2_048, 1.0
RATES = (0.01, 0.02)
# RANKED users are ranked together: a small number, so that their scores stay in the cache.
TOP, RANKED, VALID_USERS, QUICK_USERS = 20, 64, 2_000, 1_500
# A recall counts as close to the full softmax from this share of it on.
CLOSE = 0.95
FULL, SAMPLED, SAMPLED_RAW = "full softmax", "sampled, log-Q", "sampled, uncorrected"
NCE = "NCE"
IN_BATCH, IN_BATCH_RAW = "in-batch, log-Q", "in-batch, uncorrected"
NAMES = (FULL, SAMPLED, SAMPLED_RAW, NCE, IN_BATCH, IN_BATCH_RAW)
RAW = (SAMPLED_RAW, IN_BATCH_RAW)
PAIRS = (*((FULL, name) for name in NAMES[1:]), (SAMPLED, SAMPLED_RAW), (IN_BATCH, IN_BATCH_RAW))
# Recall and NDCG at 20 in percent; the first from the README of its authors' code.
PUBLISHED = {
    "LightGCN, 3 layers": ("18.24", "15.47"),
    "NGCF": (f"15.70{RECALLED}", f"13.27{RECALLED}"),
    "Mult-VAE": (f"16.41{RECALLED}", f"13.35{RECALLED}"),
}


class Lists(NamedTuple):
    """The items of all users, concatenated, and offsets of the users, ``(n_users + 1,)``."""

    items: Tensor
    offsets: Tensor

    def of(self, users: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Concatenated items of some users, the row of each item, and the items per user."""
        sizes = self.offsets[users + 1] - self.offsets[users]
        rows = torch.repeat_interleave(torch.arange(len(users)), sizes)
        first = self.offsets[users] - (sizes.cumsum(0) - sizes)
        return self.items[torch.arange(len(rows)) + first[rows]], rows, sizes

    def joined(self, other: "Lists") -> "Lists":
        """The items of each user in both lists."""
        users = torch.arange(len(self.offsets) - 1)
        one, two = self.of(users), other.of(users)
        order = torch.cat([one[1], two[1]]).argsort(stable=True)
        return Lists(torch.cat([one[0], two[0]])[order], self.offsets + other.offsets)


def read(path: Path, most: int | None = None) -> Lists:
    """Reads a file with one line per user: its number, then its items."""
    lines = gzip.decompress(path.read_bytes()).decode("ascii").splitlines()[:most]
    users = [np.array(line.split(), dtype=np.int64) for line in lines]
    if [int(user[0]) for user in users] != list(range(len(users))):
        raise ValueError(f"{path}: expected users 0, 1, … in order, one per line, got others")
    sizes = torch.tensor([0, *(len(user) - 1 for user in users)])
    return Lists(torch.from_numpy(np.concatenate([user[1:] for user in users])), sizes.cumsum(0))


class Data(NamedTuple):
    """The items of each user in three parts, and counts of the items in the training part."""

    train: Lists
    valid: Lists
    test: Lists
    counts: Tensor

    @property
    def n_users(self) -> int:
        """Number of users, the same in every part."""
        return len(self.train.offsets) - 1


def load(options: Options) -> Data:
    """Loads all three parts; only the first users in a quick version.

    Raises:
        ValueError: if a user has too few items to train on.
    """
    most = QUICK_USERS if options.quick else None
    parts = [read(options.path(path), most) for path in FILES.values()]
    train, valid, test = parts
    if int(train.offsets.diff().min()) <= TARGETS:
        raise ValueError(
            f"{FILES['train']}: expected more than {TARGETS} items per user, of which {TARGETS} "
            "are targets in each step, got fewer"
        )
    n_items = max(int(part.items.max()) for part in parts) + 1
    return Data(train, valid, test, torch.bincount(train.items, minlength=n_items))


def draw_targets(lists: Lists, users: Tensor, generator: torch.Generator) -> Batch:
    """Draws ``TARGETS`` items of each user, to be predicted from the user's other items."""
    items, rows, sizes = lists.of(users)
    order = (rows + torch.rand(len(rows), generator=generator, dtype=torch.float64)).argsort()
    place = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[rows]
    chosen = place < TARGETS
    mixed = items[order]
    target = mixed[chosen].view(len(users), TARGETS)
    return Batch((mixed[~chosen], sizes - TARGETS), target, len(users))


class History(nn.Module):
    """The sum of the input vectors of a user's items, divided by the root of their number."""

    def __init__(self, n_items: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(n_items, WIDTH, mode="sum", sparse=True)
        nn.init.normal_(self.bag.weight, std=WIDTH**-0.5)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        items, sizes = inputs
        total: Tensor = self.bag(items, sizes.cumsum(0) - sizes)
        return total / sizes.sqrt().unsqueeze(1)


class Full(nn.Module):
    """The full softmax for several targets per row, which share the normaliser."""

    def __init__(self, layer: FullSoftmax) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        layer: Any = self.layer
        vectors = embedding(target, layer.weight)
        score = torch.einsum("nd,npd->np", hidden, vectors) + layer.bias[target]
        loss: Tensor = layer(hidden, target[:, 0]) + (score[:, 0] - score.mean(1)).mean()
        return loss


class InBatch(nn.Module):
    """In-batch softmax, averaged over the targets of a row.

    For each target, the corresponding targets of the other rows are the negatives. The table has
    one vector per item, with the item's bias in the last column.
    """

    sparse = True  # the gradient of the table

    def __init__(self, layer: Any, correction: str) -> None:
        super().__init__()
        table = torch.cat([layer.weight, layer.bias.unsqueeze(1)], 1).detach()
        self.table = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        self.seen, self.correction = samplers.InBatch(layer.n_classes), correction

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        self.seen.update(target)
        query = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1)
        losses = [
            in_batch_softmax_loss(
                query, self.table(ids), self.seen.log_prob(ids), ids=ids, correction=self.correction
            )
            for ids in target.T.contiguous()
        ]
        return torch.stack(losses).mean()


def make_head(name: str, counts: Tensor, seed: int) -> nn.Module:
    """Builds the named output layer, with biases initialised to the item frequencies."""
    n = len(counts)
    if name in (FULL, IN_BATCH, IN_BATCH_RAW):
        layer = FullSoftmax(WIDTH, n)
        layer.init_bias_from_counts(counts)
        if name == FULL:
            return Full(layer)
        return InBatch(layer, "none" if name in RAW else "exact")
    by_frequency = samplers.Unigram(counts.clamp(min=1))
    options: Any = {"n_samples": SAMPLES, "sparse": True, "seed": seed}
    head: NoiseContrastive | SampledSoftmax
    if name == NCE:
        head = NoiseContrastive(WIDTH, n, by_frequency, **options)
    else:
        correction = "none" if name in RAW else "exact"
        head = SampledSoftmax(WIDTH, n, by_frequency, correction=correction, **options)
    head.init_bias_from_counts(counts)
    return head


def log_q(counts: Tensor) -> Tensor:
    """Log-frequencies of the items; items without occurrences count once."""
    least = counts.clamp(min=1).float()
    return (least / least.sum()).log()


def layer_of(head: nn.Module) -> tuple[Tensor, Tensor]:
    """The class vectors and biases by which the head ranks items."""
    if isinstance(head, InBatch):
        return head.table.weight[:, :-1].contiguous(), head.table.weight[:, -1].contiguous()
    layer: Any = head.layer if isinstance(head, Full) else head
    return layer.weight, layer.bias


@torch.no_grad()
def evaluate(
    body: nn.Module, weight: Tensor, bias: Tensor, known: Lists, truth: Lists, users: Tensor,
    tail: Tensor,
) -> dict[str, float]:  # fmt: skip
    """Ranks all items but the known ones for each user.

    Returns:
        Recall and NDCG at 20, means over users; recall of the tail items over all interactions;
        and the number of distinct recommended items.
    """
    discount = 1.0 / torch.log2(torch.arange(TOP) + 2.0)
    ideal = discount.cumsum(0)
    recall, ndcg, found, there = 0.0, 0.0, 0, 0
    shown = torch.zeros(len(weight), dtype=torch.bool)
    for some in users.split(RANKED):
        items, rows, sizes = known.of(some)
        scores = torch.addmm(bias, body((items, sizes)), weight.T)
        scores[rows, items] = -torch.inf
        top = scores.topk(TOP).indices
        right, of_user, n_right = truth.of(some)
        keys = top + torch.arange(len(some)).unsqueeze(1) * len(weight)
        hits = torch.isin(keys, right + of_user * len(weight))
        recall += float((hits.sum(1) / n_right).sum())
        ndcg += float(((hits * discount).sum(1) / ideal[n_right.clamp(max=TOP) - 1]).sum())
        found += int((hits & tail[top]).sum())
        there += int(tail[right].sum())
        shown[top] = True
    return {
        "recall": recall / len(users), "ndcg": ndcg / len(users), "tail": found / max(1, there),
        "distinct": int(shown.sum()),
    }  # fmt: skip


class Trained(NamedTuple):
    """The best model of a run by validation recall, and the record of the run."""

    body: nn.Module
    head: nn.Module
    run: dict[str, Any]


def train(data: Data, name: str, rate: float, seed: int, epochs: int, every: int) -> Trained:
    """Trains a head for some epochs, with validation after every ``every`` of them."""
    torch.manual_seed(seed)
    body, head = History(len(data.counts)), make_head(name, data.counts, seed)
    stepper = Stepper(body, head, rate, CLIP)
    order = torch.Generator().manual_seed(seed)
    # A discarded first step, so that compilation and allocation are not timed.
    first = draw_targets(data.train, torch.arange(data.n_users)[:BATCH], torch.Generator())
    Stepper(*deepcopy((body, head)), lr=0.0, clip=CLIP).step(first)
    some = torch.randperm(data.n_users, generator=torch.Generator().manual_seed(0))[:VALID_USERS]
    tail = is_tail(data.counts)
    curve: list[dict[str, float]] = []
    best = body, head
    seconds, steps = 0.0, 0
    for epoch in range(1, epochs + 1):
        for users in torch.randperm(data.n_users, generator=order).split(BATCH):
            batch = draw_targets(data.train, users, order)
            start = time.process_time()
            stepper.step(batch)
            seconds, steps = seconds + time.process_time() - start, steps + 1
        if epoch % every and epoch < epochs:
            continue
        told = evaluate(body, *layer_of(head), data.train, data.valid, some, tail)
        if told["recall"] > max((point["recall"] for point in curve), default=-1.0):
            best = deepcopy((body, head))
        curve.append({
            "epoch": epoch, "seconds": seconds, "recall": told["recall"], "ndcg": told["ndcg"]
        })  # fmt: skip
    top = max(point["recall"] for point in curve)
    progress(f"{name}, rate {rate:g}, seed {seed}: validation recall {top:.4f}, {seconds:.0f} s")
    return Trained(*best, {"rate": rate, "step_ms": 1e3 * seconds / steps, "curve": curve})


def is_tail(counts: Tensor) -> Tensor:
    """Mask of the least popular items, which together have half of all interactions."""
    return torch.from_numpy(deciles_of(counts.numpy()) >= 5)


def judged(data: Data, trained: Trained, name: str) -> dict[str, Any]:
    """The run with its test results; known items are the input and are not ranked."""
    known, users = data.train.joined(data.valid), torch.arange(data.n_users)
    tail, (weight, bias) = is_tail(data.counts), layer_of(trained.head)

    def rate(biases: Tensor) -> dict[str, float]:
        return evaluate(trained.body, weight, biases, known, data.test, users, tail)

    run = trained.run | {"test": rate(bias)}
    if name in RAW:
        run["with_log_q"] = rate(bias + log_q(data.counts))
    return run


def measure(options: Options) -> dict[str, Any]:
    """Chooses the learning rate on validation with the first seed, then trains all seeds."""
    data = load(options)
    runs: dict[str, list[dict[str, Any]]] = {}
    for name in NAMES:
        epochs, every = (5, 1) if name == FULL else (8, 2)
        rates = RATES[:1] if options.quick else RATES
        epochs, every = (2, 1) if options.quick else (epochs, every)
        first, *others = options.seeds
        tried = [train(data, name, rate, first, epochs, every) for rate in rates]
        best = max(tried, key=lambda each: max(_curve(each.run, "recall")))
        rest = (train(data, name, best.run["rate"], seed, epochs, every) for seed in others)
        runs[name] = [judged(data, each, name) for each in (best, *rest)]
    n = len(data.counts)
    known, users = data.train.joined(data.valid), torch.arange(data.n_users)
    popular = evaluate(
        History(n), torch.zeros(n, WIDTH), log_q(data.counts), known, data.test, users,
        is_tail(data.counts),
    )  # fmt: skip
    return {"users": data.n_users, "items": n, "popular": popular, "runs": runs}


def _curve(run: Mapping[str, Any], key: str) -> list[float]:
    return [point[key] for point in run["curve"]]


def _values(found: Mapping[str, Any], name: str, key: str, where: str = "test") -> list[float]:
    return [run[where][key] for run in found["runs"][name]]


def _of_mean(
    found: Mapping[str, Any], name: str, key: str = "recall", where: str = "test"
) -> float:
    return mean(_values(found, name, key, where))


def _p(found: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """P-values of differences in test recall, Holm-corrected."""
    heads = [dict(enumerate(_values(found, name, "recall"))) for name in NAMES]
    every = p_values(heads, log=False)
    corrected = holm([every[NAMES.index(a), NAMES.index(b)] for a, b in PAIRS])
    return dict(zip(PAIRS, corrected, strict=True))


def _seconds_to(found: Mapping[str, Any], name: str, level: float) -> float | None:
    """CPU time of training until validation recall is at the level; None if a run never is."""
    times = []
    for run in found["runs"][name]:
        reached = [point["seconds"] for point in run["curve"] if point["recall"] >= level]
        if not reached:
            return None
        times.append(reached[0])
    return mean(times)


def _level(found: Mapping[str, Any]) -> float:
    """The validation recall that counts as close to the full softmax."""
    return CLOSE * mean([max(_curve(run, "recall")) for run in found["runs"][FULL]])


def _at_best(run: Mapping[str, Any], key: str) -> float:
    """The value at the epoch with the best validation recall."""
    recall = _curve(run, "recall")
    return _curve(run, key)[recall.index(max(recall))]


def grids(found: Mapping[str, Any]) -> list[Grid]:
    """Test results of each head with published values below, and times."""
    p, rows, times = _p(found), [], []
    level = _level(found)
    for name, runs in found["runs"].items():
        extra, last = "", runs[0]["curve"][-1]["epoch"]
        if name in RAW:
            extra = spread(_values(found, name, "recall", "with_log_q"), 2, scale=100)
        against = p.get((FULL, name))
        rows.append([
            name, *(spread(_values(found, name, key), 2, scale=100) for key in ("recall", "ndcg")),
            "" if against is None else f"{against:.2g}",
            spread(_values(found, name, "tail"), 2, scale=100),
            f"{_of_mean(found, name, 'distinct'):,.0f}", extra,
        ])  # fmt: skip
        reached = _seconds_to(found, name, level)
        times.append([
            name, f"{runs[0]['rate']:g}", f"{mean([run['step_ms'] for run in runs]):.1f}",
            f"{mean([_at_best(run, 'epoch') for run in runs]):.1f} of {last}",
            f"{mean([_at_best(run, 'seconds') for run in runs]):.1f}",
            "not reached by all" if reached is None else f"{reached:.1f}",
        ])  # fmt: skip
    popular = found["popular"]
    cells = [f"{100 * popular[key]:.2f}" for key in ("recall", "ndcg", "tail")]
    cells.insert(2, "")
    rows.append(["most popular items", *cells, f"{popular['distinct']:,.0f}", ""])
    rows += [[f"published: {name}", *both, "", "", "", ""] for name, both in PUBLISHED.items()]
    quality = ["output layer", "recall@20", "NDCG@20", "p against full (recall)",
               "recall of the tail", "distinct items shown", "recall with log q added"]  # fmt: skip
    headings = ["output layer", "learning rate", "ms per step", "best epoch",
                "seconds to best epoch", f"seconds to {CLOSE:.0%} of full"]  # fmt: skip
    title = f"{found['users']:,} users, {found['items']:,} items, test part, percent"
    return [Grid(title, quality, rows), Grid("CPU time of the training steps", headings, times)]


def verdict(found: Mapping[str, Any]) -> Verdict:
    """Log-Q corrected sampling is close to full and faster; without correction it is worse."""
    p, recall = _p(found), {name: _of_mean(found, name) for name in NAMES}
    tail = {name: _of_mean(found, name, "tail") for name in NAMES}
    full_time, sampled_time = (_seconds_to(found, name, _level(found)) for name in (FULL, SAMPLED))
    faster = None
    if full_time is not None and sampled_time is not None:
        faster = full_time / sampled_time
    close = recall[SAMPLED] >= CLOSE * recall[FULL] and faster is not None and faster > 1
    worse = {
        raw: recall[raw] < recall[right] and p[right, raw] < LEVEL
        for right, raw in ((SAMPLED, SAMPLED_RAW), (IN_BATCH, IN_BATCH_RAW))
    }
    text = (
        f"Recall@20 is {recall[FULL]:.2%} with the full softmax and {recall[SAMPLED]:.2%} "
        f"({recall[SAMPLED] / recall[FULL]:.0%} of it) with {SAMPLES:,} samples and log-Q; "
    )
    text += (
        f"it reaches {CLOSE:.0%} of the validation recall of full in {sampled_time:.0f} seconds "
        f"instead of {full_time:.0f}. "
        if sampled_time is not None and full_time is not None
        else f"not all runs reached {CLOSE:.0%} of the validation recall of full. "
    )
    for right, raw in ((SAMPLED, SAMPLED_RAW), (IN_BATCH, IN_BATCH_RAW)):
        added = _of_mean(found, raw, "recall", "with_log_q")
        text += (
            f"{raw[0].upper()}{raw[1:]}, has {recall[raw]:.2%}, compared with {recall[right]:.2%} "
            f"with log-Q (p = {p[right, raw]:.2g}), and {tail[raw]:.2%} compared with "
            f"{tail[right]:.2%} in the tail; with log q added to its scores after training "
            f"{added:.2%}. "
        )
    text += f"NCE has {recall[NCE]:.2%}. "
    if any(worse.values()):
        text += (
            "Without correction a head learns log p - log q, which ranks popular items too low; "
            "adding log q to the scores should compensate for that. "
        )
    curves = [(name, _curve(run, "recall")) for name in NAMES for run in found["runs"][name]]
    late = [name for name, curve in curves if curve.index(max(curve)) == len(curve) - 1]
    text += (
        f"Of {len(curves)} runs {len(late)} were best at their last validation"
        + (f" ({', '.join(dict.fromkeys(late))}): their curves are not flat. " if late else ". ")
        + "The published figures are for other models, trained for longer and on the validation "
        "part as well; they are only for orientation."
    )
    kept = [close, *worse.values()]
    if all(kept):
        return Verdict("holds", text)
    return Verdict("holds in part" if any(kept) else "does not hold", text)


_COLOURS = dict(
    zip(NAMES, (OTHER_COLOURS[1], OURS_COLOURS[0], OURS_COLOURS[2],
                OURS_COLOURS[4], OTHER_COLOURS[0], OURS_COLOURS[3]), strict=True)
)  # fmt: skip


def draw(found: Mapping[str, Any], figure: "Figure") -> None:
    """Validation recall by CPU time; test recall, NDCG and tail recall with intervals."""
    curves, bars = figure.subplots(1, 2, width_ratios=(1.0, 1.15))
    for name in NAMES:
        for place, run in enumerate(found["runs"][name]):
            values = [100 * each for each in _curve(run, "recall")]
            curves.plot(_curve(run, "seconds"), values, marker="o", ms=2, lw=1,
                        color=_COLOURS[name], ls="--" if name in RAW else "-",
                        label=name if place == 0 else None)  # fmt: skip
    log_x(curves)
    curves.set_xlabel("CPU time of training steps, seconds")
    curves.set_ylabel("validation recall@20, %")
    figure.legend(loc="outside lower center", ncols=len(NAMES), fontsize=7)
    keys = {"recall": "recall@20", "ndcg": "NDCG@20", "tail": "recall@20 of the tail"}
    for column, key in enumerate(keys):
        for place, name in enumerate(NAMES):
            values = [100 * each for each in _values(found, name, key)]
            at = column + 0.12 * (place - (len(NAMES) - 1) / 2)
            bars.bar(at, mean(values), 0.11, color=_COLOURS[name])
            made = estimate(values)
            if made is not None and made.high is not None:
                half = made.high - made.mean
                bars.errorbar(at, made.mean, half, color="k", lw=0.8, capsize=1.5)
            bars.plot([at] * len(values), values, "k.", ms=2)
    bars.set_xticks(range(len(keys)), list(keys.values()))
    bars.set_ylabel("test, %")


STUDY = Study(
    title="recommendation over 41 thousand items, quality and time of output layers",
    claim=(
        "A softmax over sampled items with log-Q correction comes close to the full softmax in a "
        "fraction of its time; in-batch negatives need the correction, since otherwise popular "
        "items are negatives too often (Yi et al., RecSys 2019, recalled, no figures taken). "
        "Sampled softmax counters popularity bias and suits models of a user's history (Wu et al., "
        "arXiv:2201.02327, abstract). For orientation: recall@20 and NDCG@20 on Gowalla of "
        "LightGCN (README of its authors' code), NGCF and Mult-VAE (as in the LightGCN paper, "
        "recalled)."
    ),
    protocol=(
        "Gowalla check-ins in the split of LightGCN with a validation part taken out of the "
        "training part (719,081 / 91,047 / 217,242). Each step has 512 users, with 4 of their "
        "items, drawn at random, as targets; the hidden state (size 64) is the sum of the input "
        "vectors of their other items, divided by the root of their number. Biases are initialised "
        "to the item frequencies. The optimiser is Adam; for row-sparse gradients (input vectors, "
        "and class vectors except those of the full softmax) it is `RowAdam`, which updates only "
        "the touched rows. The learning rate (of two) is chosen by validation recall with the "
        "first seed, the epoch by validation recall in each run. The full softmax is trained for "
        "5 epochs and validated on 2,000 users after "
        "each; the others are trained for 8 and validated after every second one. 2,048 samples "
        "per step are drawn by item frequency and shared by all rows; in-batch negatives are one "
        "target of each other row, with frequencies counted during training. The test ranks all "
        "items for all users, except a user's items of the training and validation parts, which "
        "make up the hidden state. The tail consists of the least popular items that together have "
        "half of the training interactions; its recall is over all test interactions with them. "
        "Negative sampling as in word2vec is not measured: with biases its calibrated model is "
        "that of NCE, and its losses were the same in a trial. Time is CPU time of the training "
        "steps only, one thread. P-values are from paired t-tests by seed with Holm's correction. "
        "Batch size, targets per step, hidden size and learning rates were chosen by short runs on "
        "validation data; test results of one of these had been seen before."
    ),
    measure=measure,
    grids=grids,
    draw=draw,
    verdict=verdict,
    needs=tuple(
        Needed(path, f"{part}.txt of data/gowalla of github.com/geon0325/LightGCNpp, gzip")
        for part, path in FILES.items()
    ),
    size=(10.0, 3.8),
    cpu_only=True,
)
