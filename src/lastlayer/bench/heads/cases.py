"""Which heads are compared on which sizes."""

from dataclasses import dataclass

import torch

from lastlayer.bench.cases import DTYPES, USUAL_DTYPE, Case, Method
from lastlayer.bench.heads import builders, draws, top
from lastlayer.bench.heads.entries import ENTRIES, FULL, LINEAR
from lastlayer.bench.heads.entry import CPU, SWEEP, WORDS
from lastlayer.bench.heads.problem import Problem

STEP, TOP, AGAINST = "step", f"top {top.K}", "cost against V"
DRAWS, TREES = "draws", "trees"
SECTIONS = (STEP, TOP, AGAINST, DRAWS, TREES)

# Rows, hidden width, classes.
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Sizes:
    """What is measured on a device.

    Attributes:
        steps: of a training step.
        words: of a step with class vectors from spellings.
        top: of the best classes.
        against: rows and width of the cost against the number of ``classes``.
        draws: classes that are drawn from.
        trees: classes of a tree that is built, and ``clustered`` of one that is learned.
    """

    steps: tuple[Shape, ...]
    words: tuple[Shape, ...]
    top: Shape
    against: tuple[int, int]
    classes: tuple[int, ...]
    draws: tuple[int, ...] = ()
    trees: tuple[int, ...] = ()
    clustered: tuple[int, ...] = ()


MANY = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
CPU_SIZES = Sizes(
    steps=((256, 256, 50_000),),
    words=((256, 256, 5_000),),
    top=(256, 512, 1_000_000),
    against=(64, 64),
    classes=MANY,
    draws=(10_000_000,),
    trees=(1_000_000,),
    clustered=(100_000,),
)
CUDA_SIZES = Sizes(
    steps=((8192, 512, 50_000), (8192, 512, 1_000_000)),
    words=((8192, 512, 5_000),),
    top=(256, 512, 1_000_000),
    against=(8192, 512),
    classes=MANY,
    draws=(1_000_000,),
)
QUICK_CPU_SIZES = Sizes(
    steps=((64, 64, 10_000),),
    words=((64, 64, 100),),
    top=(32, 64, 20_000),
    against=(32, 32),
    classes=(1_000, 4_000, 16_000),
    draws=(10_000,),
    trees=(10_000,),
    clustered=(2_000,),
)
QUICK_CUDA_SIZES = Sizes(
    steps=((2048, 256, 30_000),),
    words=((512, 256, 500),),
    top=(256, 256, 100_000),
    against=(2048, 256),
    classes=(1_000, 10_000, 100_000),
    draws=(100_000,),
)


@dataclass(frozen=True)
class HeadCase(Case):
    """Heads on one problem, or what draws classes or builds trees, which have none.

    Attributes:
        problem: what inputs are drawn for; None where there are no heads.
    """

    problem: Problem | None

    @property
    def baseline(self) -> Method | None:
        """linear + cross_entropy on a CPU, our full softmax on a GPU; none of trees."""
        return None if self.section == TREES else super().baseline

    def title(self) -> str:
        """One line that names the case."""
        if self.problem is None:
            return f"{self.section} {self.shape[0]:,} classes"
        return f"{self.section} {super().title()}"


def plan(device: torch.device, *, quick: bool) -> list[HeadCase]:
    """All cases of a run, on small shapes where it is quick."""
    sizes = _sizes(device.type, quick=quick)
    return [
        *(_step(STEP, device.type, shape, device) for shape in sizes.steps),
        *(_step(STEP, WORDS, shape, device) for shape in sizes.words),
        _top(sizes.top, device),
        *(_step(AGAINST, SWEEP, (*sizes.against, n), device) for n in sizes.classes),
        *(_draws(n, device) for n in sizes.draws),
        *(_trees(n, builders.BUILDERS) for n in sizes.trees),
        *(_trees(n, builders.CLUSTERED) for n in sizes.clustered),
    ]


def _sizes(device: str, *, quick: bool) -> Sizes:
    if device == "cuda":
        return QUICK_CUDA_SIZES if quick else CUDA_SIZES
    return QUICK_CPU_SIZES if quick else CPU_SIZES


def _step(section: str, place: str, shape: Shape, device: torch.device) -> HeadCase:
    # A character CNN takes maxima, which in bfloat16 are others than in float64.
    dtype = "float32" if place == WORDS else USUAL_DTYPE[device.type]
    baseline = LINEAR if place in (CPU, WORDS) else FULL
    problem = Problem(*shape, DTYPES[dtype], device)
    # The baseline first, then ours: ratios to them are written as soon as a method is timed.
    found = sorted(
        (entry.method(problem) for entry in ENTRIES if place in entry.on),
        key=lambda method: (method.name != baseline, not method.is_ours),
    )
    return HeadCase(section, shape, dtype, tuple(found), "forward+backward", problem)


def _top(shape: Shape, device: torch.device) -> HeadCase:
    dtype = USUAL_DTYPE[device.type]
    problem = Problem(*shape, DTYPES[dtype], device)
    found = tuple(top.methods(problem))
    return HeadCase(TOP, shape, dtype, found, "forward", problem)


def _draws(classes: int, device: torch.device) -> HeadCase:
    found = tuple(draws.methods(classes, device))
    return HeadCase(DRAWS, (classes,), "float64", found, "forward", None)


def _trees(classes: int, made_by: dict[str, builders.Prepare]) -> HeadCase:
    found = tuple(builders.methods(made_by, classes))
    return HeadCase(TREES, (classes,), "float64", found, "forward", None)
