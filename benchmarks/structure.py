"""Code size and host time: files, lines, operations per step, seconds of first calls.

Times are the smallest of several samples, since other processes can only increase them.
"""

import json
import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import lastlayer
from benchmarks import record
from benchmarks.table import Grid, console
from lastlayer import fused, heads, samplers, trees

PACKAGE = Path(lastlayer.__file__).parent
ROWS, WIDTH, CLASSES, DRAWN = 32, 16, 100, 20
# Folders that are not part of the core.
OUTSIDE = ("lab", "integrations")
COMPILED_PACKAGES = ("numba", "rich", "scipy")

# Largest accepted values; for folders, of files and of lines.
FOLDER_TARGETS: dict[str, tuple[int | None, int | None]] = {
    "core": (250, 35_000), "heads": (34, 7_000), "fused": (20, 6_000), "losses": (16, None),
    "testing": (12, None), "trees": (16, None), "kernels": (None, None),
}  # fmt: skip
FILE_TARGETS = {
    "FullSoftmax": 11, "AdaptiveSoftmax": 12, "HierarchicalSoftmax": 10, "SampledSoftmax": 14,
}  # fmt: skip
OPERATION_TARGETS = {
    "F.cross_entropy": 8, "entmax_loss": 14, "zlpr_loss": 14, "linear_cross_entropy": 18,
    "info_nce": 16, "FullSoftmax": 18, "EntmaxHead": 24, "AdaptiveSoftmax": 26,
    "HierarchicalSoftmax": 18, "SampledSoftmax": 32, "NoiseContrastive": 32,
}  # fmt: skip
FIRST_CALLS_TARGET, STEP_TARGET = 2.5, 350

# Large enough for several threads. The time includes the import of lastlayer.
FIRST_CALLS = """
import time, torch
start = time.process_time()
import lastlayer
from lastlayer import heads, samplers
hidden, target = torch.randn(256, 64, requires_grad=True), torch.randint(1000, (256,))
scores = torch.randn(256, 1000, requires_grad=True)
lastlayer.sparsemax(scores)
lastlayer.entmax_loss(scores, target).backward()
heads.FullSoftmax(64, 1000)(hidden, target).backward()
sampler = samplers.Unigram(torch.arange(1000, 0, -1).float())
heads.SampledSoftmax(64, 1000, sampler, 64)(hidden, target).backward()
print(time.process_time() - start)
"""
IMPORTS = f"""
import sys, torch
before = set(sys.modules)
import lastlayer.heads
print([name for name in {COMPILED_PACKAGES} if name in sys.modules and name not in before])
"""


class Figure(NamedTuple):
    """One line of the table."""

    name: str
    measured: float | str
    target: float | str | None = None


def _steps() -> dict[str, Callable[[], None]]:
    """Forward and backward of each function or head, on 32 rows, 16 features and 100 classes."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, requires_grad=True)

    hidden, key, weight = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH), leaf(CLASSES, WIDTH)
    scores, target = leaf(ROWS, CLASSES), torch.randint(CLASSES, (ROWS,), generator=generator)
    labels = (torch.rand(ROWS, CLASSES, generator=generator) < 0.05).float()
    counts = torch.arange(CLASSES, 0, -1).float()

    def step(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], None]:
        return lambda: function(*inputs).backward()

    made: dict[str, Any] = {
        "FullSoftmax": heads.FullSoftmax(WIDTH, CLASSES),
        "EntmaxHead": heads.EntmaxHead(WIDTH, CLASSES),
        "AdaptiveSoftmax": heads.AdaptiveSoftmax(WIDTH, cutoffs=[20, 60], n_classes=CLASSES),
        "HierarchicalSoftmax": heads.HierarchicalSoftmax(WIDTH, trees.huffman(counts)),
        "SampledSoftmax": heads.SampledSoftmax(WIDTH, CLASSES, samplers.Unigram(counts), DRAWN),
        "NoiseContrastive": heads.NoiseContrastive(WIDTH, CLASSES, samplers.Unigram(counts), DRAWN),
    }
    return {
        "F.cross_entropy": step(functional.cross_entropy, scores, target),
        "entmax_loss": step(lastlayer.entmax_loss, scores, target),
        "zlpr_loss": step(lastlayer.zlpr_loss, scores, labels),
        "linear_cross_entropy": step(fused.linear_cross_entropy, hidden, weight, target),
        "info_nce": step(lastlayer.info_nce, hidden, key),
        **{name: step(head, hidden, target) for name, head in made.items()},
    }


class _Count(TorchDispatchMode):
    """Counts operations that go through the dispatcher."""

    operations: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations(step: Callable[[], None], *, eager: bool = False) -> int:
    """Operations that one step dispatches; ``eager`` counts those of the eager code path."""
    for _ in range(3):
        step()
    # lastlayer would leave its eager path if it detected the dispatch mode.
    unnoticed = patch.object(torch._C, "_len_torch_dispatch_stack", lambda: 0)
    counted = _Count()
    with unnoticed if eager else nullcontext(), counted:
        step()
    return counted.operations


def files(step: Callable[[], None]) -> set[str]:
    """Files of lastlayer that one step executes."""
    for _ in range(3):
        step()
    seen = set()

    def note(frame: Any, _: str, __: Any) -> None:
        name = frame.f_code.co_filename
        if name.startswith(str(PACKAGE)):
            seen.add(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return seen


def microseconds(step: Callable[[], Any]) -> float:
    """CPU time of this thread per call in a loop, which excludes other processes."""
    times = timeit.repeat(step, timer=time.thread_time, repeat=20, number=50)
    return 1e6 * min(times) / 50


def _in_new_process(program: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", program]
    return subprocess.check_output(command, text=True, env=environment).strip()


def _folders() -> Iterator[Figure]:
    for name, (most_files, most_lines) in FOLDER_TARGETS.items():
        folder = PACKAGE if name == "core" else PACKAGE / name
        paths = [p for p in folder.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in OUTSIDE]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        yield Figure(f"{name}: files", len(paths), most_files)
        yield Figure(f"{name}: lines", lines, most_lines)


def measure() -> Iterator[Figure]:
    """All figures, the quickest to measure first."""
    yield from _folders()
    steps = _steps()
    for name, most in FILE_TARGETS.items():
        yield Figure(f"files executed by a step: {name}", len(files(steps[name])), most)
    for name, most in OPERATION_TARGETS.items():
        yield Figure(f"operations of a step: {name}", operations(steps[name]), most)
    for name in OPERATION_TARGETS:
        found = operations(steps[name], eager=True)
        yield Figure(f"operations of a plain eager step: {name}", found)
    hidden, target = torch.randn(8, WIDTH, requires_grad=True), torch.randint(CLASSES, (8,))
    full, linear = heads.FullSoftmax(WIDTH, CLASSES), torch.nn.Linear(WIDTH, CLASSES)
    ours = microseconds(lambda: full(hidden, target).backward())
    yield Figure("CPU µs of a step of FullSoftmax, 8×16×100", round(ours), STEP_TARGET)
    plain = microseconds(lambda: functional.cross_entropy(linear(hidden), target).backward())
    yield Figure("CPU µs of a step of linear + cross_entropy, 8×16×100", round(plain))
    yield Figure("import lastlayer.heads after torch loads", _in_new_process(IMPORTS), "[]")
    # The first process fills Numba's cache.
    seconds = [float(_in_new_process(FIRST_CALLS)) for _ in range(3)][1:]
    name = "CPU seconds of first calls, Numba's cache warm"
    yield Figure(name, round(min(seconds), 2), FIRST_CALLS_TARGET)


def report(json_path: Path | None, *, markdown: bool, commit: str | None = None) -> None:
    """Print the table, and append the figures to a file as one line of JSON."""
    figures = list(measure())
    rows = [["" if cell is None else str(cell) for cell in figure] for figure in figures]
    grid = Grid("structure", ["figure", "measured", "target"], rows)
    if markdown:
        print(grid.markdown())
    else:
        console().print(grid.rich())
    if json_path is not None:
        environment = record.environment(torch.device("cpu"), quick=False, at=commit)
        values = {figure.name: figure.measured for figure in figures}
        line = {"family": "structure", "date": record.now(), **environment, "figures": values}
        with json_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
