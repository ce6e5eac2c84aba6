"""Base class of the conformance tests: inputs, comparisons, and error messages."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import debug

Reals = NDArray[np.float64]

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCTIONS = ("none", "mean", "sum")
# Tolerance of the sum of a row of probabilities.
SUM_TOLERANCE = dict(zip(FLOATING, (4e-3, 4e-3, 1e-6, 1e-10), strict=True))
# Tolerance of two evaluations of the same probability.
SAME_TOLERANCE = dict(zip(FLOATING, (2e-3, 8e-3, 1e-5, 1e-9), strict=True))
# A step of this size to any one score must not change which probabilities are zero.
CLEARANCE = 0.05
# Maximum deviation of a statistical test, in standard deviations: exceeded once in 10^9 runs.
MOST_DEVIATIONS = 6.0
# Neighbouring classes are pooled until the expected number of draws is at least this.
LEAST_EXPECTED = 10.0


@dataclass
class Suite:
    """Draws random inputs from one seed, and reports them if a rule is broken."""

    seed: int
    device: torch.device
    dtypes: tuple[torch.dtype, ...] = FLOATING
    # Backend of torch.compile; False to skip compilation.
    backend: str | Literal[False] = False
    generator: torch.Generator = field(init=False)
    # Name of the input in error messages.
    input_name: ClassVar[str] = "scores"

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def finest(self) -> torch.dtype:
        """The dtype for comparisons: the most precise of ``dtypes``."""
        return min(self.dtypes, key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def same(self) -> float:
        """Tolerance of two evaluations in the finest dtype."""
        return SAME_TOLERANCE[self.finest]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.device, dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator).to(self.device)

    def distributions_like(self, scores: Tensor) -> Tensor:
        """Target distributions with the shape and dtype of the scores, with some zeros."""
        drawn = self.normal(*scores.shape).exp()
        drawn = torch.where(drawn < 0.5, 0.0, drawn)
        drawn[..., :1] += 0.1
        return (drawn / drawn.sum(-1, keepdim=True)).to(scores.dtype)

    def sixteenths(self, rows: int, n: int) -> Tensor:
        """Unique multiples of 1/16 per row, which float32 represents even at an offset of 1e6."""
        return torch.stack([self.permutation(n) for _ in range(rows)]).double() / 16 - 1

    def settled(self, predict: Callable[[Tensor], Tensor], rows: int, n: int) -> Tensor:
        """Scores away from kinks: no small step of one score changes the support."""
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
            f"found {len(found)} of {rows} rows of {n} scores whose support does not change if a "
            f"score changes by {CLEARANCE}; derivatives cannot be checked",
        )

    def hold(self, *rules: Callable[[Any], None]) -> None:
        """Check rules; their function names are the messages. torch's random state is restored."""
        for rule in rules:
            with self.same_chance():  # gradgradcheck draws from torch's generator
                self.runs(rule.__name__.replace("_", " "), None, rule, self)

    @contextmanager
    def same_chance(self) -> Iterator[None]:
        """Set torch's random generators to the seed of the suite, and restore them afterwards."""
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng([self.device] if cuda else []):
            torch.default_generator.manual_seed(self.seed)
            if cuda:
                torch.cuda.manual_seed(self.seed)
            yield

    def require(
        self, rule: str, holds: Tensor | bool, detail: str, given: Tensor | None = None
    ) -> None:
        """Fail unless ``holds`` is true everywhere: a bool, or a bool tensor for a batch."""
        if isinstance(holds, Tensor) and not bool(holds.all()):
            raise self.failure(rule, detail, given, _first(~holds))
        if not isinstance(holds, Tensor) and not holds:
            raise self.failure(rule, detail, given)

    def close(
        self,
        rule: str,
        actual: Tensor,
        expected: Tensor | float,
        tolerance: float,
        given: Tensor | None = None,
    ) -> None:
        """Fail if two tensors differ by more than ``tolerance``, or in shape.

        A number is compared with every entry. Two NaN are equal.
        """
        left = actual.detach().to_dense().double()
        if not isinstance(expected, Tensor):
            expected = torch.full_like(left, expected)
        if actual.shape != expected.shape:
            shapes = f"expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
            raise self.failure(rule, shapes, given)
        if not actual.numel():
            return
        right = expected.detach().to_dense().double()
        same = (left == right) | (left.isnan() & right.isnan())
        error = torch.where(same, 0.0, (left - right).abs()).nan_to_num(nan=math.inf)
        if float(error.max()) > tolerance:
            place = _first(error == error.max())
            numbers = f"expected {right[place].item():.9g} within {tolerance:g}"
            got = f"got {left[place].item():.9g} at {place}"
            raise self.failure(rule, f"{numbers}, {got}", given, place)

    def zero(self, rule: str, actual: Tensor, given: Tensor | None = None) -> None:
        """Fail unless every entry is exactly 0."""
        self.close(rule, actual, 0.0, 0.0, given)

    def typed(
        self,
        rule: str,
        actual: Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        given: Tensor | None = None,
    ) -> None:
        """Fail unless a tensor has this dtype and shape."""
        right = actual.dtype == dtype and actual.shape == shape
        got = f"expected {dtype} {tuple(shape)}, got {actual.dtype} {tuple(actual.shape)}"
        self.require(rule, right, got, given)

    def reductions(
        self, none: Tensor, mean: Tensor, total: Tensor, batch: tuple[int, ...], given: Tensor
    ) -> None:
        """Fail unless the three reductions agree; ``batch`` is the shape of the losses."""
        got = f"expected shape {batch}, got {tuple(none.shape)}"
        self.require("reduction='none' gives one loss per row", none.shape == batch, got, given)
        self.close("reduction='sum' is the sum of 'none'", total, none.sum(), 1e-5, given)
        self.close("reduction='mean' is the mean of 'none'", mean, none.mean(), 1e-5, given)

    def refused(self, argument: str, what: str, call: Callable[..., Any], *given: Any) -> str:
        """Fail unless the call raises an error that names the argument; returns its message."""
        rule = f"{what}: a ValueError or TypeError that names the argument"
        try:
            with debug():  # values on a GPU are only checked in this mode
                call(*given)
        except (ValueError, TypeError) as error:
            message = str(error)
        except Exception as error:
            raise self.failure(rule, f"raised {type(error).__name__}: {error}") from error
        else:
            raise self.failure(rule, "nothing was raised")
        good = message.startswith(f"{argument}: ") and "expected" in message and "got" in message
        self.require(rule, good, f"expected '{argument}: expected …, got …', got {message!r}")
        return message

    def follows(self, rule: str, ids: Tensor, probs: Reals, given: Tensor | None = None) -> None:
        """Fail unless draws follow the probabilities, by a two-sided χ² test."""
        counts = np.bincount(ids.cpu().numpy(), minlength=len(probs)).astype(np.float64)
        never = (probs == 0) & (counts > 0)
        worst = int(never.argmax())
        self.require(rule, not never.any(), f"class {worst} was drawn and has probability 0", given)
        expected, found, first = pooled(probs * len(ids), counts)
        deviations = chi_square_deviations(found, expected)
        worst = int((np.abs(found - expected) / np.sqrt(expected)).argmax())
        last = first[worst + 1] - 1 if worst + 1 < len(first) else len(probs) - 1
        self.require(
            rule,
            abs(deviations) <= MOST_DEVIATIONS,
            f"{len(ids)} draws differ from log_prob by {deviations:.1f} standard deviations of χ²; "
            f"for classes {first[worst]} to {last} expected {expected[worst]:.1f} draws, got "
            f"{found[worst]:.0f}",
            given,
        )

    def compiles(
        self,
        function: Callable[..., Any],
        evaluate: Callable[[Any], tuple[Tensor, dict[str, Tensor]]],
        given: Tensor,
        tolerance: float,
    ) -> tuple[str, Callable[..., Any]]:
        """Fail unless ``evaluate`` gives the same value and gradients for the compiled function.

        Returns the text of the rule, and the compiled function.
        """
        backend = self.backend or "eager"
        rule = f"torch.compile(fullgraph=True, backend={backend!r}) with gradient"
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        with warnings.catch_warnings(action="ignore"):  # torch's own warnings during tracing
            value, slopes = self.runs(rule, given, evaluate, compiled)
        expected, right = evaluate(function)
        self.close(rule, value, expected, tolerance, given)
        for name, slope in slopes.items():
            self.close(f"{rule}: that of {name}", slope, right[name], tolerance, given)
        return rule, compiled

    def runs(
        self, rule: str, given: Tensor | None, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        """The result of ``function``; any exception breaks the rule."""
        try:
            return function(*arguments)
        except AssertionError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:600]
            raise self.failure(rule, f"raised {type(error).__name__}: {text}", given) from error

    def failure(
        self, rule: str, detail: str, given: Tensor | None = None, place: tuple[int, ...] = ()
    ) -> AssertionError:
        """The error to raise, with the rule, the numbers, the row of the input and the seed."""
        lines = [f"{rule}: {detail}"]
        if given is not None:
            lines.append(f"{self.input_name}: {_described(given, place)}")
        lines.append(f"repeat with: seed={self.seed}")
        return AssertionError("\n  ".join(lines))


def seeded(seed: int | None, device: str | torch.device) -> tuple[int, torch.device]:
    """The seed, or a random one if None, and the device of a suite."""
    if seed is None:
        seed = int(torch.randint(2**31, (), generator=_own_generator()).item())
    return seed, torch.device(device)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function, or the forward of a module, has an argument of this name."""
    if isinstance(function, torch.nn.Module):
        function = function.forward
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def pooled(
    expected: Reals, counts: Reals, least: float = LEAST_EXPECTED
) -> tuple[Reals, Reals, NDArray[np.int64]]:
    """Expected draws, draws, and the first class of bins of neighbouring classes."""
    before = np.concatenate([[0.0], np.cumsum(expected)[:-1]])
    starts = np.flatnonzero(np.diff(np.floor(before / least), prepend=-1.0))
    sums, found = (np.add.reduceat(each, starts) for each in (expected, counts))
    kept, total = [], math.inf
    for place, each in enumerate(sums):
        if total >= least:
            kept.append(place)
            total = 0.0
        total += each
    if total < least and len(kept) > 1:
        kept.pop()
    sums, found = (np.add.reduceat(each, kept) for each in (sums, found))
    return sums, found, starts[kept]


def chi_square_deviations(found: Reals, expected: Reals) -> float:
    """Pearson's χ² statistic in standard deviations, by the cube root of Wilson and Hilferty."""
    degrees = len(expected) - 1
    if degrees == 0:
        return 0.0
    statistic = float(((found - expected) ** 2 / expected).sum())
    spread = 2.0 / (9.0 * degrees)
    return (math.cbrt(statistic / degrees) - (1.0 - spread)) / math.sqrt(spread)


def _own_generator() -> torch.Generator:
    # A separate generator, so that torch's global random state does not change.
    generator = torch.Generator()
    generator.seed()
    return generator


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0].tolist())


def _described(given: Tensor, place: tuple[int, ...]) -> str:
    kind = f"{str(given.dtype).removeprefix('torch.')} {tuple(given.shape)}"
    if not given.numel() or given.dim() == 0:
        return kind
    row_place = (place + (0,) * given.dim())[: given.dim() - 1]
    inside = tuple(min(i, s - 1) for i, s in zip(row_place, given.shape, strict=False))
    row = given.detach()[inside].flatten()
    shown = ", ".join(f"{value:.6g}" for value in row[:8].tolist())
    return f"{kind}, row {row_place} = [{shown}{', …' if row.numel() > 8 else ''}]"
