"""Which losses are compared on which batches."""

from dataclasses import dataclass

from lastlayer.bench.cases import OURS, Case, Method
from lastlayer.bench.contrastive import methods
from lastlayer.bench.contrastive.truth import ONE_WAY, SYMMETRIC

SECTIONS = (SYMMETRIC, ONE_WAY)
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}

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

    baseline: Method

    def title(self) -> str:
        """One line that names the case."""
        return f"{self.section} {super().title()}"


def plan(device: str, *, quick: bool, peers: bool, only: str = "") -> list[ContrastiveCase]:
    """All cases of a run.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        quick: small batches.
        peers: leave the peers' methods in.
        only: what the titles of the cases must contain.
    """
    if device == "cuda":
        shapes = QUICK_CUDA_SHAPES if quick else CUDA_SHAPES
    else:
        shapes = QUICK_CPU_SHAPES if quick else CPU_SHAPES
    cases = []
    for section in SECTIONS:
        for shape in shapes[section]:
            baseline, *others = methods.of(section, device, quick=quick)
            kept = (m for m in others if peers or m.source in (OURS, "torch"))
            cases.append(
                ContrastiveCase(
                    section,
                    shape,
                    DTYPES[device],
                    (baseline, *kept),
                    "forward+backward",
                    baseline,
                )
            )
    return [case for case in cases if only.lower() in case.title().lower()]
