"""What people call the heads that specs have short names for."""

TITLES = {
    "full": "Full softmax",
    "entmax": "Entmax",
    "sparsemax": "Sparsemax",
    "topk": "Top-k softmax",
    "hierarchical": "Hierarchical softmax",
    "adaptive": "Adaptive softmax",
    "differentiated": "Differentiated softmax",
    "char_cnn": "Char-CNN softmax",
    "sampled": "Sampled softmax",
    "importance": "Importance sampling",
    "adaptive_importance": "Adaptive importance sampling",
    "nce": "NCE",
    "negative": "Negative sampling",
    "self_normalized": "Self-normalised softmax",
    "zlpr": "ZLPR",
    "bce": "Binary cross-entropy",
    "asymmetric": "Asymmetric loss",
    "sparsemax_labels": "Multi-label sparsemax",
    "info_nce": "InfoNCE",
}


def title(family: str, label: str) -> str:
    """The head's name, with the arguments that its label has after the name of the family.

    Example:
        >>> title("adaptive", "adaptive cutoffs=2000,10000"), title("mine:Head", "Head")
        ('Adaptive softmax (cutoffs=2000,10000)', 'Head')
    """
    named = TITLES.get(family)
    if named is None or not label.startswith(family):
        return label
    arguments = label.removeprefix(family).strip()
    return f"{named} ({arguments.replace(' ', ', ')})" if arguments else named
