"""One measurement of a loss of many labels."""

from dataclasses import dataclass

from lastlayer.bench.record import Record


@dataclass(frozen=True, kw_only=True)
class MultilabelRecord(Record):
    """One measurement of a loss of many labels.

    Attributes:
        shape: rows, hidden width and labels; rows and labels where scores are the input.
        inputs_made: how the inputs were made.
        tflop_per_s: the operations of the three products of a linear layer, over the time,
            whatever the method does; None without such a layer.
        gemm_tflop_per_s: the same of a product of two large square matrices in this run.
        tb_per_s: the bytes that must be read and written, over the time; None with a linear layer.
        copy_tb_per_s: bytes that a copy of a large buffer reads and writes in a second.
        baseline: the method that the time is divided by in ratio_to_baseline.
        peak_bytes: the most memory held at once beyond inputs and gradients.
        loss_error: |loss − truth| / |truth|, the truth in float64 from the same inputs.
        hidden_error: ‖gradient − truth‖ / ‖truth‖ of the hidden states, weight_error of the label
            vectors, scores_error of the scores.
    """

    inputs_made: str
    tflop_per_s: float | None
    gemm_tflop_per_s: float
    fraction_of_gemm: float | None
    tb_per_s: float | None
    copy_tb_per_s: float
    fraction_of_copy: float | None
    baseline: str | None
    ratio_to_baseline: float | None
    peak_bytes: int | None
    loss_error: float | None
    hidden_error: float | None
    weight_error: float | None
    scores_error: float | None

    @property
    def part(self) -> tuple[str, ...]:
        """One case: the cases of a run can be measured one at a time."""
        return self.section, self.case
