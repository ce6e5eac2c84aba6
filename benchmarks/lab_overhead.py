"""What the lab adds to the time of a training step: what its loop does between steps.

It keeps a clock, watches memory, writes metrics and checkpoints, and tells how far it is. Judging
on held-out data is left out. The steps themselves are those of any loop, and their clock is what
the rest is compared with: two runs differ by more. What it prints is kept in
results/one_off/lab-overhead-cpu.txt.
"""

import copy
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from lastlayer.lab import compare as lab
from lastlayer.lab.budget import Schedule
from lastlayer.lab.live import watcher
from lastlayer.lab.memory import PeakMemory
from lastlayer.lab.models import build_body
from lastlayer.lab.options import CompareOptions
from lastlayer.lab.specs import parse_specs
from lastlayer.lab.steps import Stepper
from lastlayer.lab.training import Training, warm_up

HEADS, STEPS, TURNS = ("hierarchical", "adaptive", "sampled"), 1500, 3


def main() -> None:
    """Prints a line a head."""
    settled = CompareOptions(heads=HEADS, budget=f"{STEPS}steps", seeds=1).settled()
    specs, device = parse_specs(settled.heads, task=settled.task), torch.device("cpu")
    print(f"{TURNS} runs of {STEPS} steps each, torch {torch.__version__}")
    print("head           ms a step   added: median, least and most of the runs")
    with tempfile.TemporaryDirectory() as folder:
        out, console = Path(folder), Console(quiet=True)
        bench = lab._prepare(settled, specs, device, out, CompareOptions(), True, console)
        watching = watcher(console, specs, [1], settled.budget, quiet=False)
        for spec in specs:
            torch.manual_seed(0)
            parts = build_body(bench.model), spec.build(bench.needs.with_seed(1))
            warm_up(Stepper(*parts, bench.lr, 1.0), bench.feed, 1)
            watching.starts(spec, 1)
            runs = [run(bench, parts, out / f"{spec.slug}{i}", watching) for i in range(TURNS)]
            ms = 1e3 * statistics.median(steps for steps, _ in runs) / STEPS
            added = sorted(100 * between / steps for steps, between in runs)
            print(
                f"{spec.text:15} {ms:8.2f}   {statistics.median(added):.2f}%, {added[0]:.2f}%, "
                f"{added[-1]:.2f}%"
            )
        watching.close()


def run(
    bench: lab.Bench,
    parts: tuple[torch.nn.Module, torch.nn.Module],
    folder: Path,
    watching: lab.Watcher,
) -> tuple[float, float]:
    """Seconds of the steps, and of what is between them."""
    folder.mkdir()
    body, head = copy.deepcopy(parts)
    judging = 0.0

    def judged() -> dict[str, float]:
        nonlocal judging
        began = time.perf_counter()
        found = bench.judge.on_the_way(body, head)
        judging += time.perf_counter() - began
        return found

    training = Training(
        stepper=Stepper(body, head, bench.lr, 1.0), feed=bench.feed, seed=1,
        schedule=Schedule(bench.budget, bench.feed.steps_per_epoch), folder=folder,
        evaluate=judged, memory=PeakMemory(bench.device, body, head), tell=watching.moves,
        stopped=lambda: False, device=bench.device,
    )  # fmt: skip
    start = time.perf_counter()
    training.run()
    steps = training.progress.seconds
    return steps, time.perf_counter() - start - judging - steps


if __name__ == "__main__":
    main()
