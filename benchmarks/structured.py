"""Time the builders of trees and a training step of the structured heads, on one core.

    python benchmarks/structured.py

The figures in docs/trees.md, docs/bands.md and docs/char_cnn.md are these. They are kept in
benchmarks/results/structured/cpu.jsonl, one line a figure.
"""

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from lastlayer import heads, trees

RESULTS = Path(__file__).parent / "results" / "structured" / "cpu.jsonl"
MILLION = 1_000_000
ROWS, WIDTH, CLASSES = 256, 256, 50_000


def zipf(n: int) -> np.ndarray:
    """Counts by Zipf's law, the most frequent class first."""
    return np.maximum(1, 1e7 / np.arange(1, n + 1)).astype(np.int64)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """The median of CPU seconds, after a call that compiles."""
    call()
    taken = []
    for _ in range(repeats):
        before = time.process_time()
        call()
        taken.append(time.process_time() - before)
    return statistics.median(taken)


def tree_times() -> dict[str, float]:
    """CPU seconds of each builder for a million classes."""
    counts = np.random.default_rng(0).permutation(zipf(MILLION))
    tree = trees.huffman(counts)
    labels = [f"word{i}" for i in range(MILLION)]
    named = trees.huffman(counts, labels=labels)
    # A taxonomy of a thousand groups.
    parents = {name: f"group{i % 1000}" for i, name in enumerate(labels)}
    parents |= {f"group{i}": "root" for i in range(1000)}
    codes = [tree.code(c) for c in range(MILLION)]
    digits = ["".join(map(str, code)) for code in codes]
    some = torch.randn(100_000, 64, generator=torch.Generator().manual_seed(0))
    folder = Path(tempfile.mkdtemp())

    def paths() -> None:
        _ = trees.huffman(counts).path_node

    cases: dict[str, Callable[[], object]] = {
        "huffman": lambda: trees.huffman(counts),
        "huffman, arity 16": lambda: trees.huffman(counts, 16),
        "balanced": lambda: trees.balanced(MILLION),
        "two_level": lambda: trees.two_level(counts),
        "collapse 64": lambda: trees.huffman(counts).collapse(64),
        "huffman with all paths": paths,
        "from_parents, names": lambda: trees.from_parents(parents),
        "from_codes, strings": lambda: trees.from_codes(digits),
        "from_codes, lists": lambda: trees.from_codes(codes),
        "save": lambda: named.save(folder / "tree.safetensors"),
        "load": lambda: trees.Tree.load(folder / "tree.safetensors"),
        "cluster, 100,000 classes": lambda: trees.cluster(some, progress=False),
        "cluster, 100,000 classes, overlap 0.3": lambda: trees.cluster(
            some, kind="adaptive", overlap=0.3, progress=False
        ),
    }
    return {name: seconds(call, 3) for name, call in cases.items()}


def step_of(module: torch.nn.Module, hidden: torch.Tensor, target: torch.Tensor) -> Any:
    """Forward and backward of a head, gradients from None."""

    def step() -> None:
        module.zero_grad(set_to_none=True)
        hidden.grad = None
        loss = module(hidden, target)
        getattr(loss, "loss", loss).backward()

    return step


class LinearLayer(torch.nn.Linear):
    """nn.Linear with the cross entropy on it."""

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(hidden), target)


def head_times() -> dict[str, float]:
    """CPU seconds of a training step, all heads taking turns."""
    torch.manual_seed(0)
    counts = zipf(CLASSES)
    shares = torch.tensor(counts / counts.sum())
    target = torch.multinomial(shares, ROWS, replacement=True)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    huffman = trees.huffman(counts)
    bands = [(2000, 192), (8000, 48), (40_000, 16)]
    chosen = heads.AdaptiveSoftmax(WIDTH, counts=counts)
    cutoffs = [int(c) for c in heads.cutoffs_from_counts(counts, WIDTH)]
    modules: dict[str, torch.nn.Module] = {
        "linear + cross_entropy": LinearLayer(WIDTH, CLASSES),
        "FullSoftmax": heads.FullSoftmax(WIDTH, CLASSES),
        f"AdaptiveSoftmax, counts {cutoffs}": chosen,
        "torch adaptive, the same cutoffs": torch.nn.AdaptiveLogSoftmaxWithLoss(
            WIDTH, CLASSES, cutoffs
        ),
        "DifferentiatedSoftmax, slices": heads.DifferentiatedSoftmax(WIDTH, bands),
        "DifferentiatedSoftmax, projections": heads.DifferentiatedSoftmax(
            WIDTH, bands, variant="projections"
        ),
        "HierarchicalSoftmax, Huffman, sparse": heads.HierarchicalSoftmax(
            WIDTH, huffman, sparse=True
        ),
        "HierarchicalSoftmax, Huffman, dense": heads.HierarchicalSoftmax(WIDTH, huffman),
        "HierarchicalSoftmax, collapsed to 64, sparse": heads.HierarchicalSoftmax(
            WIDTH, huffman.collapse(64), sparse=True
        ),
    }
    for first in (1000, 2000):
        at = [first, 10_000]
        modules[f"AdaptiveSoftmax {at}"] = heads.AdaptiveSoftmax(
            WIDTH, cutoffs=at, n_classes=CLASSES
        )
        modules[f"torch adaptive {at}"] = torch.nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, at)
    words = [f"word{i:05d}" for i in range(5000)]
    few = target % 5000
    steps = {name: step_of(module, hidden, target) for name, module in modules.items()}
    steps["CharCNNSoftmax, 5,000 words"] = step_of(heads.CharCNNSoftmax(WIDTH, words), hidden, few)
    steps["FullSoftmax, 5,000 words"] = step_of(heads.FullSoftmax(WIDTH, 5000), hidden, few)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(8):
        for name, step in steps.items():
            before = time.process_time()
            step()
            if turn:  # the first one compiles
                taken[name].append(time.process_time() - before)
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    """Measure, print and append."""
    torch.set_num_threads(1)
    made = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "threads": 1}
    made |= {"torch": torch.__version__, "python": platform.python_version()}
    RESULTS.parent.mkdir(exist_ok=True)
    for part, measured in (("step of 256×256×50,000", head_times()), ("tree", tree_times())):
        with RESULTS.open("a", encoding="utf-8") as file:
            for name, taken in measured.items():
                print(f"{part}: {name}: {1000 * taken:.1f} ms")
                record = {**made, "part": part, "name": name, "cpu_seconds": taken}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
