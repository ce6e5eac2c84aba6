"""What is measured: methods, the cases they are compared on, and the family that owns them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

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
        compact: writes a compact result rather than the dense one, so it is never the "ours" that
            others are compared with.
    """

    name: str
    source: str
    computes: str
    load: Callable[[], Call]
    op: str | None = None
    compact: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether this library is what is measured."""
        return self.source == OURS


@dataclass(frozen=True)
class Case:
    """One comparison: these methods on one size of input, in one direction.

    The baseline and our own methods come before the peers in ``methods``, because ratios to them
    are written as soon as a method is timed.
    """

    section: str
    shape: tuple[int, ...]
    dtype: str
    scale: float
    direction: Direction
    methods: tuple[Method, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return DTYPES[self.dtype]

    @property
    def backward(self) -> bool:
        """Whether the gradient is part of the work."""
        return self.direction == "forward+backward"

    def title(self) -> str:
        """One line that names the case."""
        size = "×".join(str(extent) for extent in self.shape)
        return f"{size} {self.dtype}, scale {self.scale:g}, {self.direction}"


class Family(Protocol):
    """What a family of functions adds to the harness."""

    name: str
    baseline: str
    """``computes`` of the method that every time is divided by."""

    def draw(self, case: Case, device: torch.device, seed: int) -> tuple[Tensor, ...]:
        """Fresh inputs; gradients are taken for the first.

        In the direction forward+backward the last one is the gradient of the result, which is not
        an argument of the call.
        """

    def verify(self, case: Case, method: Method, call: Call, inputs: tuple[Tensor, ...]) -> Verdict:
        """Compare the method's result on these inputs with the float64 truth."""

    def bytes_moved(self, case: Case, method: Method) -> int:
        """The fewest bytes the work must read and write."""
