"""Train with ten million classes in two processes on a CPU, and print the peak memory of each.

    torchrun --nproc-per-node 2 examples/class_parallel_10m.py
    torchrun --nproc-per-node 2 examples/class_parallel_10m.py --head sampled
    python examples/class_parallel_10m.py --classes 100000     # one process, fewer classes

A step of the exact softmax computes the scores of all classes; a step of the sampled softmax only
uses the vectors of samples and targets. In both cases, each process has only its half of the
weight, of the gradient and of the optimiser state.
"""

import argparse
import os
import resource
import sys
import time

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lastlayer import heads, parallel, samplers

WIDTH = 64


def peak() -> float:
    """Peak memory of this process so far, in gigabytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def train(head: parallel.ClassParallel, steps: int, rows: int, rank: int) -> None:
    """Train for a few steps on targets by Zipf's law, with momentum as the only optimiser state."""
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        began = time.perf_counter()
        hidden = torch.randn(rows, WIDTH, generator=draw, requires_grad=True)
        zipf = torch.rand(rows, generator=draw, dtype=torch.float64)
        target = (head.n_classes**zipf).long() - 1
        optimizer.zero_grad()
        with parallel.CountedCommunication() as counted:
            loss = head(hidden, target)
            loss.backward()
        optimizer.step()
        if rank == 0:
            sent = f"{counted.nbytes / 1e3:,.1f} kB received in {counted.rounds} calls"
            print(f"  step {step + 1}: {time.perf_counter() - began:.1f} s, {sent}", flush=True)


def main() -> None:
    """Build a head that is sharded over processes, and train it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--head", choices=("full", "sampled"), default="full")
    parser.add_argument("--classes", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="batch size of each process")
    options = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update({name: each for name, each in alone.items() if name not in os.environ})
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), options.classes
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("classes",))
    if options.head == "full":
        head = parallel.ClassParallel.build(heads.FullSoftmax, WIDTH, n, mesh=mesh)
    else:
        head = parallel.ClassParallel.build(
            heads.SampledSoftmax, WIDTH, n, samplers.LogUniform(n), n_samples=1024, mesh=mesh
        )
    if rank == 0:
        print(parallel.plan(head, mesh, rows=options.rows, optimizer_slots=1, memory=8), flush=True)
    train(head, options.steps, options.rows, rank)
    dist.barrier()
    print(f"process {rank}: peak memory {peak():.2f} GB", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
