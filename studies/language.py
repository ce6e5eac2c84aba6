"""Training of small language models with any output layer, for several studies."""

import copy
import gzip
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lastlayer.heads import Head
from lastlayer.lab.data.text import END, FirstCome, IdStream, Reading, TextData, language_data
from lastlayer.lab.evaluation import Rows, judge_rows
from lastlayer.lab.feeding import TextFeed
from lastlayer.lab.models import ModelSettings, build_body
from lastlayer.lab.statistics import holm, p_values
from lastlayer.lab.training import Stepper, warm_up
from studies.frame import Needed, progress

BROWN = Needed("brown/brown.txt.gz", "the Brown corpus of NLTK as plain text, gzip")
WIKITEXT2 = tuple(
    Needed(f"wikitext2/{part}.txt.gz", f"{part}.txt of WikiText-2, gzip")
    for part in ("train", "valid", "test")
)
# Smallest relative improvement of perplexity that counts, and the factor of the learning rate if
# there was none.
_LEAST_GAIN, _CUT = 0.002, 0.25

MakeHead = Callable[[], Head]


def brown(path: Path, reading: Reading) -> TextData:
    """Brown in lower case: 800,000 tokens for training, then 200,000 for validation.

    The split is that of Bengio and Senécal; the rest is the test part. ``reading.limit`` truncates
    the training part, and each other part to an eighth of that.
    """
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").lower().splitlines()
    tokens = [word for line in lines if not line.startswith("# ") for word in (*line.split(), END)]
    # Texts shorter than Brown are split into seven tenths and a sixth.
    train, valid = min(800_000, len(tokens) * 7 // 10), min(200_000, len(tokens) // 6)
    parts = {"train": tokens[:train], "valid": tokens[train : train + valid],
             "test": tokens[train + valid :]}  # fmt: skip
    return _data("Brown", parts, reading)


def wikitext2(folder: Path, reading: Reading) -> TextData:
    """WikiText-2 with its own split."""
    parts = {}
    for part in ("train", "valid", "test"):
        text = gzip.decompress((folder / f"{part}.txt.gz").read_bytes()).decode("utf-8")
        parts[part] = text.replace("\n", f" {END} ").split()
    return _data("WikiText-2", parts, reading)


def _data(name: str, parts: Mapping[str, Sequence[str]], reading: Reading) -> TextData:
    numbers, ids = FirstCome(), {}
    for part, tokens in parts.items():
        stream = IdStream(numbers)
        stream.add(list(tokens))
        ids[part] = stream.finish(None)
    return language_data(list(numbers), ids, {"name": name}, reading)


class Setting(NamedTuple):
    """Settings that all output layers share.

    Attributes:
        kind: type of the backbone: ``bag`` (log-bilinear, the last eight words) or ``lstm``.
        width: size of word vectors and hidden states.
        batch: batch size in windows.
        length: words per window.
        epochs: largest number of epochs; a run ends when validation stops improving after its
            learning rate was cut to a quarter.
        rates: learning rates to choose from.
        held_out: number of validation and test tokens that are evaluated, evenly spaced.
    """

    kind: str = "bag"
    width: int = 64
    batch: int = 32
    length: int = 32
    epochs: int = 12
    rates: tuple[float, ...] = (0.001, 0.003, 0.01)
    held_out: int = 20_000


class Model(NamedTuple):
    """A trained backbone and its output layer."""

    body: nn.Module
    head: Head


Watch = Callable[[Model, TextFeed], dict[str, float]]
"""Computes metrics of a model during training; its time is not measured."""


def feed_of(data: TextData, setting: Setting, device: torch.device) -> TextFeed:
    """The batches of a corpus."""
    return TextFeed(data, setting.batch, setting.length, device)


def fit(
    data: TextData, make_head: MakeHead, rate: float, seed: int, setting: Setting,
    device: torch.device, *, start_at_counts: bool = True, watch: Watch | None = None,
    looks: int = 1,
) -> tuple[dict[str, Any], Model]:  # fmt: skip
    """Train until validation stops improving; returns a record of the run and the best model.

    With ``looks`` above 1, validation and ``watch`` run that many times per epoch; early stopping
    and the choice of the best model still use whole epochs.

    Returns:
        The run and the best model. The run has ``valid`` and ``test`` perplexities, ``seconds`` of
        training steps after each epoch, ``step_ms``, ``flat`` (whether it ended before ``epochs``),
        and ``curve`` (seconds and perplexity at each look, if there are several per epoch).
    """
    torch.manual_seed(seed)
    feed = feed_of(data, setting, device)
    body = build_body(
        ModelSettings(setting.kind, "lm", data.n_classes, setting.width, length=setting.length)
    ).to(device)
    head = make_head()
    if start_at_counts:
        head.init_bias_from_counts(data.counts)
    head = head.to(device)
    model, stepper = Model(body, head), Stepper(body, head, rate, clip=1.0)
    warm_up(stepper, feed, seed)
    valid, seconds, watched = [perplexity(model, feed, "valid", setting)], [0.0], []
    curve = [(0.0, valid[0])]
    best, cut, epoch = _state(model), False, 0
    while epoch < setting.epochs:
        for part in range(looks):
            at = [(epoch * looks + part + i) * feed.steps_per_epoch // looks for i in (0, 1)]
            took = _train(stepper, feed, seed, range(*at), device)
            curve.append((curve[-1][0] + took, perplexity(model, feed, "valid", setting)))
            if watch is not None:
                watched.append(watch(model, feed))
        epoch += 1
        clock, found = curve[-1]
        seconds.append(clock)
        better = found < (1 - _LEAST_GAIN) * min(valid)
        if found < min(valid):
            best = _state(model)
        valid.append(found)
        if better:
            continue
        if cut:
            break
        cut = True
        _load(model, best)
        for group in (group for each in stepper.optimizers.values() for group in each.param_groups):
            group["lr"] *= _CUT
    _load(model, best)
    steps = epoch * feed.steps_per_epoch
    run = {
        "rate": rate, "seed": seed, "valid": valid, "seconds": seconds,
        "step_ms": 1000 * seconds[-1] / max(1, steps), "flat": epoch < setting.epochs,
        "test": perplexity(model, feed, "test", setting),
        "parameters": sum(each.numel() for each in head.parameters()),
        **({"watched": watched} if watch is not None else {}),
        **({"curve": curve} if looks > 1 else {}),
    }  # fmt: skip
    return run, model


def _train(
    stepper: Stepper, feed: TextFeed, seed: int, steps: range, device: torch.device
) -> float:
    """Seconds of the steps: CPU time of the process, or wall-clock time on a GPU."""
    stepper.body.train()
    stepper.head.train()
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    began = clock()
    for step in steps:
        stepper.step(feed.batch(seed, step))
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - began


def _state(model: Model) -> list[dict[str, Tensor]]:
    return [copy.deepcopy(module.state_dict()) for module in model]


def _load(model: Model, state: Sequence[dict[str, Tensor]]) -> None:
    for module, kept in zip(model, state, strict=True):
        module.load_state_dict(kept)


@torch.no_grad()
def states(model: Model, feed: TextFeed, part: str, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields hidden states of held-out text, ``(n, width)``, and the words that follow."""
    for each in model:
        each.eval()
    for batch in feed.held_out(part, tokens):
        yield model.body(batch.inputs).flatten(0, -2), batch.target.flatten()


def judge(model: Model, feed: TextFeed, part: str, setting: Setting) -> Rows:
    """Exact predictions of each held-out word, normalised over all classes."""
    return judge_rows(model.head, states(model, feed, part, setting.held_out))


@torch.no_grad()
def perplexity(model: Model, feed: TextFeed, part: str, setting: Setting) -> float:
    """Exact perplexity of held-out text; sampled heads are normalised over all classes, too."""
    total, n = 0.0, 0
    for hidden, target in states(model, feed, part, setting.held_out):
        total -= model.head.log_prob(hidden, target).double().sum().item()
        n += len(target)
    return math.exp(min(total / n, 700.0))


def choose_rate(
    data: TextData, make_head: MakeHead, seed: int, setting: Setting, device: torch.device,
    **given: Any,
) -> float:  # fmt: skip
    """The learning rate with the lowest validation perplexity after one epoch."""
    short = setting._replace(epochs=1)
    if len(setting.rates) == 1:
        return setting.rates[0]
    tried = {
        rate: min(fit(data, make_head, rate, seed, short, device, **given)[0]["valid"])
        for rate in setting.rates
    }
    return min(tried, key=tried.__getitem__)


Judged = Callable[[Model, TextFeed], dict[str, Any]]


def fit_seeds(
    name: str, data: TextData, make_head: MakeHead, seeds: Sequence[int], setting: Setting,
    device: torch.device, *, judged: Judged | None = None, **given: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Choose the learning rate with the first seed, then train one run per seed.

    Args:
        name: name in progress lines.
        data: the corpus.
        make_head: constructs the output layer; torch is seeded before.
        seeds: one run per seed.
        setting: settings that all output layers share.
        device: device of the training.
        judged: computes more metrics of each best model, which are added to its run.
        given: other arguments of :func:`fit`.
    """
    rate = choose_rate(data, make_head, seeds[0], setting, device, **given)
    runs = []
    for seed in seeds:
        run, model = fit(data, make_head, rate, seed, setting, device, **given)
        if judged is not None:
            run |= judged(model, feed_of(data, setting, device))
        runs.append(run)
        progress(
            f"{data.name}, {name}, seed {seed}: test perplexity {run['test']:.1f}, rate {rate:g}, "
            f"{len(run['valid']) - 1} epochs of {run['seconds'][1]:.1f} s"
            f"{'' if run['flat'] else ', not flat'}"
        )
    return runs


def of_seeds(found: Mapping[str, Any], name: str, key: str) -> list[float]:
    """A value of all runs of an output layer, one per seed."""
    return [run[key] for run in found["runs"][name]]


def mean_test(found: Mapping[str, Any], name: str) -> float:
    """The geometric mean of test perplexities of an output layer over seeds."""
    return geometric_mean(of_seeds(found, name, "test"))


def against_first(found: Mapping[str, Any]) -> dict[str, float]:
    """P-values of differences in test perplexity to the first output layer, Holm-corrected.

    From t-tests of the logarithms, paired by seed.
    """
    names = list(found["runs"])
    by_seed = [dict(enumerate(of_seeds(found, name, "test"))) for name in names]
    pairs = p_values(by_seed, log=True)
    return dict(zip(names[1:], holm([pairs[0, i] for i in range(1, len(names))]), strict=True))


def shown_p(p: Mapping[str, float], name: str) -> str:
    """A p-value as a cell of a table; empty for the baseline."""
    if name not in p:
        return ""
    return f"{p[name]:.2g}" if p[name] >= 1e-4 else "< 0.0001"


def not_flat(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A sentence for the verdict on runs that had not converged at their last epoch."""
    late = {
        name: sum(not run["flat"] for run in made)
        for name, made in runs.items()
        if any(not run["flat"] for run in made)
    }
    total = sum(map(len, runs.values()))
    if not late:
        return f"In all {total} runs validation had stopped improving before the last epoch."
    share = f"In {sum(late.values())} of {total} runs"
    return f"{share} validation still improved at the last epoch ({', '.join(late)})."


def seconds_per_epoch(run: Mapping[str, Any]) -> float:
    """Mean time of the training steps of an epoch."""
    return float(run["seconds"][-1] / (len(run["seconds"]) - 1))


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean, for perplexities."""
    return float(np.exp(np.mean(np.log(values))))
