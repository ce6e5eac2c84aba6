"""Training a run: steps, timing, validation points, the best model and checkpoints.

The whole state is saved as safetensors and JSON; nothing is pickled. The JSON file names the file
with the tensors and is replaced last, so that a kill at any moment leaves a consistent state.
"""

import copy
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lastlayer.lab.budget import Schedule
from lastlayer.lab.evaluation import Judge
from lastlayer.lab.feeding import Batch, Feed
from lastlayer.lab.machine import PeakMemory
from lastlayer.lab.records import JsonLines, read_json, replacing, write_json
from lastlayer.optim import RowAdam

_STATE, _BEST = "state.json", "best.safetensors"
WARM_UP = 3
# A loss counts as divergence above this number, and above this many times the first one.
_DIVERGED = 5.0
# Checkpoints take at most this share of the time, and are at least so many seconds apart.
_CHECKPOINT_SHARE, _CHECKPOINT_SECONDS = 0.03, 10.0
_KEPT_TIMES = 10_000
# On a GPU, steps are timed in blocks of about this length.
_BLOCK_SECONDS = 0.02


class Stepper:
    """Makes training steps of a backbone and a head.

    Parameters with row-sparse gradients are optimised by :class:`lastlayer.optim.RowAdam`, which
    updates only rows with a gradient; all others by torch's fused Adam with the same settings.
    The norm of all gradients together is clipped to ``clip``.
    """

    def __init__(self, body: nn.Module, head: nn.Module, lr: float, clip: float) -> None:
        self.body, self.head, self._clip = body, head, clip
        rows = [
            each for module in body.modules() if getattr(module, "sparse", False)
            for each in module.parameters(recurse=False)
        ]  # fmt: skip
        rows += head.parameters() if getattr(head, "sparse", False) else []
        kept = {id(each) for each in rows}
        both = [*body.parameters(), *head.parameters()]
        dense = [each for each in both if id(each) not in kept]
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        if dense:
            self.optimizers["dense"] = torch.optim.Adam(dense, lr=lr, fused=True)
        if rows:
            self.optimizers["rows"] = RowAdam(rows, lr=lr)
        self._parameters, self.device = both, both[0].device
        self._context = _context_length(head)

    def step(self, batch: Batch) -> Tensor:
        """Make one step; returns the loss before it, without a sync with the device."""
        loss = self.loss(batch)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_(self._parameters, self._clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        """The training loss of the head."""
        hidden = self.body(batch.inputs)
        context = {"context": _context_of(batch, self._context)} if self._context else {}
        made: Tensor = self.head(hidden, batch.target, **context)
        return made


def has_diverged(loss: float, first: float) -> bool:
    """Whether a mean training loss is far above the first one, or not finite."""
    return not math.isfinite(loss) or loss > _DIVERGED * max(1.0, abs(first))


def clip_(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Clip the norm of all gradients together; row-sparse ones are coalesced first."""
    values = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse and not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
        values.append(gradient._values() if gradient.is_sparse else gradient)
    if values:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)))
        torch._foreach_mul_(values, (most / (norm + 1e-6)).clamp(max=1.0))


def words_before(tokens: Tensor, n: int) -> Tensor:
    """The last ``n`` tokens at each position, ``(batch, length, n)``, the newest last; -1 pads."""
    batch, length = tokens.shape
    padded = torch.cat([tokens.new_full((batch, n - 1), -1), tokens], 1)
    return padded.unfold(1, n, 1).reshape(batch, length, n)


def _context_of(batch: Batch, n: int) -> Tensor:
    """The tokens before each target; all -1 if the inputs are not tokens."""
    inputs, shape = batch.inputs, batch.target.shape
    tokens = isinstance(inputs, Tensor) and inputs.shape == shape and len(shape) == 2
    if tokens and not inputs.is_floating_point():
        return words_before(inputs, n)
    return batch.target.new_full((*shape, n), -1)


def _context_length(head: nn.Module) -> int:
    """Number of context tokens that the loss of a head takes; 0 for most heads."""
    sampler: Any = getattr(head, "sampler", None)
    if "context" not in inspect.signature(head.forward).parameters:
        return 0
    return max(0, int(getattr(sampler, "order", 1)) - 1)


@dataclass
class Progress:
    """The progress of a run, saved in its checkpoints."""

    step: int = 0  # steps done
    seconds: float = 0.0  # training time
    tokens: int = 0  # tokens or rows seen
    # Sum and number of the losses since the loss was last recorded.
    loss_sum: float = 0.0
    loss_count: int = 0
    first_loss: float | None = None  # the first recorded loss, as a reference for divergence
    lines: int = 0  # size of metrics.jsonl in bytes
    peak_memory_mb: float | None = None
    best_score: float | None = None  # lowest validation score, at ``best_step``
    best_step: int = 0


def save_checkpoint(
    folder: Path, stepper: Stepper, progress: Progress, step_ms: list[float]
) -> None:
    """Write a checkpoint, then remove the one before it."""
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = _model_state(stepper)
    for name, optimizer in stepper.optimizers.items():
        for i, values in optimizer.state_dict()["state"].items():
            state |= {f"optimizer/{name}/{i}/{key}": value for key, value in values.items()}
    state["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["rng/cuda"] = torch.cuda.get_rng_state()
    state["step_ms"] = torch.tensor(step_ms, dtype=torch.float64)
    tensors = {place: value for place, value in state.items() if isinstance(value, Tensor)}
    numbers = {place: value for place, value in state.items() if place not in tensors}
    name = f"state-{progress.step}.safetensors"
    save_tensors(folder / name, tensors)
    write_json(folder / _STATE, {**vars(progress), "tensors": name, "optimizers": numbers})
    for old in folder.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink()


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write safetensors atomically."""
    whole = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    with replacing(path) as new:
        save_file(whole, str(new))


def load_checkpoint(folder: Path, stepper: Stepper) -> tuple[Progress, list[float]] | None:
    """Restore a checkpoint; returns progress and step times, or None if there is none."""
    if not (folder / _STATE).is_file():
        return None
    state = read_json(folder / _STATE)
    try:
        tensors = load_file(str(folder / state.pop("tensors")))
    except (OSError, SafetensorError):
        # Tensors are not synced to disk, so a power cut may have lost them.
        return None
    _load_model(stepper, tensors)
    optimizer_states: dict[str, dict[int, dict[str, Any]]] = {
        name: {} for name in stepper.optimizers
    }
    for place, value in {**tensors, **state.pop("optimizers")}.items():
        kind, *parts = place.split("/")
        if kind == "optimizer":
            optimizer_states[parts[0]].setdefault(int(parts[1]), {})[parts[2]] = value
    for name, optimizer in stepper.optimizers.items():
        optimizer.load_state_dict({**optimizer.state_dict(), "state": optimizer_states[name]})
    torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])
    return Progress(**state), tensors["step_ms"].tolist()


def _model_state(stepper: Stepper) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": each
        for name, module in (("body", stepper.body), ("head", stepper.head))
        for key, each in module.state_dict().items()
    }


def _load_model(stepper: Stepper, tensors: dict[str, Tensor]) -> None:
    for name, module in (("body/", stepper.body), ("head/", stepper.head)):
        module.load_state_dict({
            key.removeprefix(name): each for key, each in tensors.items() if key.startswith(name)
        })  # fmt: skip


Tell = Callable[[float, Progress, float | None], None]
"""Progress callback: gets the completed share of the run, its progress and its last loss."""


class RunFailedError(Exception):
    """A run cannot continue: ``status`` is that of its result, the message the reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class InterruptedRunError(Exception):
    """The user stopped the run; its checkpoint is written."""


def warm_up(stepper: Stepper, feed: Feed, seed: int) -> None:
    """Make a few steps on a copy, so that compiling and allocating are not timed."""
    parts = copy.deepcopy((stepper.body, stepper.head))
    for module in parts[0].modules():
        # cuDNN wants the weights in one buffer, which copying undoes.
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    rehearsal = Stepper(*parts, lr=0.0, clip=1.0)
    for step in range(WARM_UP):
        rehearsal.step(feed.batch(seed, step))


class Training:
    """One run, from the beginning or from the checkpoint in its folder.

    The model with the best score on validation data is kept.
    """

    def __init__(
        self,
        stepper: Stepper,
        feed: Feed,
        judge: Judge,
        *,
        seed: int,
        schedule: Schedule,
        folder: Path,
        memory: PeakMemory,
        tell: Tell,
        stopped: Callable[[], bool],
    ) -> None:
        self._stepper, self._feed, self._seed, self._schedule = stepper, feed, seed, schedule
        self._judge, self._memory, self._tell, self._stopped = judge, memory, tell, stopped
        self._on_gpu = stepper.device.type == "cuda"
        self._checkpoint, self._best = folder / "checkpoint", folder / _BEST
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)
        self.progress = Progress()
        loaded = load_checkpoint(self._checkpoint, stepper)
        if loaded is not None:
            self.progress, times = loaded
            self._times.extend(times)
        self._lines = JsonLines(folder / "metrics.jsonl", keep=self.progress.lines)
        self._last_loss: float | None = None
        self._saved_at, self._save_cost = time.perf_counter(), 0.0

    @property
    def step_ms(self) -> list[float]:
        """Times of the latest steps in milliseconds."""
        return list(self._times)

    def run(self) -> None:
        """Train to the end, or raise RunFailedError or InterruptedRunError."""
        if self.progress.step == 0:
            self._validate()
        block = 1
        self._stepper.head.train()
        self._stepper.body.train()
        self._memory.start()
        try:
            while self.progress.step < self._schedule.total:
                ahead = self._schedule.steps_to_next(self.progress.step)
                block = self._train(min(block, ahead), block)
                self._between_blocks()
        finally:
            self._memory.stop()
            self._lines.close()
        if self._is_due():
            self._save()

    def _train(self, steps: int, block: int) -> int:
        """Make and time a block of steps; returns the size of the next block."""
        now = self.progress
        losses: list[Tensor] = []
        start = time.perf_counter()
        for step in range(now.step, now.step + steps):
            batch = self._feed.batch(self._seed, step)
            losses.append(self._stepper.step(batch))
            now.tokens += batch.size
        if self._on_gpu:
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        now.step, now.seconds = now.step + steps, now.seconds + elapsed
        # Added one by one, so that the sum does not depend on the block size.
        now.loss_sum = sum(torch.stack(losses).tolist(), now.loss_sum)
        now.loss_count += steps
        self._times.append(1e3 * elapsed / steps)
        quick = self._on_gpu and elapsed < _BLOCK_SECONDS and steps == block
        return 2 * block if quick else block

    def _between_blocks(self) -> None:
        """Record, validate and checkpoint between two blocks of steps, which is not timed."""
        schedule, now = self._schedule, self.progress
        if now.step in schedule.told:
            self._record_loss()
        if now.step in schedule.judged:
            self._memory.stop()
            self._validate()
            self._memory.start()
        self._tell(now.step / schedule.total, now, self._last_loss)
        stopped = self._stopped()
        if stopped or self._is_due():
            self._memory.stop()
            self._save()
            self._memory.start()
        if stopped:
            raise InterruptedRunError

    def _record_loss(self) -> None:
        now = self.progress
        loss = now.loss_sum / max(1, now.loss_count)
        now.loss_sum, now.loss_count = 0.0, 0
        self._last_loss = loss
        self._append_line("train", loss=loss)
        if not math.isfinite(loss):
            raise RunFailedError("nan", f"the training loss was {loss} by step {now.step:,}")
        if now.first_loss is None:
            now.first_loss = loss
        elif has_diverged(loss, now.first_loss):
            raise RunFailedError(
                "diverged",
                f"the training loss rose from {now.first_loss:.4g} to {loss:.4g} by step "
                f"{now.step:,}",
            )

    def _validate(self) -> None:
        now, body, head = self.progress, self._stepper.body, self._stepper.head
        metrics = self._judge.on_the_way(body, head)
        self._append_line("valid", **metrics)
        score = self._judge.score(metrics)
        if now.best_score is None or score < now.best_score:
            now.best_score, now.best_step = score, now.step
            save_tensors(self._best, _model_state(self._stepper))
        head.train()
        body.train()

    def take_best(self) -> None:
        """Restore the model that was best on validation data."""
        if self._best.is_file() and self.progress.best_step != self.progress.step:
            _load_model(self._stepper, load_file(str(self._best)))
        self._best.unlink(missing_ok=True)

    def _append_line(self, kind: str, **values: Any) -> None:
        now = self.progress
        place = {"step": now.step, "seconds": round(now.seconds, 6), "tokens": now.tokens}
        self._lines.append({"kind": kind, **place, **values})
        now.lines = self._lines.size

    def _is_due(self) -> bool:
        waited = time.perf_counter() - self._saved_at
        return waited > max(_CHECKPOINT_SECONDS, self._save_cost / _CHECKPOINT_SHARE)

    def _save(self) -> None:
        start = time.perf_counter()
        self.progress.peak_memory_mb = self._memory.megabytes
        save_checkpoint(self._checkpoint, self._stepper, self.progress, self.step_ms)
        self._saved_at = time.perf_counter()
        self._save_cost = self._saved_at - start
