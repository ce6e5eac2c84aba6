"""The whole state of a run: tensors as safetensors, numbers as JSON; nothing is pickled.

The JSON file names the file with the tensors and is replaced last: a kill at any moment leaves one
that belongs together.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lastlayer.lab.files import read_json, write_json
from lastlayer.lab.steps import Stepper

_STATE = "state.json"


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: steps done; the batches of the next ones follow from it.
        seconds: of training alone.
        tokens: tokens or rows seen.
        loss_sum: of the losses since they were last told.
        loss_count: how many these are.
        first_loss: the first that was told, by which divergence is judged.
        step_ms: of the last steps.
        lines: bytes of metrics.jsonl that belong to it.
        peak_memory_mb: so far.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    first_loss: float | None = None
    lines: int = 0
    peak_memory_mb: float | None = None


def save_checkpoint(
    folder: Path, stepper: Stepper, progress: Progress, step_ms: list[float]
) -> None:
    """Writes the state; the one before it is removed when the new one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, options = _optimizer_state(stepper)
    for name, module in (("body", stepper.body), ("head", stepper.head)):
        tensors |= {f"{name}/{key}": each for key, each in module.state_dict().items()}
    tensors["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng/cuda"] = torch.cuda.get_rng_state()
    tensors["step_ms"] = torch.tensor(step_ms, dtype=torch.float64)
    name = f"state-{progress.step}.safetensors"
    save_tensors(folder / name, tensors)
    write_json(folder / _STATE, {**vars(progress), "tensors": name, "optimizers": options})
    for old in folder.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink()


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """A file that is whole or not there."""
    temporary = path.with_name(f".{path.name}.tmp")
    whole = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    save_file(whole, str(temporary))
    temporary.replace(path)


def load_checkpoint(folder: Path, stepper: Stepper) -> tuple[Progress, list[float]] | None:
    """Puts the state back; None where there is none."""
    if not (folder / _STATE).is_file():
        return None
    state = read_json(folder / _STATE)
    try:
        tensors = load_file(str(folder / state.pop("tensors")))
    except (OSError, SafetensorError):
        # Tensors are not waited for until they are on the disk: a power cut may have lost them.
        return None
    for name, module in (("body", stepper.body), ("head", stepper.head)):
        module.load_state_dict(_below(tensors, name))
    _load_optimizers(stepper, tensors, state.pop("optimizers"))
    torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])
    return Progress(**state), tensors["step_ms"].tolist()


def _below(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    start = f"{name}/"
    return {key[len(start) :]: each for key, each in tensors.items() if key.startswith(start)}


def _optimizer_state(stepper: Stepper) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, optimizer in stepper.optimizers.items():
        for i, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                place = f"optimizer/{name}/{i}/{key}"
                if isinstance(value, Tensor):
                    tensors[place] = value
                else:
                    numbers[place] = value
    return tensors, numbers


def _load_optimizers(stepper: Stepper, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    for name, optimizer in stepper.optimizers.items():
        whole = optimizer.state_dict()
        found: dict[int, dict[str, Any]] = {}
        for place, value in {**tensors, **numbers}.items():
            parts = place.split("/")
            if parts[:2] == ["optimizer", name]:
                found.setdefault(int(parts[2]), {})[parts[3]] = value
        optimizer.load_state_dict({**whole, "state": found})
