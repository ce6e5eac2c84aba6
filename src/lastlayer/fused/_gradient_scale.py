"""The gradients of a loss on a linear layer: within the range of half precision, and fake."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._torch import gradient_sum_dtype


def near_one(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Factors of rows as products in ``dtype`` can take them, and what they were divided by.

    float16 has nothing below 6e-8, which is less than what 1/n leaves of a probability. So factors
    are brought to 1, and gradients back with the upstream one, which may be a loss scale.
    """
    if dtype != torch.float16 or scale.shape[0] == 0:
        return scale, None
    size = scale.abs().amax()
    size = torch.where(size == 0, 1.0, size)
    return scale / size, size


def rounded_product(values: Tensor, factor: Tensor) -> Tensor:
    """Rounded once: a factor may be out of the range of half precision."""
    return (values.to(factor.dtype) * factor).to(values.dtype)


def scaled_gradients(ctx: Any, grad: Tensor) -> list[Tensor]:
    """The gradients of the forward pass times the upstream one."""
    made: list[Tensor]
    if torch.compiler.is_compiling():
        size, *made = ctx.saved_tensors
        grad = grad if size is None else grad * size
        made = [rounded_product(each, grad) for each in made]
    else:
        if ctx.spent:
            raise RuntimeError(
                "backward: the gradients of this loss were made in its forward pass and handed "
                "out by the first backward; call the loss again, or use reduction='none' and "
                "reduce it yourself, whose backward can be repeated with retain_graph=True"
            )
        ctx.spent = True
        size, *made = ctx.saved_tensors
        grad = grad if size is None else grad * size
        for each in made:
            # In place: a copy of the weight's gradient may be more than the device can hold.
            kernels.products.scale_("auto", each, grad)
    return made


def returned_gradients(hidden: Tensor, made: Sequence[Tensor | None]) -> list[Tensor]:
    """What an operation returns for the three gradients: contiguous, and empty for None.

    Whatever the strides of the operands: which way it runs also depends on the device and on
    values, which a fake does not see.
    """
    return [hidden.new_empty(0) if each is None else each.contiguous() for each in made]


def unmade_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> list[Tensor]:
    """What a fake returns for :func:`returned_gradients`: empty where one is not wanted."""
    sources = (
        (hidden, hidden.dtype),
        (weight, gradient_sum_dtype(weight.dtype)),
        (bias, None if bias is None else gradient_sum_dtype(bias.dtype)),
    )
    return [
        source.new_empty(source.shape, dtype=dtype)
        if source is not None and needed
        else hidden.new_empty(0)
        for (source, dtype), needed in zip(sources, wanted, strict=True)
    ]
