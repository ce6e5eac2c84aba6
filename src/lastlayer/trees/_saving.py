"""Trees on disk: one safetensors file, its labels as JSON in a tensor of bytes."""

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lastlayer.trees.tree import Tree

_FORMAT = "lastlayer.tree"
_ARRAYS, _NAMES = ("child_start", "child"), ("labels", "node_labels")


def save_tree(tree: "Tree", path: Path) -> None:
    """Writes the file."""
    safetensors = _safetensors()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: expected a file in a folder that is there, got {path}")
    if path.is_dir():
        raise IsADirectoryError(f"path: expected a file, got the folder {path}")
    arrays: dict[str, NDArray[Any]] = {name: getattr(tree, name) for name in _ARRAYS}
    for name in _NAMES:
        names = getattr(tree, name)
        if names is not None:
            arrays[name] = np.frombuffer(json.dumps(names).encode(), np.uint8)
    metadata = {"format": _FORMAT, "version": "1", "overlap": json.dumps(tree.overlaps)}
    safetensors.numpy.save_file(arrays, str(path), metadata)


def load_tree(path: Path) -> dict[str, Any]:
    """The arguments of the constructor."""
    safetensors = _safetensors()
    if not path.is_file():
        raise FileNotFoundError(f"path: expected a file that Tree.save wrote, got {path}")
    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — no iterator
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"path: expected a file that Tree.save wrote, got {path}: {error}"
        ) from error
    if metadata.get("format") != _FORMAT or metadata.get("version") != "1":
        raise ValueError(
            f"path: expected a tree of version 1, got {path} with metadata {metadata}; a newer "
            "lastlayer may have written it"
        )
    absent = [name for name in _ARRAYS if name not in arrays]
    if absent:
        raise ValueError(f"path: expected the arrays {_ARRAYS}, got {path} without {absent}")
    names = {
        name: json.loads(arrays[name].tobytes()) if name in arrays else None for name in _NAMES
    }
    kept = {name: arrays[name] for name in _ARRAYS}
    return {**kept, **names, "overlap": metadata.get("overlap") == "true"}


def _safetensors() -> ModuleType:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "saving and loading trees needs the package safetensors; install it with "
            'pip install "lastlayer[save]"'
        ) from error
    return safetensors
