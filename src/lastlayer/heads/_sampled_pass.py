"""The forward pass of a sampled loss: losses, and the pieces that gradients are made of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.heads._ranked import wide_dtype
from lastlayer.heads._sampled_draws import Rows, draws_apart, shared_draws
from lastlayer.heads._sampled_rule import Rule
from lastlayer.heads._sampled_targets import combined, log_mass, target_logits

_MOST_NARROW = 2**31 - 1


class Pieces(NamedTuple):
    """Gradients for the rows' factors, before that of upstream; empty where not wanted."""

    hidden: Tensor
    """``(n, d)``."""
    draws: Tensor
    """Of the vectors drawn, ``(m, d)``; of the scores, ``(n, m)``, where rows have draws apart."""
    draws_bias: Tensor
    """Of their biases, ``(m,)``; empty where rows have draws apart."""
    targets: Tensor
    """Of the scores of targets, ``(n, p)``."""
    row_shift: Tensor
    """``(n,)``."""


def run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_shift: Tensor | None,
    target: Tensor,
    ids: Tensor,
    log_weight: Tensor,
    target_log_weight: Tensor | None,
    shift: Tensor | None,
    labels: Tensor | None,
    target_labels: Tensor | None,
    row_scale: Tensor | None,
    temperature: float,
    n_exact: int,
    rule: Sequence[bool],
    chunk_rows: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Losses and effective sample sizes ``(n,)``; then :class:`Pieces`."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        dtype = wide_dtype(hidden)
        if row_shift is not None:
            shift = row_shift.to(dtype) if shift is None else shift.to(dtype) + row_shift
        how = Rule(*rule)
        factor = 1.0 / temperature
        scores = target_logits(hidden, weight, bias, target, factor, target_log_weight, row_shift)
        exact = log_mass(scores, target) if how.with_target and not how.logistic else None
        offset = log_weight.to(dtype)
        if bias is not None:
            offset = torch.add(offset, bias.detach()[ids].to(dtype), alpha=factor)
        if labels is None or target_labels is None:
            labels, target_labels = ids, target
            if hidden.device.type == "cuda" and weight.shape[0] <= _MOST_NARROW:
                # Every row reads them: half the bytes.
                labels, target_labels = ids.int(), target.int()
        rows = Rows(offset, labels, target_labels, shift, exact, row_scale, factor, n_exact, how)
        if ids.dim() == 1:
            made = shared_draws(hidden, weight, ids, rows, chunk_rows, wanted)
        else:
            made = draws_apart(hidden, weight, ids, rows, wanted)
        first, second, of_hidden, draws, draws_bias = made
        losses, slopes = combined(scores, target, exact, first, how)
        ess = torch.zeros_like(second) if how.logistic else second
        if row_scale is None:
            return [losses, ess, *(losses.new_empty(0) for _ in Pieces._fields)]
        of_shift = losses.new_empty(0)
        if wanted[3]:
            # A softmax does not see a shift of all its logits.
            total = slopes.sum(-1) + second if how.logistic else torch.zeros_like(losses)
            of_shift = total * row_scale
        slopes = slopes * (factor * row_scale.to(dtype)).unsqueeze(-1)
        if wanted[0]:
            of_hidden = of_hidden + kernels.sparse_gradient.to_hidden(
                "auto", slopes, target.clamp(min=0), weight
            )
        return [losses, ess, of_hidden, draws, draws_bias, slopes, of_shift]


def _fake(*given: Any) -> list[Tensor]:
    """Empty results of the right shapes and dtypes, for tracing."""
    hidden, target, ids, row_scale = (given[place] for place in (0, 4, 5, 11))
    to_hidden, to_weight, to_bias, to_shift = given[-1]
    dtype, (n, d) = wide_dtype(hidden), hidden.shape

    def empty(*shape: int, needed: bool = True) -> Tensor:
        made: Tensor = hidden.new_empty(
            shape if needed and row_scale is not None else 0, dtype=dtype
        )
        return made

    shared = ids.dim() == 1
    draws = (ids.shape[0], d) if shared else tuple(ids.shape)
    return [
        hidden.new_empty(n, dtype=dtype),
        hidden.new_empty(n, dtype=dtype),
        empty(n, d, needed=to_hidden),
        empty(*draws, needed=to_weight or (not shared and to_bias)),
        empty(ids.shape[0], needed=shared and to_bias),
        empty(*target.shape),
        empty(n, needed=to_shift),
    ]


torch.library.custom_op("lastlayer::sampled_loss", mutates_args=())(run).register_fake(_fake)
