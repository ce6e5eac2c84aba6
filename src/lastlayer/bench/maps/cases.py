"""Which maps are compared on which sizes, and what their float64 truth is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lastlayer import maps
from lastlayer.bench.cases import DTYPES, OURS, Case, Direction, Method, PlanError, competing
from lastlayer.bench.maps import peers as peer_methods

SECTIONS = ("shapes", "scales", "widths")
K = 64
MAX_SUPPORT = 128
TOPK = f"topk_softmax {K}"

CUDA_SHAPES = ((65536, 1024), (16384, 8192), (8192, 32768), (4096, 131072))
CPU_SHAPES = ((4096, 64), (1024, 1024), (128, 32768), (64, 131072))
SCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
DEFAULT_SCALE = 2.0
DEFAULT_DTYPES = {"cuda": ("float32", "bfloat16"), "cpu": ("float32",)}

# Exponents of two: the numbers of columns, and the constant number of scores.
CUDA_WIDTHS, CUDA_SWEEP = range(7, 21), 27
CPU_WIDTHS, CPU_SWEEP = range(6, 19, 2), 22


@dataclass(frozen=True)
class MapCase(Case):
    """Maps on scale · N(0, 1) scores."""

    scale: float

    @property
    def baseline(self) -> Method | None:
        """torch.softmax, where it is among the methods."""
        return SOFTMAX if SOFTMAX in self.methods else None

    @property
    def backward(self) -> bool:
        """Whether the gradient is part of the work."""
        return self.direction == "forward+backward"

    def title(self) -> str:
        """One line that names the case."""
        return f"{super().title()}, scale {self.scale:g}, {self.direction}"


_ALPHAS = {"sparsemax": 2.0, "entmax 1.5": 1.5, "entmax 1.25": 1.25}


def truth(computes: str, scores: Tensor) -> Tensor:
    """The probabilities that a function gives, by the reference."""
    if computes == "softmax":
        return torch.softmax(scores, -1)
    if computes == TOPK:
        return maps.topk_softmax(scores, K, impl="reference")
    return maps.entmax(scores, _ALPHAS[computes], impl="reference")


def _ours(computes: str) -> Method:
    if computes == "sparsemax":
        return Method(computes, OURS, computes, lambda: maps.sparsemax, op="entmax")
    if computes == TOPK:
        return Method(
            TOPK, OURS, TOPK, lambda: lambda x: maps.topk_softmax(x, K), op="topk_softmax"
        )
    alpha = _ALPHAS[computes]
    return Method(computes, OURS, computes, lambda: lambda x: maps.entmax(x, alpha), op="entmax")


def _support() -> Method:
    return Method(
        f"entmax_support 1.5, {MAX_SUPPORT}",
        OURS,
        "entmax 1.5",
        lambda: lambda x: maps.entmax_support(x, 1.5, MAX_SUPPORT),
        op="entmax_support",
        variant=True,
    )


def _torch_topk(scores: Tensor) -> Tensor:
    values, classes = scores.topk(K)
    return torch.zeros_like(scores).scatter_(-1, classes, values.softmax(-1))


SOFTMAX = Method("softmax", "torch", "softmax", lambda: lambda x: torch.softmax(x, -1))
TORCH_TOPK = Method("topk + softmax + scatter", "torch", TOPK, lambda: _torch_topk)
ENTMAX_SPARSEMAX = peer_methods.entmax_exact("sparsemax", "sparsemax")
ENTMAX_15 = peer_methods.entmax_exact("entmax15", "entmax 1.5")
ADASPLASH_SPARSEMAX = peer_methods.adasplash("triton_sparsemax", "sparsemax")
ADASPLASH_15 = peer_methods.adasplash("triton_entmax15", "entmax 1.5")
LIGER_SPARSEMAX = peer_methods.liger_sparsemax()


def _forward_methods(device: str, n: int, *, quick: bool) -> tuple[Method, ...]:
    ours = [_ours("sparsemax"), _ours("entmax 1.5"), _ours("entmax 1.25"), _support()]
    others = [ENTMAX_SPARSEMAX, ENTMAX_15]
    if n > K:
        ours.append(_ours(TOPK))
        others.insert(0, TORCH_TOPK)
    if not quick:
        # A bisection takes seconds on a CPU, where one alpha has to do.
        alphas = (
            {"entmax 1.5": 1.5, "entmax 1.25": 1.25} if device == "cuda" else {"entmax 1.25": 1.25}
        )
        others += [peer_methods.entmax_bisect(alpha, name) for name, alpha in alphas.items()]
    if device == "cuda":
        others += [LIGER_SPARSEMAX, ADASPLASH_SPARSEMAX, ADASPLASH_15]
    return (SOFTMAX, *ours, *others)


def _backward_methods(device: str) -> tuple[Method, ...]:
    on_cuda = (ADASPLASH_SPARSEMAX, LIGER_SPARSEMAX)
    others = on_cuda if device == "cuda" else (ENTMAX_SPARSEMAX, ENTMAX_15)
    return (SOFTMAX, _ours("sparsemax"), _ours("entmax 1.5"), *others)


def _scale_methods(device: str) -> tuple[Method, ...]:
    peer = ADASPLASH_SPARSEMAX if device == "cuda" else ENTMAX_SPARSEMAX
    return (_ours("sparsemax"), _ours("entmax 1.5"), peer)


def _width_methods(device: str, n: int) -> tuple[Method, ...]:
    others = [ENTMAX_SPARSEMAX]
    if device == "cuda":
        others.append(ADASPLASH_SPARSEMAX)
        if n <= peer_methods.LIGER_WIDEST:
            others.append(LIGER_SPARSEMAX)
    return (SOFTMAX, _ours("sparsemax"), _ours("entmax 1.5"), *others)


def _shapes(device: str, *, quick: bool) -> tuple[tuple[int, int], ...]:
    if device == "cuda":
        return CUDA_SHAPES[:2] if quick else CUDA_SHAPES
    return CPU_SHAPES[:3] if quick else CPU_SHAPES


def _scaled_shapes(device: str, *, quick: bool) -> tuple[tuple[int, int], ...]:
    if quick:
        return ()
    return CUDA_SHAPES if device == "cuda" else CPU_SHAPES[1:2]


def _sweep(device: str, *, quick: bool) -> list[tuple[int, int]]:
    widths, scores = (CUDA_WIDTHS, CUDA_SWEEP) if device == "cuda" else (CPU_WIDTHS, CPU_SWEEP)
    step = 2 if quick else 1
    return [(2 ** (scores - width), 2**width) for width in widths[::step]]


def plan(
    place: torch.device,
    *,
    quick: bool,
    peers: bool,
    dtypes: tuple[str, ...] = (),
    widths: bool = False,
) -> list[MapCase]:
    """All cases of a run, those that matter most first.

    Args:
        place: a CPU or a GPU.
        quick: few shapes and no other scales.
        peers: leave the peers' methods in.
        dtypes: names of torch dtypes; none means those that the device is judged by.
        widths: sweep over widths in a quick run too, in the first dtype.

    Raises:
        PlanError: a dtype is not known.
    """
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise PlanError(
            f"dtypes: expected names among {', '.join(DTYPES)}, got {', '.join(unknown)}"
        )
    device = place.type
    dtypes = dtypes or DEFAULT_DTYPES[device]

    def case(
        section: str,
        shape: tuple[int, int],
        dtype: str,
        methods: tuple[Method, ...],
        scale: float = DEFAULT_SCALE,
        direction: Direction = "forward",
    ) -> MapCase:
        kept = competing(methods, peers=peers)
        return MapCase(section, shape, dtype, kept, direction, scale)

    cases = []
    for shape in _shapes(device, quick=quick):
        for dtype in dtypes:
            forward = _forward_methods(device, shape[1], quick=quick)
            cases.append(case("shapes", shape, dtype, forward))
            cases.append(
                case(
                    "shapes", shape, dtype, _backward_methods(device), direction="forward+backward"
                )
            )
    for shape in _scaled_shapes(device, quick=quick):
        for dtype in dtypes:
            cases += [case("scales", shape, dtype, _scale_methods(device), s) for s in SCALES]
    if widths or not quick:
        for shape in _sweep(device, quick=quick):
            cases.append(case("widths", shape, dtypes[0], _width_methods(device, shape[1])))
    return cases
