"""Rotary positions: an inner product of rotated vectors depends on how far apart they stand."""

import torch
from torch import Tensor

_BASE = 10_000.0


def rotated(vectors: Tensor) -> Tensor:
    r"""Vectors ``(*batch, n, d)``, that at place p rotated by p.

    Of each pair of numbers :math:`(x_{2i}, x_{2i+1})` the angle is :math:`p\,10000^{-2i/d}`, so
    that a product of two rotated vectors is that of one with the other rotated by their distance.
    """
    n, d = vectors.shape[-2:]
    # In float64: at place 4096 an angle in float32 would be off by 2e-4.
    rate = _BASE ** (torch.arange(0, d, 2, dtype=torch.float64, device=vectors.device) / -d)
    angle = torch.arange(n, dtype=torch.float64, device=vectors.device).unsqueeze(-1) * rate
    cos, sin = angle.cos().to(vectors.dtype), angle.sin().to(vectors.dtype)
    even, odd = vectors[..., 0::2], vectors[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
