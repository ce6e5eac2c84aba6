"""One case from drawing its inputs to its records: verify, then time, then write down."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.bench import memory
from lastlayer.bench import record as records
from lastlayer.bench.cases import OURS, Call, CaseT, Family, Measured, Method, RecordT, VerdictT
from lastlayer.bench.peers import PeerMissing
from lastlayer.bench.progress import Reporter
from lastlayer.bench.record import Environment
from lastlayer.bench.timing import Timer, Timing

# Inputs smaller than this are rotated among several sets on a CPU, whose caches would otherwise
# hold all of them; on CUDA the timer clears the cache.
_ROTATED_BYTES = 2**25


@dataclass
class Bench(Generic[CaseT, VerdictT, RecordT]):
    """What all cases of a run share, and what the run has found so far."""

    family: Family[CaseT, VerdictT, RecordT]
    device: torch.device
    timer: Timer
    limit: float
    environment: Environment
    reporter: Reporter
    seed: int
    json_path: Path | None = None
    records: list[RecordT] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[RecordT]:
        """Results of ours that are wrong."""
        return [r for r in self.records if r.is_ours and not r.verified]

    def run(self, case: CaseT) -> None:
        """Measure one case; what a peer does wrong becomes its record, never an exception."""
        self.reporter.started(case.title())
        self.seed += 1
        try:
            inputs = self.family.draw(case, self.device, self.seed)
            self.family.started(case, inputs)
        except torch.OutOfMemoryError:
            self.notes.append(f"skipped {case.title()}: not enough memory for the inputs")
        else:
            self._measure(case, inputs)
            del inputs
        self.family.finished()
        memory.release(self.device)
        self.reporter.finished()

    def _measure(self, case: CaseT, inputs: tuple[Tensor, ...]) -> None:
        verdicts, calls = {}, {}
        for method, call in self._loaded(case):
            start = time.perf_counter()
            try:
                verdict = self.family.verify(case, method, call, inputs)
            except Exception as error:  # noqa: BLE001 — a method may fail in any way
                self._write(case, method, status=describe(error))
                continue
            self.reporter.verified(method.label, time.perf_counter() - start)
            if verdict.ok or not method.is_ours:
                verdicts[method], calls[method] = verdict, call
            else:
                self._write(case, method, verdict=verdict, status=f"wrong: {verdict.reason}")
        sets = self._input_sets(case, inputs)
        thunks = {method: self.family.thunk(call, sets) for method, call in calls.items()}
        times: dict[Method, float] = {}
        for method, timing in self.timer.time(thunks):
            verdict = verdicts[method]
            if isinstance(timing, Exception):
                self._write(case, method, verdict=verdict, status=describe(timing))
                continue
            times[method] = timing.median_ms
            status = "ok" if verdict.ok else f"inexact: {verdict.reason}"
            self._write(case, method, verdict=verdict, timing=timing, times=times, status=status)

    def _loaded(self, case: CaseT) -> Iterator[tuple[Method, Call]]:
        for method in case.methods:
            obstacle = self._obstacle(case, method)
            if obstacle is not None:
                self._write(case, method, status=obstacle)
                continue
            try:
                yield method, method.load()
            except PeerMissing as missing:
                self.absent[missing.source] = str(missing)
            except Exception as error:  # noqa: BLE001 — importing a peer may fail in any way
                self._write(case, method, status=describe(error))

    def _obstacle(self, case: CaseT, method: Method) -> str | None:
        if method.scratch is None:
            return None
        needed = method.scratch(case.shape, case.torch_dtype.itemsize)
        free = memory.free_bytes(self.device)
        if free is None or needed <= free:
            return None
        return f"does not fit: needs about {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"

    def _input_sets(self, case: CaseT, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        size = sum(tensor.nbytes for tensor in inputs)
        count = 1 if self.device.type == "cuda" else max(1, _ROTATED_BYTES // max(size, 1))
        # Far from the seeds of later cases, which follow each other.
        seeds = (self.seed + 2**20 * index for index in range(1, count))
        return [inputs, *(self.family.draw(case, self.device, seed) for seed in seeds)]

    def _write(
        self,
        case: CaseT,
        method: Method,
        *,
        status: str,
        verdict: VerdictT | None = None,
        timing: Timing | None = None,
        times: dict[Method, float] | None = None,
    ) -> None:
        times = times or {}
        ours = _time_of_ours(times, method)
        baseline = case.baseline
        implementation = None
        if method.op is not None:
            implementation = kernels.selected(method.op, self.device.type, case.torch_dtype)
        measured = Measured(
            verdict=verdict,
            milliseconds=timing.median_ms if timing else None,
            baseline_ms=None if baseline is None else times.get(baseline),
            limit=self.limit,
        )
        self._keep(
            self.family.record(
                **asdict(self.environment),
                date=records.now(),
                family=self.family.name,
                section=case.section,
                seed=self.seed,
                method=method.name,
                source=method.source,
                source_version=records.version(method.source),
                computes=method.computes,
                implementation=implementation,
                shape=case.shape,
                dtype=case.dtype,
                direction=case.direction,
                median_ms=timing.median_ms if timing else None,
                p20_ms=timing.p20_ms if timing else None,
                p80_ms=timing.p80_ms if timing else None,
                samples=timing.samples if timing else 0,
                ratio_to_ours=timing.median_ms / ours if timing and ours else None,
                verified=verdict is not None and verdict.ok,
                status=status,
                eager_ms=timing.eager_ms if timing else None,
                **self.family.details(case, method, measured),
            )
        )

    def _keep(self, record: RecordT) -> None:
        self.records.append(record)
        if self.json_path is not None:
            records.append(self.json_path, record)
        self.reporter.measured(record)


def _time_of_ours(times: dict[Method, float], but_not: Method) -> float | None:
    for method, milliseconds in times.items():
        if method is but_not or method.variant or method.source != OURS:
            continue
        if method.computes == but_not.computes:
            return milliseconds
    return None


def describe(error: Exception) -> str:
    """One short line for a table: what was raised and how its message begins."""
    text = str(error).strip()
    message = text.splitlines()[0] if text else ""
    return f"failed: {type(error).__name__}: {message}"[:100].rstrip(": ")
