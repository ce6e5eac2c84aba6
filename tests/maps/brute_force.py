"""The maps from their definitions, one row at a time in float64 with nothing clever."""

import numpy as np


def sparsemax(row: np.ndarray) -> np.ndarray:
    """Duchi et al. 2008: sort, take the largest prefix that carries itself."""
    ordered = np.sort(row)[::-1]
    sums = np.cumsum(ordered)
    counts = np.arange(1, len(row) + 1)
    size = np.max(counts[ordered * counts > sums - 1])
    return np.maximum(row - (sums[size - 1] - 1) / size, 0)


def entmax(row: np.ndarray, alpha: float) -> np.ndarray:
    """Bisection of the threshold to the last bit of float64."""
    row = np.asarray(row, dtype=np.float64) - np.max(row)
    if alpha == 1:
        return np.exp(row) / np.exp(row).sum()

    def probs(threshold: float) -> np.ndarray:
        return np.maximum((alpha - 1) * row - threshold, 0) ** (1 / (alpha - 1))

    low, high = -1.0, 0.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if probs(middle).sum() >= 1 else (low, middle)
    return probs(low) / probs(low).sum()


def topk_softmax(row: np.ndarray, k: int) -> np.ndarray:
    """The k first in a stable descending order."""
    kept = np.argsort(-row, kind="stable")[:k]
    result = np.zeros_like(row)
    result[kept] = np.exp(row[kept] - row.max())
    return result / result.sum()
