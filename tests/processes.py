"""Scripts that run in several processes, which meet in a file and say what is wrong."""

import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

needs_processes = pytest.mark.skipif(
    not hasattr(os, "fork")
    or not torch.distributed.is_available()
    or not torch.distributed.is_gloo_available(),
    reason="processes are forked, and meet through gloo",
)


def run_script(script: Path, processes: int, folder: Path, *args: str, timeout: float = 300.0):
    """Runs ``script`` as ``main`` below; fails with what its processes said."""
    with subprocess.Popen(
        [sys.executable, str(script), str(processes), str(folder), *args],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            said, wrong = run.communicate(timeout=timeout)
        except BaseException:
            # With the processes that it forked, which would go on.
            os.killpg(run.pid, signal.SIGKILL)
            raise
    assert run.returncode == 0, wrong[-6000:]
    return said


def main(process: Callable[..., None]) -> None:
    """``process(rank, processes, folder, *args)`` in each of them, forked before torch was used."""
    processes, folder, args = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _meet(rank, processes, folder)
                process(rank, processes, folder, *args)
                torch.distributed.barrier()
                torch.distributed.destroy_process_group()
                code = 0
            except BaseException:  # noqa: BLE001 — a child must not go on as its parent
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
    # That of a signal is negative.
    sys.exit(int(any(codes)))


def _meet(rank: int, processes: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # torch 2.8 uses what torch itself has deprecated.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    # Of torch's own code.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.distributed.*|.*single process.*")
    # torch 2.11 says so of every sparse tensor, also where the checks are explicitly off.
    warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly disabled")
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting of {processes}"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes
    )
