"""Measurements that are divided by a baseline's, and of losses among them."""

from dataclasses import dataclass

from lastlayer.bench.record import Record


@dataclass(frozen=True, kw_only=True)
class BaselineRecord(Record):
    """One measurement in a case that has a baseline.

    Attributes:
        gemm_tflop_per_s: the rate of a product of two large square matrices in this run.
        baseline: the method that the time is divided by in ratio_to_baseline.
        peak_bytes: the most memory held at once beyond what a family says.
        loss_error: |loss − truth| / |truth|, the truth in float64 from the same inputs; errors of
            gradients are ‖gradient − truth‖ / ‖truth‖.
    """

    gemm_tflop_per_s: float
    baseline: str | None
    ratio_to_baseline: float | None
    peak_bytes: int | None
    loss_error: float | None = None

    @property
    def part(self) -> tuple[str, ...]:
        """One case: the cases of a run can be measured one at a time."""
        return self.section, self.case


@dataclass(frozen=True, kw_only=True)
class LossRecord(BaselineRecord):
    """One measurement of a loss, its gradients included; peak_bytes are beyond inputs and these.

    Attributes:
        tflop_per_s: the operations of the three products that a loss on scores from a product
            needs, over the time, whatever the method does; None without such a product.
    """

    tflop_per_s: float | None
    fraction_of_gemm: float | None
