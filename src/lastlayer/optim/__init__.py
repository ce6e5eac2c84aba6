"""Optimisers for row-sparse gradients: large tables of which a step changes a few rows."""

from lastlayer.optim.row_adagrad import RowAdagrad
from lastlayer.optim.row_adam import RowAdam

__all__ = ["RowAdagrad", "RowAdam"]
