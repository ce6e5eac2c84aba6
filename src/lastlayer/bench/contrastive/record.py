"""One measurement of a contrastive loss."""

from dataclasses import dataclass

from lastlayer.bench.baseline_record import LossRecord


@dataclass(frozen=True, kw_only=True)
class ContrastiveRecord(LossRecord):
    """One measurement of InfoNCE, its gradients included.

    Attributes:
        shape: pairs, and the width of their vectors.
        inputs_made: how the vectors were made.
        query_error: of the gradient of the queries, key_error of the keys, temperature_error of
            the temperature.
    """

    inputs_made: str
    query_error: float | None = None
    key_error: float | None = None
    temperature_error: float | None = None

    @property
    def case(self) -> str:
        """What it was measured on, in one line."""
        return f"{self.size} {self.dtype}"
