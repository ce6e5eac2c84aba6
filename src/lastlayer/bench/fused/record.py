"""One measurement of a loss on a linear layer."""

from dataclasses import dataclass

from lastlayer.bench.record import Record


@dataclass(frozen=True, kw_only=True)
class FusedRecord(Record):
    """One measurement of a loss on a linear layer, its gradients included.

    Attributes:
        shape: rows, hidden width and classes.
        scores: the kind of scores, and ``scores_made`` how they were made.
        support_mean: classes with a probability other than 0 in a row, where a function has few;
            with support_max, over a sample of rows.
        tflop_per_s: the operations of the three products a linear layer needs, over the time,
            whatever the method does.
        gemm_tflop_per_s: the same of a product of two large square matrices in this run.
        baseline: the method that the time is divided by in ratio_to_baseline.
        peak_bytes: the most memory held at once beyond inputs and gradients.
        loss_error: |loss − truth| / |truth|, the truth in float64 from the same inputs.
        hidden_error: ‖gradient − truth‖ / ‖truth‖ of the hidden states, and weight_error of the
            class vectors.
    """

    scores: str
    scores_made: str
    support_mean: float | None
    support_max: int | None
    tflop_per_s: float | None
    gemm_tflop_per_s: float
    fraction_of_gemm: float | None
    baseline: str | None
    ratio_to_baseline: float | None
    peak_bytes: int | None
    loss_error: float | None
    hidden_error: float | None
    weight_error: float | None

    @property
    def case(self) -> str:
        """What it was measured on, in one line."""
        return f"{self.size} {self.dtype}, {self.scores} scores"

    @property
    def part(self) -> tuple[str, ...]:
        """One case: the cases of a run can be measured one at a time."""
        return self.section, self.case
