"""Heads in torch's own plans for tensor parallel models."""

import copy
from typing import Any

import torch
from torch.distributed.tensor.parallel import ParallelStyle

from lastlayer.parallel.class_parallel import ClassParallel


class ClassParallelStyle(ParallelStyle):
    """Spreads the classes of a head, for ``torch.distributed.tensor.parallel.parallelize_module``.

    The head itself becomes a :class:`ClassParallel`, so that whoever holds it has the new one.

    Args:
        rows: "shared" where hidden states are the same in all processes, as behind a tensor
            parallel body; "local" where each has its own.
        options: of :class:`ClassParallel`, by name.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from lastlayer import parallel
        >>> plan = {"lm_head": parallel.ClassParallelStyle()}
        >>> parallelize_module(model, mesh["tensor"], plan)  # doctest: +SKIP
    """

    def __init__(self, *, rows: str = "shared", **options: Any) -> None:
        super().__init__()
        self.options = {"rows": rows, **options}

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        made = ClassParallel(copy.copy(module), device_mesh, **self.options)  # type: ignore[arg-type]
        module.__dict__.clear()
        module.__dict__.update(made.__dict__)
        module.__class__ = ClassParallel
        return module
