"""One measurement of a head, or of what draws classes or builds a tree."""

from dataclasses import dataclass

from lastlayer.bench.baseline_record import BaselineRecord


@dataclass(frozen=True, kw_only=True)
class HeadRecord(BaselineRecord):
    """One measurement of a training step, of the best classes, of draws, or of building a tree.

    Attributes:
        shape: rows, hidden width and classes; of draws and trees the classes alone.
        settings: what was chosen for this many classes, such as cutoffs.
        parameters: how many numbers the head learns.
        peak_bytes: the most memory held at once beyond inputs and parameters; gradients count.
        hidden_error: of the gradient of the hidden states, and weight_error of the parameter where
            it is largest.
        value_error: of the best classes, the largest difference between the log-probabilities of
            those that were found and of the true ones, both in float64; of draws, of what is told
            of them.
        classes_differ: how many of these classes are others than in a sort of all.
        replayed_ms: on a GPU, the median of replays of a CUDA graph of the same call; None where
            the host waits for the device, and where the call is so long that it hides the host.
    """

    settings: str
    parameters: int | None
    hidden_error: float | None
    weight_error: float | None
    value_error: float | None
    classes_differ: int | None
    replayed_ms: float | None = None

    @property
    def device_ms(self) -> float | None:
        """The time of a replay, or that of plain calls where there is none."""
        return self.median_ms if self.replayed_ms is None else self.replayed_ms

    @property
    def times_faster(self) -> float | None:
        """The time of the baseline over this one."""
        return 1 / self.ratio_to_baseline if self.ratio_to_baseline else None

    @property
    def case(self) -> str:
        """What it was measured on, in one line."""
        if len(self.shape) == 1:
            return f"{self.shape[0]:,} classes"
        return f"{self.size} {self.dtype}"
