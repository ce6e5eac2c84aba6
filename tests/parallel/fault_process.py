"""A process that dies, and one that stalls: ``fault_process.py PROCESSES FOLDER die|stall``."""

import datetime as dt
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lastlayer import _processes, heads, parallel
from tests.processes import main

LOST, SECONDS, GRACE = 1, 4, 2.0


def process(rank: int, processes: int, folder: Path, what: str) -> None:
    _processes._GRACE = GRACE
    # A group of its own, with a short time limit.
    limit = dt.timedelta(seconds=SECONDS)
    group = dist.new_group([*range(processes)], timeout=limit, backend="gloo")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("classes",))
    head = parallel.ClassParallel(heads.FullSoftmax(4, 11), mesh)
    hidden, target = torch.randn(3, 4), torch.tensor([1, 2, 3])
    loss = head(hidden.requires_grad_(), target)
    started = time.monotonic()
    if rank == LOST:
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SECONDS + 3 * GRACE)
        (folder / f"{what} {rank}").write_text("woke")
        os._exit(0)
    missing = re.escape(f"no answer from rank {LOST} ")
    with pytest.raises(RuntimeError, match=f"expected all {processes} processes.*{missing}"):
        # A process that dies is missed in backward, one that stalls in the next step.
        loss.backward() if what == "die" else head(hidden, target)
    assert time.monotonic() - started < 5 * SECONDS
    (folder / f"{what} {rank}").write_text("named")
    os._exit(0)


if __name__ == "__main__":
    main(process)
