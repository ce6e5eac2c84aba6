"""Modules of the user's, from the path or from the folder that the command was given in."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType


def import_from_here(module: str) -> ModuleType:
    """The module; an ImportError where there is none."""
    here = os.fspath(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(module)
