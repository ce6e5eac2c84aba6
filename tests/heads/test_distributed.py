"""Under DDP and FSDP2, with 2 and with 4 processes, every head computes what one process does."""

from pathlib import Path

from tests.heads.every_head import EVERY_HEAD
from tests.processes import needs_processes, run_script

SCRIPT = Path(__file__).with_name("distributed_process.py")
# Of each kind one, for what depends on the number of processes.
SOME = "full", "sampled", "entmax", "adaptive", "char_cnn", "huffman", "two_level", "tail", "zlpr"
AT_FOUR = "full", "sampled", "target", "sparsemax_labels"


@needs_processes
def test_processes_compute_what_one_does(tmp_path, full):
    # Two of them load the shards of four.
    wanted = {4: EVERY_HEAD, 2: EVERY_HEAD} if full else {4: AT_FOUR, 2: SOME}
    for processes, names in wanted.items():
        run_script(SCRIPT, processes, tmp_path, *names)
