"""Conversion of scikit-learn targets y to lists of labels."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import column_or_1d

from lastlayer.integrations._linear_losses import Lists


class Target(NamedTuple):
    """Targets of training.

    Attributes:
        kind: "two" classes, more "classes", or "labels" for multi-label targets.
        classes: the class labels, or 0 to n - 1 for labels.
        n_scores: number of scores per row: 1 for two classes, else one per class or label.
        labels: the positive scores of each row.
        in_sparse: whether y was a sparse matrix.
    """

    kind: str
    classes: NDArray[Any]
    n_scores: int
    labels: Lists
    in_sparse: bool


def target_of(y: Any) -> Target:
    """Class labels ``(rows,)``, or an indicator matrix of 0 and 1, dense or sparse."""
    if sparse.issparse(y) and y.shape[1] < 2:
        raise ValueError(
            "y: expected class labels, or a matrix of at least 2 labels, got a sparse matrix of "
            f"shape {y.shape}; for one label pass y.toarray().ravel()"
        )
    check_classification_targets(y)
    kind = type_of_target(y, input_name="y")
    if kind == "multilabel-indicator":
        return _of_indicator(y)
    if kind == "multiclass-multioutput":
        raise ValueError(
            "y: expected class labels of shape (rows,), or 0 and 1 of shape (rows, labels), got "
            "several columns with more than two values; wrap this in MultiOutputClassifier"
        )
    classes, ids = np.unique(column_or_1d(y, warn=True), return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y: expected at least 2 classes, got one class, {classes[0]!r}")
    if len(classes) == 2:
        ends = np.concatenate([[0], np.cumsum(ids)])
        return Target("two", classes, 1, _lists(np.zeros(ends[-1]), ends), False)
    one_each = _lists(ids, np.arange(len(ids) + 1))
    return Target("classes", classes, len(classes), one_each, False)


def _of_indicator(y: Any) -> Target:
    in_sparse = sparse.issparse(y)
    rows = sparse.csr_array(y)
    # A sparse matrix may store zeros, and its entries may be in any order.
    if in_sparse and rows.nnz:
        rows.sum_duplicates()
        rows.eliminate_zeros()
    n_labels = rows.shape[1]
    lists = _lists(rows.indices, rows.indptr)
    return Target("labels", np.arange(n_labels), n_labels, lists, in_sparse)


def _lists(indices: NDArray[Any], offsets: NDArray[Any]) -> Lists:
    return Lists(*(torch.from_numpy(each.astype(np.int64)) for each in (indices, offsets)))
