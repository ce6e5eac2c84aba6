"""Comparisons from Python, with your own backbone and batches.

Runs, folders and pages are the same as those of ``lastlayer compare``.
"""

import hashlib
import math
import numbers
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from lastlayer.heads import Head
from lastlayer.heads.recipes import ClassData
from lastlayer.lab.comparison import conduct, options_of
from lastlayer.lab.data import Vocabulary
from lastlayer.lab.errors import LabError
from lastlayer.lab.feeding import PADDING, Batch
from lastlayer.lab.models import ModelSettings
from lastlayer.lab.options import CLASS_TASKS, OWN, CompareOptions, Settled, one_of
from lastlayer.lab.records import FROM_PYTHON, Run
from lastlayer.lab.results import Results, quality_of, read_results
from lastlayer.lab.runs import Subject, data_record
from lastlayer.lab.specs import defaults_for
from lastlayer.lab.verdict import Verdict, verdict

# Start of the search for each head's learning rate; it suits most backbones under Adam.
_USUAL_RATE = 1e-3
# Seed of held-out batches.
_HELD_OUT_SEED = 0
# Arguments whose names differ from the options of the command.
_ARGUMENTS = {"head": "heads", "budget": "steps", "width": "hidden", "vocab-size": "n_classes"}

_FLAG = r"(?P<command>`[^`]*`)|use --(?P<named>[a-z-]+) (?P<value>\w+)|--(?P<name>[a-z][a-z-]*)"

Batches = Iterable[Any]
Backbone = Callable[[], nn.Module]


def compare(
    backbone: Backbone,
    train: Batches,
    valid: Batches,
    heads: Sequence[str | type[Head]] | None = None,
    *,
    test: Batches | None = None,
    task: str = "classification",
    steps: int | None = None,
    epochs: float | None = None,
    seeds: int = 3,
    hidden: int | None = None,
    n_classes: int | None = None,
    counts: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    lr: float | str = "auto",
    tolerance: float = 0.03,
    out: Path | str | None = None,
    resume: bool = False,
    device: str = "auto",
    threads: int | None = None,
    ray: str | None = None,
    progress: bool = True,
) -> "CompareResult":
    """Train your backbone with each output layer for the same steps, and recommend one of them.

    Args:
        backbone: a function without arguments that returns a new ``nn.Module`` from inputs to
            hidden states, ``(batch, hidden)`` or ``(batch, length, hidden)``. It is called once per
            run, after seeding torch, so that every head gets the same initial weights.
        train: batches ``(inputs, target)`` that can be iterated anew in each epoch, such as a
            ``DataLoader`` or a list. Inputs are moved to the device and passed to the backbone.
            Targets are one class id per hidden state, -100 to ignore one; for ``multilabel`` the
            labels of each row, ``(batch, most labels)``, padded with -100.
        valid: validation batches, in the same form.
        heads: specs such as ``"adaptive:cutoffs=2000,10000"``, or classes that derive from
            :class:`lastlayer.heads.Head`; None takes one of every family that suits the task.
        test: test batches. Without them heads are tested on ``valid``, which the verdict notes.
        task: ``classification``, ``lm`` (ranked by perplexity) or ``multilabel``.
        steps: training steps of each run, 400 by default.
        epochs: training epochs of each run, instead of ``steps``.
        seeds: number of runs per head, each with another seed.
        hidden: hidden size; None takes it from the output for the first batch.
        n_classes: number of classes; None takes the largest target in ``train``, plus 1.
        counts: how often each class occurs in training; None counts them in ``train``.
        class_names: names of the classes, for display and for heads that read their spelling.
        lr: learning rate, or ``auto``, which tries three or more per head.
        tolerance: the cheapest head whose quality is within this share of the best is recommended.
        out: folder of the comparison; None creates a temporary one, which is not deleted.
        resume: continue the comparison in ``out``.
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: number of CPU threads of torch.
        ray: address of a Ray cluster, or ``local``, to make the runs there in parallel.
        progress: show the progress.

    Every head sees the same batches: random numbers that they draw from torch's generator depend on
    the seed and the step only. A list is shuffled in each epoch; other iterables shuffle
    themselves. Saved heads have their classes ordered by falling count, which several heads
    require; vocabulary.json lists ``class_names``, or the original class ids, in that order.

    Raises:
        LabError: an argument or a batch is not valid; raised before any training.

    Example:
        >>> import torch
        >>> inputs = torch.randn(256, 4)
        >>> target = inputs.argmax(1)
        >>> batches = list(zip(inputs.split(32), target.split(32)))
        >>> found = compare(
        ...     lambda: torch.nn.Linear(4, 8), batches[2:], batches[:2], ["full", "hierarchical"],
        ...     steps=20, seeds=1, lr=0.01, progress=False,
        ... )
        >>> [run.status for run in found.runs]
        ['ok', 'ok']
        >>> found.verdict.best.title in ("Full softmax", "Hierarchical softmax")
        True
        >>> sorted(found.curves()[0])
        ['accuracy', 'head', 'seconds', 'seed', 'step']
    """
    if steps is not None and epochs is not None:
        raise LabError(
            f"steps: expected None if epochs={epochs} is given, got {steps}; give one of them"
        )
    lengths: tuple[tuple[str, Any, Any, str], ...] = (
        ("steps", steps, numbers.Integral, "a whole number from 1"),
        ("epochs", epochs, numbers.Real, "a number above 0"),
    )
    for name, value, kind, expected in lengths:
        if value is not None and not (isinstance(value, kind) and 0 < value < math.inf):
            raise LabError(f"{name}: expected {expected}, got {value!r}")
    if isinstance(heads, str | type):
        raise LabError(f"heads: expected a list of heads, got {heads!r}; put it into a list")
    one_of("task", task, CLASS_TASKS)
    if heads is None and task == "lm" and class_names is None:
        # Heads that read spellings need class names.
        heads = defaults_for("classification")
    budget = f"{400 if steps is None else steps}steps" if epochs is None else f"{epochs}epochs"
    options = CompareOptions(
        heads=tuple(map(_spec, heads)) if heads else None, budget=budget,
        seeds=seeds, task=task, device=device, lr=str(lr), tolerance=tolerance, threads=threads,
    )  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="lastlayer-") if out is None else out)
    parts = {"train": train, "valid": valid, "test": valid if test is None else test}
    make = partial(
        _subject, backbone, parts, task=task, hidden=hidden, n_classes=n_classes, counts=counts,
        names=class_names,
    )  # fmt: skip
    try:
        options = options_of(options, folder, resume)
        done = conduct(options, folder, make, console=Console(quiet=not progress), ray=ray)
    except BaseException as error:
        if out is None and not (folder / "compare.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, LabError):
            raise type(error)(_as_arguments(str(error))) from None
        raise
    return CompareResult(done.out, done.interrupted)


@dataclass(frozen=True)
class CompareResult:
    """The results of a comparison, read from its folder.

    Attributes:
        folder: holds all records, models and the page; :func:`lastlayer.lab.load_trained` reads the
            runs below ``runs/``.
        interrupted: whether it was stopped by Ctrl-C; ``resume=True`` continues it.
    """

    folder: Path
    interrupted: bool = False

    @cached_property
    def results(self) -> Results:
        """Heads with their means over seeds, confidence intervals and ranks."""
        return read_results(self.folder)

    @cached_property
    def verdict(self) -> Verdict:
        """The conclusions, among them ``sentence``, ``findings``, ``notes`` and ``recommended``."""
        return verdict(self.results)

    @property
    def runs(self) -> tuple[Run, ...]:
        """One run per head and seed, with status, test metrics, costs and learning curves."""
        return self.results.comparison.runs

    def table(self, kind: str = "rich") -> Any:
        """All heads, best first, as a ``rich`` table or as ``markdown`` text."""
        from lastlayer.lab.report.tables import markdown
        from lastlayer.lab.show import results_table

        if kind not in ("rich", "markdown"):
            raise LabError(f"kind: expected rich or markdown, got {kind!r}")
        if kind == "markdown":
            return markdown(self.results, self.verdict)
        return results_table(self.results, width=120)

    def curves(self) -> list[dict[str, Any]]:
        """Validation points of all runs, one record each, for ``pandas.DataFrame``."""
        metric = self.results.metric
        return [
            {
                "head": run.head.title, "seed": run.seed, "step": point.step,
                "seconds": point.seconds, metric.label: quality_of(point, metric),
            }
            for run in self.runs
            for point in run.valid
        ]  # fmt: skip

    def report(self, path: Path | str | None = None) -> Path:
        """Write the page into the folder, and copy it to ``path`` if given; returns its path."""
        from lastlayer.lab.report import write_report

        page = write_report(self.folder)
        place = page if path is None else Path(path)
        if place != page:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, place)
        return place

    def _repr_markdown_(self) -> str:
        return str(self.table("markdown"))

    def __str__(self) -> str:
        return self.verdict.sentence


def _spec(head: str | type[Head]) -> str:
    return head if isinstance(head, str) else f"{head.__module__}:{head.__qualname__}"


def _as_arguments(text: str) -> str:
    """Replace command-line options in a message by the arguments of :func:`compare`."""

    def argument(match: re.Match[str]) -> str:
        if match["command"]:
            return match["command"]
        flag = match["named"] or match["name"]
        name = _ARGUMENTS.get(flag, flag.replace("-", "_"))
        return f"use {name}={match['value']!r}" if match["value"] else name

    text = re.sub(r"--resume\b(?!:)", "resume=True", text)
    return re.sub(_FLAG, argument, text)


@dataclass(frozen=True)
class _PartStatistics:
    """Class counts, rows per batch and a hash of the targets of a part."""

    counts: NDArray[np.int64]
    rows: list[int]
    digest: str


class GivenFeed:
    """The feed of the user's batches, with class ids ordered by falling count.

    ``rows`` has the number of rows in each batch of a part, ``place`` the new id of each class.
    """

    def __init__(
        self, parts: Mapping[str, Batches], rows: Mapping[str, list[int]], place: Tensor, task: str,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._parts, self._rows, self._device = parts, rows, device
        self._place, self._one_class = place.to(device), task != "multilabel"
        self.steps_per_epoch, self.batch_size = len(rows["train"]), max(rows["train"])
        self._next: tuple[int, int] | None = None
        self._stream: Iterator[Any] = iter(())

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without the current iterator."""
        return {**vars(self), "_next": None, "_stream": iter(())}

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of a step; out of order, all batches before it in the epoch are iterated."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._next != (seed, step) or place == 0:
            self._stream = self._shuffled(seed, epoch)
            for _ in range(place):
                next(self._stream)
        self._next = seed, step + 1
        try:
            return self._moved(next(self._stream))
        except StopIteration:
            raise RuntimeError(
                f"train: expected {self.steps_per_epoch} batches in each epoch, got {place}"
            ) from None

    def held_out(self, part: str, rows: int) -> Iterator[Batch]:
        """Whole batches of a part, evenly spaced, with about ``rows`` rows in total."""
        sizes = self._rows[part]
        wanted = max(1, min(len(sizes), round(rows / (sum(sizes) / len(sizes)))))
        chosen = set(np.linspace(0, len(sizes) - 1, wanted).astype(np.int64).tolist())
        for i, batch in enumerate(_seeded(self._parts[part], _HELD_OUT_SEED)):
            if i in chosen:
                yield self._moved(batch)

    def _shuffled(self, seed: int, epoch: int) -> Iterator[Any]:
        batches = self._parts["train"]
        if isinstance(batches, list | tuple):
            order = np.random.default_rng([seed, epoch]).permutation(len(batches))
            return (batches[i] for i in order)
        return _seeded(batches, int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))

    def _moved(self, batch: Any) -> Batch:
        inputs, given = batch
        target = torch.as_tensor(given).to(self._device, torch.int64)
        target = torch.where(target < 0, target, self._place[target.clamp(min=0)])
        size = target.numel() if self._one_class else len(target)
        return Batch(_to_device(inputs, self._device), target, size)


def _seeded(batches: Batches, seed: int) -> Iterator[Any]:
    """Iterate with a seeded state of torch's generator; the caller's state is not changed."""
    own = getattr(batches, "generator", None)
    if isinstance(own, torch.Generator):
        own.manual_seed(seed)
    state, stream = torch.Generator().manual_seed(seed).get_state(), None
    while True:
        outside = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            stream = iter(batches) if stream is None else stream
            batch = next(stream)
        except StopIteration:
            return
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(outside)
        yield batch


def _to_device(value: Any, device: torch.device) -> Any:
    """Move all tensors in a nested value to the device."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return type(value)({key: _to_device(each, device) for key, each in value.items()})  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        moved = [_to_device(each, device) for each in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


def _subject(
    backbone: Backbone,
    parts: Mapping[str, Batches],
    _settled: Settled,
    device: torch.device,
    *,
    task: str,
    hidden: int | None,
    n_classes: int | None,
    counts: Sequence[int] | None,
    names: Sequence[str] | None,
) -> Subject:
    """Check data and backbone in one pass, and collect what the runs need."""
    given = None if counts is None else np.asarray(counts)
    if given is not None:
        if given.ndim != 1 or given.dtype.kind not in "iu" or (given < 0).any():
            raise LabError(
                f"counts: expected one whole number from 0 per class, got {counts!r:.80}"
            )
        if n_classes not in (None, len(given)):
            raise LabError(
                f"n_classes: expected {len(given)}, the length of counts, got {n_classes}"
            )
        n_classes = len(given)
    statistics = {"train": _scan("train", parts["train"], task, n_classes)}
    train_counts = statistics["train"].counts
    n_classes = len(train_counts) if n_classes is None else n_classes
    if n_classes < 2 or (train_counts > 0).sum() < 2:
        raise LabError(
            "train: expected targets of at least 2 classes, got one class only; check the targets "
            "or n_classes"
        )
    judged_on_valid = parts["test"] is parts["valid"]
    statistics["valid"] = _scan("valid", parts["valid"], task, n_classes)
    statistics["test"] = (
        statistics["valid"] if judged_on_valid else _scan("test", parts["test"], task, n_classes)
    )
    if names is not None and len(set(names)) != n_classes:
        raise LabError(
            f"class_names: expected {n_classes} unique names, got {len(set(names))} of {len(names)}"
        )
    width = _hidden_size(backbone, parts["train"], task, hidden, device)
    totals = np.pad(train_counts, (0, n_classes - len(train_counts))) if given is None else given
    order = np.argsort(-totals, kind="stable")
    vocabulary = Vocabulary(
        tuple(str(i if names is None else names[i]) for i in order), totals[order].astype(np.int64)
    )
    described = {
        "batches": len(statistics["train"].rows), "notes": [_NO_TEST] if judged_on_valid else [],
    }  # fmt: skip
    sizes = {part: sum(each.rows) for part, each in statistics.items()}
    fingerprint = "".join(each.digest[:16] for each in statistics.values())
    return Subject(
        data=data_record("your own batches", task, n_classes, sizes, fingerprint, described),
        needs=ClassData(width, vocabulary.counts, () if names is None else vocabulary.tokens),
        feed=GivenFeed(
            parts, {part: each.rows for part, each in statistics.items()},
            torch.from_numpy(np.argsort(order)), task, device,
        ),
        model=ModelSettings(OWN, task, 0, width),
        make_body=backbone,
        explore=lambda _body, _head: [],
        n_rows=sizes["train"],
        save=lambda out: vocabulary.save(out / "vocabulary.json"),
        usual_lr=_USUAL_RATE,
        command=[FROM_PYTHON],
    )  # fmt: skip


_NO_TEST = (
    "No test batches were given: heads are tested on the validation batches, which also selected "
    "the best model of each run, so qualities are slightly optimistic"
)


def _scan(name: str, batches: Batches, task: str, n_classes: int | None) -> _PartStatistics:
    """Check in one pass that every batch is a pair and every target a class, and count them."""
    if isinstance(batches, Iterator) or not hasattr(batches, "__iter__"):
        raise LabError(
            f"{name}: expected batches that can be iterated anew in each epoch, such as a "
            f"DataLoader or a list, got {type(batches).__name__}; make a list of it"
        )
    counts = np.zeros(n_classes or 0, np.int64)
    rows, digest = [], hashlib.sha256()
    for i, batch in enumerate(_seeded(batches, _HELD_OUT_SEED)):
        target = _target_of(f"{name}: batch {i}", batch, task)
        kept = target[target != PADDING]
        if len(kept) and (kept.min() < 0 or (n_classes is not None and kept.max() >= n_classes)):
            wrong = kept.min() if kept.min() < 0 else kept.max()
            most = "" if n_classes is None else f" to {n_classes - 1}"
            raise LabError(
                f"{name}: expected classes from 0{most}, or {PADDING} to ignore one, got {wrong} "
                f"in batch {i}"
            )
        extended = np.bincount(kept, minlength=len(counts))
        extended[: len(counts)] += counts
        counts = extended
        rows.append(target.size if task != "multilabel" else len(target))
        digest.update(target.tobytes())
    if not rows or not counts.sum():
        raise LabError(f"{name}: expected batches with targets, got none")
    return _PartStatistics(counts, rows, digest.hexdigest())


def _target_of(name: str, batch: Any, task: str) -> NDArray[np.int64]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        what = f"{len(batch)} of them" if isinstance(batch, list | tuple) else type(batch).__name__
        raise LabError(f"{name}: expected a pair (inputs, target), got {what}")
    try:
        target = torch.as_tensor(batch[1]).detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise LabError(f"{name}: expected a tensor of targets, got {error}") from error
    if target.dtype.kind not in "iu":
        raise LabError(
            f"{name}: expected whole numbers as targets, got {target.dtype}; give the number of "
            f"each class{f', lists of labels padded with {PADDING}' * (task == 'multilabel')}"
        )
    least = 2 if task == "multilabel" else 1
    if target.ndim < least or (task == "multilabel" and target.ndim > least):
        shape = "(batch, most labels)" if task == "multilabel" else "(batch,) or (batch, length)"
        raise LabError(f"{name}: expected targets of shape {shape}, got {target.shape}")
    return target.astype(np.int64)


def _hidden_size(
    backbone: Backbone, train: Batches, task: str, hidden: int | None, device: torch.device
) -> int:
    """The hidden size of the backbone's output for the first batch."""
    if isinstance(backbone, nn.Module) or not callable(backbone):
        raise LabError(
            f"backbone: expected a function that returns a new module, got "
            f"{type(backbone).__name__}; every run needs new weights: pass lambda: MyBackbone(…)"
        )
    with torch.random.fork_rng():
        body, again = backbone(), backbone()
        if not isinstance(body, nn.Module):
            raise LabError(f"backbone: expected an nn.Module from it, got {type(body).__name__}")
        if body is again:
            raise LabError("backbone: expected a new module from each call, got the same one twice")
        inputs, given = next(iter(_seeded(train, _HELD_OUT_SEED)))
        with torch.no_grad():
            output = body.to(device).eval()(_to_device(inputs, device))
    if not isinstance(output, Tensor):
        raise LabError(f"backbone: expected a tensor of hidden states, got {type(output).__name__}")
    shape = torch.as_tensor(given).shape
    rows = shape[:1] if task == "multilabel" else shape
    if output.shape[:-1] != rows or output.ndim < 2:
        raise LabError(
            f"backbone: expected hidden states of shape ({', '.join(map(str, rows))}, hidden) for "
            f"targets of shape {tuple(shape)}, got {tuple(output.shape)}"
        )
    if hidden is not None and output.shape[-1] != hidden:
        raise LabError(f"backbone: expected hidden states of size {hidden}, got {output.shape[-1]}")
    if output.dtype != torch.get_default_dtype():
        raise LabError(
            f"backbone: expected hidden states of {torch.get_default_dtype()}, got {output.dtype}; "
            "cast its output"
        )
    return output.shape[-1]
