"""Under DDP and FSDP2, with 2 and with 4 processes, every head computes what one process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.heads.every_head import EVERY_HEAD

SCRIPT = Path(__file__).with_name("distributed_process.py")
# Of each kind one, for what depends on the number of processes.
SOME = "full", "sampled", "entmax", "adaptive", "char_cnn", "huffman", "two_level", "tail", "zlpr"
AT_FOUR = "full", "sampled", "target", "sparsemax_labels"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)
def test_processes_compute_what_one_does(tmp_path, full):
    # Two of them load the shards of four.
    wanted = {4: EVERY_HEAD, 2: EVERY_HEAD} if full else {4: AT_FOUR, 2: SOME}
    for processes, names in wanted.items():
        meeting, shards = tmp_path / f"meeting of {processes}", tmp_path / "shards"
        run = subprocess.run(
            [sys.executable, str(SCRIPT), str(processes), str(meeting), str(shards), *names],
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path])},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr[-4000:]
