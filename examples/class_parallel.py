"""Train a small model whose classes are sharded over processes.

    torchrun --nproc-per-node 2 examples/class_parallel.py
    python examples/class_parallel.py                # the same in one process

Each process reads its own rows. The backbone is replicated with DDP; the classes of the head are
sharded over processes. The head is saved, and can be loaded with any number of processes.
"""

import argparse
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lastlayer import heads, parallel


def main() -> None:
    """Train, predict, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--classes", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=256, help="batch size of each process")
    options = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update({name: each for name, each in alone.items() if name not in os.environ})
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("classes",))

    torch.manual_seed(0)  # the same initial backbone in all processes, as DDP would ensure, too
    body = DistributedDataParallel(torch.nn.Sequential(
        torch.nn.Embedding(options.classes, 32), torch.nn.Linear(32, 64), torch.nn.Tanh()
    ))  # fmt: skip
    # No process ever has the full weight. The loss is that of the rows of all processes, but DDP
    # averages the gradients of the backbone, so they are multiplied by the number of processes.
    head = parallel.ClassParallel.build(
        heads.FullSoftmax, 64, options.classes, mesh=mesh, hidden_grad_scale=ranks
    )
    both = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parallel.parameter_groups(both), lr=1e-2)

    draw = torch.Generator().manual_seed(rank)  # different rows in each process
    for step in range(options.steps):
        tokens = torch.randint(50, (options.rows,), generator=draw)
        target = (tokens * 379 + 1) % options.classes  # the next token
        loss = head(body(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    tokens = torch.arange(50)
    right = head.topk(body(tokens), 1).classes[:, 0] == (tokens * 379 + 1) % options.classes
    print(f"process {rank} has {len(head.classes):,} classes; {int(right.sum())} of 50 are correct")
    with tempfile.TemporaryDirectory() as made:
        shared = [made]
        dist.broadcast_object_list(shared)  # one folder for all processes
        head.save(Path(shared[0]) / "head")
        if rank == 0:
            print("one process loads it as", type(heads.Head.load(Path(made) / "head")).__name__)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
