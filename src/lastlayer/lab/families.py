"""Families of heads: their display names and colours.

This module does not import torch: the help of ``lastlayer compare`` lists the families.
"""

from typing import NamedTuple


class Display(NamedTuple):
    """The display of a family, which is the first part of a spec."""

    title: str  # display name
    colour: int  # index in the palette of the page, the same in every comparison


FAMILIES = {
    "full": Display("Full softmax", 0),
    "entmax": Display("Entmax", 6),
    "sparsemax": Display("Sparsemax", 9),
    "topk": Display("Top-k softmax", 8),
    "hierarchical": Display("Hierarchical softmax", 2),
    "adaptive": Display("Adaptive softmax", 1),
    "differentiated": Display("Differentiated softmax", 5),
    "char_cnn": Display("Char-CNN softmax", 10),
    "sampled": Display("Sampled softmax", 3),
    "importance": Display("Importance sampling", 11),
    "adaptive_importance": Display("Adaptive importance sampling", 12),
    "nce": Display("NCE", 4),
    "negative": Display("Negative sampling", 7),
    "self_normalized": Display("Self-normalised softmax", 13),
    "zlpr": Display("ZLPR", 1),
    "bce": Display("Binary cross-entropy", 0),
    "asymmetric": Display("Asymmetric loss", 2),
    "sparsemax_labels": Display("Multi-label sparsemax", 3),
    "info_nce": Display("InfoNCE", 0),
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
