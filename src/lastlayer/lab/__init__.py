"""The lab: train one backbone with each head under the same budget, and see which head suits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lastlayer.lab.api import CompareResult, compare
    from lastlayer.lab.trained import Trained, load_trained

__all__ = ["CompareResult", "Trained", "compare", "load_trained"]


def __getattr__(name: str) -> Any:
    """Import on first use, so that parsing the options of a command does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = "api" if name in ("CompareResult", "compare") else "trained"
    return getattr(import_module(f"lastlayer.lab.{module}"), name)
