"""What a machine can do, measured in a second or two."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

# How long each measurement may take, and of how many calls the fastest counts at least.
_SECONDS, _FEWEST = 0.25, 5


@dataclass(frozen=True)
class Machine:
    """Costs of what training steps are made of, in seconds.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        flop: one operation of a product: on a CPU of 256 × 256 and 256 × 4,096 numbers.
        byte: one byte that is read from or written to memory.
        fresh: one byte of memory that the system has to hand out first, beyond ``byte``. On a CPU
            that is the case of blocks over 32 MB, which are given back when they are freed.
        score: one score of a softmax.
        call: one small operation with its gradient: what Python and torch take for themselves.
        number: bytes of a number: 4 on a CPU, 2 on a GPU.
    """

    device: str
    flop: float
    byte: float
    fresh: float
    score: float
    call: float
    number: int = 4

    def as_json(self) -> dict[str, Any]:
        """The rates, in the units that people use."""
        return {
            **asdict(self),
            "tflop_per_s": 1e-12 / self.flop,
            "gb_per_s": 1e-9 / self.byte,
            "call_us": 1e6 * self.call,
        }


def measure(device: str) -> Machine:
    """Time five things on this machine, with as many threads as torch uses.

    The fastest of several calls counts: whatever else runs can only make one slower.
    """
    import torch

    number = 2 if device == "cuda" else 4
    made: dict[str, Any] = {
        "device": device,
        "dtype": torch.bfloat16 if device == "cuda" else torch.float32,
    }

    def fastest(call: Callable[[], object]) -> float:
        def timed() -> float:
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        timed()
        samples, spent = [timed()], 0.0
        while len(samples) < _FEWEST or (spent < _SECONDS and len(samples) < 1000):
            samples.append(timed())
            spent += samples[-1]
        return min(samples)

    # A GPU has to be given so much that the launch does not count.
    large = device == "cuda"
    rows, width, classes = (4096, 1024, 16384) if large else (256, 256, 4096)
    a, b = torch.randn(rows, width, **made), torch.randn(classes, width, **made)
    flop = fastest(lambda: a @ b.t()) / (2 * rows * width * classes)
    scores = torch.randn(2048 if large else 64, 8192, **made)
    score = fastest(lambda: torch.softmax(scores, -1)) / scores.numel()
    block = 2**29 if large else 2**26
    source = torch.zeros(block // number, **made)
    target = torch.zeros_like(source)
    byte = fastest(lambda: target.copy_(source)) / (2 * block)
    fill = fastest(lambda: torch.empty_like(source).fill_(1.0)) / block
    small = torch.randn(8, 8, device=device, requires_grad=True)

    def chain() -> None:
        out = small
        for _ in range(20):
            out = torch.tanh(out)
        out.sum().backward()

    return Machine(
        device=device,
        flop=flop,
        byte=byte,
        fresh=max(0.0, fill - byte) if device == "cpu" else 0.0,
        score=score,
        call=fastest(chain) / 20,
        number=number,
    )
