"""InfoNCE over a batch of pairs, with the gradients of queries, keys and the temperature."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import driver
from benchmarks.driver import BACKWARD, Call, Case, Family, Inputs, Method, Results
from benchmarks.record import OURS
from lastlayer import losses

SYMMETRIC, ONE_WAY = "symmetric", "one-way"
MAIN, NAMES = "info_nce", ("query", "key", "temperature")
# Pairs and the size of their vectors, by device and whether the run is quick.
SHAPES: dict[tuple[str, bool], dict[str, list[tuple[int, int]]]] = {
    ("cuda", False): {
        SYMMETRIC: [(8192, 768), (32768, 768), (131072, 768)],
        ONE_WAY: [(32768, 768)],
    },
    ("cpu", False): {SYMMETRIC: [(1024, 128), (2048, 128), (4096, 128)], ONE_WAY: [(4096, 128)]},
    ("cuda", True): {SYMMETRIC: [(8192, 256)], ONE_WAY: [(8192, 256)]},
    ("cpu", True): {SYMMETRIC: [(512, 64)], ONE_WAY: [(512, 64)]},
}
TEMPERATURE = 0.07
# Standard deviation of the vectors of a pair around their common mean.
SPREAD = 1.5
MADE = (
    f"query and key = c + {SPREAD:g}·N(0, 1) with c ~ N(0, 1) for each pair, temperature "
    f"{TEMPERATURE:g}, with a gradient"
)
# The temperature has one gradient, a sum over all pairs.
_TOLERANCES = {"float32": {"temperature": 1e-4}, "bfloat16": {"temperature": 1e-2}}

NOTES = f"""\
- A shape is pairs × vector size. Times are of forward + backward, with the gradients of queries,
  keys and the temperature. Inputs: {MADE}.
- Verified: the loss and all gradients of the whole batch, against float64.
- TFLOP/s are 6·pairs²·width over the time, the three products of a loss with stored similarities,
  for every method.
- torch eager is `cross_entropy` on all cosines over the temperature (symmetric: on their transpose
  too); compiled is `torch.compile` of the same. A method whose similarities would not fit in memory
  is left out.
"""


def _cosines(query: Tensor, key: Tensor) -> Tensor:
    return functional.normalize(query, dim=-1) @ functional.normalize(key, dim=-1).T


def _one_way(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    own = torch.arange(len(query), device=query.device)
    return functional.cross_entropy(_cosines(query, key).float() / temperature, own)


def _both_ways(query: Tensor, key: Tensor, temperature: Tensor) -> Tensor:
    scores = _cosines(query, key).float() / temperature
    own = torch.arange(len(query), device=query.device)
    return (functional.cross_entropy(scores, own) + functional.cross_entropy(scores.T, own)) / 2


def _ours(query: Tensor, key: Tensor, temperature: Tensor, **options: Any) -> Tensor:
    return losses.info_nce(query, key, temperature=temperature, **options)


def _info_nce_pytorch() -> Call:
    install = "pip install info-nce-pytorch"
    function = driver.peer("info-nce-pytorch", "info_nce", "info_nce", install)
    return lambda q, k, t: function(q, k, temperature=t)


def _open_clip() -> Call:
    install = "pip install open-clip-torch"
    loss = driver.peer("open-clip-torch", "open_clip.loss", "ClipLoss", install)()

    def function(query: Tensor, key: Tensor, temperature: Tensor) -> Any:
        query, key = functional.normalize(query, dim=-1), functional.normalize(key, dim=-1)
        return loss(query, key, 1.0 / temperature.to(query.dtype))

    return function


def _methods(section: str, shape: tuple[int, ...], device: str, *, quick: bool) -> list[Method]:
    """The baseline and the other methods."""
    symmetric, dtype = section == SYMMETRIC, driver.USUAL_DTYPE[device]
    scores, itemsize = shape[0] * shape[0], driver.DTYPES[dtype].itemsize
    plain = _both_ways if symmetric else _one_way
    # Peak memory: the similarities, and the saved tensors of the softmax of each direction.
    held = scores * (4 + 2 * (3 if symmetric else 2) * itemsize)

    def made(name: str, source: str, load: Any, scratch: int = 0) -> Method:
        return Method(name, source, load, section, scratch, tolerances=_TOLERANCES[dtype])

    def ours(chunk_rows: str) -> Any:
        return lambda: partial(_ours, symmetric=symmetric, chunk_rows=chunk_rows)

    eager = made("eager", "torch", lambda: plain, held)
    compiled = made("compiled", "torch", partial(driver.compiled, plain), scores * 3 * itemsize)
    mine = [made(MAIN, OURS, ours("auto")), made(f"{MAIN}, low memory", OURS, ours("low"))]
    if symmetric:
        other = made("ClipLoss", "open-clip-torch", _open_clip, held)
    else:
        other = made("info_nce", "info-nce-pytorch", _info_nce_pytorch, held)
    if device == "cpu":
        # Compiling takes longer than a whole quick run.
        return [eager, *mine, *([] if quick else [compiled]), other]
    return [compiled, *mine, eager, other]


def reference(section: str, inputs: Inputs) -> Results:
    """The mean loss and its gradients; symmetric is the mean of both directions."""
    query, key, temperature = leaves = driver.in_float64(*inputs)
    ways = [(query, key), (key, query)] if section == SYMMETRIC else [(query, key)]
    pairs = len(query)

    def row_losses(part: slice) -> Tensor:
        own = torch.arange(pairs, device=query.device)[part]
        scores = (_cosines(one[part], other) / temperature for one, other in ways)
        found = [functional.cross_entropy(each, own, reduction="none") for each in scores]
        return torch.stack(found).mean(0)

    return driver.exact_step(dict(zip(NAMES, leaves, strict=True)), row_losses, pairs, pairs)


def _case(section: str, shape: tuple[int, int], device: str, quick: bool) -> Case:
    dtype = driver.USUAL_DTYPE[device]

    def draw(on: torch.device, seed: int) -> Inputs:
        """Pairs whose vectors are more similar to each other than to all others."""
        generator = torch.Generator(on).manual_seed(seed)
        common = driver.normal(shape, generator)
        query, key = (
            (common + SPREAD * driver.normal(shape, generator)).to(driver.DTYPES[dtype])
            for _ in range(2)
        )
        return query, key, torch.tensor(TEMPERATURE, device=on)

    pairs, width = shape
    found = tuple(_methods(section, shape, device, quick=quick))
    return Case(
        section, shape, dtype, BACKWARD, found, draw, NAMES, reference,
        flop=6 * pairs * pairs * width, facts={"inputs": MADE},
    )  # fmt: skip


def _cases(place: torch.device, quick: bool) -> list[Case]:
    return [
        _case(section, shape, place.type, quick)
        for section, shapes in SHAPES[place.type, quick].items()
        for shape in shapes
    ]


FAMILY = Family(name="contrastive", title="Contrastive losses", cases=_cases, notes=NOTES)
