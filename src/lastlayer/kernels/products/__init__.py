"""Products with a few classes per row, scaling by a tensor, and weighted means.

``scores`` computes the scores of chosen classes; a class of -1 is padding, with a score of 0.
``to_hidden`` and ``add_to_weight_`` multiply a sparse score gradient, given as values and classes
(n, k), by the class vectors and by the hidden states. A value of 0 is padding, whatever its class;
the values of a class that occurs more than once are summed. ``scale_`` multiplies tensors in place,
without memory traffic if the factor is 1. ``weighted_mean`` reduces the losses of rows, and returns
1 over the sum of the weights too. ``row_factors`` masks rows whose targets are ignored.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation


def _scores(hidden: Tensor, _weight: Tensor, _bias: Tensor | None, classes: Tensor) -> Tensor:
    return hidden.new_empty(classes.shape, dtype=accumulation_dtype(hidden.dtype))


def _to_hidden(values: Tensor, _classes: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(values.shape[0], weight.shape[1])


def _weighted_mean(losses: Tensor, _weights: Tensor | None) -> tuple[Tensor, Tensor]:
    return losses.new_empty(()), losses.new_empty(())


def _row_factors(
    target: Tensor, hidden: Tensor, row_weight: Tensor | None, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = target.new_empty(target.shape, dtype=torch.float32)
    weight = weight if row_weight is None else row_weight.new_empty(target.shape)
    clean = target.new_empty(target.shape), hidden.new_empty(hidden.shape)
    return *clean, weight, weight.new_empty(target.shape)


scores = operation("products.scores", "class_scores", _scores)
to_hidden = operation("products.to_hidden", "sparse_gradient_to_hidden", _to_hidden)
add_to_weight_ = operation(
    "products.add_to_weight_", "sparse_gradient_add_to_weight_", writes=("weight_gradient",)
)
scale_ = operation("products.scale_", "scale_", writes=("values", "others"))
row_factors = operation(
    "products.row_factors", "row_factors", _row_factors, integers=True, has_cpu=False
)
weighted_mean = operation("products.weighted_mean", "weighted_mean", _weighted_mean)
