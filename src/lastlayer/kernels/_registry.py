"""Registers operations and selects their implementations.

Each operation is registered once with ``torch.library``. ``impl="auto"`` selects the CPU
implementation for CPU tensors and the Triton implementation for CUDA tensors, if they exist and can
run, and the reference otherwise. In eager mode the implementation is called directly: going through
torch's dispatcher costs host time.
"""

import importlib
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import infer_schema

from lastlayer._torch import constant_while_traced, is_eager, is_exporting

Impl = Literal["auto", "reference", "triton", "cpu"]
IMPLEMENTATIONS: tuple[str, ...] = ("reference", "triton", "cpu")

_library = torch.library.Library("lastlayer", "DEF")
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def available() -> dict[str, str | None]:
    """Maps each implementation to the reason why it cannot run in this process; None if it can."""
    if find_spec("triton") is None:
        triton_reason = "the package triton is not installed"
    elif not torch.cuda.is_available() and not _interpreted():
        triton_reason = "there is no CUDA device (TRITON_INTERPRET=1 runs it slowly on the CPU)"
    elif torch.version.hip is not None:
        # Kernels are launched through Triton's CUDA launcher.
        triton_reason = "this torch was built for ROCm, and the kernels need CUDA"
    else:
        triton_reason = None
    numba_reason = None if find_spec("numba") else "the package numba is not installed"
    return {"reference": None, "triton": triton_reason, "cpu": numba_reason}


@constant_while_traced
def _why_unavailable(impl: str) -> str | None:
    """Why an implementation cannot run; None if it can. torch 2.11 cannot trace ``available``."""
    return available()[impl]


def operations() -> tuple[str, ...]:
    """The names of all operations, for :func:`selected`."""
    return tuple(sorted(_operations))


@constant_while_traced
def selected(op: str, device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """The implementation that ``impl="auto"`` selects for ``op``, given device type and dtype."""
    if op not in _operations:
        raise ValueError(f"op: expected one of {sorted(_operations)}, got {op!r}")
    operation = _operations[op]
    if device_type == "cpu" and operation.has_cpu and available()["cpu"] is None:
        return "cpu"
    if device_type == "cuda" and operation.triton_takes(dtype) and available()["triton"] is None:
        return "triton"
    return "reference"


def returns_nothing(*_: object) -> None:
    """Fake implementation of an operation that only writes into its arguments."""
    return None


def like_first(first: Tensor, *_: object) -> Tensor:
    """Fake implementation of an operation whose result is like its first argument, contiguous."""
    return torch.empty_like(first, memory_format=torch.contiguous_format)


class Operation:
    """An operation, called with the name of an implementation and the arguments.

    The implementation is selected by device and dtype of the first argument, a tensor.

    Args:
        package: the package that contains ``reference.py``, ``triton.py`` and ``cpu.py``.
        function: the name of the function in each of these modules.
        schema: name, arguments and results in the schema language of ``torch.library``.
        fake: returns empty results of the right shape, for tracing.
        integers: whether the first argument holds integers; its dtype is then not checked.
        has_cpu: whether there is a CPU implementation; otherwise the reference runs on a CPU.
    """

    def __init__(
        self,
        package: str,
        function: str,
        schema: str,
        fake: Callable[..., Any] = returns_nothing,
        *,
        integers: bool = False,
        has_cpu: bool = True,
    ) -> None:
        self.name, self.has_cpu = schema.split("(", maxsplit=1)[0], has_cpu
        self._package, self._function, self._integers = package, function, integers
        self._loaded: dict[str, Callable[..., Any]] = {}
        self._resolved: dict[tuple[torch.device, torch.dtype], Callable[..., Any]] = {}
        _library.define(schema)
        _library.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lastlayer::{self.name}", fake, lib=_library)
        self._dispatched = getattr(torch.ops.lastlayer, self.name).default
        _operations[self.name] = self

    def __call__(self, impl: Impl, *args: Any) -> Any:
        if impl != "auto":
            self._check_can_run(impl, args[0])
            return self.implementation(impl)(*args)
        first = args[0]
        if not is_eager(first):
            if is_exporting():
                # An exported program must contain only torch's own operations.
                return self.implementation("reference")(*args)
            return self._dispatched(*args)
        function = self._resolved.get((first.device, first.dtype))
        return self._run(*args) if function is None else function(*args)

    def triton_takes(self, dtype: torch.dtype) -> bool:
        """Whether the Triton implementation supports this dtype of the first argument."""
        return self._integers or dtype in _TRITON_DTYPES

    def implementation(self, impl: str) -> Callable[..., Any]:
        """The function of one implementation.

        Its module is imported on first use: importing numba or triton takes long.
        """
        function = self._loaded.get(impl)
        if function is None:
            module = importlib.import_module(f"{self._package}.{impl}")
            # torch.compile cannot trace the import, but can read this dict.
            function = self._loaded[impl] = getattr(module, self._function)
        return function

    def _run(self, *args: Any) -> Any:
        first = args[0]
        function = self.implementation(selected(self.name, first.device.type, first.dtype))
        self._resolved[first.device, first.dtype] = function
        return function(*args)

    def _check_can_run(self, impl: str, tensor: Tensor) -> None:
        if impl not in IMPLEMENTATIONS:
            raise ValueError(
                f"impl: expected 'auto' or one of {IMPLEMENTATIONS}, got {impl!r}; "
                "'auto' selects the fastest that can run"
            )
        device, reason = tensor.device.type, _why_unavailable(impl)
        if impl == "cpu" and not self.has_cpu:
            reason = "it has no CPU implementation"
        elif reason is None and impl == "cpu" and device != "cpu":
            reason = f"the scores are on {device!r}"
        elif reason is None and impl == "triton":
            if device != "cuda" and not (device == "cpu" and _interpreted()):
                reason = f"the scores are on {device!r}"
            elif not self.triton_takes(tensor.dtype):
                reason = f"it does not support {tensor.dtype}"
        if reason is not None:
            raise ValueError(
                f"impl: {impl!r} cannot run {self.name} here: {reason}; "
                "use impl='auto' or impl='reference'"
            )


def operation(
    function: str,
    name: str,
    fake: Callable[..., Any] = returns_nothing,
    writes: tuple[str, ...] = (),
    **options: bool,
) -> Operation:
    """Creates the :class:`Operation` ``name``; its schema is inferred from the reference.

    ``function`` is "package.function", where the package is one of ``lastlayer.kernels`` and has
    that function in each implementation. ``writes`` names the arguments that it writes into.
    """
    package, _, function = f"lastlayer.kernels.{function}".rpartition(".")
    reference = getattr(importlib.import_module(f"{package}.reference"), function)
    schema = infer_schema(reference, mutates_args=writes, op_name=name)
    return Operation(package, function, schema, fake, **options)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


_operations: dict[str, Operation] = {}
