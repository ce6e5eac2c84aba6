"""Maps from scores to probabilities: sparsemax, entmax and top-k softmax."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import driver
from benchmarks.driver import BACKWARD, DTYPES, FORWARD, Call, Case, Inputs, Method, Results, Work
from benchmarks.record import OURS
from lastlayer import maps

K, MAX_SUPPORT = 64, 128
TOPK = f"topk_softmax {K}"
ALPHAS = {"sparsemax": 2.0, "entmax 1.5": 1.5, "entmax 1.25": 1.25}
SUPPORT = f"entmax_support 1.5, {MAX_SUPPORT}"

SHAPES = {
    "cuda": ((65536, 1024), (16384, 8192), (8192, 32768), (4096, 131072)),
    "cpu": ((4096, 64), (1024, 1024), (128, 32768), (64, 131072)),
}
SCALES, USUAL_SCALE = (0.01, 0.1, 1.0, 10.0, 100.0), 2.0
SCALED_SHAPES = {"cuda": SHAPES["cuda"], "cpu": SHAPES["cpu"][1:2]}
DTYPES_ON = {"cuda": ("float32", "bfloat16"), "cpu": ("float32",)}
# Exponents of two: of the numbers of columns, and of the constant number of scores.
WIDTHS = {"cuda": (range(7, 21), 27), "cpu": (range(6, 19, 2), 22)}
_ENTMAX_FIRST_K = 512
# Liger's rows must fit in one Triton block.
_LIGER_WIDEST = 65536

NOTES = """\
- A shape is rows × columns. Scores are scale · N(0, 1). forward+backward is the map and
  `torch.autograd.grad` with a given upstream gradient.
- Verified: up to 64 rows are compared with the float64 reference, and the sums of all rows with 1.
- Bytes are the minimum traffic: forward reads and writes one matrix, backward reads two more and
  writes one. The limit is a copy of a large buffer in the same run, bytes read plus written.
- Peers run with their default settings; the entmax package gets `k=512` on longer rows. AdaSplash
  tunes its kernel once per dtype, on the first shape.
"""


def truth(computes: str, scores: Tensor) -> Tensor:
    """Probabilities by the reference implementation."""
    if computes == "softmax":
        return torch.softmax(scores, -1)
    if computes == TOPK:
        return maps.topk_softmax(scores, K, impl="reference")
    return maps.entmax(scores, ALPHAS[computes], impl="reference")


def _torch_topk(scores: Tensor) -> Tensor:
    values, classes = scores.topk(K)
    return torch.zeros_like(scores).scatter_(-1, classes, values.softmax(-1))


def _entmax_package(name: str, **options: Any) -> Call:
    function = driver.peer("entmax", "entmax", name)

    def call(scores: Tensor) -> Any:
        # With k it sorts only the k largest scores at first; shorter rows are sorted completely.
        first_k = _ENTMAX_FIRST_K if scores.shape[-1] > _ENTMAX_FIRST_K else None
        return function(scores, dim=-1, **options or {"k": first_k})

    return call


def _liger() -> Call:
    function = driver.peer("liger-kernel", "liger_kernel.ops.sparsemax", "LigerSparsemaxFunction")
    return lambda scores: function.apply(scores, -1)


_SPLASH = partial(driver.peer, "adasplash", "adasplash")
# By source and name: the function that is computed, and a function that loads the map.
METHODS: dict[tuple[str, str], tuple[str, Callable[[], Call]]] = {
    ("torch", "softmax"): ("softmax", lambda: partial(torch.softmax, dim=-1)),
    (OURS, "sparsemax"): ("sparsemax", lambda: maps.sparsemax),
    (OURS, "entmax 1.5"): ("entmax 1.5", lambda: partial(maps.entmax, alpha=1.5)),
    (OURS, "entmax 1.25"): ("entmax 1.25", lambda: partial(maps.entmax, alpha=1.25)),
    (OURS, SUPPORT): (
        "entmax 1.5", lambda: partial(maps.entmax_support, alpha=1.5, max_support=MAX_SUPPORT),
    ),
    (OURS, TOPK): (TOPK, lambda: partial(maps.topk_softmax, k=K)),
    ("torch", "topk + softmax + scatter"): (TOPK, lambda: _torch_topk),
    ("entmax", "sparsemax"): ("sparsemax", partial(_entmax_package, "sparsemax")),
    ("entmax", "entmax15"): ("entmax 1.5", partial(_entmax_package, "entmax15")),
    **{
        ("entmax", f"entmax_bisect {alpha}"): (
            f"entmax {alpha}", partial(_entmax_package, "entmax_bisect", alpha=alpha)
        )
        for alpha in (1.5, 1.25)
    },
    ("liger-kernel", "sparsemax"): ("sparsemax", _liger),
    ("adasplash", "triton_sparsemax"): ("sparsemax", partial(_SPLASH, "triton_sparsemax")),
    ("adasplash", "triton_entmax15"): ("entmax 1.5", partial(_SPLASH, "triton_entmax15")),
}  # fmt: skip
SOFTMAX, SPARSEMAX, ENTMAX = ("torch", "softmax"), (OURS, "sparsemax"), (OURS, "entmax 1.5")
ENTMAX_PACKAGE = (("entmax", "sparsemax"), ("entmax", "entmax15"))
LIGER, ADASPLASH = ("liger-kernel", "sparsemax"), ("adasplash", "triton_sparsemax")


def _methods(section: str, device: str, columns: int, direction: str, *, quick: bool) -> list[Any]:
    """The methods to compare, as keys of :data:`METHODS`."""
    cuda = device == "cuda"
    if section == "scales":
        return [SPARSEMAX, ENTMAX, ADASPLASH if cuda else ENTMAX_PACKAGE[0]]
    if section == "widths":
        others = [ADASPLASH, *([LIGER] if columns <= _LIGER_WIDEST else [])] if cuda else []
        return [SOFTMAX, SPARSEMAX, ENTMAX, ENTMAX_PACKAGE[0], *others]
    if direction == BACKWARD:
        return [SOFTMAX, SPARSEMAX, ENTMAX, *((ADASPLASH, LIGER) if cuda else ENTMAX_PACKAGE)]
    found = list(METHODS)
    if columns <= K:
        found = [key for key in found if METHODS[key][0] != TOPK]
    if not cuda:
        # A bisection takes seconds on a CPU, so only one alpha is measured.
        left_out = ("liger-kernel", "adasplash")
        found = [k for k in found if k[0] not in left_out and k[1] != "entmax_bisect 1.5"]
    return [key for key in found if not (quick and "bisect" in key[1])]


def _loaded(load: Callable[[], Call], direction: str) -> Work:
    function = load()

    def forward(scores: Tensor) -> Results:
        made = function(scores)
        return {"entries": made} if isinstance(made, Tensor) else made._asdict()

    def forward_and_backward(scores: Tensor, cotangent: Tensor) -> Results:
        made = function(scores)
        (gradient,) = torch.autograd.grad(made, scores, cotangent)
        return {"entries": made.detach(), "gradient": gradient}

    return Work(forward_and_backward if direction == BACKWARD else forward)


def _case(
    section: str, shape: tuple[int, int], dtype: str, direction: str, device: str, *, quick: bool,
    scale: float = USUAL_SCALE,
) -> Case:  # fmt: skip
    rows, columns = shape
    itemsize, backward = DTYPES[dtype].itemsize, direction == BACKWARD
    # Bytes of a compact result instead of a matrix: values, indices and the size of the support.
    compact = rows * (columns * itemsize + MAX_SUPPORT * (itemsize + 8) + 8)

    def method(key: tuple[str, str]) -> Method:
        (source, name), (computes, load) = key, METHODS[key]
        moved = compact if name == SUPPORT else None
        return Method(name, source, lambda: _loaded(load, direction), computes, bytes=moved)

    def draw(on: torch.device, seed: int) -> Inputs:
        generator = torch.Generator(on).manual_seed(seed)
        scores = driver.normal(shape, generator).mul_(scale).to(DTYPES[dtype])
        return (scores, driver.normal(shape, generator, dtype)) if backward else (scores,)

    keys = _methods(section, device, columns, direction, quick=quick)
    return Case(
        section, shape, dtype, direction, tuple(map(method, keys)), draw,
        ("scores",) if backward else (), reference, compare,
        baseline=section != "scales", bytes=rows * columns * itemsize * (5 if backward else 2),
        facts={"scale": scale},
    )  # fmt: skip


def _cases(place: torch.device, quick: bool) -> list[Case]:
    device = place.type
    dtypes = DTYPES_ON[device]
    shapes = SHAPES[device][: {"cuda": 2, "cpu": 3}[device] if quick else None]

    case = partial(_case, device=device, quick=quick)
    cases = [
        case("shapes", shape, dtype, direction)
        for shape in shapes for dtype in dtypes for direction in (FORWARD, BACKWARD)
    ]  # fmt: skip
    if not quick:
        cases += [
            case("scales", shape, dtype, FORWARD, scale=scale)
            for shape in SCALED_SHAPES[device] for dtype in dtypes for scale in SCALES
        ]  # fmt: skip
    widths, scores = WIDTHS[device]
    swept = [(2 ** (scores - width), 2**width) for width in widths[:: 3 if quick else 1]]
    return cases + [case("widths", shape, dtypes[0], FORWARD) for shape in swept]


def reference(computes: str, inputs: Inputs) -> Results:
    """Float64 probabilities, and the gradient if wanted, for a sample of rows."""
    scores, *cotangent = inputs
    rows = _sample_rows(scores)
    leaf = scores[rows].double().requires_grad_()
    exact = truth(computes, leaf)
    results = {"rows": rows, "entries": exact.detach()}
    if cotangent:
        (results["gradient"],) = torch.autograd.grad(exact, leaf, cotangent[0][rows].double())
    return results


def compare(method: Method, results: Results, exact: Results, inputs: Inputs) -> dict[str, float]:
    """The largest error of an entry and of a row sum, and the relative error of the gradient."""
    rows, true = exact["rows"], exact["entries"]
    if method.name == SUPPORT:
        return _compare_support(results, rows, true)
    made = results["entries"]
    sums = _largest(made.sum(-1, dtype=torch.float64) - 1)
    if "gradient" in results:
        # The gradient is discontinuous where a score enters the support. Rows whose support changed
        # by rounding have two correct gradients and are left out.
        same = ((made[rows] > 0) == (true > 0)).all(-1)
        error = driver.relative_error(results["gradient"][rows][same], exact["gradient"][same])
        return {"sums": sums, "gradient": error if 2 * int(same.sum()) >= len(rows) else torch.inf}
    got = made[rows].double()
    if method.computes == TOPK:
        true = _nearest_of_ties(inputs[0][rows].double(), true, got)
    return {"sums": sums, "entries": _largest(got - true)}


def _compare_support(results: Results, rows: Tensor, true: Tensor) -> dict[str, float]:
    """Scatter the compact result back into rows whose support fits, and compare those."""
    values, sizes = results["values"], results["size"]
    fits = sizes <= MAX_SUPPORT
    # Padding has index 0 and value 0, so adding it does not change a real entry at index 0.
    dense = torch.zeros_like(true)
    dense.scatter_add_(-1, results["indices"][rows], values[rows].double())
    too_small = bool((sizes[rows] < (true > 1e-6).sum(-1)).any())
    unknown = too_small or not bool(fits.any())
    return {
        "sums": _largest(values.sum(-1, dtype=torch.float64)[fits] - 1),
        "entries": torch.inf if unknown else _largest((dense - true)[fits[rows]]),
    }


def _nearest_of_ties(scores: Tensor, true: Tensor, got: Tensor) -> Tensor:
    """The reference, but accepting any choice among scores that are tied for the last place."""
    last = scores.topk(K).values[..., -1:]
    value = true.masked_fill(scores != last, 0).amax(-1, keepdim=True)
    return torch.where(scores == last, torch.where(got > value / 2, value, 0.0), true)


def _sample_rows(scores: Tensor) -> Tensor:
    """The first row, the last row, and random rows."""
    (rows, columns), device = scores.shape, scores.device
    # float64 references of wide rows are slow on a CPU; row sums are checked on all rows anyway.
    most = 64 if device.type == "cuda" else max(4, min(64, 2**19 // max(columns, 1)))
    if rows <= most:
        return torch.arange(rows, device=device)
    some = torch.randint(rows, (most,), device=device)
    some[0], some[-1] = 0, rows - 1
    return some


def _largest(errors: Tensor) -> float:
    """The largest absolute value; NaN if any is NaN, 0 if there is none."""
    return float(errors.abs().max()) if errors.numel() else 0.0


FAMILY = driver.Family(
    "maps", "Maps", _cases, NOTES, {"widths": "columns", "scales": "scale"}, pictured=("widths",)
)
