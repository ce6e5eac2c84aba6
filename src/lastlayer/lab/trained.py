"""A run that was trained: its body, its head and its vocabulary, back from its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lastlayer.heads import Head
from lastlayer.heads.base import SavedModule
from lastlayer.lab._importing import import_from_here
from lastlayer.lab.data import Vocabulary
from lastlayer.lab.data.text import Tokenizer
from lastlayer.lab.errors import LabError
from lastlayer.lab.files import read_json
from lastlayer.lab.models import ModelSettings, build_body

MODEL, HEAD, CONFIG, VOCABULARY = "model.safetensors", "head", "config.json", "vocabulary.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Trained:
    """A model that can be used.

    Attributes:
        body: from inputs to hidden states.
        head: the end of it.
        vocabulary: the tokens, or the labels.
        config: what it was trained with.
        tokenizer: what its text was cut with, where that were no words.
    """

    body: nn.Module
    head: Head
    vocabulary: Vocabulary
    config: dict[str, Any]
    tokenizer: Tokenizer | None = None


def run_folder(path: Path) -> Path:
    """The folder of a run; a comparison with a single finished run stands for it."""
    if (path / MODEL).is_file():
        return path
    runs = sorted((path / "runs").glob(f"*/{MODEL}"))
    if len(runs) == 1:
        return runs[0].parent
    if runs:
        names = ", ".join(str(each.parent.relative_to(path)) for each in runs)
        raise LabError(f"RUN: expected one run, got the {len(runs)} of '{path}'; name one: {names}")
    raise LabError(
        f"RUN: expected the folder of a finished run, with a {MODEL}, got '{path}'; "
        "lastlayer compare writes them below --out in runs/"
    )


def vocabulary_path(folder: Path) -> Path:
    """That of an exported run is beside it, that of a comparison above its runs."""
    beside = folder / VOCABULARY
    return beside if beside.is_file() else folder.parent.parent / VOCABULARY


def load_trained(path: Path, device: torch.device | str = "cpu") -> Trained:
    """What ``lastlayer compare`` trained or ``lastlayer export`` wrote. Nothing is unpickled."""
    folder = run_folder(path)
    config = read_json(folder / CONFIG)
    try:
        family, settings = str(config["family"]), ModelSettings(**config["model"])
    except (KeyError, TypeError) as error:
        raise _damaged(folder / CONFIG, error) from error
    _import_users_class(family)
    body = build_body(settings)
    try:
        body.load_state_dict(load_file(str(folder / MODEL)))
    except (SafetensorError, RuntimeError) as error:
        raise _damaged(folder / MODEL, error) from error
    try:
        head: Any = SavedModule.load(folder / HEAD, device=device)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(folder / HEAD, error) from error
    place = vocabulary_path(folder)
    vocabulary = Vocabulary.load(place, unknown=settings.task == "lm")
    own = place.with_name(TOKENIZER)
    tokenizer = Tokenizer(own) if own.is_file() else None
    return Trained(body.to(device).eval(), head.eval(), vocabulary, config, tokenizer)


def _damaged(path: Path, error: Exception) -> LabError:
    told = (str(error).strip() or type(error).__name__).splitlines()[0]
    return LabError(f"RUN: expected what lastlayer compare wrote, got '{path}' damaged: {told}")


def _import_users_class(family: str) -> None:
    """A class of the user's has to be imported before it can be loaded."""
    module, colon, _ = family.partition(":")
    if not colon:
        return
    try:
        import_from_here(module)
    except ImportError as error:
        raise LabError(
            f"RUN: expected the module {module} of its head to be importable, got {error}; "
            "run the command in the folder that has it"
        ) from error
