"""What the interpreter accepts the compiler may refuse: kernels compile for sm_90 without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from implementations import FULL

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).with_name("compile_for_gpu.py")
KEY = """
import builtins
from triton.runtime import cache
from triton.compiler import compiler
if {kept}:
    from lastlayer.kernels import _triton

module = cache if hasattr(cache, "triton_key") else compiler
opened, plain = [], builtins.open
builtins.open = lambda *args, **options: opened.append(str(args[0])) or plain(*args, **options)
key = module.triton_key()
print(sum("libtriton" in name for name in opened), key)
"""


def run(folder: Path, *command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    ran = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_kernels_compile_for_a_gpu(tmp_path):
    """Every kernel in the full run; else every fifth one."""
    lines = run(tmp_path, str(SCRIPT), "1" if FULL else "5").split("\n")[:-1]
    assert len(lines) > (50 if FULL else 10)
    assert all(line.endswith(" True") for line in lines), lines


def test_triton_hashes_itself_once_and_not_in_every_process(tmp_path):
    first, second, plain = (
        run(tmp_path, "-c", KEY.format(kept=kept)).split(maxsplit=1) for kept in (True, True, False)
    )
    assert (first[0], second[0], plain[0]) == ("1", "0", "1")
    assert first[1] == second[1] == plain[1]
