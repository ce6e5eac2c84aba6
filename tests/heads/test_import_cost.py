"""What ``import lastlayer.heads`` brings along."""

import subprocess
import sys


def loads_the_compiler(statement):
    program = f"import sys\n{statement}\nprint('torch._dynamo' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return {"True": True, "False": False}[ran.stdout.strip()]


def test_heads_do_not_load_the_compiler_unless_torch_does():
    use = "from lastlayer import heads, trees\nimport torch\n"
    use += "head = heads.HierarchicalSoftmax(4, trees.balanced(9))\nhead.topk(torch.randn(3, 4), 2)"
    assert not loads_the_compiler(use) or loads_the_compiler("import torch")


def test_trees_load_neither_numba_nor_rich():
    program = "import torch, sys\nbefore = {*sys.modules}\nimport lastlayer.trees\n"
    program += "print({*sys.modules} - before & {'numba', 'rich', 'scipy'})"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "set()"
