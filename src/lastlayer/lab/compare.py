"""Every head with every seed under the same budget, and the page that says which suits the data."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from rich.console import Console

from lastlayer.heads.recipes import ClassData
from lastlayer.lab import environment
from lastlayer.lab.costs import measure_costs
from lastlayer.lab.data import Data, LabelData, PairData, SparseRows, TextData
from lastlayer.lab.errors import LabError
from lastlayer.lab.evaluation import ClassJudge, LabelJudge, PairJudge, TextJudge
from lastlayer.lab.explorer import explore
from lastlayer.lab.feeding import Feed, RowFeed, TextFeed
from lastlayer.lab.files import LOCK, Lock, check_space, check_writable, read_json
from lastlayer.lab.label_explorer import explore_labels
from lastlayer.lab.live import Watcher, watcher
from lastlayer.lab.models import FeatureBody, ModelSettings, PairBody, build_body
from lastlayer.lab.options import IDENTITY, CompareOptions, Settled
from lastlayer.lab.reading import read_data, told_of
from lastlayer.lab.records import SCHEMA, frozen_record, write_once
from lastlayer.lab.runs import Bench, perform, step_times
from lastlayer.lab.specs import HeadSpec, parse_specs

_FLOAT = 4
# Numbers of a checkpoint for each parameter: itself and two moments. An old one and a new one are
# there at a time.
_CHECKPOINT_COPIES = 6


@dataclass(frozen=True)
class Compared:
    """What a comparison has left.

    Attributes:
        out: its folder.
        results: of its runs, in the order they were made.
        interrupted: whether a person has stopped it.
        costs: against the number of classes, as costs.json has them; None where it was stopped
            before.
    """

    out: Path
    results: list[dict[str, Any]]
    interrupted: bool
    costs: dict[str, Any] | None = None


def compare(
    options: CompareOptions, out: Path, *, resume: bool, quiet: bool, console: Console
) -> Compared:
    """Trains and judges; every mistake of the options is a LabError before the first run.

    Args:
        options: what to compare.
        out: the folder of the comparison.
        resume: go on with what is there.
        quiet: show nothing on the way.
        console: what it is shown on.
    """
    options = _options_of(options, out, resume)
    settled = options.settled()
    parse_specs(settled.heads, task=settled.task)
    device = environment.device_named(settled.device)
    if settled.threads is not None:
        torch.set_num_threads(settled.threads)
    new = not out.exists()
    check_writable(out)
    lock = Lock(out)
    try:
        bench, specs = _prepare(settled, device, out, options, quiet, console)
    except BaseException:
        lock.release()
        if new:
            with suppress(OSError):
                out.rmdir()
        raise
    watching = watcher(console, specs, settled.seeds, quiet=quiet)
    try:
        with _interruptible(_say_aside if quiet else watching.says) as stopped, _few_objects():
            results = _run_all(bench, specs, settled.seeds, watching, stopped)
            costs = None
            if not stopped and bench.model.task != "pairs":
                costs = measure_costs(bench, specs, results, watching, lambda: bool(stopped))
            return Compared(out, results, bool(stopped), costs)
    finally:
        watching.close()
        lock.release()


def _run_all(
    bench: Bench, specs: list[HeadSpec], seeds: list[int], watching: Watcher, stopped: list[bool]
) -> list[dict[str, Any]]:
    """All heads with the first seed, then with the next: every head has a result early."""
    results: list[dict[str, Any]] = []
    for seed in seeds:
        for spec in specs:
            result = bench.finished(spec, seed)
            if result is None:
                if stopped:
                    return results
                watching.starts(spec, seed)
                result = perform(bench, spec, seed, watching.moves, lambda: bool(stopped))
            results.append(result)
            watching.ends(spec, seed, result)
    return results


def _prepare(
    settled: Settled,
    device: torch.device,
    out: Path,
    options: CompareOptions,
    quiet: bool,
    console: Console,
) -> tuple[Bench, list[HeadSpec]]:
    """Everything before the first run, and the heads, which follow from the task of the data."""
    if not quiet:
        console.print(f"Reading {settled.data or 'the embedded corpus'} …", highlight=False)
    data = read_data(settled)
    if not quiet:
        for line in told_of(data):
            console.print(line, highlight=False, markup=False)
    settled = options.settled(data.task)
    specs = parse_specs(settled.heads, task=data.task)
    feed, model = _feed(data, settled, device)
    _check_given_states(model, options)
    _check_sizes(options, feed)
    needs = ClassData(model.width, np.asarray(data.counts), _class_names(data))
    check_space(out, _bytes_needed(specs, len(settled.seeds), model, needs))
    judge = _judge(data, feed)
    n_rows = len(data.train) if isinstance(data, TextData) else data.train.n_rows
    bench = Bench(
        out=out,
        model=model,
        needs=needs,
        feed=feed,
        judge=judge,
        explore=lambda body, head: _explored(data, body, head, feed, device),
        steps=0,
        lr=settled.lr,
        finds_rate=settled.finds_rate,
        n_rows=n_rows,
        device=device,
        record={},
        fit=_fitted_to(data),
    )
    budget = _budget(bench, specs, settled, quiet, console)
    baseline = {"name": judge.baseline_name, **judge.baseline()}
    record = frozen_record(
        settled, specs, data, feed, model, device, options, budget, baseline
    )  # fmt: skip
    write_once(out, record, data)
    shared = ("data", "model", "budget", "settings", "device", "versions", "git")
    kept = {"schema": SCHEMA, **{name: record[name] for name in shared}}
    return replace(bench, steps=budget["amount"], record=kept), specs


def _check_given_states(model: ModelSettings, options: CompareOptions) -> None:
    """Hidden states that are there already have a size, and need no backbone."""
    if model.kind != IDENTITY:
        return
    given = {"--width": (options.width, model.width), "--model": (options.model, None)}
    for option, (value, own) in given.items():
        if value not in (None, own):
            raise LabError(
                f"{option}: expected none beside hidden states of size {model.width}, got "
                f"{value}; leave it out: heads are trained on the states themselves"
            )


def _class_names(data: Data) -> tuple[str, ...]:
    if isinstance(data, TextData):
        return data.vocabulary.tokens
    return data.label_names if isinstance(data, LabelData) else ()


def _budget(
    bench: Bench, specs: list[HeadSpec], settled: Settled, quiet: bool, console: Console
) -> dict[str, Any]:
    """The steps that every head makes, for compare.json; those of a folder that is there stay."""
    path = bench.out / "compare.json"
    if path.is_file():
        return dict(read_json(path)["budget"])
    asked, per_epoch = settled.budget, bench.feed.steps_per_epoch
    made: dict[str, Any] = {"kind": "steps"}
    slowest_ms = None
    if asked.kind == "seconds":
        if not quiet:
            console.print("Timing a step of each head …", highlight=False)
        times = step_times(bench, specs)
        slowest = max(specs, key=lambda spec: times[spec.slug])
        slowest_ms = times[slowest.slug]
        made |= {"slowest": slowest.label, "step_ms": round(slowest_ms, 3)}
    steps = asked.steps(per_epoch, slowest_ms)
    made |= {"amount": steps, "asked": str(asked), "epochs": round(steps / per_epoch, 4)}
    if slowest_ms is not None and not quiet:
        console.print(
            f"{asked} are {steps:,} steps of {made['slowest']}, the slowest head: every head makes "
            "as many.",
            highlight=False,
        )  # fmt: skip
    return made


def _feed(data: Data, settled: Settled, device: torch.device) -> tuple[Feed, ModelSettings]:
    if isinstance(data, TextData):
        text = TextFeed(data, settled.batch, settled.length, device)
        model = ModelSettings(
            settled.model, "lm", data.n_classes, settled.width, settled.layers, text.length
        )
        return text, model
    rows = RowFeed(data, settled.batch, device)
    if isinstance(data, PairData):
        dense = not isinstance(data.train.query, SparseRows)
        inputs, keys = data.widths[0], 0 if data.shared else data.widths[1]
        model = ModelSettings(
            settled.model, data.task, inputs, settled.width, dense=dense, keys=keys
        )
        return rows, model
    if data.hidden:
        return rows, ModelSettings(IDENTITY, data.task, data.n_features, data.n_features)
    dense = not isinstance(data.train.features, SparseRows)
    model = ModelSettings(settled.model, data.task, data.n_features, settled.width, dense=dense)
    return rows, model


def _check_sizes(options: CompareOptions, feed: Feed) -> None:
    """A size that was asked for has to be possible; the usual ones shrink to small data."""
    length = int(getattr(feed, "length", 1))
    if options.length is not None and options.length > length:
        raise LabError(
            f"--length: expected at most {length:,} tokens, one less than the training data has, "
            f"got {options.length:,}"
        )
    most = feed.batch_size // length
    if options.batch is not None and options.batch > most:
        what = f"windows of {length:,} tokens" if length > 1 else "rows"
        raise LabError(
            f"--batch: expected at most {most:,}, the {what} of the training data, got "
            f"{options.batch:,}"
        )


def _fitted_to(data: Data) -> Callable[[torch.nn.Module], None] | None:
    """Dense features have units of their own: backbones learn them from the training part."""
    if isinstance(data, TextData):
        return None
    both = data.train[:2] if isinstance(data, PairData) else data.train[:1]
    if any(isinstance(each, SparseRows) for each in both):
        return None
    features = [torch.from_numpy(np.ascontiguousarray(each)) for each in both]

    def fit(body: torch.nn.Module) -> None:
        if isinstance(body, FeatureBody | PairBody):
            body.fit(*features)

    return fit


def _judge(data: Data, feed: Feed) -> TextJudge | LabelJudge | PairJudge:
    kinds: dict[str, Any] = {
        "lm": TextJudge, "classification": ClassJudge, "multilabel": LabelJudge, "pairs": PairJudge,
    }  # fmt: skip
    made: TextJudge | LabelJudge | PairJudge = kinds[data.task](feed, np.asarray(data.counts))
    return made


def _explored(
    data: Data,
    body: torch.nn.Module,
    head: torch.nn.Module,
    feed: Feed,
    device: torch.device,
) -> list[dict[str, Any]]:
    if isinstance(data, TextData) and isinstance(feed, TextFeed):
        return explore(data, body, head, feed.length, device)
    if isinstance(data, LabelData) and isinstance(body, FeatureBody):
        return explore_labels(data, body, head, feed)
    return []


def _bytes_needed(specs: list[HeadSpec], seeds: int, model: ModelSettings, needs: ClassData) -> int:
    """Of all models and of the largest checkpoint. It builds every head once: bad values show."""
    try:
        of_body = sum(each.numel() for each in build_body(model).parameters())
        of_heads = [sum(each.numel() for each in spec.build(needs).parameters()) for spec in specs]
    except (MemoryError, RuntimeError) as error:
        told = str(error).partition("\n")[0]
        if isinstance(error, RuntimeError) and "allocate memory" not in told:
            raise
        raise LabError(
            f"--width: expected a model that fits into memory, got {model.width:,} for "
            f"{needs.n_classes:,} classes ({told}); choose a smaller one, or lower --vocab-size"
        ) from error
    kept = seeds * sum(of_body + each for each in of_heads)
    return _FLOAT * (kept + _CHECKPOINT_COPIES * (of_body + max(of_heads)))


def _options_of(options: CompareOptions, out: Path, resume: bool) -> CompareOptions:
    path = out / "compare.json"
    if resume:
        if not path.is_file():
            raise LabError(
                f"--resume: expected a folder with a compare.json, got '{out}'; leave --resume out "
                "to begin there"
            )
        recorded = CompareOptions.from_json(read_json(path).get("options") or {})
        return options.resumed(recorded, out)
    if out.exists() and (not out.is_dir() or any(each.name != LOCK for each in out.iterdir())):
        raise LabError(
            f"--out: expected a folder that is new or empty, got '{out}'; add --resume to go on "
            "with what is there, or choose another one"
        )
    return options


@contextmanager
def _few_objects() -> Iterator[None]:
    """Memory is collected after each run: what is there before them all is not looked through."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _say_aside(text: str) -> None:
    """Quiet or not, a person who presses Ctrl-C is there and waits for an answer."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def _interruptible(say: Callable[[str], None]) -> Iterator[list[bool]]:
    """A list that fills with the first Ctrl-C, which is answered at once; the next is as always."""
    pressed: list[bool] = []

    def press(_number: int, _frame: FrameType | None) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, before)
        say("Stopping after this step; the page follows. Ctrl-C again ends at once.")

    try:
        before = signal.signal(signal.SIGINT, press)
    except ValueError:
        # Only the main thread hears signals.
        yield pressed
        return
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
