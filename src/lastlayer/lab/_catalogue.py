"""Every family of heads that the lab can compare. One is added here, and only here."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module

from lastlayer import heads
from lastlayer.lab._fill import Needs
from lastlayer.lab._values import Choice, Pairs

Arguments = dict[str, Any]

_SAMPLER = {"sampler": Choice(("unigram", "log_uniform", "uniform")), "power": float}


@dataclass(frozen=True)
class Family:
    """How a head is made from data and arguments.

    Attributes:
        name: in specs.
        cls: gives the class; called when a head is built.
        about: one line for the list of families.
        tasks: what it can learn.
        fixed: arguments that make the family what it is.
        usual: arguments that the lab sets unless they are given.
        extra: arguments that a spec has beside those of the constructor, with their kinds.
        filled: arguments of the constructor that come from the data.
        fill: makes them, from the data and the arguments.
    """

    name: str
    cls: Callable[[], type[Module]]
    about: str = ""
    tasks: tuple[str, ...] = ("lm",)
    fixed: Arguments = field(default_factory=dict)
    usual: Arguments = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()
    fill: Callable[[Needs, Arguments], Arguments] | None = None

    def build(self, needs: Needs, arguments: Arguments) -> Module:
        """A head for this data."""
        cls = self.cls()
        given = {**self.usual, **arguments, **self.fixed}
        if self.fill is not None:
            given = {**given, **self.fill(needs, given)}
            given = {name: each for name, each in given.items() if not self._is_extra(name)}
        taken = inspect.signature(cls).parameters
        known = {
            "in_features": needs.in_features,
            "n_classes": needs.n_classes,
            "counts": needs.counts,
            "spellings": needs.spellings,
            "seed": needs.seed,
        }
        from_data = {name: each for name, each in known.items() if name in taken}
        return cls(**{**from_data, **given})

    def _is_extra(self, name: str) -> bool:
        return name in self.extra and name not in self.filled


def _tree(needs: Needs, given: Arguments) -> Arguments:
    return {"tree": needs.tree(given.get("tree", "huffman"), given.get("arity"))}


def _sampler(needs: Needs, given: Arguments, n_samples: int) -> Arguments:
    kind, power = given.get("sampler", "unigram"), given["power"]
    # From a quarter of all classes on, the full softmax is the faster one.
    usual = {"n_samples": min(n_samples, max(1, needs.n_classes // 4))}
    usual = {} if "n_samples" in given else usual
    return {"sampler": needs.sampler(kind, power), **usual}


def _bands(needs: Needs, given: Arguments) -> Arguments:
    if "bands" in given:
        return {"bands": given["bands"]}
    return {"bands": needs.bands(given.get("share", 0.5), given.get("variant", "slices"))}


def _counts(needs: Needs, _given: Arguments) -> Arguments:
    return {"counts": needs.counts.clip(min=1)}


def _multilabel() -> type[Module]:
    from lastlayer.heads.multi_label import MultiLabel

    return MultiLabel


def _sampled(
    name: str, cls: type[Module], about: str, *, n_samples: int = 512, power: float = 1.0
) -> Family:
    def fill(needs: Needs, given: Arguments) -> Arguments:
        return _sampler(needs, {"power": power, **given}, n_samples)

    return Family(
        name, lambda: cls, about, usual={"sparse": True}, extra=_SAMPLER,
        filled=frozenset({"sampler"}), fill=fill,
    )  # fmt: skip


_FAMILIES = (
    Family("full", lambda: heads.FullSoftmax, "softmax over all classes, fused"),
    Family("entmax", lambda: heads.EntmaxHead, "entmax: most probabilities exactly 0"),
    Family("sparsemax", lambda: heads.EntmaxHead, "entmax with α = 2", fixed={"alpha": 2.0}),
    Family("topk", lambda: heads.TopKSoftmaxHead, "softmax over the k best", usual={"k": 100}),
    Family(
        "hierarchical",
        lambda: heads.HierarchicalSoftmax,
        "a path through a tree of small choices",
        usual={"sparse": True},
        extra={"tree": Choice(("huffman", "balanced", "two_level")), "arity": int},
        filled=frozenset({"tree"}),
        fill=_tree,
    ),
    Family(
        "adaptive", lambda: heads.AdaptiveSoftmax, "frequent classes first, clusters of rare ones",
        filled=frozenset({"order"}), fill=_counts,
    ),
    Family(
        "differentiated",
        lambda: heads.DifferentiatedSoftmax,
        "narrower vectors for rare classes",
        extra={"bands": Pairs, "share": float},
        filled=frozenset({"bands", "order"}),
        fill=_bands,
    ),
    Family("char_cnn", lambda: heads.CharCNNSoftmax, "class vectors from their spelling"),
    _sampled("sampled", heads.SampledSoftmax, "softmax against drawn classes"),
    _sampled("importance", heads.ImportanceSampling, "self-normalised importance sampling"),
    Family(
        "adaptive_importance",
        lambda: heads.AdaptiveImportanceSampling,
        "importance sampling whose proposal learns",
        usual={"sparse": True},
        fill=_counts,
    ),
    _sampled("nce", heads.NoiseContrastive, "noise-contrastive estimation"),
    _sampled(
        "negative", heads.NegativeSampling, "negative sampling of word2vec", n_samples=64,
        power=0.75,
    ),
    Family("self_normalized", lambda: heads.SelfNormalized, "softmax whose log Z is near 0"),
    *(
        Family(name, _multilabel, about, tasks=("multilabel",), fixed={"loss": loss})
        for name, loss, about in (
            ("zlpr", "zlpr", "zero-bounded log-sum-exp and pairwise ranking"),
            ("bce", "bce", "one logistic choice a label"),
            ("asymmetric", "asymmetric", "logistic choices with fewer easy negatives"),
            ("sparsemax_labels", "sparsemax", "one sparse distribution over the labels"),
        )
    ),
)  # fmt: skip

CATALOGUE = {family.name: family for family in _FAMILIES}
"""All families by name."""

_DEFAULTS = {
    "lm": [
        "full", "entmax", "hierarchical", "hierarchical:tree=two_level", "adaptive",
        "differentiated", "char_cnn:filters=1x16,2x16,3x32", "sampled", "nce", "negative",
    ],
    "multilabel": ["zlpr", "bce", "asymmetric", "sparsemax_labels"],
}  # fmt: skip


def defaults_for(task: str) -> list[str]:
    """Specs of a good selection: one of every family that suits the task."""
    return list(_DEFAULTS[task])
