"""Trained runs: load them from their folder, generate text, and export them."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lastlayer.heads import Head
from lastlayer.heads.base import SavedModule
from lastlayer.lab.data import Vocabulary
from lastlayer.lab.data.load import LINE_ENDS, cut
from lastlayer.lab.data.text import END, Tokenizer
from lastlayer.lab.errors import LabError, first_line
from lastlayer.lab.explorer import readable
from lastlayer.lab.models import ModelSettings, build_body
from lastlayer.lab.options import OWN
from lastlayer.lab.records import check_writable, read_json
from lastlayer.lab.specs import import_from_here

MODEL, HEAD, CONFIG, VOCABULARY = "model.safetensors", "head", "config.json", "vocabulary.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        body: the backbone, from inputs to hidden states.
        head: its output layer.
        vocabulary: the tokens, or the labels.
        config: the settings of its run.
        tokenizer: the tokenizer of its text; None for words.
    """

    body: nn.Module
    head: Head
    vocabulary: Vocabulary
    config: dict[str, Any]
    tokenizer: Tokenizer | None = None


def run_folder(path: Path) -> Path:
    """The folder of a run, which is ``path`` or the only finished run of a comparison."""
    if (path / MODEL).is_file():
        return path
    runs = sorted((path / "runs").glob(f"*/{MODEL}"))
    if len(runs) == 1:
        return runs[0].parent
    if runs:
        names = ", ".join(str(each.parent.relative_to(path)) for each in runs)
        raise LabError(f"path: expected one run, got {len(runs)} in '{path}'; give one: {names}")
    raise LabError(
        f"path: expected the folder of a finished run, with a {MODEL}, got '{path}'; a comparison "
        "writes them into runs/ of its folder"
    )


def vocabulary_path(folder: Path) -> Path:
    """The vocabulary.json of a run: in its folder if exported, else in that of its comparison."""
    beside = folder / VOCABULARY
    return beside if beside.is_file() else folder.parent.parent / VOCABULARY


def load_trained(
    path: Path | str,
    device: torch.device | str = "cpu",
    *,
    backbone: Callable[[], nn.Module] | None = None,
) -> Trained:
    """Load a run of ``lastlayer compare``, or one that was exported. Nothing is unpickled.

    Args:
        path: the folder of a run.
        device: the device of the model.
        backbone: the function that was passed to :func:`lastlayer.lab.compare`, for its runs.
    """
    folder = run_folder(Path(path))
    config = read_json(folder / CONFIG)
    try:
        family, settings = str(config["family"]), ModelSettings(**config["model"])
    except (KeyError, TypeError) as error:
        raise _damaged(folder / CONFIG, error) from error
    _import_users_class(family)
    own = settings.kind == OWN
    if own and backbone is None:
        raise LabError(
            "backbone: expected the function that was passed to lastlayer.lab.compare, got None; "
            f"'{folder}' holds only the weights"
        )
    body = backbone() if own and backbone is not None else build_body(settings)
    try:
        body.load_state_dict(load_file(str(folder / MODEL)))
    except (SafetensorError, RuntimeError) as error:
        raise _damaged(folder / MODEL, error) from error
    try:
        head: Any = SavedModule.load(folder / HEAD, device=device)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _damaged(folder / HEAD, error) from error
    place = vocabulary_path(folder)
    vocabulary = Vocabulary.load(place, unknown=settings.task == "lm" and not own)
    cutter = place.with_name(TOKENIZER)
    tokenizer = Tokenizer(cutter) if cutter.is_file() else None
    return Trained(body.to(device).eval(), head.eval(), vocabulary, config, tokenizer)


def _damaged(path: Path, error: Exception) -> LabError:
    return LabError(
        f"path: expected a file of a comparison, got a damaged '{path}': {first_line(error)}"
    )


def _import_users_class(family: str) -> None:
    """Import the module of a user's head, which is required to load it."""
    module, colon, _ = family.partition(":")
    if not colon:
        return
    try:
        import_from_here(module)
    except ImportError as error:
        raise LabError(
            f"path: expected an importable module {module} for its head, got {error}; start Python "
            "in the folder of the module"
        ) from error


@dataclass(frozen=True)
class Step:
    """A generated token."""

    token: str
    p: float  # its probability
    top: list[tuple[str, float]]  # the most probable tokens and their probabilities


def prompt_tokens(trained: Trained, prompt: str) -> list[str]:
    """Tokenize a prompt in the same way as the training data of the run."""
    described = (trained.config.get("data") or {}).get("description") or {}
    return cut(prompt, str(described.get("format", "text")), trained.tokenizer)


def unknown_words(trained: Trained, prompt: Sequence[str]) -> list[str]:
    """The tokens of a prompt that are not in the vocabulary, each once."""
    known = trained.vocabulary.ids
    return list(dict.fromkeys(word for word in prompt if word not in known))


@torch.no_grad()
def generate(
    trained: Trained, prompt: Sequence[str], *, tokens: int, top: int, temperature: float, seed: int
) -> Iterator[Step]:
    """Sample one token after the other from the probabilities of the head.

    Without a prompt the text begins on a new line. Temperature 0 takes the most probable token.
    """
    config, words = trained.config, trained.vocabulary
    if config["model"]["kind"] == OWN:
        raise LabError("trained: expected a run on text, got one with a backbone of your own")
    if (task := config["model"]["task"]) != "lm":
        raise LabError(f"trained: expected a run of the task lm, got one of {task}")
    device = next(trained.body.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    length = int(config["model"]["length"])
    ids = words.encode(prompt or [END]).tolist()
    for _ in range(tokens):
        window = torch.tensor([ids[-length:]], device=device)
        hidden = trained.body(window)[:, -1]
        log_prob = trained.head.log_prob(hidden)[0]
        best = trained.head.topk(hidden, min(top, trained.head.n_classes))
        if temperature == 0:
            chosen = int(log_prob.argmax())
        else:
            weights = torch.softmax(log_prob.double() / temperature, 0)
            chosen = int(torch.multinomial(weights, 1, generator=generator))
        ids.append(chosen)
        pairs = zip(best.classes[0].tolist(), best.values[0].exp().tolist(), strict=True)
        yield Step(
            readable(words.tokens[chosen]),
            float(log_prob[chosen].exp()),
            [(readable(words.tokens[i]), p) for i, p in pairs],
        )


def table_of(steps: list[Step], top: int) -> Table:
    """A table with one row per token: its probability, and the most probable tokens."""
    table = Table("token", "p", *(f"{i + 1}" for i in range(top)))
    for step in steps:
        best = [Text(f"{token} {p:.2f}") for token, p in step.top[:top]]
        table.add_row(Text(step.token), f"{step.p:.3f}", *best)
    return table


def as_text(tokens: list[str], tokenizer: Tokenizer | None = None) -> str:
    """Join tokens with spaces or by their tokenizer; tokens for line ends become line ends."""
    ended = ["\n" if token in LINE_ENDS else token for token in tokens]
    if tokenizer is not None:
        return tokenizer.joined(ended)
    return " ".join(ended).replace(" \n", "\n").replace("\n ", "\n").strip()


_FEATURES, _RESULT = "features.json", "result.json"


def export(path: Path, to: Path) -> list[Path]:
    """Copy a finished run into a new folder for :func:`load_trained`; returns its files."""
    folder = run_folder(path)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise LabError(f"to: expected a folder that is new or empty, got '{to}'")
    vocabulary = vocabulary_path(folder)
    needed = [*(folder / name for name in (MODEL, CONFIG, _RESULT, HEAD)), vocabulary]
    missing = [str(each) for each in needed if not each.exists()]
    if missing:
        raise LabError(f"path: expected a whole run, got '{folder}' without {', '.join(missing)}")
    check_writable(to, option="to")
    for name in (MODEL, CONFIG, _RESULT):
        shutil.copyfile(folder / name, to / name)
    shutil.copytree(folder / HEAD, to / HEAD)
    shutil.copyfile(vocabulary, to / VOCABULARY)
    for name in (_FEATURES, TOKENIZER):
        if (vocabulary.parent / name).is_file():
            shutil.copyfile(vocabulary.parent / name, to / name)
    return sorted(each for each in to.rglob("*") if each.is_file())
