"""What people know of each family of heads: its name, its colour on every page, its papers.

Torch is not needed to read it: the help of ``lastlayer compare`` lists the families.
"""

from typing import NamedTuple


class Reference(NamedTuple):
    """A paper."""

    text: str
    link: str = ""


class Family(NamedTuple):
    """One name in specs."""

    title: str  # what people call it
    colour: int  # its place in the palette of the page, whatever else is compared


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
# Of heads that are not ours.
OWN_COLOUR = 14


def colour(family: str) -> int:
    """Which colour of the palette a family has."""
    known = FAMILIES.get(family)
    return OWN_COLOUR if known is None else known.colour


def title(family: str, label: str) -> str:
    """The head's name, with the arguments that its label has after the name of the family.

    Example:
        >>> title("adaptive", "adaptive cutoffs=2000,10000"), title("mine:Head", "Head")
        ('Adaptive softmax (cutoffs=2000,10000)', 'Head')
    """
    known = FAMILIES.get(family)
    if known is None or not label.startswith(family):
        return label
    arguments = label.removeprefix(family).strip()
    return f"{known.title} ({arguments.replace(' ', ', ')})" if arguments else known.title


def _arxiv(text: str, number: str) -> Reference:
    return Reference(f"{text}, arXiv:{number}", f"https://arxiv.org/abs/{number}")


_GRAVE = _arxiv(
    "Grave, Joulin, Cissé, Grangier and Jégou, Efficient softmax approximation for GPUs, ICML 2017",
    "1609.04309",
)
_ENTMAX = _arxiv(
    "Peters, Niculae and Martins, Sparse sequence-to-sequence models, ACL 2019", "1905.05702"
)
_SPARSEMAX = _arxiv(
    "Martins and Astudillo, From softmax to sparsemax: A sparse model of attention and multi-label "
    "classification, ICML 2016",
    "1602.02068",
)
_JEAN = _arxiv(
    "Jean, Cho, Memisevic and Bengio, On using very large target vocabulary for neural machine "
    "translation, ACL 2015",
    "1412.2007",
)

REFERENCES: dict[str, tuple[Reference, ...]] = {
    "entmax": (_ENTMAX,),
    "sparsemax": (_SPARSEMAX,),
    "hierarchical": (
        Reference(
            "Morin and Bengio, Hierarchical probabilistic neural network language model, AISTATS "
            "2005"
        ),
        Reference("Mnih and Hinton, A scalable hierarchical distributed language model, NIPS 2008"),
    ),
    "adaptive": (_GRAVE,),
    "differentiated": (
        _arxiv(
            "Chen, Grangier and Auli, Strategies for training large vocabulary neural language "
            "models, ACL 2016",
            "1512.04906",
        ),
    ),
    "char_cnn": (
        _arxiv(
            "Jozefowicz, Vinyals, Schuster, Shazeer and Wu, Exploring the limits of language "
            "modeling, 2016",
            "1602.02410",
        ),
    ),
    "sampled": (_JEAN,),
    "importance": (
        Reference(
            "Bengio and Senécal, Quick training of probabilistic neural nets by importance "
            "sampling, AISTATS 2003"
        ),
    ),
    "adaptive_importance": (
        Reference(
            "Bengio and Senécal, Adaptive importance sampling to accelerate training of a neural "
            "probabilistic language model, IEEE Transactions on Neural Networks 19(4), 2008"
        ),
    ),
    "nce": (
        Reference(
            "Gutmann and Hyvärinen, Noise-contrastive estimation: A new estimation principle for "
            "unnormalized statistical models, AISTATS 2010"
        ),
        _arxiv(
            "Mnih and Teh, A fast and simple algorithm for training neural probabilistic language "
            "models, ICML 2012",
            "1206.6426",
        ),
    ),
    "negative": (
        _arxiv(
            "Mikolov, Sutskever, Chen, Corrado and Dean, Distributed representations of words and "
            "phrases and their compositionality, NIPS 2013",
            "1310.4546",
        ),
    ),
    "self_normalized": (
        Reference(
            "Devlin, Zbib, Huang, Lamar, Schwartz and Makhoul, Fast and robust neural network "
            "joint models for statistical machine translation, ACL 2014"
        ),
    ),
    "zlpr": (
        _arxiv("Su, Zhu, Murtadha, Pan, Wen and Liu, ZLPR: A novel loss for multi-label "
               "classification, 2022", "2208.02955"),
    ),
    "asymmetric": (
        _arxiv(
            "Ridnik, Ben-Baruch, Zamir, Noy, Friedman, Protter and Zelnik-Manor, Asymmetric loss "
            "for multi-label classification, ICCV 2021",
            "2009.14119",
        ),
    ),
    "sparsemax_labels": (_SPARSEMAX,),
    "info_nce": (
        _arxiv("van den Oord, Li and Vinyals, Representation learning with contrastive predictive "
               "coding, 2018", "1807.03748"),
    ),
}  # fmt: skip
