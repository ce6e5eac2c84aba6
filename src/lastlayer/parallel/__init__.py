"""Heads whose classes are spread over processes and machines, on ``torch.distributed``."""

from lastlayer.parallel.class_parallel import ClassParallel
from lastlayer.parallel.style import ClassParallelStyle

__all__ = ["ClassParallel", "ClassParallelStyle"]
