"""CPU kernels on several threads, from several threads, and after a fork."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, threading
import numpy as np
import torch
import lastlayer
from lastlayer.kernels import _threads

torch.set_num_threads(2)
scores = torch.randn(512, 257)
expected = lastlayer.sparsemax(scores, impl="reference").numpy()

def is_right():  # compared by numpy, since torch's own threads do not outlive a fork either
    return np.allclose(lastlayer.sparsemax(scores).numpy(), expected, atol=1e-6)

assert is_right()
{body}
"""

FROM_THREADS = """
answers = []
workers = [
    threading.Thread(target=lambda: answers.append(all(is_right() for _ in range(50))))
    for _ in range(4)
]
for worker in workers: worker.start()
for worker in workers: worker.join()
assert answers == [True] * 4, answers
assert not _threads._entrance.locked()
"""

AFTER_A_FORK = """
child = os.fork()
if child == 0:
    os._exit(0 if is_right() and _threads._entrance.locked() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert is_right()
"""


@pytest.mark.parametrize("body", [FROM_THREADS, AFTER_A_FORK], ids=["threads", "fork"])
def test_numba_threads_do_not_abort(body):
    """In a process of its own: where this goes wrong the process is ended, not the test."""
    if body is AFTER_A_FORK and not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
