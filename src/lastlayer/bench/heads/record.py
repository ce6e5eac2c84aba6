"""One measurement of a head, or of what builds a tree."""

from dataclasses import dataclass

from lastlayer.bench.record import Record


@dataclass(frozen=True, kw_only=True)
class HeadRecord(Record):
    """One measurement of a training step, of the best classes, or of building a tree.

    Attributes:
        shape: rows, hidden width and classes; of trees the classes alone.
        settings: what was chosen for this many classes, such as cutoffs.
        parameters: how many numbers the head learns.
        gemm_tflop_per_s: the rate of a product of two large square matrices in this run.
        baseline: the method that the time is divided by in ratio_to_baseline.
        peak_bytes: the most memory held at once beyond inputs and parameters; gradients count.
        loss_error: |loss − truth| / |truth|, the truth in float64 from the same numbers.
        hidden_error: ‖gradient − truth‖ / ‖truth‖ of the hidden states, and weight_error of the
            parameter where it is largest.
        value_error: of the best classes, the largest difference between the log-probabilities of
            those that were found and of the true ones, both in float64.
        classes_differ: how many of these classes are others than in a sort of all.
        replayed_ms: on a GPU, the median of replays of a CUDA graph of the same call; None where
            the host waits for the device, and where the call is so long that it hides the host.
    """

    settings: str
    parameters: int | None
    gemm_tflop_per_s: float
    baseline: str | None
    ratio_to_baseline: float | None
    peak_bytes: int | None
    loss_error: float | None
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

    @property
    def part(self) -> tuple[str, ...]:
        """One case: the cases of a run can be measured one at a time."""
        return self.section, self.case
