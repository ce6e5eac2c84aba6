"""What is measured: methods, the cases they are compared on, and the family that owns them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from lastlayer.bench import table, timing
from lastlayer.bench.record import Record
from lastlayer.bench.timing import Thunk, Timer
from lastlayer.bench.verify import Verdict

Direction = Literal["forward", "forward+backward"]
Call = Callable[..., Any]

OURS = "lastlayer"
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# What a family is measured in where nobody asks for another dtype.
USUAL_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}


class PlanError(ValueError):
    """A run that cannot be made as asked, found before any work."""


@dataclass(frozen=True)
class Method:
    """One implementation of one function.

    Attributes:
        name: what the table calls it, for example ``"sparsemax"``.
        source: the distribution it comes from: ``"lastlayer"``, ``"torch"`` or a peer's.
        computes: the function it computes; methods that share it are compared with ours.
        load: gives the callable; raises :class:`lastlayer.bench.peers.PeerMissing` where the
            peer is not installed.
        op: our operation below it, to say which kernel ran; None for others.
        variant: another setting or output of ours, so it is never the "ours" that others are
            compared with.
        scratch: the bytes it needs beyond its inputs, from the shape and the size of a number;
            None where that is always little.
    """

    name: str
    source: str
    computes: str
    load: Callable[[], Call]
    op: str | None = None
    variant: bool = False
    scratch: Callable[[tuple[int, ...], int], int] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this library is what is measured."""
        return self.source == OURS

    @property
    def label(self) -> str:
        """Source and name."""
        return f"{self.source} {self.name}"


def competing(methods: Iterable[Method], *, peers: bool) -> tuple[Method, ...]:
    """All of them, or those that need no other package."""
    return tuple(method for method in methods if peers or method.source in (OURS, "torch"))


@dataclass(frozen=True)
class Case:
    """One comparison: these methods on one size of input, in one direction.

    The baseline and our own methods come before the peers in ``methods``, because ratios to them
    are written as soon as a method is timed.
    """

    section: str
    shape: tuple[int, ...]
    dtype: str
    methods: tuple[Method, ...]
    direction: Direction

    @property
    def baseline(self) -> Method | None:
        """The method that every time of the case is divided by: the first."""
        return self.methods[0]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return DTYPES[self.dtype]

    def title(self) -> str:
        """One line that names the case."""
        return f"{'×'.join(str(extent) for extent in self.shape)} {self.dtype}"


CaseT = TypeVar("CaseT", bound=Case)
VerdictT = TypeVar("VerdictT", bound=Verdict)
RecordT = TypeVar("RecordT", bound=Record)


@dataclass(frozen=True, kw_only=True)
class Measured(Generic[VerdictT]):
    """What was found of one method on one case.

    Attributes:
        verdict: None where it could not be verified.
        milliseconds: None where it was not timed; ``baseline_ms`` the same of the baseline.
        limit: what the device can do at best.
    """

    verdict: VerdictT | None
    milliseconds: float | None
    baseline_ms: float | None
    limit: float

    @property
    def ratio_to_baseline(self) -> float | None:
        """The time over that of the baseline."""
        if not (self.milliseconds and self.baseline_ms):
            return None
        return self.milliseconds / self.baseline_ms

    def tera_per_s(self, count: float) -> float | None:
        """So many bytes or operations over the time."""
        return timing.tera_per_s(count, self.milliseconds) if self.milliseconds else None


class Family(ABC, Generic[CaseT, VerdictT, RecordT]):
    """What a family of functions adds to the harness."""

    name: str
    record: type[RecordT]

    @abstractmethod
    def draw(self, case: CaseT, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Fresh inputs of a case."""

    @abstractmethod
    def verify(
        self, case: CaseT, method: Method, call: Call, inputs: tuple[Tensor, ...]
    ) -> VerdictT:
        """Compare the method's result on these inputs with the float64 truth."""

    @abstractmethod
    def thunk(self, call: Call, sets: list[tuple[Tensor, ...]]) -> Thunk:
        """What is timed: one call, on the next set of inputs each time."""

    @abstractmethod
    def details(self, case: CaseT, method: Method, measured: Measured[VerdictT]) -> dict[str, Any]:
        """The fields of a record that only this family has."""

    def limit(self, device: torch.device, timer: Timer, *, quick: bool) -> float:
        """What the device can do at best, measured once a run: the rate of a large product."""
        return timing.gemm_tflop_per_s(device, timer, quick=quick)

    def in_words(self, limit: float) -> str:
        """The limit for the terminal."""
        return table.gemm_limit(limit)

    def timer(self, device: torch.device, *, quick: bool) -> Timer:
        """What times the methods."""
        return timing.standard_timer(device, quick=quick)

    def started(self, case: CaseT, inputs: tuple[Tensor, ...]) -> None:
        """A case begins: what all its methods share can be found out here."""

    def finished(self) -> None:
        """A case is done: what was kept for it can go."""
