"""Heads on disk: the state as safetensors, the constructor's arguments as JSON."""

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from lastlayer.heads.base import Head

CONFIG, STATE = "config.json", "model.safetensors"
SomeHead = TypeVar("SomeHead", bound="Head")


def save_head(head: "Head", folder: Path) -> None:
    """Writes both files."""
    safetensors = _safetensors()
    made_of = {"head": type(head).__name__, "arguments": head.config()}
    text = json.dumps(made_of, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    safetensors.save_file(state, str(folder / STATE))
    head._save_extra(folder)
    (folder / CONFIG).write_text(text, encoding="utf-8")


def load_head(cls: type[SomeHead], folder: Path, device: torch.device) -> SomeHead:
    """A head of ``cls`` or of a class below it."""
    safetensors = _safetensors()
    for name in (CONFIG, STATE):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"folder: expected {CONFIG} and {STATE}, as save writes them, got {folder}, "
                f"which has no {name}"
            )
    made_of = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    made = _class_named(made_of["head"], cls, folder)
    head = made.from_config({**made_of["arguments"], **made._load_extra(folder)})
    # The tensors themselves become the state: they bring their dtype along.
    head.load_state_dict(safetensors.load_file(str(folder / STATE), str(device)), assign=True)
    return head.to(device)


def _class_named(name: str, cls: type[SomeHead], folder: Path) -> type[SomeHead]:
    if cls.__name__ == name:
        return cls
    found = [each for each in _below(cls) if each.__name__ == name]
    if len(found) == 1:
        return found[0]
    trouble = "no such class is imported" if not found else f"{len(found)} classes have this name"
    raise ValueError(
        f"folder: expected a saved {cls.__name__}, got {name!r} in {folder}, and {trouble}; "
        f"call load on the class that was saved: {name}.load(folder)"
    )


def _below(cls: type[SomeHead]) -> list[type[SomeHead]]:
    return [each for child in cls.__subclasses__() for each in (child, *_below(child))]


def _safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "saving and loading heads needs the package safetensors; install it with "
            'pip install "lastlayer[save]"'
        ) from error
    return safetensors.torch
