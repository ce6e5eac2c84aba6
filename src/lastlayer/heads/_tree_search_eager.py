"""Functions that torch.compile calls and does not look into."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable``, with types: a search goes where values lead it."""
    made: Callable[P, R] = torch.compiler.disable(function)
    return made
