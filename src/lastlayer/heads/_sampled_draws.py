"""The draws of rows: their scores, and the gradients of hidden and of the vectors drawn."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import accumulation_dtype
from lastlayer.fused._products import add_weight_gradient_, scores_into, set_weight_gradient
from lastlayer.heads._sampled_chunks import rows_for
from lastlayer.heads._sampled_rule import Rule
from lastlayer.kernels import sampled_rows


class Rows(NamedTuple):
    """What the rows of scores are turned into losses with."""

    offset: Tensor
    ids: Tensor
    target: Tensor
    shift: Tensor | None
    exact: Tensor | None
    row_scale: Tensor | None
    factor: float
    n_exact: int
    rule: Rule

    def run(
        self,
        impl: kernels.Impl,
        scores: Tensor,
        gradient: Tensor,
        results: Tensor,
        columns: Tensor,
        part: slice,
    ) -> None:
        """Scores to their gradient, two numbers a row, and sums of the gradient's columns."""

        def some(each: Tensor | None) -> Tensor | None:
            return None if each is None else each[part]

        apart = self.offset.dim() == 2
        sampled_rows.forward_(
            impl, scores, gradient, results[0, part], results[1, part], columns,
            self.offset[part] if apart else self.offset, self.ids[part] if apart else self.ids,
            self.target[part], some(self.shift), some(self.exact), some(self.row_scale),
            self.factor, self.n_exact, self.rule.logistic, self.rule.drop_hits, self.rule.average,
            part.start > 0,
        )  # fmt: skip


class Made(NamedTuple):
    """What comes of the draws; gradients are for the rows' factors, and empty where not wanted."""

    first: Tensor
    second: Tensor
    of_hidden: Tensor
    """``(n, d)``."""
    of_draws: Tensor
    """Of the vectors drawn ``(m, d)``; of the scores ``(n, m)`` where rows have draws apart."""
    of_bias: Tensor
    """Of their biases, ``(m,)``; empty where rows have draws apart."""


def operands(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden and the vectors drawn in the dtype of the products."""
    dtype = hidden.dtype if _multiplies_narrow(hidden) else accumulation_dtype(hidden.dtype)
    return hidden.to(dtype), weight.detach().index_select(0, ids).to(dtype)


def shared_draws(
    hidden: Tensor,
    vectors: Tensor,
    rows: Rows,
    chunk_rows: str,
    wanted: Sequence[bool],
    impl: kernels.Impl = "auto",
) -> Made:
    """Of draws that are the same for every row, some rows at a time."""
    dtype = accumulation_dtype(hidden.dtype)
    (n, d), m = hidden.shape, vectors.shape[0]
    to_hidden, to_weight, to_bias, _ = (each and rows.row_scale is not None for each in wanted)
    narrow = _multiplies_narrow(hidden)
    size = rows_for(chunk_rows, n, m, narrow)
    results = hidden.new_empty(2, n, dtype=dtype)
    of_hidden = hidden.new_empty((n, d) if to_hidden else 0, dtype=dtype)
    of_draws = hidden.new_empty((m, d) if to_weight else 0, dtype=dtype)
    parts = sampled_rows.parts_of_columns(size, m, hidden.device.type)
    columns = hidden.new_empty((parts, m) if to_bias else 0, dtype=dtype)
    scores = hidden.new_empty(size, m, dtype=dtype)
    # A gradient in half precision takes the place of the scores, row by row.
    gradient = scores.view(hidden.dtype)[:, :m] if narrow and m else scores
    for start in range(0, max(1, n), size):
        part = slice(start, min(n, start + size))
        made = scores_into(scores, hidden[part], vectors, None)
        slopes = gradient[: part.stop - start]
        rows.run(impl, made, slopes, results, columns, part)
        if to_hidden:
            scores_into(of_hidden[part], slopes, vectors.t(), None)
        if to_weight:
            add = add_weight_gradient_ if start else set_weight_gradient
            add(of_draws, slopes, hidden[part])
    of_bias = columns.sum(0) if to_bias and parts > 1 else columns.view(-1)
    return Made(results[0], results[1], of_hidden, of_draws, of_bias)


def _multiplies_narrow(hidden: Tensor) -> bool:
    """Whether products of half precision come out in float32: on a CPU operands are widened."""
    return hidden.device.type == "cuda" and hidden.dtype != accumulation_dtype(hidden.dtype)


def draws_apart(
    hidden: Tensor, weight: Tensor, ids: Tensor, rows: Rows, wanted: Sequence[bool]
) -> Made:
    """As of :func:`shared_draws`, with the gradient of scores in the place of the vectors'."""
    dtype = accumulation_dtype(hidden.dtype)
    to_hidden, to_weight, to_bias, _ = (each and rows.row_scale is not None for each in wanted)
    scores = kernels.products.scores("auto", hidden, weight, None, ids)
    nothing = hidden.new_empty(0, dtype=dtype)
    results = hidden.new_empty(2, hidden.shape[0], dtype=dtype)
    rows.run("auto", scores, scores, results, nothing, slice(0, hidden.shape[0]))
    of_hidden = nothing
    if to_hidden:
        of_hidden = kernels.products.to_hidden("auto", scores, ids, weight).to(dtype)
    of_scores = scores if to_weight or to_bias else nothing
    return Made(results[0], results[1], of_hidden, of_scores, nothing)
