"""Families of heads: their display names and colours.

This module does not import torch: the help of ``lastlayer compare`` lists the families.
"""

from typing import NamedTuple


class Family(NamedTuple):
    """The display of a family, which is the first part of a spec."""

    title: str  # display name
    colour: int  # index in the palette of the page, the same in every comparison


FAMILIES = {
    "full": Family("Full softmax", 0),
    "entmax": Family("Entmax", 6),
    "sparsemax": Family("Sparsemax", 9),
    "topk": Family("Top-k softmax", 8),
    "hierarchical": Family("Hierarchical softmax", 2),
    "adaptive": Family("Adaptive softmax", 1),
    "differentiated": Family("Differentiated softmax", 5),
    "char_cnn": Family("Char-CNN softmax", 10),
    "sampled": Family("Sampled softmax", 3),
    "importance": Family("Importance sampling", 11),
    "adaptive_importance": Family("Adaptive importance sampling", 12),
    "nce": Family("NCE", 4),
    "negative": Family("Negative sampling", 7),
    "self_normalized": Family("Self-normalised softmax", 13),
    "zlpr": Family("ZLPR", 1),
    "bce": Family("Binary cross-entropy", 0),
    "asymmetric": Family("Asymmetric loss", 2),
    "sparsemax_labels": Family("Multi-label sparsemax", 3),
    "info_nce": Family("InfoNCE", 0),
}
# The colour of users' own heads.
OWN_COLOUR = 14


def colour(family: str) -> int:
    """The index of the family's colour in the palette."""
    known = FAMILIES.get(family)
    return OWN_COLOUR if known is None else known.colour


def title(family: str, label: str) -> str:
    """The display name of a head: that of its family, and the arguments in its label.

    Example:
        >>> title("adaptive", "adaptive cutoffs=2000,10000"), title("mine:Head", "Head")
        ('Adaptive softmax (cutoffs=2000,10000)', 'Head')
    """
    known = FAMILIES.get(family)
    if known is None or not label.startswith(family):
        return label
    arguments = label.removeprefix(family).strip()
    return f"{known.title} ({arguments.replace(' ', ', ')})" if arguments else known.title
