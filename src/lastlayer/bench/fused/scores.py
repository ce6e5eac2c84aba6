"""The inputs of a linear layer with a loss on it, so that its scores are of some kind."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Trained-like scores: how high the target stands, and how many classes come close to it.
LOWEST_LEAD, HIGHEST_LEAD = 4.0, 8.0
NEAR_CLASSES, FARTHEST = 32, 0.5
VERY_FLAT = 0.01

Draw = Callable[[tuple[int, ...], torch.Generator], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Scores:
    """A kind of scores.

    Attributes:
        name: what it is called.
        made: how the inputs are made, in one sentence.
        draw: float32 hidden states and class vectors, and targets, from (rows, width, classes).
    """

    name: str
    made: str
    draw: Draw


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _class_vectors(classes: int, width: int, generator: torch.Generator) -> Tensor:
    # Of length 1 or so, so that scores have the size of the hidden states' entries.
    return _normal(classes, width, generator=generator).div_(width**0.5)


def _flat(scale: float) -> Draw:
    def draw(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        rows, width, classes = shape
        hidden = _normal(rows, width, generator=generator).mul_(scale)
        weight = _class_vectors(classes, width, generator)
        device = generator.device
        target = torch.randint(classes, (rows,), generator=generator, device=device)
        return hidden, weight, target

    return draw


def _trained(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, classes = shape
    device = generator.device
    weight = _class_vectors(classes, width, generator)
    frequency = 1.0 / torch.arange(1, classes + 1, device=device)
    target = torch.multinomial(frequency, rows, replacement=True, generator=generator)

    def uniform(low: float, high: float) -> Tensor:
        drawn = torch.rand(rows, 1, generator=generator, device=device)
        return drawn.mul_(high - low).add_(low)

    lead = uniform(LOWEST_LEAD, HIGHEST_LEAD)
    hidden = _normal(rows, width, generator=generator) + lead * weight[target]
    for step in range(1, min(NEAR_CLASSES, classes - 1) + 1):
        hidden += lead * uniform(FARTHEST, 1.0) * weight[(target + step) % classes]
    return hidden, weight, target


FLAT = Scores(
    "flat",
    "hidden ~ N(0, 1), class vectors ~ N(0, 1)/√width, targets uniform: scores ~ N(0, 1)",
    _flat(1.0),
)
VERY_FLAT_SCORES = Scores(
    "very flat",
    f"as flat, with hidden ~ {VERY_FLAT:g}·N(0, 1): scores ~ {VERY_FLAT:g}·N(0, 1)",
    _flat(VERY_FLAT),
)
TRAINED = Scores(
    "trained-like",
    "class vectors w ~ N(0, 1)/√width, target y by Zipf's law (p ∝ 1/(1 + y)), "
    f"hidden = a·(w_y + Σ r_j·w_(y+j), j = 1 … {NEAR_CLASSES}) + N(0, 1), "
    f"a ~ U({LOWEST_LEAD:g}, {HIGHEST_LEAD:g}), r_j ~ U({FARTHEST:g}, 1): "
    "the target leads, its neighbours come close, all others are noise",
    _trained,
)
