"""One measurement of a loss on a linear layer."""

from dataclasses import dataclass

from lastlayer.bench.baseline_record import LossRecord


@dataclass(frozen=True, kw_only=True)
class FusedRecord(LossRecord):
    """One measurement of a loss on a linear layer, its gradients included.

    Attributes:
        shape: rows, hidden width and classes.
        scores: the kind of scores, and ``scores_made`` how they were made.
        support_mean: classes with a probability other than 0 in a row, where a function has few;
            with support_max, over a sample of rows.
        hidden_error: of the gradient of the hidden states, and weight_error of the class vectors.
    """

    scores: str
    scores_made: str
    support_mean: float | None
    support_max: int | None
    hidden_error: float | None = None
    weight_error: float | None = None

    @property
    def case(self) -> str:
        """What it was measured on, in one line."""
        return f"{self.size} {self.dtype}, {self.scores} scores"
