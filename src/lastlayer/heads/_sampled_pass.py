"""The forward pass of a sampled loss: losses, and the pieces that gradients are made of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype
from lastlayer.heads._sampled_draws import Rows, draws_apart, operands, shared_draws
from lastlayer.heads._sampled_one_target import one_target, suits
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
    entries: Tensor
    """The classes that draws and then targets belong to; row by row where draws are apart."""


def run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_shift: Tensor | None,
    target: Tensor,
    ids: Tensor,
    log_expected: Tensor,
    target_log_expected: Tensor | None,
    shift: Tensor | None,
    labels: Tensor | None,
    target_labels: Tensor | None,
    scale: Tensor,
    row_scale: Tensor | None,
    temperature: float,
    n_exact: int,
    rule: Sequence[bool],
    chunk_rows: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Losses times ``scale``, effective sample sizes ``(n,)``; then :class:`Pieces`."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        how, factor = Rule(*rule), 1.0 / temperature
        dtype = accumulation_dtype(hidden.dtype)
        if row_shift is not None:
            shift = row_shift.to(dtype) if shift is None else shift.to(dtype) + row_shift
        to_classes = row_scale is not None and (wanted[1] or wanted[2])
        if suits(hidden, weight, target, ids, labels):
            losses, made, slopes, entries = one_target(
                hidden, weight, bias, row_shift, target, ids, log_expected, target_log_expected,
                shift, scale, row_scale, factor, n_exact, how, chunk_rows, wanted,
            )  # fmt: skip
            of_hidden, slopes = made.of_hidden, slopes.unsqueeze(-1)
            raw = slopes / factor if wanted[3] and row_scale is not None else slopes
        else:
            scores = target_logits(
                hidden, weight, bias, target, factor, target_log_expected, row_shift
            )
            exact = log_mass(scores, target) if how.with_target and not how.logistic else None
            offset = -log_expected.to(dtype)
            if bias is not None:
                offset = torch.add(offset, bias.detach()[ids].to(dtype), alpha=factor)
            if labels is None or target_labels is None:
                labels, target_labels = ids, target
            rows = Rows(
                offset, labels, target_labels, shift, exact, row_scale, factor, n_exact, how
            )
            if ids.dim() == 1:
                made = shared_draws(*operands(hidden, weight, ids), rows, chunk_rows, wanted)
            else:
                made = draws_apart(hidden, weight, ids, rows, wanted)
            losses, raw = combined(scores, target, exact, made.first, how)
            losses = torch.where(scale == 0, 0.0, losses * scale)
            entries = _entries(ids, target, weight.shape[0]) if to_classes else ids
            slopes, of_hidden = raw, made.of_hidden
            if row_scale is not None:
                raw = raw * row_scale.to(dtype).unsqueeze(-1)
                slopes = raw * factor
            if wanted[0] and row_scale is not None:
                of_hidden = of_hidden + kernels.products.to_hidden(
                    "auto", slopes, target.clamp(min=0), weight
                )
        ess = torch.zeros_like(made.second) if how.logistic else made.second
        if row_scale is None:
            nothing = [losses.new_empty(0) for _ in Pieces._fields[:-1]]
            return [losses, ess, *nothing, ids.new_empty(0, dtype=_narrow(weight.shape[0]))]
        of_shift = losses.new_empty(0)
        if wanted[3]:
            # A softmax does not see a shift of all its logits.
            of_shift = torch.zeros_like(losses)
            if how.logistic:
                total = raw.sum(-1) + made.second * row_scale
                of_shift = torch.where(row_scale == 0, 0.0, total)
        entries = entries if to_classes else ids.new_empty(0, dtype=_narrow(weight.shape[0]))
        return [losses, ess, of_hidden, made.of_draws, made.of_bias, slopes, of_shift, entries]


def _entries(ids: Tensor, target: Tensor, n_classes: int) -> Tensor:
    if ids.dim() == 1:
        entries = torch.cat([ids, target.flatten()])
    else:
        entries = torch.cat([ids, target], 1).flatten()
    # A place without a target has a slope of 0, and goes to a class that is touched anyway.
    entries = torch.where(entries < 0, entries[:1].clamp(min=0), entries)
    return entries.to(_narrow(n_classes))


def _narrow(n_classes: int) -> torch.dtype:
    """Sorting half as many bytes takes half the time."""
    return torch.int32 if n_classes <= _MOST_NARROW else torch.int64


def _fake(*given: Any) -> list[Tensor]:
    """Empty results of the right shapes and dtypes, for tracing."""
    hidden, weight, target, ids, row_scale = (given[place] for place in (0, 1, 4, 5, 12))
    to_hidden, to_weight, to_bias, to_shift = given[-1]
    dtype, (n, d) = accumulation_dtype(hidden.dtype), hidden.shape

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
        ids.new_empty(
            ids.numel() + target.numel() if row_scale is not None and (to_weight or to_bias) else 0,
            dtype=_narrow(weight.shape[0]),
        ),
    ]


torch.library.custom_op("lastlayer::sampled_loss", mutates_args=())(run).register_fake(_fake)
