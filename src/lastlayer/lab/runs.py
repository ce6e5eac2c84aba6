"""One run: a head and a seed, trained, evaluated and saved in its own folder.

Also the preparations: timing a step of each head if the budget is a time, and the search for the
learning rate of each head.
"""

import math
import shutil
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lastlayer.heads.recipes import ClassData
from lastlayer.lab import records
from lastlayer.lab.budget import Schedule
from lastlayer.lab.errors import first_line
from lastlayer.lab.evaluation import Judge
from lastlayer.lab.feeding import Feed
from lastlayer.lab.machine import PeakMemory, give_back, is_out_of_memory, load_per_core
from lastlayer.lab.models import ModelSettings
from lastlayer.lab.specs import HeadSpec
from lastlayer.lab.training import (
    InterruptedRunError,
    RunFailedError,
    Stepper,
    Tell,
    Training,
    has_diverged,
    save_tensors,
    warm_up,
)

CLIP = 1.0
# Runs with these states are not repeated on resume; other failures may not recur.
FINAL = ("ok", "nan", "diverged")
# Keeps the seeds of heads apart from those of backbones and batches.
_HEAD_SEED = 1_000_003
# Learning rates to try: the default one, its neighbours, and further ones while the outermost is
# best, up to a bound. Each is tried in a run with a share of the steps.
_RATE_FACTOR, _FURTHEST = 3.0, 2
_RATE_SHARE, _RATE_STEPS = 1 / 4, (20, 1000)
# Steps over which a short run averages its training loss.
_BLOCK = 10
# Number of timed steps, and a bound on their total time.
_TIMED_STEPS, _TIMED_SECONDS = 8, 1.0


def data_record(
    name: str,
    task: str,
    classes: int,
    sizes: Mapping[str, int],
    fingerprint: str,
    description: dict[str, Any],
) -> dict[str, Any]:
    """The entry of compare.json about the data; ``sizes`` are tokens or rows of each part."""
    return {
        "name": name, "task": task, "classes": classes,
        "tokens" if task == "lm" else "rows": sum(sizes.values()),
        **{f"{part}_size": size for part, size in sizes.items()},
        "fingerprint": fingerprint, "description": description,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The data and the backbone of a comparison, from files or from Python."""

    data: dict[str, Any]  # the entry of compare.json about the data
    needs: ClassData  # class data from which heads are built
    feed: Feed  # the source of batches
    model: ModelSettings  # settings of the backbone, as in compare.json
    # Returns a backbone with new weights, which depend on torch's generator only.
    make_body: Callable[[], nn.Module]
    # Returns the explorer's entries for a backbone and a head.
    explore: Callable[[nn.Module, nn.Module], list[dict[str, Any]]]
    n_rows: int  # rows of the training part, for label frequencies
    # Writes other files of a trained model, such as the vocabulary.
    save: Callable[[Path], None]
    # Learning rate around which each head's own is searched; None takes that of the options.
    usual_lr: float | None = None
    # The recorded command, if it is not ``lastlayer compare`` with the options.
    command: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Bench(Subject):
    """A subject with everything else that the runs of a comparison share."""

    out: Path  # the folder of the comparison
    judge: Judge  # evaluates models
    steps: int  # of each run
    lr: float  # learning rate, or the one around which each head's own is searched
    finds_rate: bool  # whether each head's own learning rate is searched
    device: torch.device  # of all runs
    record: dict[str, Any]  # content of config.json apart from head and seed

    def folder(self, spec: HeadSpec, seed: int) -> Path:
        """The folder of a run."""
        return self.out / "runs" / f"{spec.slug}-s{seed}"

    def finished(self, spec: HeadSpec, seed: int) -> dict[str, Any] | None:
        """The result of a run that is not repeated on resume; None for other runs."""
        path = self.folder(spec, seed) / "result.json"
        result = records.read_json(path) if path.is_file() else {}
        return result if result.get("status") in FINAL else None


def started(bench: Bench, spec: HeadSpec, seed: int) -> tuple[nn.Module, nn.Module, str]:
    """Backbone and head with new weights, and how the head's biases are initialised."""
    # The backbone first: its weights depend on the seed only, and are the same for every head.
    torch.manual_seed(seed)
    body = bench.make_body()
    torch.manual_seed(seed + _HEAD_SEED)
    head = spec.build(bench.needs.with_seed(seed))
    bias = _start_bias(bench, head)
    return body.to(bench.device), head.to(bench.device), bias


def _start_bias(bench: Bench, head: Any) -> str:
    """Initialise biases by class frequencies, without which a head would lag in short runs."""
    if bench.model.task == "pairs":
        return ""
    several = {"n_rows": bench.n_rows} if bench.model.task == "multilabel" else {}
    try:
        head.init_bias_from_counts(bench.needs.counts, **several)
    except (NotImplementedError, ValueError, TypeError) as error:
        return first_line(error)
    return records.STARTED


def step_ms(bench: Bench, spec: HeadSpec) -> float:
    """Median milliseconds of a few training steps."""
    with torch.random.fork_rng():
        body, head, _ = started(bench, spec, 0)
        stepper = Stepper(body, head, bench.lr, CLIP)
        warm_up(stepper, bench.feed, 0)
        times: list[float] = []
        while len(times) < _TIMED_STEPS and (sum(times) < _TIMED_SECONDS or not times):
            batch = bench.feed.batch(0, len(times))
            begin = time.perf_counter()
            stepper.step(batch)
            if bench.device.type == "cuda":
                torch.cuda.synchronize(bench.device)
            times.append(time.perf_counter() - begin)
    give_back()
    return 1e3 * statistics.median(times)


def known_rate(bench: Bench, spec: HeadSpec) -> dict[str, Any] | None:
    """The learning rate of a head, found before or given; None if it has to be searched."""
    found = records.read_rates(bench.out).get(spec.slug)
    return found if found or bench.finds_rate else {"lr": bench.lr, "tried": []}


def keep_rate(bench: Bench, spec: HeadSpec, made: dict[str, Any]) -> dict[str, Any]:
    """Add a learning rate to the file; only one process may do so at a time."""
    records.write_json(
        bench.out / records.RATES_FILE, {**records.read_rates(bench.out), spec.slug: made}
    )
    return made


def search_rate(bench: Bench, spec: HeadSpec, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Find the learning rate that is best on validation data, in short runs of the same model.

    In runs of more than one epoch the next lower rate is taken if it is about as good, since long
    runs overfit less with it.
    """
    least, most = _RATE_STEPS
    steps = min(bench.steps, max(least, min(most, round(_RATE_SHARE * bench.steps))))
    # The best rate falls with the square root of the steps, so short runs need a higher one.
    higher = math.sqrt(bench.steps / steps)
    scores: dict[int, float] = {}
    ahead = [0, -1, 1]
    while ahead:
        for place in ahead:
            scores[place] = _short_run(bench, spec, higher * _rate(bench, place), steps, stopped)
        best = min(scores, key=scores.__getitem__)
        beyond = best + (1 if best > 0 else -1)
        is_outermost = best in (min(scores), max(scores)) and math.isfinite(scores[best])
        ahead = [beyond] if is_outermost and abs(beyond) <= _FURTHEST else []
    lower = scores.get(best - 1, math.inf)
    overfits = bench.steps > bench.feed.steps_per_epoch
    chosen = best - 1 if overfits and bench.judge.is_as_good(lower, scores[best]) else best
    tried = [{"lr": _rate(bench, place), "score": scores[place]} for place in sorted(scores)]
    return {"lr": _rate(bench, chosen), "steps": steps, "tried": tried}


def _rate(bench: Bench, place: int) -> float:
    """The default learning rate times the factor to the power of ``place``."""
    return float(f"{bench.lr * _RATE_FACTOR**place:.2g}")


def _short_run(
    bench: Bench, spec: HeadSpec, rate: float, steps: int, stopped: Callable[[], bool]
) -> float:
    """The validation score after a short run; infinite if it diverged.

    The training loss is checked for divergence, since a diverged model can look perfect on
    validation data.
    """
    with torch.random.fork_rng():
        body, head, _ = started(bench, spec, 0)
        stepper = Stepper(body, head, rate, CLIP)
        body.train()
        head.train()
        losses = []
        try:
            for step in range(steps):
                if stopped():
                    raise InterruptedRunError
                losses.append(stepper.step(bench.feed.batch(0, step)))
            means = [float(torch.stack(losses[i : i + _BLOCK]).mean())
                     for i in range(0, steps, _BLOCK)]  # fmt: skip
            if any(has_diverged(mean, means[0]) for mean in means):
                return math.inf
            score = bench.judge.score(bench.judge.on_the_way(body, head))
        except (ValueError, OverflowError):
            # From the logarithm of a NaN or infinite loss.
            return math.inf
    return score if math.isfinite(score) else math.inf


def perform(
    bench: Bench, spec: HeadSpec, seed: int, tell: Tell, stopped: Callable[[], bool]
) -> dict[str, Any]:
    """Make or resume a run, and write its result, also after an error."""
    folder = bench.folder(spec, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    records.write_json(folder / "config.json", {**spec.as_json(), "seed": seed, **bench.record})
    found: dict[str, Any] = {}
    reason: str | None = None
    with torch.random.fork_rng():
        try:
            _train(bench, spec, seed, found, tell, stopped)
            status = "ok"
        except RunFailedError as failed:
            status, reason = failed.status, str(failed)
        except InterruptedRunError:
            status, reason = "interrupted", "stopped by Ctrl-C; resume the comparison to continue"
        except Exception as error:  # noqa: BLE001 — a head of the user's may raise anything
            reason = first_line(error)
            status = "out of memory"
            if not is_out_of_memory(error):
                status, reason = "error", f"{type(error).__name__}: {reason}"
                found["traceback"] = traceback.format_exc()
    result = written(bench, spec, seed, status, reason, found)
    if status in FINAL:
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    give_back()
    return result


def written(
    bench: Bench,
    spec: HeadSpec,
    seed: int,
    status: str,
    reason: str | None,
    found: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the result of a run into its folder; values that are not known are left out."""
    result = {
        "head": spec.text, "label": spec.label, "slug": spec.slug, "family": spec.family,
        "seed": seed, "status": status, "reason": reason, "test": None, "explorer": [],
        **(found or {}),
    }  # fmt: skip
    folder = bench.folder(spec, seed)
    folder.mkdir(parents=True, exist_ok=True)
    records.write_json(folder / "result.json", result)
    return result


def _train(
    bench: Bench,
    spec: HeadSpec,
    seed: int,
    found: dict[str, Any],
    tell: Tell,
    stopped: Callable[[], bool],
) -> None:
    """Train, test and save a run; values known so far are in ``found`` even if it fails."""
    known = known_rate(bench, spec)
    rate = (known or keep_rate(bench, spec, search_rate(bench, spec, stopped)))["lr"]
    body, head, bias = started(bench, spec, seed)
    own, others = (sum(p.numel() for p in module.parameters()) for module in (head, body))
    found |= {"lr": rate, "bias": bias, "parameters": own + others, "head_parameters": own}
    stepper = Stepper(body, head, rate, CLIP)
    warm_up(stepper, bench.feed, seed)
    memory = PeakMemory(bench.device, body, head)
    torch.manual_seed(seed)
    folder = bench.folder(spec, seed)
    training = Training(
        stepper, bench.feed, bench.judge, seed=seed, schedule=Schedule(bench.steps), folder=folder,
        memory=memory, tell=tell, stopped=stopped,
    )  # fmt: skip
    try:
        training.run()
        training.take_best()
        test = bench.judge.at_the_end(body, head)
        if any(isinstance(each, float) and math.isnan(each) for each in test.values()):
            raise RunFailedError("nan", "the head has NaN for some rows of the test data")
        found |= {"test": test, "explorer": bench.explore(body, head)}
        _keep(folder, body, head)
    finally:
        found |= _costs(training, memory, bench.feed.steps_per_epoch)


def _costs(training: Training, memory: PeakMemory, steps_per_epoch: int) -> dict[str, Any]:
    now, times = training.progress, training.step_ms
    low, middle, high = np.percentile(times, [25, 50, 75]).tolist() if times else [None] * 3
    peaks = [each for each in (memory.megabytes, now.peak_memory_mb) if each is not None]
    return {
        "steps": now.step,
        "epochs": now.step / steps_per_epoch,
        "best_step": now.best_step,
        "step_ms": middle,
        "step_ms_low": low,
        "step_ms_high": high,
        "step_ms_mean": statistics.fmean(times) if times else None,
        "load": load_per_core(),
        "seconds": now.seconds,
        "tokens": now.tokens,
        "tokens_per_second": now.tokens / now.seconds if now.seconds else None,
        "peak_memory_mb": max(peaks, default=None),
    }


def _keep(folder: Path, body: nn.Module, head: nn.Module) -> None:
    """Save the trained model, for ``generate`` and ``export``."""
    save_tensors(folder / "model.safetensors", body.state_dict())
    with records.replacing(folder / "head") as new:
        for old in (new, folder / "head"):
            shutil.rmtree(old, ignore_errors=True)
        head.save(new)  # type: ignore[operator]
