"""Plots of attention weights."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lastlayer._checks import check_tensor


def plot_attention(
    weights: Tensor, query_words: Sequence[str], key_words: Sequence[str], ax: Any = None
) -> Any:
    """Plots attention weights over words: darker cells have larger weights, white is zero.

    Args:
        weights: weights of one head, ``(queries, keys)``. Those of :func:`attention_weights` are
            ``found.to_dense(len(key_words))[text, head]``.
        query_words: one word per row.
        key_words: one word per column.
        ax: matplotlib axes to draw on; by default new ones.

    Returns:
        The axes.

    Raises:
        ImportError: if matplotlib is missing.
        ValueError: if ``weights`` does not have one row and column per word.
    """
    check_tensor("weights", weights)
    expected = len(query_words), len(key_words)
    if tuple(weights.shape) != expected:
        raise ValueError(
            f"weights: expected shape {expected}, a row per query word and a column per key word, "
            f"got {tuple(weights.shape)}"
        )
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ImportError(
            'plot_attention needs matplotlib: pip install "lastlayer[lab]"'
        ) from error
    if ax is None:
        size = 0.32 * expected[1] + 1.5, 0.32 * expected[0] + 1.0
        _, ax = plt.subplots(figsize=size, layout="constrained")
    shown = weights.detach().float().cpu().numpy()
    largest = float(shown.max(initial=0.0))
    ax.imshow(shown, cmap="Blues", vmin=0.0, vmax=max(largest, 1e-6), aspect="auto")
    # A word such as "$5" is no formula.
    words = {"parse_math": False}
    ax.set_xticks(
        range(expected[1]), key_words, rotation=60, ha="right", rotation_mode="anchor", **words
    )
    ax.set_yticks(range(expected[0]), query_words, **words)
    for row, column in zip(*shown.nonzero(), strict=True):
        value = shown[row, column]
        ax.text(
            column, row, f"{value:.2f}".lstrip("0"), ha="center", va="center", fontsize=6,
            color="white" if value > 0.6 * largest else "black",
        )  # fmt: skip
    return ax
