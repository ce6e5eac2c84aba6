"""The tables of the page on class-parallel heads, computed by :mod:`lastlayer.parallel`."""

from pathlib import Path

import torch

from lastlayer import heads, parallel, samplers, trees
from lastlayer.parallel.communication import as_bytes

WIDTH, N_CLASSES, RANKS, ROWS = 512, 1_000_000, 8, 64
# Sent by every head that gathers rows; left out of the table, since the text of the page has it.
_ROWS = "hidden states", "targets", "gradient of hidden", "number of rows"


def _heads() -> dict[str, tuple[heads.Head, int]]:
    """A head of each family, and its number of targets per row."""
    meta = {"device": "meta"}
    n, log_uniform = N_CLASSES, samplers.LogUniform(N_CLASSES)
    words = [f"word{i}" for i in range(1000)]
    sampled = log_uniform, 1024
    return {
        "`FullSoftmax`": (heads.FullSoftmax(WIDTH, n, **meta), 1),
        "`SelfNormalized`": (heads.SelfNormalized(WIDTH, n, **meta), 1),
        "`SelfNormalized`, a tenth of the rows": (
            heads.SelfNormalized(WIDTH, n, fraction=0.1, **meta), 1,
        ),
        "`EntmaxHead`": (heads.EntmaxHead(WIDTH, n, **meta), 1),
        "`TopKSoftmaxHead`, k = 10": (heads.TopKSoftmaxHead(WIDTH, n, 10, **meta), 1),
        "`MultiLabel`, ZLPR": (heads.MultiLabel(WIDTH, n, **meta), 5),
        "`MultiLabel`, BCE or asymmetric": (heads.MultiLabel(WIDTH, n, "bce", **meta), 5),
        "`MultiLabel`, sparsemax": (heads.MultiLabel(WIDTH, n, "sparsemax", **meta), 5),
        "`AdaptiveSoftmax`, 2 clusters": (
            heads.AdaptiveSoftmax(WIDTH, cutoffs=[20_000, 200_000], n_classes=n, **meta), 1,
        ),
        "`DifferentiatedSoftmax`, 2 bands": (
            heads.DifferentiatedSoftmax(WIDTH, [(100_000, 384), (900_000, 128)], **meta), 1,
        ),
        "`CharCNNSoftmax`, 1000 classes": (heads.CharCNNSoftmax(WIDTH, words, **meta), 1),
        "`HierarchicalSoftmax`, binary tree, 1000 classes": (
            heads.HierarchicalSoftmax(WIDTH, trees.balanced(1000), **meta), 1,
        ),
        "the same, with two paths for some classes": (
            heads.HierarchicalSoftmax(WIDTH, _overlapping(1000), **meta), 1,
        ),
        "`SampledSoftmax`, `ImportanceSampling`, 1024 draws": (
            heads.SampledSoftmax(WIDTH, n, *sampled, **meta), 1,
        ),
        "`SampledSoftmax`, 1024 draws of `Unigram`": (
            heads.SampledSoftmax(WIDTH, n, samplers.Unigram(range(1, n + 1)), 1024, **meta), 1,
        ),
        "`NoiseContrastive`, `NegativeSampling`, 1024 draws": (
            heads.NoiseContrastive(WIDTH, n, *sampled, **meta), 1,
        ),
    }  # fmt: skip


def _overlapping(n: int) -> trees.Tree:
    """A complete binary tree with 1024 leaves, some of whose classes have two."""
    codes = [f"{each:010b}" for each in range(1024)]
    return trees.from_codes([codes[c::n] for c in range(n)])


def exchanges() -> str:
    """The table of what each head exchanges per row and per step."""
    lines = [
        "| head | floats per row | rounds | bytes received per row | once per step |",
        "|---|---|---|---|---|",
    ]
    for name, (head, targets) in _heads().items():
        made = parallel.communication(head, RANKS, ROWS, targets=targets)
        of_rows = [each for each in made.exchanges if each.floats_per_row]
        floats = str(made.floats_per_row)
        if any(each.at_most for each in of_rows):
            floats = f"up to {floats}"
        nbytes = sum(each.nbytes for each in of_rows) / (ROWS * RANKS)
        rounds = sum(each.rounds for each in of_rows)
        others = [each for each in made.exchanges if each not in of_rows and each.what not in _ROWS]
        cells = "; ".join(_once(each) for each in others)
        lines.append(f"| {name} | {floats} | {rounds} | {nbytes:.0f} | {cells} |")
    return "\n".join(lines)


def _once(each: parallel.Exchange) -> str:
    times = f"{each.rounds} × " if each.rounds > 1 else ""
    most = "up to " if each.at_most else ""
    return f"{times}{each.what}: {most}{as_bytes(each.nbytes)}"


# Classes, hidden size, rows of all processes, processes.
_SIZES = [
    (128_256, 4096, 65_536, 8),
    (256_000, 2304, 65_536, 8),
    (1_000_000, 512, 65_536, 8),
    (10_000_000, 512, 16_384, 16),
    (100_000_000, 512, 8_192, 64),
    (1_000_000_000, 512, 8_192, 256),
]


def volumes() -> str:
    """The table of memory and traffic of the three layouts, up to a billion classes."""
    lines = [
        "| classes × hidden | rows, processes | DDP | FSDP2 | class-parallel | take |",
        "|---|---|---|---|---|---|",
    ]
    for n, width, rows, ranks in _SIZES:
        head = heads.FullSoftmax(width, n, device="meta", dtype=torch.bfloat16)
        made = parallel.plan(head, ranks, rows=rows // ranks, memory=80)
        cells = [
            f"{as_bytes(each.memory.total)}{'' if each.fits else ' (too large)'}, "
            f"{as_bytes(each.nbytes)} in {each.rounds} calls"
            for each in made.layouts
        ]
        sizes = f"{n:,} × {width:,} | {rows:,}, {ranks}"
        lines.append(f"| {sizes} | {' | '.join(cells)} | {made.layout} |")
    return "\n".join(lines)


def write_all(folder: Path) -> None:
    """Writes both tables as files to include."""
    folder.mkdir(parents=True, exist_ok=True)
    for make in (exchanges, volumes):
        text = f"{make()}\n"
        (folder / f"class_parallel_{make.__name__}.md").write_text(text, encoding="utf-8")
