"""Makes the runs of a comparison as tasks of a Ray cluster, each with its own cores and GPU.

Every run writes its own folder, as without Ray, so the folder of the comparison has to be on a file
system that all machines share. A run whose worker is lost restarts from its checkpoint.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

from lastlayer.lab.errors import LabError, first_line
from lastlayer.lab.live import Watcher
from lastlayer.lab.runs import Bench, keep_rate, known_rate, perform, search_rate, written
from lastlayer.lab.specs import HeadSpec

LOCAL = "local"
_RETRIES = 3
# File that tells the workers that the user pressed Ctrl-C.
_STOP = ".stop"
_CONNECT_SECONDS, _POLL_SECONDS = 5.0, 0.5


class Cluster:
    """A connection to Ray, and the cores and GPUs of each run.

    The address is ``host:port`` or ``ray://host:port``, ``auto`` for a cluster that runs on this
    machine, or ``local`` to start one. Each run gets a whole GPU: sharing it would distort step
    times.
    """

    def __init__(self, address: str, threads: int, gpus: int) -> None:
        if find_spec("ray") is None:
            raise LabError('--ray: expected ray to be installed; pip install "lastlayer[ray]"')
        self._address, self._threads, self._gpus = address, threads, gpus
        self._mine = False

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        # Step times and records of this process are for as many threads as a worker has.
        torch.set_num_threads(self._threads)
        if self._address != LOCAL or not ray.is_initialized():
            self._connect()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        # A task that fits on no machine would wait forever.
        for option, kind, wanted in (
            ("--threads", "CPU", self._threads), ("--device cuda", "GPU", self._gpus),
        ):  # fmt: skip
            most = max((node.get(kind, 0) for node in nodes), default=0)
            if wanted > most:
                self.__exit__()
                raise LabError(
                    f"{option}: expected at most the {most:g} {kind}s of the largest machine of "
                    f"--ray {self._address}, got {wanted}"
                )
        return self

    def _connect(self) -> None:
        import ray

        _check_reachable(self._address)
        paths = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        try:
            ray.init(
                address=self._address, log_to_driver=False, logging_level=logging.ERROR,
                include_dashboard=False if self._address == LOCAL else None,
                runtime_env={"env_vars": {"PYTHONPATH": paths}},
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError, TimeoutError, OSError) as error:
            raise _unreachable(self._address, error) from error
        self._mine = True

    def __exit__(self, *_raised: object) -> None:
        import ray

        if self._mine:
            ray.shutdown()

    def run_all(
        self,
        bench: Bench,
        specs: list[HeadSpec],
        seeds: list[int],
        watching: Watcher,
        stopped: list[bool],
    ) -> list[dict[str, Any]]:
        """Make all runs in parallel; each waits for the learning rate of its head."""
        import ray

        task = ray.remote(num_cpus=self._threads, num_gpus=self._gpus, max_retries=_RETRIES)
        search, make = task(_search), task(_make)
        stop, shared = bench.out / _STOP, ray.put(bench)
        stop.unlink(missing_ok=True)
        results: dict[tuple[int, str], dict[str, Any]] = {}
        waiting: dict[Any, tuple[HeadSpec, int | None]] = {}
        rates: dict[str, Any] = {}

        def ended(spec: HeadSpec, seed: int, result: dict[str, Any]) -> None:
            results[seed, spec.slug] = result
            watching.starts(spec, seed)
            watching.ends(spec, seed, result)

        order = [(seed, spec) for seed in seeds for spec in specs]
        for seed, spec in order:
            before = bench.finished(spec, seed)
            if before is not None:
                ended(spec, seed, before)
                continue
            if spec.slug not in rates:
                rates[spec.slug] = known_rate(bench, spec)
                if rates[spec.slug] is None:
                    rates[spec.slug] = search.remote(shared, spec, self._threads)
                    waiting[rates[spec.slug]] = spec, None
            reference = make.remote(shared, spec, seed, rates[spec.slug], self._threads)
            waiting[reference] = spec, seed
        for spec, seed_, found in self._finished(waiting, stop, stopped):
            if seed_ is None:
                if isinstance(found, dict):
                    keep_rate(bench, spec, found)
            elif isinstance(found, Exception):
                told = str(found).strip().splitlines() or [type(found).__name__]
                reason = f"the worker was lost {_RETRIES + 1} times, or failed: {told[-1]}"
                ended(spec, seed_, written(bench, spec, seed_, "error", reason))
            elif found is not None:
                ended(spec, seed_, found)
        stop.unlink(missing_ok=True)
        return [results[seed, spec.slug] for seed, spec in order if (seed, spec.slug) in results]

    def _finished(
        self, waiting: dict[Any, tuple[HeadSpec, int | None]], stop: Path, stopped: list[bool]
    ) -> Iterator[tuple[HeadSpec, int | None, Any]]:
        """Yields tasks as they finish, with their results; more may be added to ``waiting``."""
        import ray

        while waiting:
            done, _ = ray.wait(list(waiting), timeout=_POLL_SECONDS)
            if stopped and not stop.exists():
                stop.touch()
            for reference in done:
                spec, seed = waiting.pop(reference)
                try:
                    found = ray.get(reference)
                except ray.exceptions.RayError as error:
                    found = error
                yield spec, seed, found


def _search(bench: Bench, spec: HeadSpec, threads: int) -> dict[str, Any] | None:
    """Search the learning rate of a head on a worker; None after an error."""
    torch.set_num_threads(threads)
    try:
        return search_rate(bench, spec, _Stopped(bench.out / _STOP))
    except Exception:  # noqa: BLE001 — the runs raise it again, and report it
        return None


def _make(
    bench: Bench, spec: HeadSpec, seed: int, rate: dict[str, Any] | None, threads: int
) -> dict[str, Any] | None:
    """Make a run on a worker; None if it was stopped before the run began."""
    torch.set_num_threads(threads)
    stopped = _Stopped(bench.out / _STOP)
    if stopped():
        return None
    # The driver may not have written the file of learning rates yet.
    bench = replace(bench, finds_rate=False, lr=rate["lr"] if rate else bench.lr)
    return bench.finished(spec, seed) or perform(bench, spec, seed, lambda *_: None, stopped)


class _Stopped:
    """Whether the stop file exists; checked at most twice per second."""

    def __init__(self, path: Path) -> None:
        self._path, self._looked, self._found = path, -1.0, False

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._found and now - self._looked > _POLL_SECONDS:
            self._looked, self._found = now, self._path.exists()
        return self._found


def _check_reachable(address: str) -> None:
    """Fail fast if the cluster is not reachable, for which Ray itself waits for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        if address in (LOCAL, "auto"):
            return
        raise LabError(f"--ray: expected host:port, auto or {LOCAL}, got {address!r}")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> LabError:
    return LabError(
        f"--ray: expected a Ray cluster at {address}, got none: {first_line(error)}; start one "
        f"with `ray start --head`, or use --ray {LOCAL}"
    )
