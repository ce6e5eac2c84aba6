"""Calls of the sweep at common sizes, compared with compiled torch, eager and replayed.

Losses on stored scores, layers with odd sizes, and small problems, which are limited by the host.
"""

import torch

from benchmarks import sweep
from benchmarks.driver import Case, Family
from benchmarks.sweep import Size

NOTES = """\
- Calls and torch code are those of *Every call*. *Compiled* is `torch.compile` of that code, which
  for a sparse map or loss is the softmax or cross entropy, another function of the same shape.
- Verified: results and gradients, as there.
- 128,259 classes are Llama's vocabulary with three added tokens; 32,003 and 50,257 are other sizes
  that are not multiples of a tile. Each is listed with its aligned neighbour.
"""

# Rows, classes and dtype of stored scores, by device.
SCORES = {
    "cuda": (
        (65536, 1024, "bfloat16"),
        (16384, 8192, "bfloat16"),
        (8192, 32768, "float32"),
        (4096, 131072, "bfloat16"),
    ),
    "cpu": ((4096, 64, "float32"), (1024, 1024, "float32"), (128, 32768, "float32")),
}
LOSSES = (
    "sparsemax_loss", "entmax_loss, alpha 1.5", "entmax_loss, alpha 1.3",
    "entmax_loss, distributions", "topk_softmax_loss", "multilabel_sparsemax_loss", "bce_loss",
    "asymmetric_loss", "zlpr_loss",
)  # fmt: skip
SMALL = ((32, 100, "float32"), (64, 1000, "float32"), (64, 32000, "float32"))
SMALL_CALLS = (
    "sparsemax", "entmax, alpha 1.5", "sparsemax_loss", "entmax_loss, alpha 1.5", "zlpr_loss",
)  # fmt: skip
LAYER = "linear_cross_entropy"
LAYERS = {
    "cuda": (
        (8192, 4096, 128256), (8192, 4096, 128259), (8192, 2048, 32000), (8192, 2048, 32003),
        (4096, 768, 50304), (4096, 768, 50257), (4096, 1000, 32000), (4096, 1001, 32000),
    ),
    "cpu": ((64, 64, 1000), (255, 127, 20003)),
}  # fmt: skip


def _cases(device: torch.device, quick: bool) -> list[Case]:
    specs, kind = {spec.name: spec for spec in sweep.SPECS}, device.type
    some = 1 if quick else None
    asked = [
        (name, Size(rows, 1, classes), dtype)
        for names, sizes in ((LOSSES, SCORES[kind]), (SMALL_CALLS, SMALL))
        for rows, classes, dtype in sizes[:some]
        for name in names
    ]
    usual = "bfloat16" if kind == "cuda" else "float32"
    asked += [(LAYER, Size(*size), usual) for size in LAYERS[kind][:some]]
    # On a CPU, compiling takes longer than a whole quick run.
    return [
        specs[name].case(size, dtype, compiled=not quick, replayed=True)
        for name, size, dtype in asked
    ]


FAMILY = Family("plain", "Plain calls", _cases, NOTES, seed=1617)
