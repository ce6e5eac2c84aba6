"""How an operation gets its implementations, and how one of them is chosen.

An operation is registered once with ``torch.library``. On CPU tensors ``impl="auto"`` takes the CPU
implementation where there is one, on CUDA tensors the Triton one, and the reference elsewhere. In
eager mode the implementation is called directly: going through torch's dispatcher costs host time.
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
    """For each implementation None where it can run in this process, else the reason why not."""
    if find_spec("triton") is None:
        triton_reason = "the package triton is not installed"
    elif not torch.cuda.is_available() and not _interpreted():
        triton_reason = "there is no CUDA device (TRITON_INTERPRET=1 runs it slowly on the CPU)"
    elif torch.version.hip is not None:
        # Their launcher is that of CUDA.
        triton_reason = "this torch is for ROCm, and the kernels are for CUDA"
    else:
        triton_reason = None
    numba_reason = None if find_spec("numba") else "the package numba is not installed"
    return {"reference": None, "triton": triton_reason, "cpu": numba_reason}


def operations() -> tuple[str, ...]:
    """The names of all operations, as :func:`selected` takes them."""
    return tuple(sorted(_operations))


@constant_while_traced
def selected(op: str, device_type: str, dtype: torch.dtype = torch.float32) -> str:
    """The implementation that ``impl="auto"`` takes for ``op`` on such a tensor."""
    if op not in _operations:
        raise ValueError(f"op: expected one of {sorted(_operations)}, got {op!r}")
    operation = _operations[op]
    if device_type == "cpu" and operation.has_cpu and available()["cpu"] is None:
        return "cpu"
    if device_type == "cuda" and operation.triton_takes(dtype) and available()["triton"] is None:
        return "triton"
    return "reference"


def returns_nothing(*_: object) -> None:
    """The fake of an operation that writes into its arguments."""
    return None


def like_first(first: Tensor, *_: object) -> Tensor:
    """The fake of an operation whose result is like its first argument, but contiguous."""
    return torch.empty_like(first, memory_format=torch.contiguous_format)


class Operation:
    """One operation: callable with the name of an implementation, and the arguments.

    Args:
        package: the package that holds ``reference.py``, ``triton.py`` and ``cpu.py``.
        function: the name of the function in each of these modules.
        schema: name, arguments and results in the schema language of ``torch.library``; device and
            dtype of the first argument, a tensor, decide which implementation runs.
        fake: gives empty results of the right shape, for tracing.
        integers: whether the first argument holds integers, so that its device alone decides.
        has_cpu: whether there is a CPU implementation; without one the reference runs there.
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
                # A program that leaves torch has torch's own operations alone.
                return self.implementation("reference")(*args)
            return self._dispatched(*args)
        function = self._resolved.get((first.device, first.dtype))
        return self._run(*args) if function is None else function(*args)

    def triton_takes(self, dtype: torch.dtype) -> bool:
        """Whether the Triton implementation has such a first argument."""
        return self._integers or dtype in _TRITON_DTYPES

    def implementation(self, impl: str) -> Callable[..., Any]:
        """The function of one implementation.

        Its module is imported here, so that nobody pays for a numba or triton that is not used.
        """
        function = self._loaded.get(impl)
        if function is None:
            module = importlib.import_module(f"{self._package}.{impl}")
            # A compiler cannot trace the import, but finds what is kept here.
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
                "'auto' takes the fastest that can run"
            )
        device, reason = tensor.device.type, available()[impl]
        if impl == "cpu" and not self.has_cpu:
            reason = "it has no CPU implementation"
        elif reason is None and impl == "cpu" and device != "cpu":
            reason = f"the scores are on {device!r}"
        elif reason is None and impl == "triton":
            if device != "cuda" and not (device == "cpu" and _interpreted()):
                reason = f"the scores are on {device!r}"
            elif not self.triton_takes(tensor.dtype):
                reason = f"it has no {tensor.dtype}"
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
    """The :class:`Operation` ``name``.

    ``function`` is that of the implementations, as "op.function" with the package that has them;
    ``writes`` are the arguments that it writes into.
    """
    package, _, function = f"lastlayer.kernels.{function}".rpartition(".")
    reference = getattr(importlib.import_module(f"{package}.reference"), function)
    schema = infer_schema(reference, mutates_args=writes, op_name=name)
    return Operation(package, function, schema, fake, **options)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


_operations: dict[str, Operation] = {}
