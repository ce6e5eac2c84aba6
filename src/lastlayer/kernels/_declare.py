"""How the package of an operation declares it: the signature of its reference is the schema."""

import importlib
from collections.abc import Callable
from typing import Any

from torch.library import infer_schema

from lastlayer.kernels._registry import Operation, returns_nothing


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
