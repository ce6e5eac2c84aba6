"""The two sums of ZLPR over all spans of a text, and their gradients, on CUDA.

There is no CPU kernel: elsewhere tiles of scores are stored, see :mod:`lastlayer.fused.spans`.
README.md has the derivation.

``target`` is bool ``(texts, types, n, n)``, or has int64 cells ``(texts, m)``: each is ``(type · n
+ start) · n + end``, or -1 for padding.
"""

from typing import NamedTuple

from torch import Tensor


class SpanParts(NamedTuple):
    """Inputs of span scores: the vectors of starts and ends, and their biases.

    Attributes:
        query: vectors of starts, ``(texts, types or 1, n, head_size)``.
        key: vectors of ends, of the same shape.
        start_bias: ``(texts, types, n)``, or None.
        end_bias: ``(texts, types, n)``, or None.
        mask: ``(texts, n)`` bool, True for tokens; None if all are tokens.
    """

    query: Tensor
    key: Tensor
    start_bias: Tensor | None
    end_bias: Tensor | None
    mask: Tensor | None
