"""What a row makes of the logits of its targets and of its draws."""

from typing import NamedTuple


class Rule(NamedTuple):
    """One of the losses that differ in nothing else."""

    # Binary losses, softplus(-target) + Σ softplus(draw), instead of a softmax.
    logistic: bool = False
    # Whether targets are part of the normaliser of a softmax; if not it is that of draws alone.
    with_target: bool = True
    # Leave out draws that are a target of the row.
    drop_hits: bool = True
    # Divide by the number of draws that are left.
    average: bool = False
