"""One measurement of a loss of many labels."""

from dataclasses import dataclass

from lastlayer.bench.baseline_record import LossRecord


@dataclass(frozen=True, kw_only=True)
class MultilabelRecord(LossRecord):
    """One measurement of a loss of many labels.

    Attributes:
        shape: rows, hidden width and labels; rows and labels where scores are the input.
        inputs_made: how the inputs were made.
        tb_per_s: the bytes that must be read and written, over the time; None with a linear layer.
        copy_tb_per_s: bytes that a copy of a large buffer reads and writes in a second.
        hidden_error: of the gradient of the hidden states, weight_error of the label vectors,
            scores_error of the scores.
    """

    inputs_made: str
    tb_per_s: float | None
    copy_tb_per_s: float
    fraction_of_copy: float | None
    hidden_error: float | None = None
    weight_error: float | None = None
    scores_error: float | None = None
