"""Small backbones, and the head for pairs, which is a loss of two hidden states.

Backbones map tokens ``(batch, length)`` to hidden states ``(batch, length, width)``, or rows of
features to ``(batch, width)``.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lastlayer.heads.base import SavedModule
from lastlayer.heads.recipes import Recipe
from lastlayer.lab.errors import LabError
from lastlayer.lab.options import IDENTITY, MODELS
from lastlayer.losses import info_nce

Features = Tensor | tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a backbone."""

    kind: str  # lstm, transformer or bag; identity for precomputed hidden states; own
    task: str  # lm, classification, multilabel or pairs
    inputs: int  # number of tokens or features
    width: int  # size of embeddings and hidden states
    layers: int = 1  # layers of an LSTM or a transformer
    length: int = 1  # length of a window of tokens
    dense: bool = False  # whether features are dense; they are standardised
    keys: int = 0  # number of features of keys; 0 if they are the same as those of queries


def build_body(settings: ModelSettings) -> nn.Module:
    """A backbone with new weights, which depend only on the state of torch's generator."""
    known = MODELS if settings.task == "lm" else ("bag", IDENTITY)
    if settings.kind not in known:
        raise LabError(
            f"--model: expected one of {', '.join(known)} for --task {settings.task}, "
            f"got {settings.kind!r}"
        )
    if settings.kind == IDENTITY:
        return nn.Identity()
    if settings.task == "pairs":
        return PairBody(settings.inputs, settings.width, settings.keys, dense=settings.dense)
    if settings.task != "lm":
        return FeatureBody(settings.inputs, settings.width, dense=settings.dense)
    if settings.kind == "lstm":
        return LSTMBody(settings.inputs, settings.width, settings.layers)
    if settings.kind == "transformer":
        return TransformerBody(settings.inputs, settings.width, settings.layers, settings.length)
    return BagBody(settings.inputs, settings.width)


def _embedding(inputs: int, width: int) -> nn.Embedding:
    """An embedding with row-sparse gradients: a step updates only the tokens of its batch."""
    made = nn.Embedding(inputs, width, sparse=True)
    nn.init.normal_(made.weight, std=0.1)
    return made


class LSTMBody(nn.Module):
    """Embeddings and an LSTM, whose state starts from zero in each window."""

    def __init__(self, inputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = _embedding(inputs, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(self.embedding(tokens))[0]
        return hidden


class BagBody(nn.Module):
    """A log-bilinear model: a sum of the last eight embeddings with weights by distance."""

    reach = 8

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.embedding = _embedding(inputs, width)
        self.weight = nn.Parameter(torch.empty(width, 1, self.reach))
        nn.init.normal_(self.weight, mean=1 / self.reach, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        vectors = self.embedding(tokens).transpose(1, 2)
        padded = functional.pad(vectors, (self.reach - 1, 0))
        summed = functional.conv1d(padded, self.weight, groups=padded.shape[1])
        return summed.transpose(1, 2)


class TransformerBody(nn.Module):
    """A small causal transformer with learned positions and pre-norm blocks."""

    def __init__(self, inputs: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = _embedding(inputs, width)
        self.positions = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        normed: Tensor = self.norm(hidden)
        return normed


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # Attention heads of size 32 if the width is a multiple of it.
        self.n_heads = width // 32 if width % 32 == 0 else 1
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix_in, self.mix_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.mix_in(self.before(hidden)).view(batch, length, 3, self.n_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix_out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.narrow(functional.gelu(self.wide(self.between(hidden))))
        return hidden + added


class FeatureBody(nn.Module):
    """A bag of features: the sum of their vectors times their values, then ReLU.

    Dense features are standardised with the mean and the variance that ``fit`` computes.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, inputs: int, width: int, *, dense: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(inputs, width, mode="sum", sparse=True)
        nn.init.normal_(self.bag.weight, std=0.1)
        self.bias = nn.Parameter(torch.full((width,), 0.01))
        if dense:
            self.register_buffer("shift", torch.zeros(inputs))
            self.register_buffer("scale", torch.ones(inputs))

    def fit(self, features: Tensor) -> None:
        """Standardise dense features to mean 0 and variance 1 over these rows; constants to 0."""
        spread, middle = torch.var_mean(features.double(), 0, correction=0)
        self.shift.copy_(middle)
        self.scale.copy_(torch.where(spread > 0, spread, 1.0).rsqrt())

    def forward(self, features: Features) -> Tensor:
        """Dense features ``(batch, inputs)``, or ids, offsets and values, to ``(batch, width)``."""
        if isinstance(features, Tensor):
            summed = ((features - self.shift) * self.scale) @ self.bag.weight
        else:
            ids, offsets, values = features
            summed = self.bag(ids, offsets, per_sample_weights=values)
        return functional.relu(summed + self.bias)


class PairBody(nn.Module):
    """Two towers, each a bag of features and a linear layer; one shared tower if ``keys`` is 0.

    ``keys`` is the number of features of keys, or 0 if they have the same features as queries.
    """

    def __init__(self, inputs: int, width: int, keys: int, *, dense: bool) -> None:
        super().__init__()
        sizes = [inputs, keys] if keys else [inputs]
        self.towers = nn.ModuleList(FeatureBody(n, width, dense=dense) for n in sizes)
        self.projections = nn.ModuleList(nn.Linear(width, width) for _ in sizes)

    def fit(self, query: Tensor, key: Tensor) -> None:
        """Standardise dense features."""
        for tower, features in zip(self.towers, (query, key), strict=False):
            if isinstance(tower, FeatureBody):
                tower.fit(features)

    def forward(self, pair: tuple[Features, Features]) -> Tensor:
        """Queries and keys to ``(batch, 2, width)``."""
        sides = ((0, pair[0]), (-1, pair[1]))
        return torch.stack([self.projections[i](self.towers[i](each)) for i, each in sides], 1)


class InfoNCE(SavedModule):
    """The head for pairs: the loss :func:`lastlayer.losses.info_nce` with its settings.

    Args:
        in_features: size of the hidden state.
        temperature: divides the similarities.
        symmetric: whether keys also have to find their query.
        learn_temperature: whether the temperature is trained, starting from ``temperature``.
    """

    recipe: ClassVar[Recipe] = Recipe(
        "info_nce",
        "each query finds its key among those of the batch",
        task="pairs",
        compared=(
            "info_nce",
            "info_nce:symmetric=true",
            "info_nce:temperature=0.2",
            "info_nce:temperature=0.02",
            "info_nce:learn_temperature=true",
        ),
    )

    def __init__(
        self,
        in_features: int,
        *,
        temperature: float = 0.07,
        symmetric: bool = False,
        learn_temperature: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature: expected a number above 0, got {temperature}")
        self.in_features, self.temperature = in_features, temperature
        self.symmetric, self.learn_temperature = symmetric, learn_temperature
        self.log_temperature = nn.Parameter(
            torch.tensor(math.log(temperature)), requires_grad=learn_temperature
        )

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The loss of pairs ``(batch, 2, in_features)``; pairs of one group are not negatives."""
        query, key = hidden.unbind(1)
        found = self.log_temperature.exp() if self.learn_temperature else self.temperature
        return info_nce(query, key, temperature=found, symmetric=self.symmetric, groups=target)
