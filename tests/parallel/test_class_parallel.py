"""Classes over 1 to 4 processes: losses, gradients and predictions are those of one process."""

from pathlib import Path

import pytest

from tests.heads.every_head import EVERY_HEAD
from tests.processes import needs_processes, run_script

HERE = Path(__file__).parent
# Of each kind one, for what depends on the number of processes.
SOME = "full", "entmax", "adaptive", "differentiated", "char_cnn", "two_level", "sampled", "zlpr"


@needs_processes
def test_fused_losses_of_classes_that_are_spread(tmp_path, full):
    run_script(HERE / "functional_process.py", 4, tmp_path, *(["all"] if full else []))


@needs_processes
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_head_computes_what_one_process_does(tmp_path, full, processes):
    names = EVERY_HEAD if full or processes == 3 else SOME
    run_script(HERE / "heads_process.py", processes, tmp_path, *names)
