"""Softmax over the k largest scores of a row. Its backward is that of entmax at alpha = 1."""

from lastlayer.kernels._registry import Operation, like_first

forward = Operation(__name__, "forward", "topk_softmax(Tensor scores, int k) -> Tensor", like_first)
