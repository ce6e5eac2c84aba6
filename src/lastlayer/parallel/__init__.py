"""Heads whose classes are spread over processes and machines, on ``torch.distributed``."""

from lastlayer.parallel.class_parallel import ClassParallel

__all__ = ["ClassParallel"]
