"""The two sums of ZLPR over all spans of a text, and their gradients, on CUDA.

There is no other implementation: elsewhere tiles of scores are stored, see
:mod:`lastlayer.fused.spans`. README.md has the derivation.

``target`` are bools ``(texts, types, n, n)``, or int64 cells ``(texts, m)``, each ``(type · n +
start) · n + end``, or -1 for none.
"""

from typing import NamedTuple

from torch import Tensor


class SpanParts(NamedTuple):
    """What scores are made of: a product of two vectors, and what start and end add.

    Attributes:
        query: ``(texts, types or 1, n, head_size)``.
        key: the same.
        start_bias: ``(texts, types, n)``, or None.
        end_bias: the same.
        mask: ``(texts, n)`` bool, True for tokens; None where all are.
    """

    query: Tensor
    key: Tensor
    start_bias: Tensor | None
    end_bias: Tensor | None
    mask: Tensor | None
