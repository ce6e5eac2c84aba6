"""Verifies and times the methods of all families.

A family lists :class:`Case` objects. For each case the driver draws the inputs, calls each method,
compares its results with the float64 reference, measures its peak memory, times all methods in
turn, replays the calls that a CUDA graph can capture, and writes one record per method.
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
# Default dtype of a family.
USUAL_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}
# Largest accepted errors: relative, and in norm for results with many entries.
TOLERANCES = {
    "loss": {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-3},
    "gradient": {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-2},
    # Absolute: entries of probabilities, and their row sums.
    "entries": {"float64": 1e-12, "float32": 1e-6, "bfloat16": 4e-3},
    "sums": {"float64": 1e-12, "float32": 1e-6, "bfloat16": 4e-3},
}
# Total bytes and largest number of rotated input sets, so that inputs do not stay in a cache.
_ROTATED = {"cuda": (2**28, 8), "cpu": (2**25, 64)}
_REPLAYED_SETS = 4
# Samples of each method if cases share a time budget.
_FEWEST = 3
# Entries per chunk of a comparison.
_COMPARED = 1 << 26
# Larger than the number of cases, whose seeds are consecutive.
_SEED_STEP = 2**20
# Sources that are not peers: --no-peers keeps them.
_AT_HAND = (OURS, "torch", "transformers")
PEERS_COMMAND = 'pip install "lastlayer[peers]"'

# Number of titles that an error lists.
_SHOWN = 12


@dataclass(frozen=True)
class Work:
    """How to call a method, if it is more than a function.

    Attributes:
        call: the timed call, from the inputs of the case to results.
        captured: the call for a CUDA graph, if it must differ, since gradients may not accumulate.
        verified: the call for the verification, if it differs from the timed call.
        errors: computes the errors of results, if the reference of the case does not apply.
        facts: additional fields of the record, from results.
        replayed: whether to capture and replay a CUDA graph.
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
        name: name in tables.
        source: the distribution it is from: ``"lastlayer"``, ``"torch"`` or a peer's.
        load: returns a :class:`Work`, or a function from the inputs of the case to a loss; raises
            :class:`PeerMissing` if the peer is not installed.
        computes: the function it computes, if that is not its name.
        scratch: bytes that it needs beyond its inputs, if that may be too much.
        bytes: the fewest bytes it must read and write, if they differ from those of the case.
        tolerances: tolerances that differ from the default, by the name of the result.
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
        draw: draws new inputs, from a device and a seed.
        gradients: names of the first inputs, which get gradients; without any, losses are called
            without gradients.
        reference: computes float64 results from the name of the function and the inputs; by default
            they are those of the first method, such as plain torch code. An entry ``"support"`` has
            the number of classes in the support of each row.
        compare: computes errors of results by name, if they are not relative errors.
        baseline: whether times are divided by that of the first method.
        flop: operations that the problem needs, or ``bytes`` that it must read and write.
        results_count: whether results are part of the peak memory.
        facts: additional fields of the records.
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
        """How to call a method on this case."""
        loaded = method.load()
        if isinstance(loaded, Work):
            return loaded
        if self.gradients:
            return loss_step(loaded, *self.gradients)
        forward = torch.no_grad()(loaded)
        return Work(lambda *inputs: {"loss": forward(*inputs)})

    def leaves(self, inputs: Inputs) -> Inputs:
        """The inputs, detached; those in ``gradients`` require a gradient."""
        count = len(self.gradients)
        return *(x.detach().requires_grad_() for x in inputs[:count]), *inputs[count:]

    def first_in_float64(self, _: str, inputs: Inputs) -> Results:
        """The default reference: results of the first method on the same inputs in float64."""
        wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
        results: Results = self.work(self.methods[0]).call(*self.leaves(wide))
        return results


@dataclass(frozen=True)
class Family:
    """A family of cases.

    Attributes:
        cases: returns all cases of a run, from the device and whether the run is quick.
        notes: what is measured and how it is verified, for the page.
        sweeps: sections shown as one table of times over a size, with the name of the size.
        pictured: sections that the figure of the page shows; all if empty.
        seed: seed of the inputs, if all runs use the same; None for a new one in each run.
        shown: the tables of the records, or only of the ``misses``, if they are not one per case.
        seconds: default time budget of a run, by the type of the device.
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
        # A missing dependency of the peer is an error of its installation, and is raised as it is.
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
    """Forward and backward of a loss, starting with gradients of None.

    Args:
        function: computes the loss from the inputs.
        names: names of the first inputs, which get gradients.
        parameters: other tensors that get gradients.
        update: a step of their optimiser, which is then part of each timed call.
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
    """``torch.compile`` without graph breaks and dynamic shapes, which would distort the time."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def exact_step(
    leaves: Mapping[str, Tensor], row_losses: Callable[[slice], Tensor], rows: int, columns: int
) -> Results:
    """The mean loss and its gradients in float64, by autograd, in chunks of rows.

    Args:
        leaves: float64 tensors that get gradients, by name.
        row_losses: computes the losses of a slice of rows, or their sum.
        rows: number of rows.
        columns: number of scores per row.
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
    """Float64 copies that require gradients, for :func:`exact_step`."""
    return [each.detach().double().requires_grad_() for each in tensors]


def row_parts(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Slices of rows whose float64 scores fit into a fixed amount of memory."""
    step = max(1, {"cuda": 2**31, "cpu": 2**27}[device.type] // (8 * columns))
    return [slice(first, min(rows, first + step)) for first in range(0, rows, step)]


def normal(shape: Sequence[int], generator: torch.Generator, dtype: str = "float32") -> Tensor:
    """Standard normal numbers, drawn in float32."""
    drawn = torch.randn(tuple(shape), generator=generator, device=generator.device)
    return drawn.to(DTYPES[dtype])


def relative_error(got: Tensor | None, exact: Tensor) -> float:
    """‖got − exact‖ / ‖exact‖ in float64; a gradient of None counts as zeros."""
    if got is None:
        return float(bool((exact != 0).any()))
    if got.is_sparse:
        # Duplicate entries are summed in float64; optimisers may sum them in other ways.
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
    """The state and the records of a run.

    Attributes:
        shared: fields that all records share: the environment and the limits of the device.
        seed: seed of the inputs of the last case.
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
        """Our results that are wrong."""
        return [r for r in self.records if r.is_ours and not r.verified]

    def measure(self, case: Case) -> None:
        """Measure one case; an exception in a method becomes its record and is not raised."""
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
    """Fields of the record: errors, whether they are within tolerance, and peak memory."""
    leaves = case.leaves(inputs)
    call = work.verified or work.call
    # The first call compiles and tunes, which may take memory.
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
    """Leave NaN in memory that the next result is likely to reuse, to detect unwritten entries."""
    floating = [each for each in inputs if each.is_floating_point() and each.is_cuda]
    if floating:
        torch.full_like(max(floating, key=lambda each: each.nbytes), float("nan"))


def _describe(error: Exception) -> str:
    """The type of an error and the beginning of its message, in one line."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"failed: {type(error).__name__}: {message}"[:100].rstrip(": ")


def chosen(cases: Sequence[Case], only: Sequence[str], *, peers: bool) -> list[Case]:
    """The cases whose title contains one of the texts ``only``, with or without peers.

    Raises:
        ValueError: if there are none.
    """
    found = [case for case in cases if any(text.lower() in case.title.lower() for text in only)]
    if not found:
        titles = [case.title for case in cases]
        more = f"; and {len(titles) - _SHOWN} more" if len(titles) > _SHOWN else ""
        shown = "; ".join(titles[:_SHOWN]) + more
        raise ValueError(f"--only: expected part of one of [{shown}], got {' '.join(only)!r}")
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
    """Measure the limits of the device, then all cases; progress is printed to ``out``.

    Every record is appended to ``json_path`` as soon as its case is measured. ``commit`` is that of
    the source, if git is not available. Cases share a budget of ``seconds``, verification included;
    if it is used up, the remaining methods are still timed with a few calls.
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
