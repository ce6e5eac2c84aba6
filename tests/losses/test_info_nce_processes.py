"""Several processes with parts of a batch, of different sizes, are one process with all of it."""

from pathlib import Path

import pytest
import torch

from lastlayer.losses.contrastive import info_nce
from tests.processes import needs_processes, run_script

SCRIPT = Path(__file__).with_name("info_nce_process.py")
PROCESSES = 4


@needs_processes
def test_gradients_after_averaging_are_those_of_one_process(tmp_path, seed):
    run_script(SCRIPT, PROCESSES, tmp_path, str(seed))


def test_gathering_needs_processes():
    query = torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"gather: expected False if torch.distributed is not"):
        info_nce(query, query, gather=True)
    with pytest.raises(ValueError, match=r"gather: expected one of .* got 'odd'"):
        info_nce(query, query, gather="odd")
    with pytest.raises(ValueError, match="process_group: expected None without gather=True"):
        info_nce(query, query, process_group=object())
