"""A comparison: every head is trained with every seed under the same budget."""

import gc
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console

from lastlayer.heads.recipes import ClassData
from lastlayer.lab import machine, records
from lastlayer.lab.costs import measure_costs
from lastlayer.lab.data import Data, PairData, SparseRows, TextData
from lastlayer.lab.errors import LabError, first_line
from lastlayer.lab.evaluation import EPSILON, JUDGES, rows_for
from lastlayer.lab.explorer import explore
from lastlayer.lab.feeding import Feed, RowFeed, TextFeed
from lastlayer.lab.live import Watcher, watcher
from lastlayer.lab.models import FeatureBody, ModelSettings, PairBody, build_body
from lastlayer.lab.on_ray import Cluster
from lastlayer.lab.options import IDENTITY, CompareOptions, Settled
from lastlayer.lab.runs import CLIP, Bench, Subject, data_record, known_rate, perform, step_ms
from lastlayer.lab.specs import HeadSpec, parse_specs
from lastlayer.lab.training import WARM_UP
from lastlayer.parallel.communication import as_bytes

_FLOAT = 4
# Values per parameter in checkpoints: itself and two moments, and all of them twice, since the old
# checkpoint is removed after the new one is written.
_CHECKPOINT_COPIES = 6


@dataclass(frozen=True)
class Compared:
    """The outcome of a comparison."""

    out: Path  # its folder
    results: list[dict[str, Any]]  # of its runs, in the order in which they were made
    interrupted: bool  # whether the user stopped it
    # Cost by number of classes, the content of costs.json; None if not measured.
    costs: dict[str, Any] | None = None


Make = Callable[[Settled, torch.device], Subject]


def compare(
    options: CompareOptions,
    out: Path,
    *,
    resume: bool,
    console: Console,
    ray: str | None = None,
) -> Compared:
    """Compare heads on the data in the options; ``ray`` is the address of a cluster, if any."""
    options = options_of(options, out, resume)

    def make(settled: Settled, device: torch.device) -> Subject:
        console.print(f"Reading {settled.data or 'the embedded corpus'} …", highlight=False)
        data = settled.read()
        subject = _of_data(data, options.settled(data.task), device)
        if subject.model.kind == IDENTITY:
            # Precomputed hidden states have a fixed size, and need no backbone.
            own = subject.model.width
            for option, value, fits in (
                ("--width", options.width, (None, own)), ("--model", options.model, (None,)),
            ):  # fmt: skip
                if value not in fits:
                    raise LabError(
                        f"{option}: expected none with hidden states of size {own}, got {value}; "
                        "leave it out: heads are trained on the hidden states directly"
                    )
        return subject

    return conduct(options, out, make, console=console, ray=ray)


def conduct(
    options: CompareOptions,
    out: Path,
    make: Make,
    *,
    console: Console,
    ray: str | None = None,
) -> Compared:
    """Make and evaluate all runs. User errors are raised before the first run, without files."""
    settled = options.settled()
    parse_specs(settled.heads, task=settled.task)
    device = machine.device_named(settled.device)
    run_all = _run_all
    with ExitStack() as open_things:
        open_things.callback(torch.set_num_threads, torch.get_num_threads())
        if settled.threads is not None:
            torch.set_num_threads(settled.threads)
        if ray is not None:
            cluster = Cluster(ray, settled.threads or 1, gpus=int(device.type == "cuda"))
            run_all = open_things.enter_context(cluster).run_all
        new = not out.exists()
        records.check_writable(out)
        lock = records.Lock(out)
        open_things.callback(lock.release)
        try:
            bench, specs = _prepare(options, out, make(settled, device), device, console)
        except BaseException:
            lock.release()
            if new:
                with suppress(OSError):
                    out.rmdir()
            raise
        watching = watcher(console, specs, settled.seeds)
        open_things.callback(watching.close)
        # Garbage is collected after each run; objects that exist before the first need no scan.
        gc.collect()
        gc.freeze()
        open_things.callback(gc.unfreeze)
        # Ctrl-C is acknowledged with --quiet, too.
        say = partial(typer.echo, err=True) if console.quiet else watching.says
        with _interruptible(say) as stopped:
            results = run_all(bench, specs, settled.seeds, watching, stopped)
            costs = None
            if not stopped and bench.model.task != "pairs":
                costs = measure_costs(bench, specs, results, watching, lambda: bool(stopped))
            return Compared(out, results, bool(stopped), costs)


def _run_all(
    bench: Bench, specs: list[HeadSpec], seeds: list[int], watching: Watcher, stopped: list[bool]
) -> list[dict[str, Any]]:
    """All heads with the first seed, then with the next, so that every head has a result early."""
    results: list[dict[str, Any]] = []
    for seed in seeds:
        for spec in specs:
            result = bench.finished(spec, seed)
            if result is None:
                if stopped:
                    return results
                watching.starts(spec, seed)
                if known_rate(bench, spec) is None:
                    watching.searches(spec)
                result = perform(bench, spec, seed, watching.moves, lambda: bool(stopped))
            results.append(result)
            watching.ends(spec, seed, result)
    return results


def _prepare(
    options: CompareOptions, out: Path, subject: Subject, device: torch.device, console: Console
) -> tuple[Bench, list[HeadSpec]]:
    """Check everything and write compare.json before the first run; returns bench and heads."""
    for line in records.told_of(subject.data):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    task = subject.model.task
    settled = options.settled(task)
    if subject.usual_lr is not None and settled.finds_rate:
        settled = replace(settled, lr=subject.usual_lr)
    specs = parse_specs(settled.heads, task=task)
    _check_sizes(options, subject.feed)
    _check_space(out, specs, len(settled.seeds), subject)
    on_gpu = device.type == "cuda"
    judge = JUDGES[task](subject.feed, subject.needs.counts, on_gpu=on_gpu)
    bench = Bench(
        **vars(subject), out=out, judge=judge, steps=0, lr=settled.lr,
        finds_rate=settled.finds_rate, device=device, record={},
    )  # fmt: skip
    budget = _budget(bench, specs, settled, console)
    n_classes = subject.data["classes"]
    shared = {
        "data": subject.data,
        "model": asdict(subject.model),
        "budget": budget,
        "settings": {
            "batch": subject.feed.batch_size,
            "steps_per_epoch": subject.feed.steps_per_epoch,
            "lr": settled.lr,
            "lr_of_each_head": settled.finds_rate,
            "tolerance": settled.tolerance,
            "optimizer": "Adam, and RowAdam for row-sparse gradients",
            "clip": CLIP,
            "warm_up_steps": WARM_UP,
            "valid_rows": rows_for("valid", n_classes, on_gpu=on_gpu),
            "test_rows": rows_for("test", n_classes, on_gpu=on_gpu),
            "epsilon": EPSILON,
        },
        "device": machine.device_record(device),
        "versions": machine.versions(),
        "git": machine.git_commit(),
    }
    record = {
        "schema": records.SCHEMA,
        "command": subject.command or options.command(),
        "created": machine.now(),
        **shared,
        "baseline": {"name": judge.baseline_name, **judge.baseline()},
        "heads": [spec.as_json() for spec in specs],
        "seeds": settled.seeds,
        "options": options.as_json(),
    }
    path = out / "compare.json"
    if path.is_file():
        _check_same(records.read_json(path), record, out)
    else:
        subject.save(out)
        records.write_json(path, record)
    return replace(
        bench, steps=budget["amount"], record={"schema": records.SCHEMA, **shared}
    ), specs


def _check_same(before: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    """A resumed comparison must have the settings that compare.json records."""
    parts = [
        ("data", before["data"].get("fingerprint"), now["data"]["fingerprint"]),
        ("classes", before["data"].get("classes"), now["data"]["classes"]),
        ("heads", *([each["spec"] for each in side["heads"]] for side in (before, now))),
        *((name, before.get(name), now[name]) for name in ("seeds", "budget", "model")),
        *((f"settings.{name}", before["settings"].get(name), value)
          for name, value in now["settings"].items()),
        ("device", before["device"].get("name"), now["device"]["name"]),
    ]  # fmt: skip
    other = [f"{name} was {then} and is {new}" for name, then, new in parts if then != new]
    if other:
        raise LabError(
            f"--resume: expected the settings of the comparison in '{out}', got others: "
            f"{'; '.join(other)}; choose another --out"
        )


def _of_data(data: Data, settled: Settled, device: torch.device) -> Subject:
    """Data from files, with a backbone of the lab."""
    feed, model = _feed(data, settled, device)

    def save(out: Path) -> None:
        data.vocabulary.save(out / "vocabulary.json")
        if tokenizer := data.description.get("tokenizer"):
            shutil.copyfile(tokenizer, out / "tokenizer.json")
        if not isinstance(data, TextData):
            records.write_json(out / "features.json", list(data.feature_names))

    return Subject(
        data=data_record(
            data.name, data.task, data.n_classes, data.sizes, data.fingerprint, data.description
        ),
        needs=ClassData(model.width, np.asarray(data.counts), data.vocabulary.tokens),
        feed=feed,
        model=model,
        make_body=partial(_body_for, data, model),
        explore=partial(explore, data, feed, device),
        n_rows=data.sizes["train"],
        save=save,
    )


def _budget(
    bench: Bench, specs: list[HeadSpec], settled: Settled, console: Console
) -> dict[str, Any]:
    """The budget in steps, for compare.json; a resumed comparison keeps its recorded budget."""
    path = bench.out / "compare.json"
    if path.is_file():
        return dict(records.read_json(path)["budget"])
    asked, per_epoch = settled.budget, bench.feed.steps_per_epoch
    budget: dict[str, Any] = {"kind": "steps"}
    slowest_ms = None
    if asked.kind == "seconds":
        console.print("Timing a step of each head …", highlight=False)
        slowest_ms, label = max((step_ms(bench, spec), spec.label) for spec in specs)
        budget |= {"slowest": label, "step_ms": round(slowest_ms, 3)}
    steps = asked.steps(per_epoch, slowest_ms)
    if slowest_ms is not None:
        console.print(
            f"{asked} of training is {steps:,} steps of {budget['slowest']}, the slowest head; "
            "every head makes as many steps.",
            highlight=False,
        )
    return {**budget, "amount": steps, "asked": str(asked), "epochs": round(steps / per_epoch, 4)}


def _feed(data: Data, settled: Settled, device: torch.device) -> tuple[Feed, ModelSettings]:
    kind, width = settled.model, settled.width
    if isinstance(data, TextData):
        text = TextFeed(data, settled.batch, settled.length, device)
        return text, ModelSettings(kind, "lm", data.n_classes, width, settled.layers, text.length)
    rows = RowFeed(data, settled.batch, device)
    if isinstance(data, PairData):
        inputs, keys = data.widths[0], 0 if data.shared else data.widths[1]
        dense = not isinstance(data.train.query, SparseRows)
        return rows, ModelSettings(kind, data.task, inputs, width, dense=dense, keys=keys)
    if data.hidden:
        return rows, ModelSettings(IDENTITY, data.task, data.n_features, data.n_features)
    dense = not isinstance(data.train.features, SparseRows)
    return rows, ModelSettings(kind, data.task, data.n_features, width, dense=dense)


def _check_sizes(options: CompareOptions, feed: Feed) -> None:
    """Refuse a given batch size or length that exceeds the data; defaults are reduced instead."""
    length = int(getattr(feed, "length", 1))
    if options.length is not None and not isinstance(feed, TextFeed):
        raise LabError(
            f"--length: expected none, since only text of --task lm is cut into windows, got "
            f"{options.length:,}"
        )
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


def _body_for(data: Data, model: ModelSettings) -> torch.nn.Module:
    """A new backbone; dense features are standardised with statistics of the training part."""
    body = build_body(model)
    if isinstance(data, TextData) or not isinstance(body, FeatureBody | PairBody):
        return body
    both = data.train[:2] if isinstance(data, PairData) else data.train[:1]
    if not any(isinstance(each, SparseRows) for each in both):
        body.fit(*(torch.from_numpy(np.ascontiguousarray(each)) for each in both))
    return body


def _check_space(out: Path, specs: list[HeadSpec], seeds: int, subject: Subject) -> None:
    """Check that all models and the largest checkpoint fit on disk, and that all heads build."""
    needs, model = subject.needs, subject.model
    free = machine.free_memory(torch.device("cpu"))
    try:
        # A system that overcommits memory would kill the process when it fills the embedding.
        embedding = 0 if model.kind == IDENTITY else _FLOAT * model.inputs * model.width
        if free is not None and embedding > free:
            raise MemoryError(f"{as_bytes(embedding)} of embeddings, {as_bytes(free)} free")
        of_body = sum(each.numel() for each in subject.make_body().parameters())
        of_heads = [sum(each.numel() for each in spec.build(needs).parameters()) for spec in specs]
    except (MemoryError, RuntimeError) as error:
        if not machine.is_out_of_memory(error):
            raise
        raise LabError(
            f"--width: expected a model that fits into memory, got {needs.in_features:,} for "
            f"{needs.n_classes:,} classes ({first_line(error)}); choose a smaller one, or lower "
            "--vocab-size"
        ) from error
    kept = seeds * sum(of_body + each for each in of_heads)
    wanted = _FLOAT * (kept + _CHECKPOINT_COPIES * (of_body + max(of_heads)))
    if (free := shutil.disk_usage(out).free) < wanted:
        raise LabError(
            f"--out: expected {as_bytes(wanted)} of free disk for the models and checkpoints of "
            f"all runs, got {as_bytes(free)} at '{out}'; use fewer heads or seeds, or another disk"
        )


def options_of(options: CompareOptions, out: Path, resume: bool) -> CompareOptions:
    """The recorded options with ``resume``; otherwise the given ones, for a new or empty folder."""
    path = out / "compare.json"
    if resume:
        if not path.is_file():
            raise LabError(
                f"--resume: expected a folder with a compare.json, got '{out}'; leave out --resume "
                "to start a new comparison there"
            )
        recorded = CompareOptions.from_json(records.read_json(path).get("options") or {})
        return options.resumed(recorded, out)
    if out.exists() and (
        not out.is_dir() or any(each.name != records.LOCK for each in out.iterdir())
    ):
        raise LabError(
            f"--out: expected a folder that is new or empty, got '{out}'; add --resume to continue "
            "its comparison, or choose another one"
        )
    return options


@contextmanager
def _interruptible(say: Callable[[str], None]) -> Iterator[list[bool]]:
    """Yields a list, empty until the first Ctrl-C; a second Ctrl-C interrupts as usual."""
    pressed: list[bool] = []

    def press(_number: int, _frame: FrameType | None) -> None:
        pressed.append(True)
        # Shells start background jobs with SIGINT ignored; there, too, the second one interrupts.
        signal.signal(signal.SIGINT, before if callable(before) else signal.default_int_handler)
        say("Stopping after the current step, then writing the page. Ctrl-C again stops at once.")

    try:
        before = signal.signal(signal.SIGINT, press)
    except ValueError:
        # Python handles signals in the main thread only.
        yield pressed
        return
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
