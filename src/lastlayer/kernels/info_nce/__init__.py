"""InfoNCE on a chunk of rows of scores, which need not all be stored. README.md has the formulas.

``scores`` are products of queries and keys, ``(rows, keys)``; the similarity is ``scale`` times the
score. The own key of row i is column ``own + i``; if ``own`` is the number of columns, no row has
one. Groups are int32 ranks that are compared for equality. Other keys of the same group are further
positives if ``positive``, and are ignored otherwise. ``bounded`` means that scores lie between -1
and 1, up to rounding.
"""

from lastlayer.kernels._registry import operation

unit_rows_ = operation("info_nce.unit_rows_", "unit_rows_", writes=("out",))
row_gradients_ = operation(
    "info_nce.row_gradients_", "unit_rows_gradient_", writes=("out", "along")
)
weights_ = operation("info_nce.weights_", "info_nce_weights_", writes=("scores", "out"))
statistics_ = operation(
    "info_nce.statistics_",
    "info_nce_statistics_",
    writes=("row_lse", "row_positive", "column_lse", "column_positive"),
)
