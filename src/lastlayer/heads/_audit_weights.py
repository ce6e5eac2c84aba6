"""Importance weights of drawn classes: how many draws they are worth, and the Z they say."""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lastlayer.heads._log_z import temperature_of
from lastlayer.heads._rows import row_chunks
from lastlayer.heads._scores import wide_scores

if TYPE_CHECKING:
    from lastlayer.heads._sampled import SampledHead

_COPIES = 4.0


class Importance(NamedTuple):
    """Of each row, ``(n,)``."""

    ess: Tensor
    """(Σr)² / Σr² with r = e^s / q."""
    log_z: Tensor | None
    """log of the mean of r: what the draws say that log Σ e^s is."""


@torch.no_grad()
def importance(head: "SampledHead", rows: Tensor, counter: Tensor) -> Importance:
    """Of ``n_samples`` draws of the head's sampler, the same for all rows."""
    ids, log_q = head._drawn(counter)
    rows, weight, bias = head._operands(rows)
    vectors, biases = weight[ids], None if bias is None else bias[ids]
    ess, log_z = [], []
    for part in row_chunks(rows, head.n_samples, head.chunk_rows, _COPIES):
        scores = wide_scores(rows[part], vectors, biases) / temperature_of(head)
        # A class that is not left to chance has no part in it.
        log_r = torch.where(log_q == -math.inf, -math.inf, scores - log_q)
        total = torch.logsumexp(log_r, -1)
        ess.append(torch.exp(2.0 * total - torch.logsumexp(2.0 * log_r, -1)))
        log_z.append(total - math.log(head.n_samples))
    return Importance(torch.cat(ess), torch.cat(log_z))
