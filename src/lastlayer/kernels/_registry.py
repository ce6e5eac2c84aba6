"""How an operation gets its three implementations, and how one of them is chosen.

An operation is registered once with ``torch.library``; torch's dispatcher then picks the CPU
implementation for CPU tensors, the Triton one for CUDA tensors and the reference elsewhere, in
eager mode and inside ``torch.compile`` alike. Naming an implementation skips the dispatcher.
"""

import importlib
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch

from lastlayer._torch import is_eager

Impl = Literal["auto", "reference", "triton", "cpu"]
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "triton", "cpu")

_library = torch.library.Library("lastlayer", "DEF")
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def available() -> dict[str, str | None]:
    """For each implementation None where it can run in this process, else the reason why not."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if find_spec("triton") is None:
        triton_reason = "the package triton is not installed"
    elif not torch.cuda.is_available() and not interpreted:
        triton_reason = "there is no CUDA device (TRITON_INTERPRET=1 runs it slowly on the CPU)"
    else:
        triton_reason = None
    numba_reason = None if find_spec("numba") else "the package numba is not installed"
    return {"reference": None, "triton": triton_reason, "cpu": numba_reason}


def selected(op: str, device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """The implementation that ``impl="auto"`` takes for ``op`` on such a tensor."""
    if op not in _operations:
        raise ValueError(f"op: expected one of {sorted(_operations)}, got {op!r}")
    if device_type == "cpu" and available()["cpu"] is None:
        return "cpu"
    if device_type == "cuda" and available()["triton"] is None and _operations[op].takes(dtype):
        return "triton"
    return "reference"


class Operation:
    """One operation: callable with tensors, by the dispatcher or by a named implementation.

    Args:
        name: its name below ``torch.ops.lastlayer``.
        schema: its arguments and results in the schema language of ``torch.library``; the first
            argument is the tensor whose device and dtype decide.
        package: the package that holds ``reference.py``, ``triton.py`` and ``cpu.py``.
        function: the name of the function in each of these modules.
        fake: gives empty results of the right shape, for tracing.
        integers: whether the first argument holds integers, so that its device alone decides.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        package: str,
        function: str,
        fake: Callable[..., Any],
        *,
        integers: bool = False,
    ) -> None:
        self.name, self._package, self._function = name, package, function
        self._integers = integers
        self._loaded: dict[str, Callable[..., Any]] = {}
        _library.define(f"{name}{schema}")
        _library.impl(name, self._run_selected, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lastlayer::{name}", fake, lib=_library)
        self._dispatched = getattr(torch.ops.lastlayer, name).default
        _operations[name] = self

    def __call__(self, impl: Impl, *args: Any) -> Any:
        if impl == "auto":
            if is_eager(args[0]):
                return self._run_selected(*args)
            return self._dispatched(*args)
        self._check_can_run(impl, args[0])
        return self._implementation(impl)(*args)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the Triton implementation has such a first argument."""
        return self._integers or dtype in _TRITON_DTYPES

    def _run_selected(self, *args: Any) -> Any:
        chosen = selected(self.name, args[0].device.type, args[0].dtype)
        return self._implementation(chosen)(*args)

    def _implementation(self, impl: str) -> Callable[..., Any]:
        # Imported at first use: neither numba nor triton is paid for by those who do not need it.
        if impl not in self._loaded:
            module = importlib.import_module(f"{self._package}.{impl}")
            self._loaded[impl] = getattr(module, self._function)
        return self._loaded[impl]

    def _check_can_run(self, impl: str, tensor: torch.Tensor) -> None:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(
                f"impl: expected 'auto' or one of {IMPLEMENTATIONS}, got {impl!r}; "
                "'auto' takes the fastest that can run"
            )
        device, reason = tensor.device.type, available()[impl]
        if reason is None and impl == "cpu" and device != "cpu":
            reason = f"the scores are on {device!r}"
        if reason is None and impl == "triton":
            interpreted = os.environ.get("TRITON_INTERPRET") == "1"
            if device != "cuda" and not (device == "cpu" and interpreted):
                reason = f"the scores are on {device!r}"
            elif not self.takes(tensor.dtype):
                reason = f"it has no {tensor.dtype}"
        if reason is not None:
            raise ValueError(
                f"impl: {impl!r} cannot run {self.name} here: {reason}; "
                "use impl='auto' or impl='reference'"
            )


_operations: dict[str, Operation] = {}
