"""Training a run to the end of its budget, with its clock, its points and its checkpoints."""

import copy
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lastlayer.lab.budget import Schedule
from lastlayer.lab.checkpoint import Progress, load_checkpoint, save_checkpoint
from lastlayer.lab.feeding import Feed
from lastlayer.lab.files import Lines
from lastlayer.lab.memory import PeakMemory
from lastlayer.lab.steps import Stepper

WARM_UP = 3
# A loss so many times the first one is no accident of a batch.
_DIVERGED = 5.0
# Checkpoints take at most this share of the time, and are this far apart at least.
_CHECKPOINT_SHARE, _CHECKPOINT_SECONDS = 0.03, 10.0
_KEPT_TIMES = 10_000
# On a GPU the host waits once for so much work.
_BLOCK_SECONDS = 0.02

Evaluate = Callable[[], dict[str, Any]]
Tell = Callable[[float, Progress, float | None], None]


class RunFailedError(Exception):
    """A run that cannot go on: ``status`` says how, the message why."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class InterruptedRunError(Exception):
    """A person has stopped it; the checkpoint is written."""


def warm_up(stepper: Stepper, feed: Feed, seed: int) -> None:
    """A few steps on a copy, which compile and allocate; they are neither counted nor learned."""
    parts = copy.deepcopy((stepper.body, stepper.head))
    for module in parts[0].modules():
        # cuDNN wants the weights in one piece, which copies are not.
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    rehearsal = Stepper(*parts, lr=0.0, clip=1.0)
    for step in range(WARM_UP):
        rehearsal.step(feed.batch(seed, step))


class Training:
    """One run, from its beginning or its checkpoint.

    Args:
        stepper: what is trained.
        feed: where its batches come from.
        seed: their order.
        schedule: when it ends and when it is judged.
        folder: of the run; ``metrics.jsonl`` and ``checkpoint/`` are in it.
        evaluate: judges the model on validation data.
        memory: measures while steps are made.
        tell: hears how far it is, in parts of 1, and the last loss.
        stopped: whether a person wants it to end.
        device: of the model.
    """

    def __init__(
        self,
        *,
        stepper: Stepper,
        feed: Feed,
        seed: int,
        schedule: Schedule,
        folder: Path,
        evaluate: Evaluate,
        memory: PeakMemory,
        tell: Tell,
        stopped: Callable[[], bool],
        device: torch.device,
    ) -> None:
        self._stepper, self._feed, self._seed, self._schedule = stepper, feed, seed, schedule
        self._evaluate, self._memory, self._device = evaluate, memory, device
        self._tell, self._stopped = tell, stopped
        self._checkpoint = folder / "checkpoint"
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)
        self.progress = Progress()
        loaded = load_checkpoint(self._checkpoint, stepper)
        if loaded is not None:
            self.progress, times = loaded
            self._times.extend(times)
        self._lines = Lines(folder / "metrics.jsonl", keep=self.progress.lines)
        self._last_loss: float | None = None
        self._saved_at, self._save_cost = time.perf_counter(), 0.0

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds of the last steps."""
        return list(self._times)

    def run(self) -> None:
        """Trains to the end.

        Raises:
            RunFailedError: the loss is not finite any more, or far above the first one.
            InterruptedRunError: a person wants it to end.
        """
        if self.progress.step == 0:
            self._judge()
        block = 1
        self._stepper.head.train()
        self._stepper.body.train()
        self._memory.start()
        try:
            while self._place() < self._schedule.total:
                ahead = self._schedule.steps_to_next(self.progress.step)
                block = self._train(block if ahead is None else min(block, ahead), block)
                self._told()
        finally:
            self._memory.stop()
            self._lines.close()
        if self._is_due():
            self._save()

    def _place(self) -> float:
        return self._schedule.place(self.progress.step, self.progress.seconds)

    def _train(self, steps: int, block: int) -> int:
        """Some steps and their time; how many to make next."""
        now, before = self.progress, self._place()
        losses: list[Tensor] = []
        start = time.perf_counter()
        for step in range(now.step, now.step + steps):
            batch = self._feed.batch(self._seed, step)
            losses.append(self._stepper.step(batch))
            now.tokens += batch.size
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elapsed = time.perf_counter() - start
        now.step, now.seconds = now.step + steps, now.seconds + elapsed
        # One by one: the sum does not depend on how many steps were made at a time.
        now.loss_sum = sum(torch.stack(losses).tolist(), now.loss_sum)
        now.loss_count += steps
        self._times.append(1e3 * elapsed / steps)
        self._before = before
        quick = self._device.type == "cuda" and elapsed < _BLOCK_SECONDS and steps == block
        return 2 * block if quick else block

    def _told(self) -> None:
        """Everything between two blocks of steps; none of it is on the clock."""
        schedule, place, now = self._schedule, self._place(), self.progress
        last = place >= schedule.total
        if schedule.told(place) > schedule.told(self._before) or last:
            self._tell_loss()
        if schedule.judged(place) > schedule.judged(self._before) or last:
            self._memory.stop()
            self._judge()
            self._memory.start()
        self._tell(min(1.0, place / schedule.total), now, self._last_loss)
        stopped = self._stopped()
        if stopped or self._is_due():
            self._memory.stop()
            self._save()
            self._memory.start()
        if stopped:
            raise InterruptedRunError

    def _tell_loss(self) -> None:
        now = self.progress
        loss = now.loss_sum / max(1, now.loss_count)
        now.loss_sum, now.loss_count = 0.0, 0
        self._last_loss = loss
        self._line("train", loss=loss)
        if not math.isfinite(loss):
            raise RunFailedError("nan", f"the training loss was {loss} by step {now.step:,}")
        if now.first_loss is None:
            now.first_loss = loss
        elif loss > _DIVERGED * max(1.0, abs(now.first_loss)):
            raise RunFailedError(
                "diverged",
                f"the training loss rose from {now.first_loss:.4g} to {loss:.4g} by step "
                f"{now.step:,}",
            )

    def _judge(self) -> None:
        self._line("valid", **self._evaluate())
        self._stepper.head.train()
        self._stepper.body.train()

    def _line(self, kind: str, **values: Any) -> None:
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
