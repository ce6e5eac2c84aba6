"""Which losses are compared on which batches."""

from dataclasses import dataclass

import torch

from lastlayer.bench.cases import USUAL_DTYPE, Case, competing
from lastlayer.bench.contrastive import methods
from lastlayer.bench.contrastive.truth import ONE_WAY, SYMMETRIC

SECTIONS = (SYMMETRIC, ONE_WAY)

# Pairs and width of the vectors.
Shapes = tuple[tuple[int, int], ...]
CUDA_SHAPES: dict[str, Shapes] = {
    SYMMETRIC: tuple((n, 768) for n in (8192, 32768, 131072)),
    ONE_WAY: ((32768, 768),),
}
CPU_SHAPES: dict[str, Shapes] = {
    SYMMETRIC: tuple((n, 128) for n in (1024, 2048, 4096)),
    ONE_WAY: ((4096, 128),),
}
QUICK_CUDA_SHAPES: dict[str, Shapes] = {SYMMETRIC: ((8192, 256),), ONE_WAY: ((8192, 256),)}
QUICK_CPU_SHAPES: dict[str, Shapes] = {SYMMETRIC: ((512, 64),), ONE_WAY: ((512, 64),)}


@dataclass(frozen=True)
class ContrastiveCase(Case):
    """A loss on one batch of pairs, forward and backward."""

    def title(self) -> str:
        """One line that names the case."""
        return f"{self.section} {super().title()}"


def plan(place: torch.device, *, quick: bool, peers: bool) -> list[ContrastiveCase]:
    """All cases of a run.

    Args:
        place: a CPU or a GPU.
        quick: small batches.
        peers: leave the peers' methods in.
    """
    device = place.type
    if device == "cuda":
        shapes = QUICK_CUDA_SHAPES if quick else CUDA_SHAPES
    else:
        shapes = QUICK_CPU_SHAPES if quick else CPU_SHAPES
    cases = []
    for section in SECTIONS:
        for shape in shapes[section]:
            kept = competing(methods.of(section, device, quick=quick), peers=peers)
            dtype = USUAL_DTYPE[device]
            cases.append(ContrastiveCase(section, shape, dtype, kept, "forward+backward"))
    return cases
