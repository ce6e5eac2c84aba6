"""Losses on a linear layer, with the gradients of hidden states and class vectors."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import driver, maps
from benchmarks.driver import BACKWARD, DTYPES, Call, Case, Family, Inputs, Method, Results, Work
from benchmarks.record import OURS
from lastlayer import fused, losses

LARGE, SMALL, SPARSE = "large width", "small width", "sparse"
CROSS_ENTROPY, TOPK = "cross_entropy", maps.TOPK
# Rows, hidden size, classes; by device and whether the run is quick.
SHAPES: dict[tuple[str, bool], dict[str, tuple[tuple[int, int, int], ...]]] = {
    ("cuda", False): {
        LARGE: ((8192, 4096, 128256), (8192, 2048, 256000), (16384, 1024, 50304)),
        SMALL: ((16384, 128, 1_000_000), (16384, 64, 200_000)),
        SPARSE: ((8192, 2048, 128256),),
    },
    ("cpu", False): {LARGE: ((512, 256, 100_000),), SMALL: (), SPARSE: ((256, 256, 32_000),)},
    ("cuda", True): {
        LARGE: ((4096, 1024, 32000),),
        SMALL: ((4096, 64, 50000),),
        SPARSE: ((2048, 512, 32000),),
    },
    ("cpu", True): {LARGE: ((256, 128, 8000),), SMALL: (), SPARSE: ((128, 128, 8000),)},
}
# With sparse probabilities, rounding of scores changes the probabilities more, and changes which
# classes are in the support.
_SPARSE_TOLERANCES = {
    "float64": {"loss": 1e-12, "hidden": 1e-9, "weight": 1e-9},
    "float32": {"loss": 1e-5, "hidden": 5e-3, "weight": 5e-3},
    "bfloat16": {"loss": 1e-2, "hidden": 5e-2, "weight": 5e-2},
}
# Rows per chunk of the baseline that calls torch.compile on chunks.
CHUNK_ROWS = 2048
# Trained-like scores: the range of the target's score, the number of classes with similar scores,
# and the range of their share of it.
LEAD, NEAR_CLASSES, NEAREST = (4.0, 8.0), 32, (0.5, 1.0)
VERY_FLAT = 0.01
# Peers: source, module, name, and the install command if it is not in our extras.
CCE = ("cut-cross-entropy", "cut_cross_entropy", "linear_cross_entropy")
QUACK = ("quack-kernels", "quack.linear_cross_entropy", "chunked_linear_cross_entropy",
         "pip install quack-kernels")  # fmt: skip


def _class_vectors(classes: int, width: int, generator: torch.Generator) -> Tensor:
    # Vectors of norm about 1, so that scores have the scale of the hidden states' entries.
    return driver.normal((classes, width), generator).div_(width**0.5)


def _flat(
    shape: tuple[int, ...], generator: torch.Generator, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, classes = shape
    hidden = driver.normal((rows, width), generator).mul_(scale)
    weight = _class_vectors(classes, width, generator)
    target = torch.randint(classes, (rows,), generator=generator, device=generator.device)
    return hidden, weight, target


def _trained(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, classes = shape
    device = generator.device
    weight = _class_vectors(classes, width, generator)
    frequency = 1.0 / torch.arange(1, classes + 1, device=device)
    target = torch.multinomial(frequency, rows, replacement=True, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        drawn = torch.rand(rows, 1, generator=generator, device=device)
        return drawn.mul_(high - low).add_(low)

    lead = uniform(*LEAD)
    hidden = driver.normal((rows, width), generator) + lead * weight[target]
    for step in range(1, min(NEAR_CLASSES, classes - 1) + 1):
        hidden += lead * uniform(*NEAREST) * weight[(target + step) % classes]
    return hidden, weight, target


TRAINED, FLAT = "trained-like", "flat"
# By the kind of scores: a description of the inputs, and a function that draws them in float32.
KINDS: dict[str, tuple[str, Call]] = {
    TRAINED: (
        (
            "class vectors w ~ N(0, 1)/√width, target y by Zipf's law (p ∝ 1/(1 + y)), "
            f"hidden = a·(w_y + Σ r_j·w_(y+j), j = 1 … {NEAR_CLASSES}) + N(0, 1), "
            f"a ~ U({LEAD[0]:g}, {LEAD[1]:g}), r_j ~ U({NEAREST[0]:g}, {NEAREST[1]:g}): "
            "the target leads, its neighbours come close, all others are noise"
        ),
        _trained,
    ),
    FLAT: (
        "hidden ~ N(0, 1), class vectors ~ N(0, 1)/√width, targets uniform: scores ~ N(0, 1)",
        _flat,
    ),
    "very flat": (
        f"as flat, with hidden ~ {VERY_FLAT:g}·N(0, 1): scores ~ {VERY_FLAT:g}·N(0, 1)",
        partial(_flat, scale=VERY_FLAT),
    ),
}
_MADE = "\n".join(f"  - *{name}*: {made}." for name, (made, _) in KINDS.items())

NOTES = f"""\
- A shape is rows × hidden size × classes. Times are of forward + backward, with the gradients of
  hidden states and class vectors. There are three kinds of scores:
{_MADE}
- Verified: the loss and both gradients of the whole problem, against float64.
- TFLOP/s are 6·rows·width·classes over the time, the three products of a linear layer, for every
  method. The limit is a product of two square matrices in the same run.
- torch eager is `cross_entropy(linear(hidden, weight).float(), target)`, and compiled is
  `torch.compile` of it, also called on chunks of {CHUNK_ROWS} rows. *Stored scores* are our losses
  on the output of `linear`. Peers run with their default settings; Cut Cross-Entropy skips parts of
  the gradient by default. A method whose scores would not fit in memory is left out.
"""


# Our losses on hidden states and class vectors, and on stored scores.
LOSSES: dict[str, tuple[Call, Call]] = {
    "sparsemax": (partial(fused.linear_entmax_loss, alpha=2.0), losses.sparsemax_loss),
    "entmax 1.5": (partial(fused.linear_entmax_loss, alpha=1.5), losses.entmax_loss),
    TOPK: (
        partial(fused.linear_topk_softmax_loss, k=maps.K),
        partial(losses.topk_softmax_loss, k=maps.K),
    ),
}


def _stored(name: str) -> Call:
    on_scores = LOSSES[name][1]
    return lambda h, w, y: on_scores(functional.linear(h, w), y)


def _into_float32() -> Work:
    """The gradient of the class vectors is accumulated in a float32 buffer, and returned there."""

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> Results:
        total = torch.zeros_like(weight, dtype=torch.float32)
        loss = fused.linear_cross_entropy(hidden, weight, target, weight_grad=total)
        results = driver.loss_step(lambda *_: loss, "hidden").call(hidden)
        weight.grad = None
        return {**results, "weight": total}

    return Work(call, replayed=False)


def _eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), target)


def _product_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, reduction: str = "mean"
) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).float(), target, reduction=reduction)


def _on_chunks() -> Work:
    compiled = driver.compiled(partial(_product_loss, reduction="sum"))

    def call(hidden: Tensor, weight: Tensor, target: Tensor) -> dict[str, Any]:
        total, gradients = torch.zeros((), device=hidden.device), []
        chunks = zip(hidden.detach().split(CHUNK_ROWS), target.split(CHUNK_ROWS), strict=True)
        for some, their_target in chunks:
            leaf = some.requires_grad_()
            loss = compiled(leaf, weight, their_target) / hidden.shape[0]
            loss.backward()
            total += loss.detach()
            gradients.append(leaf.grad)
        of_weight, weight.grad = weight.grad, None
        return {"loss": total, "hidden": torch.cat(gradients), "weight": of_weight}

    return Work(call, replayed=False)


def _torch_fused() -> Call:
    function = getattr(functional, "linear_cross_entropy", None)
    if function is None:
        raise driver.PeerMissing("torch linear_cross_entropy", f"not in torch {torch.__version__}")
    return partial(function, options=torch.nn.LinearCrossEntropyOptions())


def _liger() -> Call:
    name = "LigerFusedLinearCrossEntropyLoss"
    loss = driver.peer("liger-kernel", "liger_kernel.transformers", name)()
    return lambda h, w, y: loss(w, h, y)


def _methods(section: str, shape: tuple[int, ...], device: str, *, quick: bool) -> list[Method]:
    """The baseline and the other methods."""
    scores, dtype = shape[0] * shape[-1], driver.USUAL_DTYPE[device]
    itemsize = DTYPES[dtype].itemsize

    def made(name: str, source: str, load: Any, scratch: int = 0) -> Method:
        return Method(name, source, load, CROSS_ENTROPY, scratch=scratch)

    main = made(CROSS_ENTROPY, OURS, lambda: fused.linear_cross_entropy)
    if section == SPARSE:
        held, exact = scores * (8 + 4 * itemsize), _SPARSE_TOLERANCES[dtype]
        ways = (("", lambda name: LOSSES[name][0], 0), (", stored scores", _stored, held))
        return [main] + [
            Method(name + way, OURS, partial(load, name), name, scratch, tolerances=exact)
            for way, load, scratch in ways for name in LOSSES
        ]  # fmt: skip
    in_chunks = partial(fused.linear_cross_entropy, chunk_rows="low")
    low = made("cross_entropy, low memory", OURS, lambda: in_chunks)
    eager = made("eager", "torch", lambda: _eager, scores * (12 + itemsize))
    compile_loss = partial(driver.compiled, _product_loss)
    compiled = made("compiled", "torch", compile_loss, scores * 2 * itemsize)
    torch_fused = made("linear_cross_entropy", "torch", _torch_fused)
    if device == "cpu":
        # Compiling takes longer than a whole quick run. torch's own fused loss, with its small
        # chunks on a CPU, takes longer than a whole full run.
        return [eager, main, low, torch_fused if quick else compiled]
    others = [
        torch_fused,
        made("fused linear CE", "liger-kernel", _liger),
        made("linear CE", CCE[0], lambda: driver.peer(*CCE)),
        made("chunked linear CE", QUACK[0], lambda: driver.peer(*QUACK)),
    ]
    if section == SMALL:
        on_chunks = made(f"compiled, {CHUNK_ROWS}-row chunks", "torch", _on_chunks)
        return [compiled, main, eager, on_chunks, *others]
    float32 = made("cross_entropy, float32 sum", OURS, _into_float32)
    return [compiled, main, low, float32, eager, *others]


def reference(computes: str, inputs: Inputs) -> Results:
    """The mean loss ⟨p − y, scores⟩ + H(p), its gradients, and the supports."""
    (hidden, weight), target = driver.in_float64(*inputs[:2]), inputs[2]
    supports = []
    # Alpha 1 is the Shannon entropy.
    alpha = maps.ALPHAS.get(computes, 1.0)

    def row_losses(part: slice) -> Any:
        scores = hidden[part] @ weight.t()
        # The gradient of the loss is p − y, as if p were constant.
        probs = maps.truth("softmax" if computes == CROSS_ENTROPY else computes, scores.detach())
        supports.append((probs > 0).sum(-1))
        if alpha == 1.0:
            entropy = torch.special.entr(probs).sum(-1)
        else:
            entropy = (1.0 - probs.pow(alpha).sum(-1)) / (alpha * (alpha - 1.0))
        own = scores.gather(-1, target[part].unsqueeze(-1)).squeeze(-1)
        return torch.linalg.vecdot(probs, scores) - own + entropy

    leaves = {"hidden": hidden, "weight": weight}
    results = driver.exact_step(leaves, row_losses, len(hidden), len(weight))
    return results if computes == CROSS_ENTROPY else results | {"support": torch.cat(supports)}


def _case(section: str, shape: tuple[int, int, int], kind: str, device: str, quick: bool) -> Case:
    dtype = driver.USUAL_DTYPE[device]
    made, drawn = KINDS[kind]

    def draw(on: torch.device, seed: int) -> Inputs:
        hidden, weight, target = drawn(shape, torch.Generator(on).manual_seed(seed))
        return hidden.to(DTYPES[dtype]), weight.to(DTYPES[dtype]), target

    return Case(
        section, shape, dtype, BACKWARD, tuple(_methods(section, shape, device, quick=quick)), draw,
        ("hidden", "weight"), reference, flop=6 * math.prod(shape),
        facts={"scores": kind, "inputs": made},
    )  # fmt: skip


def _cases(place: torch.device, quick: bool) -> list[Case]:
    shapes = SHAPES[place.type, quick]
    return [
        _case(section, shape, kind, place.type, quick)
        for section in (LARGE, SMALL, SPARSE)
        for shape in shapes[section]
        for kind in (KINDS if section == SPARSE else (FLAT,))
    ]


FAMILY = Family(name="fused", title="Fused losses", cases=_cases, notes=NOTES)
