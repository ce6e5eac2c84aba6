"""One case from drawing its inputs to its records: verify, then time, then write down."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.bench import record as records
from lastlayer.bench.cases import OURS, Call, Case, Family, Method
from lastlayer.bench.peers import PeerMissing
from lastlayer.bench.progress import Reporter
from lastlayer.bench.record import Environment, Record
from lastlayer.bench.timing import Thunk, Timer, Timing, tb_per_s
from lastlayer.bench.verify import Verdict

# Inputs smaller than this are rotated among several sets on a CPU, whose caches would otherwise
# hold all of them; on CUDA the timer clears the cache.
_ROTATED_BYTES = 2**25


@dataclass
class Bench:
    """What all cases of a run share, and what the run has found so far."""

    family: Family
    device: torch.device
    timer: Timer
    copy_tb_per_s: float
    environment: Environment
    reporter: Reporter
    seed: int
    json_path: Path | None = None
    records: list[Record] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Record]:
        """Results of ours that are wrong."""
        return [r for r in self.records if r.source == OURS and not r.verified]

    def run(self, case: Case) -> None:
        """Measure one case; what a peer does wrong becomes its record, never an exception."""
        self.reporter.started(case.title())
        self.seed += 1
        try:
            inputs = self.family.draw(case, self.device, self.seed)
        except torch.OutOfMemoryError:
            self.notes.append(f"skipped {case.title()}: not enough memory for the scores")
        else:
            self._measure(case, inputs)
        self.reporter.finished()

    def _measure(self, case: Case, inputs: tuple[Tensor, ...]) -> None:
        verdicts, calls = {}, {}
        for method, call in self._loaded(case):
            try:
                verdict = self.family.verify(case, method, call, inputs)
            except Exception as error:  # noqa: BLE001 — a method may fail in any way
                self._write(case, method, status=describe(error))
                continue
            if verdict.ok or not method.is_ours:
                verdicts[method], calls[method] = verdict, call
            else:
                self._write(case, method, verdict=verdict, status=f"wrong: {verdict.reason}")
        sets = self._input_sets(case, inputs)
        thunks = {method: _thunk(case, call, sets) for method, call in calls.items()}
        times: dict[Method, float] = {}
        for method, timing in self.timer.time(thunks):
            verdict = verdicts[method]
            if isinstance(timing, Exception):
                self._write(case, method, verdict=verdict, status=describe(timing))
                continue
            times[method] = timing.median_ms
            status = "ok" if verdict.ok else f"inexact: {verdict.reason}"
            self._write(case, method, verdict=verdict, timing=timing, times=times, status=status)

    def _loaded(self, case: Case) -> Iterator[tuple[Method, Call]]:
        for method in case.methods:
            try:
                yield method, method.load()
            except PeerMissing as missing:
                self.absent[missing.source] = str(missing)
            except Exception as error:  # noqa: BLE001 — importing a peer may fail in any way
                self._write(case, method, status=describe(error))

    def _input_sets(self, case: Case, inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        size = sum(tensor.numel() * tensor.element_size() for tensor in inputs)
        count = 1 if self.device.type == "cuda" else max(1, _ROTATED_BYTES // max(size, 1))
        # Far from the seeds of later cases, which follow each other.
        seeds = (self.seed + 2**20 * index for index in range(1, count))
        return [inputs, *(self.family.draw(case, self.device, seed) for seed in seeds)]

    def _write(
        self,
        case: Case,
        method: Method,
        *,
        status: str,
        verdict: Verdict | None = None,
        timing: Timing | None = None,
        times: dict[Method, float] | None = None,
    ) -> None:
        moved = self.family.bytes_moved(case, method)
        speed = tb_per_s(moved, timing.median_ms) if timing else None
        times = times or {}
        baseline = _time_of(times, self.family.baseline, source="torch")
        ours = _time_of(times, method.computes, source=OURS, but_not=method)
        implementation = None
        if method.op is not None:
            implementation = kernels.selected(method.op, self.device.type, case.torch_dtype)
        self._keep(
            Record(
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
                scale=case.scale,
                direction=case.direction,
                median_ms=timing.median_ms if timing else None,
                p20_ms=timing.p20_ms if timing else None,
                p80_ms=timing.p80_ms if timing else None,
                samples=timing.samples if timing else 0,
                bytes=moved,
                tb_per_s=speed,
                copy_tb_per_s=self.copy_tb_per_s,
                fraction_of_copy=speed / self.copy_tb_per_s if speed else None,
                ratio_to_softmax=timing.median_ms / baseline if timing and baseline else None,
                ratio_to_ours=timing.median_ms / ours if timing and ours else None,
                error=verdict.error if verdict else None,
                row_sum_error=verdict.row_sum_error if verdict else None,
                verified=verdict is not None and verdict.ok,
                status=status,
                eager_ms=timing.eager_ms if timing else None,
            )
        )

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        if self.json_path is not None:
            records.append(self.json_path, record)
        self.reporter.measured(record)


def _time_of(
    times: dict[Method, float], computes: str, *, source: str, but_not: Method | None = None
) -> float | None:
    for method, milliseconds in times.items():
        if method is but_not or method.compact:
            continue
        if method.computes == computes and method.source == source:
            return milliseconds
    return None


def _thunk(case: Case, call: Call, sets: list[tuple[Tensor, ...]]) -> Thunk:
    if not case.backward:
        rotation = itertools.cycle(sets)
        return lambda: call(*next(rotation))
    leaves = itertools.cycle(
        [(first.detach().requires_grad_(), rest[-1], rest[:-1]) for first, *rest in sets]
    )

    def forward_and_backward() -> tuple[Tensor, ...]:
        leaf, cotangent, others = next(leaves)
        return torch.autograd.grad(call(leaf, *others), leaf, cotangent)

    return forward_and_backward


def describe(error: Exception) -> str:
    """One short line for a table: what was raised and how its message begins."""
    text = str(error).strip()
    message = text.splitlines()[0] if text else ""
    return f"failed: {type(error).__name__}: {message}"[:100].rstrip(": ")
