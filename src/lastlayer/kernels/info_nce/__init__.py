"""What InfoNCE does with a few rows of products, without holding all. README.md has the formulas.

``scores`` are products of queries and keys, ``(rows, keys)``; the similarity is ``scale`` times
that. The own key of row i is column ``own + i``; where ``own`` is the number of columns no row has
one. Groups are int32 ranks that are compared for equality: with ``positive`` keys of the same
group are positives besides the own one, else they are left out. ``bounded`` promises that scores
lie between -1 and 1, give or take their rounding.
"""

from functools import partial

from lastlayer.kernels._registry import Operation

_SIMILARITIES = (
    "Tensor scale, int own, Tensor? query_groups, Tensor? key_groups, bool positive, bool bounded"
)
_operation = partial(Operation, __name__)

unit_rows_ = _operation(
    "unit_rows_", "unit_rows_(Tensor rows, Tensor(a!) out, bool normalize) -> ()"
)
statistics_ = _operation(
    "statistics_",
    f"info_nce_statistics_(Tensor scores, {_SIMILARITIES}, Tensor(a!) row_lse, "
    "Tensor(b!) row_positive, Tensor(c!) column_lse, Tensor(d!) column_positive) -> ()",
)
weights_ = _operation(
    "weights_",
    f"info_nce_weights_(Tensor(a!) scores, {_SIMILARITIES}, Tensor row_lse, Tensor row_push, "
    "Tensor row_pull, Tensor column_lse, Tensor column_push, Tensor column_pull, "
    "Tensor(b!) out) -> ()",
)
row_gradients_ = _operation(
    "row_gradients_",
    "unit_rows_gradient_(Tensor rows, Tensor gradient, Tensor factor, bool normalize, "
    "Tensor(a!) out, Tensor(b!) along) -> ()",
)
