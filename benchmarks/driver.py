"""What all families share: verify each method against float64, then time it beside the others.

A family lists :class:`Case` objects. The driver draws the inputs of a case, calls each method,
compares its results with the float64 reference, measures its peak memory, times all methods in
turn, replays what a CUDA graph can hold, and writes one record per method.
"""

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic, time_ns
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import record, timing
from benchmarks.record import OURS, Record
from benchmarks.table import Grid
from benchmarks.timing import Clock, Timing

Call = Callable[..., Any]
Inputs = tuple[Tensor, ...]
# By name, such as "loss" and the gradients "hidden" and "weight".
Results = dict[str, Tensor]

FORWARD, BACKWARD = "forward", "forward+backward"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# What a family is measured in where it does not say otherwise.
USUAL_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
# Largest accepted distance to the reference: relative, in norm where a result has many entries.
TOLERANCES = {
    "loss": {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-3},
    "gradient": {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2},
    # Absolute: entries of probabilities, and what rows of them sum to.
    "entries": {"float64": 1e-12, "float32": 1e-6, "bfloat16": 4e-3},
    "sums": {"float64": 1e-12, "float32": 1e-6, "bfloat16": 4e-3},
}
# Inputs are rotated among so many bytes of them, at most so many sets, so that no cache holds them.
_ROTATED = {"cuda": (2**28, 8), "cpu": (2**25, 64)}
_REPLAYED_SETS = 4
# Samples of each method where cases share a time.
_FEWEST = 3
# Numbers that are compared at a time.
_COMPARED = 1 << 26
# Far from the seeds of other cases, which follow each other.
_SEED_STEP = 2**20
# Sources that are no peers: what is compared with them builds on them.
_AT_HAND = (OURS, "torch", "transformers")
PEERS_COMMAND = 'pip install "lastlayer[peers]"'

# Titles that an error lists.
_SHOWN = 12


@dataclass(frozen=True)
class Work:
    """What a method loads, where there is more to say than what is called.

    Attributes:
        call: what is timed: takes the inputs of the case and returns results.
        captured: the same for a CUDA graph, where gradients must not be accumulated.
        replayed: whether a CUDA graph of it may be captured.
        verified: the same for the verification, where it is not what is timed.
        errors: distances of results to the reference, where the case has none for this method.
        facts: fields of the record, from results.
    """

    call: Call
    captured: Call | None = None
    verified: Call | None = None
    errors: Callable[[Any, Inputs], dict[str, float]] | None = None
    facts: Callable[[Any], dict[str, Any]] = lambda _: {}
    replayed: bool = True


@dataclass(frozen=True, eq=False)
class Method:
    """One implementation of one function.

    Attributes:
        name: what tables call it.
        source: the distribution it comes from: ``"lastlayer"``, ``"torch"`` or a peer's.
        load: gives work, or a function from the inputs of the case to a loss; raises
            :class:`PeerMissing` where the peer is not installed.
        computes: the function it computes, where that is not its name.
        scratch: bytes that it needs beyond its inputs, where that may be too much.
        bytes: the fewest it must read and write, where that is not what the case says.
        tolerances: by the name of a result, where they are not the usual ones.
    """

    name: str
    source: str
    load: Callable[[], "Work | Call"]
    computes: str = ""
    scratch: int = 0
    bytes: int | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Source and name."""
        return f"{self.source} {self.name}"

    def tolerance(self, result: str, dtype: str) -> float:
        """The largest accepted error of a result."""
        usual = TOLERANCES.get(result, TOLERANCES["gradient"])[dtype]
        return self.tolerances.get(result, usual)


@dataclass(frozen=True)
class Case:
    """These methods on one size of input.

    Attributes:
        draw: fresh inputs from a device and a seed.
        gradients: names of the inputs that get gradients, from the first; without any, losses are
            called without gradients.
        reference: float64 results from the function that is computed and the inputs; those of the
            first method, such as plain torch code, where there is no other. An entry ``"support"``
            counts the classes of each row that have a probability.
        compare: distances of results to the reference, by name, where they are not relative.
        baseline: whether times are divided by that of the first method.
        flop: operations that the problem needs, or ``bytes`` that it must read and write.
        results_count: whether results are part of the peak memory.
        facts: further fields of the records.
    """

    section: str
    shape: tuple[int, ...]
    dtype: str
    direction: str
    methods: tuple[Method, ...]
    draw: Callable[[torch.device, int], Inputs]
    gradients: tuple[str, ...] = ()
    reference: Callable[[str, Inputs], Results] | None = None
    compare: Callable[[Method, Any, Results, Inputs], dict[str, float]] | None = None
    baseline: bool = True
    flop: int | None = None
    bytes: int | None = None
    results_count: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The case in one line."""
        scale, scores = self.facts.get("scale"), self.facts.get("scores")
        return record.title(self.section, self.shape, self.dtype, self.direction, scale, scores)

    def work(self, method: Method) -> Work:
        """What is called of a method."""
        loaded = method.load()
        if isinstance(loaded, Work):
            return loaded
        if self.gradients:
            return loss_step(loaded, *self.gradients)
        forward = torch.no_grad()(loaded)
        return Work(lambda *inputs: {"loss": forward(*inputs)})

    def leaves(self, inputs: Inputs) -> Inputs:
        """The inputs, detached, of which the first get gradients."""
        count = len(self.gradients)
        return *(x.detach().requires_grad_() for x in inputs[:count]), *inputs[count:]

    def first_in_float64(self, _: str, inputs: Inputs) -> Results:
        """The usual reference: results of the first method on the same inputs in float64."""
        wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        results: Results = self.work(self.methods[0]).call(*self.leaves(wide))
        return results


@dataclass(frozen=True)
class Family:
    """What a family adds to the driver.

    Attributes:
        cases: all of a run, from the type of the device and whether the run is quick.
        notes: what is measured and how it is verified, for the page.
        sweeps: sections that are shown as one table of times against a size, with its name.
        pictured: sections that the picture of the page shows; all where empty.
        seed: what inputs are drawn with, so that every run has the same; None for new ones.
        shown: tables of the records, or of ``misses`` alone, where they are not one per case.
        seconds: of a whole run by the type of the device, where cases share a time.
    """

    name: str
    title: str
    cases: Callable[[torch.device, bool], list[Case]]
    notes: str
    sweeps: Mapping[str, str] = field(default_factory=dict)
    pictured: Sequence[str] = ()
    seed: int | None = None
    shown: Callable[..., list[Grid]] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


class PeerMissing(ImportError):  # noqa: N818 — absence is an answer here, not an error
    """A peer is not installed."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(reason)
        self.source = source


def peer(source: str, module: str, name: str, install: str = PEERS_COMMAND) -> Any:
    """A name from a peer's module.

    Raises:
        PeerMissing: the peer is not installed.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        # Something else missing below the peer is a fault of its installation, and is told as such.
        if error.name == package:
            raise PeerMissing(source, f"not installed: {install}") from error
        raise
    return getattr(importlib.import_module(module), name)


def loss_step(
    function: Call,
    *names: str,
    parameters: Mapping[str, Tensor] | None = None,
    update: Callable[[], Any] | None = None,
) -> Work:
    """Forward and backward of a loss, from gradients set to None.

    Args:
        function: from inputs to the loss.
        names: of the inputs that get gradients, from the first.
        parameters: what else gets gradients.
        update: a step of their optimiser, which then ends each timed call.
    """

    def leaves(inputs: Inputs) -> dict[str, Tensor]:
        return dict(zip(names, inputs, strict=False)) | dict(parameters or {})

    def verified(*inputs: Tensor, end: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        loss = function(*inputs)
        loss.backward()
        end()
        results = {"loss": loss.detach()}
        for name, leaf in leaves(inputs).items():
            results[name], leaf.grad = leaf.grad, None
        return results

    def captured(*inputs: Tensor) -> None:
        found = list(leaves(inputs).values())
        gradients = torch.autograd.grad(function(*inputs), found, allow_unused=True)
        if update is not None:
            for leaf, gradient in zip(found, gradients, strict=True):
                leaf.grad = gradient
            update()
            for leaf in found:
                leaf.grad = None

    call = verified if update is None else partial(verified, end=update)
    return Work(call, captured, verified)


def compiled(function: Call) -> Call:
    """One graph for one shape: a break or a general graph would be timed as what it is not."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def exact_step(
    leaves: Mapping[str, Tensor], row_losses: Callable[[slice], Tensor], rows: int, columns: int
) -> Results:
    """The mean loss and its gradients in float64, by autograd, a few rows at a time.

    Args:
        leaves: float64 tensors that get gradients, by name.
        row_losses: the losses of some rows, or their sum.
        rows: how many there are.
        columns: scores of each.
    """
    total: Tensor | float = 0.0
    for part in row_parts(rows, columns, next(iter(leaves.values())).device):
        loss = row_losses(part).sum() / rows
        loss.backward()
        total += loss.detach()
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    return {"loss": torch.as_tensor(total), **gradients}


def in_float64(*tensors: Tensor) -> list[Tensor]:
    """Leaves of :func:`exact_step`."""
    return [each.detach().double().requires_grad_() for each in tensors]


def row_parts(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Rows whose float64 scores of all columns are held at a time."""
    step = max(1, {"cuda": 2**31, "cpu": 2**27}[device.type] // (8 * columns))
    return [slice(first, min(rows, first + step)) for first in range(0, rows, step)]


def normal(shape: Sequence[int], generator: torch.Generator, dtype: str = "float32") -> Tensor:
    """Standard normal numbers, drawn in float32."""
    drawn = torch.randn(tuple(shape), generator=generator, device=generator.device)
    return drawn.to(DTYPES[dtype])


def relative_error(got: Tensor | None, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖ in float64; a gradient that is missing counts as zeros."""
    if got is None:
        return float(bool((exact != 0).any()))
    if got.is_sparse:
        # Entries of one row are added up in float64: how an optimiser does it is its own matter.
        parts = got._indices(), got._values().double()
        got = torch.sparse_coo_tensor(*parts, got.shape, check_invariants=False).to_dense()
    wrong, right = (torch.zeros((), dtype=torch.float64, device=exact.device) for _ in range(2))
    for some, true in zip(
        got.reshape(-1).split(_COMPARED), exact.reshape(-1).split(_COMPARED), strict=True
    ):
        wrong += (some.double() - true).square().sum()
        right += true.square().sum()
    return float((wrong / right.clamp_min(1e-300)).sqrt())


@dataclass
class Run:
    """What a run has found so far.

    Attributes:
        shared: fields that all records have: the environment, and the limits of the device.
        seed: of the inputs of the last case.
        absent: why a peer was not measured.
    """

    family: Family
    device: torch.device
    clock: Clock
    shared: dict[str, Any]
    seed: int
    out: Console
    json_path: Path | None = None
    records: list[Record] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Record]:
        """Results of ours that are wrong."""
        return [r for r in self.records if r.is_ours and not r.verified]

    def measure(self, case: Case) -> None:
        """Measure one case; what a peer does wrong becomes its record, never an exception."""
        self.seed += 1
        try:
            inputs = case.draw(self.device, self.seed)
        except torch.OutOfMemoryError:
            self.notes.append(f"skipped {case.title}: not enough memory for the inputs")
            return
        found: dict[Method, tuple[Work, dict[str, Any]]] = {}
        exact: dict[str, Results] = {}
        for method in case.methods:
            free = timing.free_bytes(self.device)
            if method.scratch and free is not None and method.scratch > free:
                needed = f"needs about {method.scratch / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
                self._write(case, method, status=f"does not fit: {needed}")
                continue
            try:
                work = case.work(method)
                facts = _verify(case, method, work, inputs, exact)
            except PeerMissing as missing:
                self.absent[missing.source] = str(missing)
            except Exception as error:  # noqa: BLE001 — a method may fail in any way
                self._write(case, method, status=_describe(error))
            else:
                if facts["verified"] or method.source != OURS:
                    found[method] = work, facts
                else:
                    self._write(case, method, **facts | {"status": f"wrong: {facts['status']}"})
        exact.clear()
        sets = self._input_sets(case, inputs)
        times = self.clock.time(
            {
                method: _rotating(work.call, [case.leaves(each) for each in sets])
                for method, (work, _) in found.items()
            }
        )
        for method, (work, facts) in found.items():
            timed = times[method]
            if isinstance(timed, Exception):
                self._write(case, method, **facts | {"status": _describe(timed), "verified": False})
                continue
            if not facts["verified"]:
                facts["status"] = f"inexact: {facts['status']}"
            if work.replayed and timed.median_ms <= timing.LONGEST_REPLAYED_MS:
                call = work.captured or work.call
                calls = [partial(call, *case.leaves(each)) for each in sets[:_REPLAYED_SETS]]
                facts["replayed_ms"] = timing.replayed_ms(calls, self.device)
            self._write(case, method, timed, **facts)

    def _input_sets(self, case: Case, inputs: Inputs) -> list[Inputs]:
        rotated, most = _ROTATED[self.device.type]
        size = sum(tensor.nbytes for tensor in inputs)
        count = max(1, min(most, rotated // max(size, 1)))
        seeds = (self.seed + _SEED_STEP * index for index in range(1, count))
        return [inputs, *(case.draw(self.device, seed) for seed in seeds)]

    def _write(self, case: Case, method: Method, timed: Timing | None = None, **facts: Any) -> None:
        made = Record(
            **self.shared,
            date=record.now(),
            family=self.family.name,
            section=case.section,
            seed=self.seed,
            method=method.name,
            source=method.source,
            source_version=record.version(method.source),
            computes=method.computes or method.name,
            shape=case.shape,
            dtype=case.dtype,
            direction=case.direction,
            baseline=case.methods[0].label if case.baseline else None,
            flop=case.flop,
            bytes=method.bytes or case.bytes,
            **({} if timed is None else timed._asdict()),
            **{"verified": False} | dict(case.facts) | facts,
        )
        self.records.append(made)
        if self.json_path is not None:
            record.append(self.json_path, made)
        if not made.quick:
            time = "-" if made.median_ms is None else f"{made.median_ms:.3f} ms"
            line = f"{made.date[11:19]} {case.title} {method.label}: {time} {made.status}"
            self.out.print(line, highlight=False, markup=False, soft_wrap=True)


def _verify(
    case: Case, method: Method, work: Work, inputs: Inputs, exact: dict[str, Results]
) -> dict[str, Any]:
    """Fields of the record: errors, whether they are small enough, and the peak memory."""
    leaves = case.leaves(inputs)
    call = work.verified or work.call
    # The first call compiles and tunes, and may take memory for it.
    call(*leaves)
    _poison(inputs)
    results, peak = timing.with_peak(lambda: call(*leaves), inputs[0].device)
    facts = work.facts(results)
    if work.errors is not None:
        errors = work.errors(results, inputs)
    else:
        computes = method.computes or method.name
        if computes not in exact:
            exact[computes] = (case.reference or case.first_in_float64)(computes, inputs)
        true = exact[computes]
        if case.compare is not None:
            errors = case.compare(method, results, true, inputs)
        else:
            errors = {name: relative_error(got, true[name]) for name, got in results.items()}
        support = true.get("support")
        if support is not None:
            facts["support_mean"] = float(support.double().mean())
            facts["support_max"] = int(support.max())
    if peak is not None and not case.results_count:
        peak = max(0, peak - sum(each.nbytes for each in results.values() if each is not None))
    if not errors:
        raise RuntimeError("no result was compared with a reference")
    # Written so that NaN never passes.
    wrong = [n for n, error in errors.items() if not error <= method.tolerance(n, case.dtype)]
    status = f"{wrong[0]} off by {errors[wrong[0]]:.1e}" if wrong else "ok"
    verdict = {"errors": errors, "verified": not wrong, "status": status, "peak_bytes": peak}
    return facts | verdict


def _rotating(call: Call, sets: Sequence[Inputs]) -> timing.Thunk:
    rotation = itertools.cycle(sets)
    return lambda: call(*next(rotation))


def _poison(inputs: Inputs) -> None:
    """Leave NaN in memory that the next result is likely to get: unwritten entries then show."""
    floating = [each for each in inputs if each.is_floating_point() and each.is_cuda]
    if floating:
        torch.full_like(max(floating, key=lambda each: each.nbytes), float("nan"))


def _describe(error: Exception) -> str:
    """One short line: what was raised and how its message begins."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"failed: {type(error).__name__}: {message}"[:100].rstrip(": ")


def chosen(cases: Sequence[Case], only: str, *, peers: bool) -> list[Case]:
    """The cases whose title contains ``only``, without peers where they are not wanted.

    Raises:
        ValueError: there are none.
    """
    found = [case for case in cases if only.lower() in case.title.lower()]
    if not found:
        titles = [case.title for case in cases]
        more = f"; and {len(titles) - _SHOWN} more" if len(titles) > _SHOWN else ""
        shown = "; ".join(titles[:_SHOWN]) + more
        raise ValueError(f"--only: expected part of one of [{shown}], got {only!r}")
    if peers:
        return found
    kept = [tuple(m for m in case.methods if m.source in _AT_HAND) for case in found]
    return [replace(case, methods=some) for case, some in zip(found, kept, strict=True)]


def run(
    family: Family,
    cases: Sequence[Case],
    device: torch.device,
    *,
    quick: bool,
    out: Console,
    json_path: Path | None = None,
    commit: str | None = None,
    seconds: float | None = None,
) -> Run:
    """Measure the limits of the device, then all cases; what is found is told to ``out``.

    Every record is appended to ``json_path`` as soon as its case is measured. ``commit`` is that of
    the source, where git cannot say. Cases share so many ``seconds``, verification included; what
    that takes too long for is still timed, by a few calls.
    """
    end = None if seconds is None else monotonic() + seconds
    clock = Clock.of(device, quick=quick)
    shared = record.environment(device, quick=quick, at=commit) | timing.limits(clock, quick=quick)
    timing.release(device)
    seed = time_ns() % 2**40 if family.seed is None else family.seed
    made = Run(family, device, clock, shared, seed, out, json_path)
    with out.status("") as status:
        for number, case in enumerate(cases, start=1):
            status.update(f"{number} of {len(cases)}: {case.title}")
            if end is not None:
                share = max(0.0, end - monotonic()) / (len(cases) - number + 1)
                # Half of it is for verification.
                budget = min(clock.budget_s, share / 2 / len(case.methods))
                made.clock = replace(clock, budget_s=budget, fewest_samples=_FEWEST)
            made.measure(case)
            timing.release(device)
    return made
