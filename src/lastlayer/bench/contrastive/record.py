"""One measurement of a contrastive loss."""

from dataclasses import dataclass

from lastlayer.bench.record import Record


@dataclass(frozen=True, kw_only=True)
class ContrastiveRecord(Record):
    """One measurement of InfoNCE, its gradients included.

    Attributes:
        shape: pairs, and the width of their vectors.
        inputs_made: how the vectors were made.
        tflop_per_s: the operations of the three products that the loss needs, over the time,
            whatever the method does.
        gemm_tflop_per_s: the same of a product of two large square matrices in this run.
        baseline: the method that the time is divided by in ratio_to_baseline.
        peak_bytes: the most memory held at once beyond inputs and gradients.
        loss_error: |loss − truth| / |truth|, the truth in float64 from the same inputs.
        query_error: ‖gradient − truth‖ / ‖truth‖ of the queries, and key_error of the keys.
        temperature_error: the same of the temperature.
    """

    inputs_made: str
    tflop_per_s: float | None
    gemm_tflop_per_s: float
    fraction_of_gemm: float | None
    baseline: str | None
    ratio_to_baseline: float | None
    peak_bytes: int | None
    loss_error: float | None
    query_error: float | None
    key_error: float | None
    temperature_error: float | None

    @property
    def case(self) -> str:
        """What it was measured on, in one line."""
        return f"{self.size} {self.dtype}"

    @property
    def part(self) -> tuple[str, ...]:
        """One case: the cases of a run can be measured one at a time."""
        return self.section, self.case
