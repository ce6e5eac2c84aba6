"""The draws of rows: their scores, and the gradients of hidden and of the vectors drawn."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused._products import add_weight_gradient_, scores_into, set_weight_gradient
from lastlayer.heads._ranked import wide_dtype
from lastlayer.heads._sampled_chunks import sizes_for
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

    def run(self, scores: Tensor, gradient: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        def some(each: Tensor | None) -> Tensor | None:
            return None if each is None else each[part]

        apart = self.offset.dim() == 2
        made: tuple[Tensor, Tensor] = sampled_rows.forward_(
            "auto", scores, gradient, self.offset[part] if apart else self.offset,
            self.ids[part] if apart else self.ids, self.target[part], some(self.shift),
            some(self.exact), some(self.row_scale), self.factor, self.n_exact, self.rule.logistic,
            self.rule.drop_hits, self.rule.average,
        )  # fmt: skip
        return made


def shared_draws(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    rows: Rows,
    chunk_rows: str,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """What ``rows`` make of the scores, two numbers a row; then gradients for their factors.

    Those of hidden, of the vectors drawn and of their biases; empty where not wanted.
    """
    dtype = wide_dtype(hidden)
    narrow = _multiplies_narrow(hidden)
    operand = hidden.dtype if narrow else dtype
    vectors = weight.detach().index_select(0, ids).to(operand)
    hidden = hidden.to(operand)
    (n, d), m = hidden.shape, ids.shape[0]
    to_hidden, to_weight, to_bias, _ = (each and rows.row_scale is not None for each in wanted)
    sizes = sizes_for(chunk_rows, n, m, narrow)
    results: list[tuple[Tensor, Tensor]] = []
    of_hidden = hidden.new_empty((n, d) if to_hidden else 0, dtype=dtype)
    of_draws = hidden.new_empty((m, d) if to_weight else 0, dtype=dtype)
    of_bias = hidden.new_empty(m if to_bias else 0, dtype=dtype)
    scores = hidden.new_empty(sizes.scores, m, dtype=dtype)
    apart = narrow and rows.row_scale is not None
    gradient = hidden.new_empty(sizes.gradient, m) if apart else scores
    for start in range(0, max(1, n), sizes.gradient):
        stop = min(n, start + sizes.gradient)
        for begin in range(start, max(1, stop), sizes.scores):
            part = slice(begin, min(stop, begin + sizes.scores))
            made = scores_into(scores, hidden[part], vectors, None)
            into = gradient[begin - start : part.stop - start] if apart else made
            results.append(rows.run(made, into, part))
        slopes = gradient[: stop - start]
        if to_hidden:
            scores_into(of_hidden[start:stop], slopes, vectors.t(), None)
        if to_weight:
            add = add_weight_gradient_ if start else set_weight_gradient
            add(of_draws, slopes, hidden[start:stop])
        if to_bias:
            sums = slopes.sum(0, dtype=dtype)
            of_bias = of_bias.add_(sums) if start else sums
    first, second = results[0] if len(results) == 1 else map(torch.cat, zip(*results, strict=True))
    return [first, second, of_hidden, of_draws, of_bias]


def _multiplies_narrow(hidden: Tensor) -> bool:
    """Whether products of half precision come out in float32: on a CPU operands are widened."""
    return hidden.device.type == "cuda" and hidden.dtype != wide_dtype(hidden)


def draws_apart(
    hidden: Tensor, weight: Tensor, ids: Tensor, rows: Rows, wanted: Sequence[bool]
) -> list[Tensor]:
    """As of :func:`shared_draws`, with the gradient of scores in the place of the vectors'."""
    dtype = wide_dtype(hidden)
    to_hidden, to_weight, to_bias, _ = (each and rows.row_scale is not None for each in wanted)
    scores = kernels.class_scores.forward("auto", hidden, weight, None, ids)
    first, second = rows.run(scores, scores, slice(None))
    nothing = hidden.new_empty(0, dtype=dtype)
    of_hidden = nothing
    if to_hidden:
        of_hidden = kernels.sparse_gradient.to_hidden("auto", scores, ids, weight).to(dtype)
    return [first, second, of_hidden, scores if to_weight or to_bias else nothing, nothing]
