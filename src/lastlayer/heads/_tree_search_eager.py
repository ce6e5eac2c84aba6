"""Functions that torch.compile calls and does not look into."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.disable``, with types: a search goes where values lead it.

    To disable anything, torch imports its whole compiler. That takes seconds, so it is left to
    those who compile, and have it already.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            made: R = torch.compiler.disable(function)(*args, **kwargs)
            return made
        return function(*args, **kwargs)

    return call
