"""How the package of an operation declares it: the signature of its reference is the schema."""

import importlib
from collections.abc import Callable
from typing import Any

from torch.library import infer_schema

from lastlayer.kernels._registry import Operation, returns_nothing


def operation(
    package: str,
    function: str,
    name: str,
    fake: Callable[..., Any] = returns_nothing,
    writes: tuple[str, ...] = (),
    **options: bool,
) -> Operation:
    """The :class:`Operation` ``name``; ``writes`` are the arguments that it writes into."""
    reference = getattr(importlib.import_module(f"{package}.reference"), function)
    schema = infer_schema(reference, mutates_args=writes, op_name=name)
    return Operation(package, function, schema, fake, **options)
