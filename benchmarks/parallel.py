"""Class-parallel heads on this machine: ``python -m benchmarks parallel``.

Measures two ratios, each verified first: the overhead of ClassParallel on a mesh of one process
over the plain head, and the speed-up of a full softmax on two processes with one core each over one
process with one core, which is 2 at best. Each process is pinned to a core. With a GPU only the
first is measured, on the GPU and with NCCL. Nothing else should run at the same time.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks import record
from lastlayer import heads, parallel

# Rows of all processes, hidden size, classes.
SHAPES = ((256, 64, 1_000_000), (1024, 128, 100_000))
ONE = {
    "cpu": ((256, 128, 20_003), (64, 64, 1000)),
    "cuda": ((8192, 4096, 128_256), (4096, 512, 32_000), (256, 256, 10_000)),
}
REPEATS = 7


def run(json_path: Path | None, commit: str | None) -> int:
    """Measure, print, and append a JSON line for each figure."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shared = record.environment(device, quick=False, at=commit)

    def keep(what: str, shape: Sequence[int], names: str, first: float, second: float) -> None:
        ratio = first / second if what == "two processes" else second / first
        sizes = "×".join(map(str, shape))
        print(f"{what}, {sizes}: {names.format(first, second)}, ratio {ratio:.3f}", flush=True)
        if json_path is not None:
            line = {"family": "parallel", "date": record.now(), **shared, "what": what}
            line |= {"shape": [*shape], "milliseconds": [first, second], "ratio": ratio}
            with json_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    for shape in SHAPES if device.type == "cpu" else ():
        one, two = (_processes(n, shape) for n in (1, 2))
        if abs(one["loss"] - two["loss"]) > 1e-4 * abs(one["loss"]):
            print(f"two processes: got loss {two['loss']}, expected {one['loss']}", file=sys.stderr)
            return 1
        names = "one process {:.1f} ms, two {:.1f} ms"
        keep("two processes", shape, names, one["milliseconds"], two["milliseconds"])
    for shape in ONE[device.type]:
        found = _mesh_of_one(shape, device)
        keep("mesh of one", shape, "plain head {:.3f} ms, sharded {:.3f} ms", *found)
    return 0


def _processes(n: int, shape: Any) -> dict[str, float]:
    """The median step of ``n`` processes, and the loss."""
    with tempfile.TemporaryDirectory() as folder:
        given = [sys.executable, "-m", "benchmarks.parallel", folder, str(n), *map(str, shape)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        children = [subprocess.Popen([*given, str(rank)], env=environment) for rank in range(n)]
        codes = [child.wait() for child in children]
        if any(codes):
            raise OSError("a process of the benchmark failed")
        made: dict[str, float] = json.loads((Path(folder) / "found.json").read_text())
        return made


def _measure(folder: Path, processes: int, rows: int, width: int, classes: int, rank: int) -> None:
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (processes,))
    head = parallel.ClassParallel.build(
        heads.FullSoftmax, width, classes, mesh=mesh, even_rows=True
    )
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    part = slice(rank * rows // processes, (rank + 1) * rows // processes)
    own = hidden[part].clone().requires_grad_()
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        head.zero_grad()
        loss = head(own, target[part])
        loss.backward()
        dist.barrier()
        times.append(time.perf_counter() - begin)
    if rank == 0:
        found = {"milliseconds": 1e3 * statistics.median(times[1:]), "loss": loss.item()}
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _mesh_of_one(shape: Any, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a plain head, and of a ClassParallel on a mesh of one process, in turn."""
    rows, width, classes = shape
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"file://{folder}/meeting", rank=0,
            world_size=1,
        )  # fmt: skip
        try:
            mesh = dist.device_mesh.init_device_mesh(device.type, (1,))
            plain, copied = (
                heads.FullSoftmax(width, classes, device=device, dtype=dtype) for _ in range(2)
            )
            spread = parallel.ClassParallel(copied, mesh, even_rows=True)
            hidden = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
            target = torch.randint(classes, (rows,), device=device)
            torch.testing.assert_close(spread(hidden, target), spread.gather()(hidden, target))
            times: tuple[list[float], list[float]] = [], []
            for _ in range(60):
                for head, found in zip((plain, spread), times, strict=True):
                    begin = time.perf_counter()
                    head.zero_grad()
                    head(hidden, target).backward()
                    if on_gpu:
                        torch.cuda.synchronize()
                    found.append(time.perf_counter() - begin)
            one, other = (1e3 * statistics.median(found[10:]) for found in times)
            return one, other
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    _measure(Path(sys.argv[1]), *map(int, sys.argv[2:]))
