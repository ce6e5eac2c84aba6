"""What InfoNCE does with a few rows of products, without holding all. README.md has the formulas.

``scores`` are products of queries and keys, ``(rows, keys)``; the similarity is ``scale`` times
that. The own key of row i is column ``own + i``; where ``own`` is the number of columns no row has
one. Groups are int32 ranks that are compared for equality: with ``positive`` keys of the same
group are positives besides the own one, else they are left out. ``bounded`` promises that scores
lie between -1 and 1, give or take their rounding.
"""

from lastlayer.kernels._registry import Operation


def _fake(*_: object) -> None:
    return None


unit_rows_ = Operation(
    "unit_rows_",
    "(Tensor rows, Tensor(a!) out, bool normalize) -> ()",
    __name__,
    "unit_rows_",
    _fake,
)

statistics_ = Operation(
    "info_nce_statistics_",
    "(Tensor scores, Tensor scale, int own, Tensor? query_groups, Tensor? key_groups, "
    "bool positive, bool bounded, Tensor(a!) row_lse, Tensor(b!) row_positive, "
    "Tensor(c!) column_lse, Tensor(d!) column_positive) -> ()",
    __name__,
    "statistics_",
    _fake,
)

weights_ = Operation(
    "info_nce_weights_",
    "(Tensor(a!) scores, Tensor scale, int own, Tensor? query_groups, Tensor? key_groups, "
    "bool positive, bool bounded, Tensor row_lse, Tensor row_push, Tensor row_pull, "
    "Tensor column_lse, Tensor column_push, Tensor column_pull, Tensor(b!) out) -> ()",
    __name__,
    "weights_",
    _fake,
)

row_gradients_ = Operation(
    "unit_rows_gradient_",
    "(Tensor rows, Tensor gradient, Tensor factor, bool normalize, Tensor(a!) out, "
    "Tensor(b!) along) -> ()",
    __name__,
    "row_gradients_",
    _fake,
)
