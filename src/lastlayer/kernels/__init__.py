"""The operations under the maps, each with a reference, a Triton and a CPU implementation."""

from lastlayer.kernels import entmax, topk_softmax
from lastlayer.kernels._registry import IMPLEMENTATIONS, Impl, available, selected

__all__ = ["IMPLEMENTATIONS", "Impl", "available", "entmax", "selected", "topk_softmax"]
