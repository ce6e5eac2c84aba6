"""Train a small model whose classes are spread over processes.

    torchrun --nproc-per-node 2 examples/class_parallel.py
    python examples/class_parallel.py                # the same in one process

Each process reads its own rows. The body is the same in all of them and inside of DDP; of the head
each process has a range of the classes. The head is saved, and loads with any number of processes.
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
    parser.add_argument("--rows", type=int, default=256, help="of each process in a step")
    options = parser.parse_args()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update({name: each for name, each in alone.items() if name not in os.environ})
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("classes",))

    torch.manual_seed(0)  # the same body everywhere; DDP would see to it too
    body = DistributedDataParallel(torch.nn.Sequential(
        torch.nn.Embedding(options.classes, 32), torch.nn.Linear(32, 64), torch.nn.Tanh()
    ))  # fmt: skip
    # No process ever has the whole table. DDP averages the gradients of the body over processes,
    # and the head's loss is that of the rows of all of them: so times their number.
    head = parallel.ClassParallel.build(
        heads.FullSoftmax, 64, options.classes, mesh=mesh, hidden_grad_scale=ranks
    )
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-2)

    draw = torch.Generator().manual_seed(rank)  # other rows in each process
    for step in range(options.steps):
        tokens = torch.randint(50, (options.rows,), generator=draw)
        target = (tokens * 379 + 1) % options.classes  # what follows a token
        loss = head(body(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    tokens = torch.arange(50)
    right = head.topk(body(tokens), 1).classes[:, 0] == (tokens * 379 + 1) % options.classes
    print(f"process {rank} has {len(head.classes):,} classes; {int(right.sum())} of 50 are right")
    with tempfile.TemporaryDirectory() as made:
        shared = [made]
        dist.broadcast_object_list(shared)  # one folder, which all processes see
        head.save(Path(shared[0]) / "head")
        if rank == 0:
            print("one process opens it as", type(heads.Head.load(Path(made) / "head")).__name__)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
