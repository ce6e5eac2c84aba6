"""The forward pass where each row has one target and all rows share their draws, on a GPU.

Most of a step is then three products, and what is left are small steps, whose launches would take
longer than they do. So they are part of three kernels: one before the products, the one between
them, and one after.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import is_eager
from lastlayer.heads._sampled_draws import Made, Rows, shared_draws
from lastlayer.heads._sampled_rule import Rule
from lastlayer.kernels import sampled_rows

# Classes are told apart by 32 bits.
_MOST_CLASSES = 2**31 - 1


def suits(hidden: Tensor, weight: Tensor, target: Tensor, ids: Tensor, labels: object) -> bool:
    """Whether the kernels can take it."""
    return (
        hidden.device.type == "cuda"
        and is_eager(hidden)
        and ids.dim() == 1
        and ids.shape[0] > 0
        and target.shape[1] == 1
        and labels is None
        and weight.shape[0] <= _MOST_CLASSES
        and kernels.selected("sampled_start", "cuda", hidden.dtype) == "triton"
        and weight.dtype != torch.float64
    )


def one_target(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_shift: Tensor | None,
    target: Tensor,
    ids: Tensor,
    log_expected: Tensor,
    target_log_expected: Tensor | None,
    shift: Tensor | None,
    scale: Tensor,
    row_scale: Tensor | None,
    factor: float,
    n_exact: int,
    rule: Rule,
    chunk_rows: str,
    wanted: Sequence[bool],
    impl: kernels.Impl = "auto",
) -> tuple[Tensor, Made, Tensor, Tensor]:
    """Losses, what comes of the draws, slopes ``(n,)``, and the classes of draws and targets."""
    m = ids.shape[0]
    hidden, vectors, logits, offset, entries = sampled_rows.start(
        impl, hidden, weight.detach(), None if bias is None else bias.detach(), target.view(-1),
        ids, log_expected, None if target_log_expected is None else target_log_expected.reshape(-1),
        row_shift, factor,
    )  # fmt: skip
    exact = logits if rule.with_target and not rule.logistic else None
    labels, of_targets = entries[:m], entries[m:]
    rows = Rows(
        offset, labels, of_targets.unsqueeze(-1), shift, exact, row_scale, factor, n_exact, rule
    )
    made = shared_draws(hidden, vectors, rows, chunk_rows, wanted, impl)
    losses, slopes = sampled_rows.finish_(
        impl, made.first, logits, scale, row_scale, of_targets, weight.detach(), made.of_hidden,
        factor, rule.logistic, rule.with_target,
    )  # fmt: skip
    return losses, made, slopes, entries
