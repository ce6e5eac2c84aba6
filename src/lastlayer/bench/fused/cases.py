"""Which losses are compared on which sizes."""

from dataclasses import dataclass

import torch

from lastlayer.bench.cases import USUAL_DTYPE, Case, Method, competing
from lastlayer.bench.fused import methods
from lastlayer.bench.fused.scores import FLAT, TRAINED, VERY_FLAT_SCORES, Scores

LARGE, SMALL, SPARSE = "large width", "small width", "sparse"
SECTIONS = (LARGE, SMALL, SPARSE)
KINDS = (TRAINED, FLAT, VERY_FLAT_SCORES)

# Rows, hidden width, classes.
Shapes = tuple[tuple[int, int, int], ...]
CUDA_SHAPES: dict[str, Shapes] = {
    LARGE: ((8192, 4096, 128256), (8192, 2048, 256000), (16384, 1024, 50304)),
    SMALL: ((16384, 128, 1_000_000), (16384, 64, 200_000)),
    SPARSE: ((8192, 2048, 128256),),
}
CPU_SHAPES: dict[str, Shapes] = {
    LARGE: ((512, 256, 100_000),),
    SMALL: (),
    SPARSE: ((256, 256, 32_000),),
}
QUICK_CUDA_SHAPES: dict[str, Shapes] = {
    LARGE: ((4096, 1024, 32000),),
    SMALL: ((4096, 64, 50000),),
    SPARSE: ((2048, 512, 32000),),
}
QUICK_CPU_SHAPES: dict[str, Shapes] = {
    LARGE: ((256, 128, 8000),),
    SMALL: (),
    SPARSE: ((128, 128, 8000),),
}


@dataclass(frozen=True)
class FusedCase(Case):
    """Losses on a linear layer with scores of one kind, forward and backward."""

    scores: Scores

    def title(self) -> str:
        """One line that names the case."""
        return f"{self.section} {super().title()}, {self.scores.name} scores"


def plan(place: torch.device, *, quick: bool, peers: bool) -> list[FusedCase]:
    """All cases of a run.

    Args:
        place: a CPU or a GPU.
        quick: small shapes.
        peers: leave the peers' methods in.
    """
    device = place.type
    shapes = _shapes(device, quick=quick)
    cases = []
    for section in SECTIONS:
        for shape in shapes[section]:
            for scores in KINDS if section == SPARSE else (FLAT,):
                kept = competing(_methods(section, device, quick=quick), peers=peers)
                dtype = USUAL_DTYPE[device]
                cases.append(FusedCase(section, shape, dtype, kept, "forward+backward", scores))
    return cases


def _shapes(device: str, *, quick: bool) -> dict[str, Shapes]:
    if device == "cuda":
        return QUICK_CUDA_SHAPES if quick else CUDA_SHAPES
    return QUICK_CPU_SHAPES if quick else CPU_SHAPES


def _methods(section: str, device: str, *, quick: bool) -> list[Method]:
    """The baseline, ours, then the others."""
    if section == SPARSE:
        fused = [methods.ours(computes) for computes in methods.SPARSE]
        return [methods.MAIN, *fused, *map(methods.unfused, methods.SPARSE)]
    if device == "cpu":
        # Compiling takes longer than all of a quick run, and torch's own fused loss, with its small
        # chunks on a CPU, longer than all of a full one.
        other = methods.TORCH_FUSED if quick else methods.COMPILED
        return [methods.EAGER, methods.MAIN, methods.LOW, other]
    peers = [methods.LIGER, methods.CCE, methods.QUACK]
    if section == SMALL:
        torchs = [methods.EAGER, methods.ON_CHUNKS, methods.TORCH_FUSED]
        return [methods.COMPILED, methods.MAIN, *torchs, *peers]
    ours = [methods.MAIN, methods.LOW, methods.FLOAT32_SUM]
    return [methods.COMPILED, *ours, methods.EAGER, methods.TORCH_FUSED, *peers]
