"""Vectors of classes, made ready for clustering."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lastlayer._checks import as_array
from lastlayer._torch import accumulation_dtype


def as_vectors(name: str, vectors: Any, normalize: bool) -> NDArray[np.float32]:
    """Rows in float32, scaled and centred so that their squares neither overflow nor vanish."""
    expected = "floating vectors, one a class"
    if isinstance(vectors, torch.Tensor) and vectors.is_floating_point():
        wide = accumulation_dtype(vectors.dtype)
        array: NDArray[Any] = vectors.detach().to("cpu", wide).numpy()
    else:
        array = as_array(name, vectors, expected)
    if array.dtype.kind != "f":
        raise TypeError(f"{name}: expected {expected}, got {array.dtype}")
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name}: expected shape (n_classes, d), neither 0, got {array.shape}")
    array = array.astype(np.float64 if array.itemsize > 4 else np.float32, copy=False)
    largest = np.abs(array).max(1)
    if not np.isfinite(largest).all():
        c = int((~np.isfinite(largest)).argmax())
        raise ValueError(f"{name}: expected finite numbers, got {_odd(array[c])} for class {c}")
    if normalize:
        # Large and small ones first, so that their squares are in range.
        array = array / np.where(largest > 0, largest, 1)[:, None]
        lengths = np.linalg.norm(array, axis=1, keepdims=True)
        array = array / np.where(lengths > 0, lengths, 1)
    else:
        array = array / (largest.max() or 1.0)
    mean = array.mean(0, dtype=np.float64).astype(array.dtype)
    centred: NDArray[np.float32] = (array - mean).astype(np.float32, copy=False)
    return centred


def _odd(vector: NDArray[Any]) -> float:
    return float(vector[~np.isfinite(vector)][0])
