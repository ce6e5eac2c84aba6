"""Optimisers for tables of class vectors, of which a step touches a few rows."""

from lastlayer.optim.row_adagrad import RowAdagrad
from lastlayer.optim.row_adam import RowAdam

__all__ = ["RowAdagrad", "RowAdam"]
