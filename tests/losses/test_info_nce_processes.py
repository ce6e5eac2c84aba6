"""Several processes with parts of a batch, of different sizes, are one process with all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lastlayer.losses.contrastive import info_nce

SCRIPT = Path(__file__).with_name("info_nce_process.py")
PROCESSES = 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)
def test_gradients_after_averaging_are_those_of_one_process(tmp_path, seed):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(PROCESSES), str(tmp_path / "meeting"), str(seed)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-4000:]


def test_gathering_needs_processes():
    query = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"gather: expected False where torch.distributed is not"):
        info_nce(query, query, gather=True)
    with pytest.raises(ValueError, match=r"gather: expected one of .* got 'odd'"):
        info_nce(query, query, gather="odd")
    with pytest.raises(ValueError, match="process_group: expected None without gather=True"):
        info_nce(query, query, process_group=object())
