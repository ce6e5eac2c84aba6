"""Heads in the plans of torch's tensor parallelism."""

import copy
from typing import Any

import torch
from torch.distributed.tensor.parallel import ParallelStyle

from lastlayer.parallel.class_parallel import ClassParallel


class ClassParallelStyle(ParallelStyle):
    """Shards the classes of a head, for ``torch.distributed.tensor.parallel.parallelize_module``.

    The head becomes a :class:`ClassParallel` in place, so existing references stay valid.

    Args:
        rows: "shared" if hidden states are the same in all processes, as after a tensor-parallel
            backbone; "local" if each process has its own.
        options: keyword arguments of :class:`ClassParallel`.

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
