"""Which losses are compared on which sizes."""

from dataclasses import dataclass

import torch

from lastlayer.bench.cases import USUAL_DTYPE, Case, Direction, competing
from lastlayer.bench.multilabel import methods
from lastlayer.bench.multilabel.truth import DENSE_ZLPR, LINEAR_BCE, LINEAR_ZLPR

SECTIONS = (LINEAR_ZLPR, LINEAR_BCE, DENSE_ZLPR)
# Labels of each row that are on.
POSITIVES = 8

# Rows, hidden width and labels; of dense scores rows and labels.
Shapes = tuple[tuple[int, ...], ...]
CUDA_SHAPES: dict[str, Shapes] = {
    LINEAR_ZLPR: ((1024, 768, 1_000_000),),
    LINEAR_BCE: ((1024, 768, 1_000_000),),
    DENSE_ZLPR: ((4096, 32768),),
}
CPU_SHAPES: dict[str, Shapes] = {
    LINEAR_ZLPR: ((128, 128, 200_000),),
    LINEAR_BCE: (),
    DENSE_ZLPR: ((256, 32768),),
}
QUICK_CUDA_SHAPES: dict[str, Shapes] = {
    LINEAR_ZLPR: ((512, 256, 50_000),),
    LINEAR_BCE: ((512, 256, 50_000),),
    DENSE_ZLPR: ((1024, 8192),),
}
QUICK_CPU_SHAPES: dict[str, Shapes] = {
    LINEAR_ZLPR: ((64, 64, 10_000),),
    LINEAR_BCE: ((64, 64, 10_000),),
    DENSE_ZLPR: ((64, 4096),),
}


@dataclass(frozen=True)
class MultilabelCase(Case):
    """A loss on one size of input."""

    @property
    def is_dense(self) -> bool:
        """Whether the inputs are scores and labels, and not what makes them."""
        return self.section == DENSE_ZLPR

    def title(self) -> str:
        """One line that names the case."""
        return f"{self.section} {super().title()} {self.direction}"


def plan(place: torch.device, *, quick: bool, peers: bool) -> list[MultilabelCase]:
    """All cases of a run.

    Args:
        place: a CPU or a GPU.
        quick: small shapes.
        peers: leave the peers' methods in.
    """
    device = place.type
    if device == "cuda":
        shapes = QUICK_CUDA_SHAPES if quick else CUDA_SHAPES
    else:
        shapes = QUICK_CPU_SHAPES if quick else CPU_SHAPES
    cases = []
    for section in SECTIONS:
        directions: tuple[Direction, ...] = ("forward+backward",)
        if section == DENSE_ZLPR:
            directions = ("forward", "forward+backward")
        for shape in shapes[section]:
            for direction in directions:
                found = methods.of(section, device, backward="backward" in direction)
                kept = competing(found, peers=peers)
                cases.append(MultilabelCase(section, shape, USUAL_DTYPE[device], kept, direction))
    return cases
