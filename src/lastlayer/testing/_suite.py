"""What both suites stand on: inputs, comparisons, and messages that say what broke and where."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# How far a row may be from a sum of 1.
SUM_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-6,
    torch.bfloat16: 4e-3,
    torch.float16: 4e-3,
}
# How far two evaluations of the same probability may be from each other.
SAME_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: 8e-3,
    torch.float16: 2e-3,
}
# A step of this size to any one score must not change which probabilities are zero.
CLEARANCE = 0.05


@dataclass
class Suite:
    """Draws inputs and fails with a full account of them."""

    seed: int
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def finest(self) -> torch.dtype:
        """The dtype to compare in: the most precise of those that are accepted."""
        return min(self.dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def same(self) -> float:
        """How far two evaluations in the finest dtype may differ."""
        return SAME_TOLERANCE[self.finest]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.device, dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator).to(self.device)

    def distributions_like(self, scores: Tensor) -> Tensor:
        """Targets of the shape and dtype of the scores, with some zeros."""
        drawn = self.normal(*scores.shape).exp()
        drawn = torch.where(drawn < 0.5, 0.0, drawn)
        drawn[..., 0] += 0.1
        return (drawn / drawn.sum(-1, keepdim=True)).to(scores.dtype)

    def sixteenths(self, rows: int, n: int) -> Tensor:
        """Different multiples of 1/16: float32 holds them exactly even at an offset of 1e6."""
        order = [torch.randperm(n, generator=self.generator) for _ in range(rows)]
        return torch.stack(order).to(self.device, torch.float64) / 16 - 1

    def settled(self, predict: Callable[[Tensor], Tensor], rows: int, n: int) -> Tensor:
        """Scores away from kinks: no small step to one of them changes the support."""
        steps = CLEARANCE * torch.cat([torch.eye(n), -torch.eye(n)]).to(self.device, self.finest)
        found: list[Tensor] = []
        for _ in range(200):
            scores = 1.5 * self.normal(n, dtype=self.finest)
            around = predict(torch.cat([scores[None], scores + steps])) != 0
            if bool((around == around[0]).all()):
                found.append(scores)
            if len(found) == rows:
                return torch.stack(found)
        raise self.failure(
            "the support is stable",
            f"found {len(found)} of {rows} rows of {n} scores whose zeros stay where they are when "
            f"a score moves by {CLEARANCE}; derivatives cannot be checked",
        )

    def require(self, rule: str, holds: Tensor | bool, detail: str, scores: Tensor) -> None:
        """Fails unless all of ``holds``, a bool or one bool an entry of a batch of rows."""
        if isinstance(holds, Tensor):
            if bool(holds.all()):
                return
            raise self.failure(rule, detail, scores, _first(~holds))
        if not holds:
            raise self.failure(rule, detail, scores)

    def close(
        self, rule: str, actual: Tensor, expected: Tensor, tolerance: float, scores: Tensor
    ) -> None:
        """Fails where two tensors differ by more than ``tolerance`` anywhere, or in shape."""
        if actual.shape != expected.shape:
            shapes = f"expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
            raise self.failure(rule, shapes, scores)
        if not actual.numel():
            return
        left, right = actual.detach().double(), expected.detach().double()
        same = (left == right) | (left.isnan() & right.isnan())
        error = torch.where(same, 0.0, (left - right).abs()).nan_to_num(nan=float("inf"))
        if float(error.max()) > tolerance:
            place = _first(error == error.max())
            raise self.failure(
                rule,
                f"expected {right[place].item():.9g} within {tolerance:g}, "
                f"got {left[place].item():.9g} at {place}",
                scores,
                place,
            )

    def failure(
        self, rule: str, detail: str, scores: Tensor | None = None, place: tuple[int, ...] = ()
    ) -> AssertionError:
        """What to raise: the rule, the numbers, the row of the input and the seed."""
        lines = [f"{rule}: {detail}"]
        if scores is not None:
            lines.append(f"scores: {_described(scores, place)}")
        lines.append(f"repeat with: seed={self.seed}")
        return AssertionError("\n  ".join(lines))

    def runs(
        self, rule: str, scores: Tensor | None, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """The result of ``function``; whatever it raises breaks the rule."""
        try:
            return function(*arguments)
        except AssertionError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:600]
            raise self.failure(rule, f"raised {type(error).__name__}: {text}", scores) from error

    def hold(self, rule: Callable[..., None], *arguments: Any) -> None:
        """Checks one rule. torch's random state, which gradgradcheck draws from, is given back."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.default_generator.manual_seed(self.seed)
            self.runs(rule.__name__.replace("_", " "), None, rule, self, *arguments)


def fresh_seed(seed: int | None) -> int:
    """``seed``, or one that differs from call to call."""
    if seed is not None:
        return seed
    return int(torch.randint(2**31, (), generator=_own_generator()).item())


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function, or the forward of a module, has an argument of this name."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _own_generator() -> torch.Generator:
    # A generator of its own: a suite leaves torch's global random state as it found it.
    generator = torch.Generator()
    generator.seed()
    return generator


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0].tolist())


def _described(scores: Tensor, place: tuple[int, ...]) -> str:
    kind = f"{str(scores.dtype).removeprefix('torch.')} {tuple(scores.shape)}"
    if not scores.numel() or scores.dim() == 0:
        return kind
    row_place = (place + (0,) * scores.dim())[: scores.dim() - 1]
    row = scores.detach()[
        tuple(min(i, s - 1) for i, s in zip(row_place, scores.shape, strict=False))
    ]
    shown = ", ".join(f"{value:.6g}" for value in row.flatten()[:8].tolist())
    more = ", …" if row.numel() > 8 else ""
    return f"{kind}, row {row_place} = [{shown}{more}]"
