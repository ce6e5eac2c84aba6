"""Heads whose classes are sharded over processes and machines, with ``torch.distributed``."""

from lastlayer.parallel.class_parallel import ClassParallel
from lastlayer.parallel.communication import Communication, Exchange, communication
from lastlayer.parallel.counting import CountedCommunication
from lastlayer.parallel.optimizers import clip_grad_norm_, parameter_groups
from lastlayer.parallel.plan import LayoutCost, Memory, Plan, plan
from lastlayer.parallel.style import ClassParallelStyle

__all__ = [
    "ClassParallel",
    "ClassParallelStyle",
    "Communication",
    "CountedCommunication",
    "Exchange",
    "LayoutCost",
    "Memory",
    "Plan",
    "clip_grad_norm_",
    "communication",
    "parameter_groups",
    "plan",
]
