"""Multi-label losses, on a linear layer and on scores."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import driver
from benchmarks.driver import BACKWARD, FORWARD, Call, Case, Family, Inputs, Method, Results
from benchmarks.record import OURS
from lastlayer import fused, losses

LINEAR_ZLPR, LINEAR_BCE, DENSE_ZLPR = "linear + ZLPR", "linear + BCE", "ZLPR of scores"
MAIN = {
    LINEAR_ZLPR: "linear_zlpr_loss",
    LINEAR_BCE: "linear_bce_loss",
    DENSE_ZLPR: "zlpr_loss",
}
# Number of positive labels per row.
POSITIVES = 8
# Rows, hidden size and labels; for scores, rows and labels. By device and whether it is quick.
SHAPES: dict[tuple[str, bool], dict[str, tuple[int, ...]]] = {
    ("cuda", False): {
        LINEAR_ZLPR: (1024, 768, 1_000_000),
        LINEAR_BCE: (1024, 768, 1_000_000),
        DENSE_ZLPR: (4096, 32768),
    },
    ("cpu", False): {LINEAR_ZLPR: (128, 128, 200_000), DENSE_ZLPR: (256, 32768)},
    ("cuda", True): {
        LINEAR_ZLPR: (512, 256, 50_000),
        LINEAR_BCE: (512, 256, 50_000),
        DENSE_ZLPR: (1024, 8192),
    },
    ("cpu", True): {
        LINEAR_ZLPR: (64, 64, 10_000),
        LINEAR_BCE: (64, 64, 10_000),
        DENSE_ZLPR: (64, 4096),
    },
}
MADE = (
    "hidden ~ N(0, 1) and label vectors ~ N(0, 1/width), or scores ~ N(0, 1); "
    f"{POSITIVES} labels per row, one of each {POSITIVES}th of all"
)
NOTES = f"""\
- A shape is rows × hidden size × labels with a linear layer, with the gradients of hidden states
  and label vectors, and rows × labels on scores, with bool labels. Inputs: {MADE}.
- Verified: the loss and all gradients of the whole problem, against float64.
- TFLOP/s are 6·rows·width·labels over the time. On scores, the bytes are those of reading scores
  and labels once in forward and once more in backward, and of writing the gradient.
- torch eager stores all scores in float32, and for ZLPR gathers the positives by their indices;
  compiled is `torch.compile` of the same. Peers run with their default settings.
"""


def _beside_zero(terms: Tensor) -> Tensor:
    """``log(1 + sum e^x)``."""
    return torch.logaddexp(terms.logsumexp(-1), terms.new_zeros(()))


def _linear_zlpr(hidden: Tensor, weight: Tensor, positives: Tensor) -> Tensor:
    scores = functional.linear(hidden, weight).float()
    negatives = scores.scatter(1, positives, -torch.inf)
    return (_beside_zero(negatives) + _beside_zero(-scores.gather(1, positives))).mean()


def _linear_bce(hidden: Tensor, weight: Tensor, positives: Tensor) -> Tensor:
    scores = functional.linear(hidden, weight).float()
    target = torch.zeros_like(scores).scatter(1, positives, 1.0)
    total = functional.binary_cross_entropy_with_logits(scores, target, reduction="sum")
    return total / hidden.shape[0]


def _zlpr_rows(scores: Tensor, target: Tensor) -> Tensor:
    negatives = scores.masked_fill(target, -torch.inf)
    return _beside_zero(negatives) + _beside_zero((-scores).masked_fill(~target, -torch.inf))


def _dense_zlpr(scores: Tensor, target: Tensor) -> Tensor:
    return _zlpr_rows(scores.float(), target).mean()


def _bert4torch() -> Call:
    name = "MultilabelCategoricalCrossentropy"
    loss = driver.peer("bert4torch", "bert4torch.losses", name, "pip install bert4torch")()
    return lambda scores, target: loss(scores, target.to(scores.dtype))


# Our loss, and the same loss in torch.
LOSSES: dict[str, tuple[Call, Call]] = {
    LINEAR_ZLPR: (fused.linear_zlpr_loss, _linear_zlpr),
    LINEAR_BCE: (fused.linear_bce_loss, _linear_bce),
    DENSE_ZLPR: (losses.zlpr_loss, _dense_zlpr),
}


def _methods(section: str, shape: tuple[int, ...], device: str) -> list[Method]:
    """The baseline and the other methods."""
    scores, itemsize = shape[0] * shape[-1], driver.DTYPES[driver.USUAL_DTYPE[device]].itemsize
    (ours, plain), main = LOSSES[section], MAIN[section]

    def made(name: str, source: str, load: Any, scratch: int = 0) -> Method:
        return Method(name, source, load, section, scratch=scratch)

    found = [made(main, OURS, lambda: ours)]
    eager = made("eager", "torch", lambda: plain, scores * (20 + 2 * itemsize))
    others = []
    if section == DENSE_ZLPR:
        others.append(made("multilabel CE", "bert4torch", _bert4torch, scores * 12 * itemsize))
    else:
        low = partial(ours, chunk_classes="low")
        found.append(made(f"{main}, low memory", OURS, lambda: low))
    # On a CPU, compiling takes longer than everything else.
    if device == "cpu":
        return [eager, *found, *others]
    held = scores * (2 + 2 * itemsize)
    return [
        made("compiled", "torch", partial(driver.compiled, plain), held), *found, eager, *others
    ]  # fmt: skip


def reference(section: str, inputs: Inputs) -> Results:
    """The mean loss and the gradients of hidden and weight, or of the scores."""
    *tensors, target = inputs
    leaves = driver.in_float64(*tensors)

    def row_losses(part: slice) -> Tensor:
        if section == DENSE_ZLPR:
            return _zlpr_rows(leaves[0][part], target[part])
        scores = leaves[0][part] @ leaves[1].t()
        on = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, target[part], value=True)
        if section == LINEAR_ZLPR:
            return _zlpr_rows(scores, on)
        return -functional.logsigmoid(torch.where(on, scores, -scores))

    columns = target.shape[1] if section == DENSE_ZLPR else len(leaves[1])
    named = dict(zip(_names(section), leaves, strict=True))
    return driver.exact_step(named, row_losses, len(target), columns)


def _names(section: str) -> tuple[str, ...]:
    return ("scores",) if section == DENSE_ZLPR else ("hidden", "weight")


def _case(section: str, shape: tuple[int, ...], direction: str, device: str) -> Case:
    dtype, dense = driver.USUAL_DTYPE[device], section == DENSE_ZLPR
    rows, labels = shape[0], shape[-1]

    def draw(on: torch.device, seed: int) -> Inputs:
        """Scores ~ N(0, 1), and distinct labels within each row."""
        generator = torch.Generator(on).manual_seed(seed)
        within = labels // POSITIVES
        lists = torch.randint(within, (rows, POSITIVES), generator=generator, device=on)
        lists += within * torch.arange(POSITIVES, device=on)
        if dense:
            marked = torch.zeros(shape, dtype=torch.bool, device=on).scatter_(1, lists, value=True)
            return driver.normal(shape, generator, dtype), marked
        width = shape[1]
        weight = driver.normal((labels, width), generator).div_(width**0.5).to(driver.DTYPES[dtype])
        return driver.normal((rows, width), generator, dtype), weight, lists

    backward, itemsize = direction == BACKWARD, driver.DTYPES[dtype].itemsize
    moved = 2 * (itemsize + 1) + itemsize if backward else itemsize + 1
    return Case(
        section, shape, dtype, direction, tuple(_methods(section, shape, device)), draw,
        _names(section) if backward else (), reference,
        flop=None if dense else 6 * math.prod(shape),
        bytes=rows * labels * moved if dense else None, facts={"inputs": MADE},
    )  # fmt: skip


def _cases(place: torch.device, quick: bool) -> list[Case]:
    return [
        _case(section, shape, direction, place.type)
        for section, shape in SHAPES[place.type, quick].items()
        for direction in ((FORWARD, BACKWARD) if section == DENSE_ZLPR else (BACKWARD,))
    ]


FAMILY = Family(name="multilabel", title="Many labels", cases=_cases, notes=NOTES)
