"""Heads whose recipes are still to move into their own files."""

from typing import Any, Literal

from lastlayer import heads
from lastlayer.heads import bands_from_counts
from lastlayer.heads.recipes import Arguments, ClassData, Recipe


def _tree(data: ClassData, given: Arguments) -> Arguments:
    return {"tree": data.tree(given.get("tree", "huffman"), given.get("arity"))}


def _bands(data: ClassData, given: Arguments) -> Arguments:
    if "bands" in given:
        return {"bands": given["bands"]}
    share, variant = given.get("share", 0.5), given.get("variant", "slices")
    most = max(1, int(share * data.n_classes * data.in_features))
    make = lambda: bands_from_counts(  # noqa: E731
        data.positive_counts(), data.in_features, most, variant=variant
    )
    return {"bands": data.once(("bands", share, variant), make)}


def _counts(data: ClassData, _given: Arguments) -> Arguments:
    return {"counts": data.positive_counts()}


REST: list[tuple[Any, Recipe]] = [
    (heads.HierarchicalSoftmax, Recipe(
        "hierarchical", "a path through a tree of small choices", defaults={"sparse": True},
        extra={"tree": Literal["huffman", "balanced", "two_level"], "arity": int},
        filled=frozenset({"tree"}), from_data=_tree,
        compared=("hierarchical", "hierarchical:tree=two_level"), rank=20,
    )),
    (heads.AdaptiveSoftmax, Recipe(
        "adaptive", "frequent classes first, clusters of rare ones", filled=frozenset({"order"}),
        from_data=_counts, compared=("adaptive",), rank=21,
    )),
    (heads.DifferentiatedSoftmax, Recipe(
        "differentiated", "narrower vectors for rare classes",
        extra={"bands": list[tuple[int, int]], "share": float},
        filled=frozenset({"bands", "order"}), from_data=_bands, compared=("differentiated",),
        rank=22,
    )),
    (heads.CharCNNSoftmax, Recipe(
        "char_cnn", "class vectors from their spelling",
        compared=("char_cnn:filters=1x16,2x16,3x32",), rank=23,
    )),
    *((heads.MultiLabel, Recipe(
        name, about, task="multilabel", fixed={"loss": loss}, compared=(name,), rank=rank
    )) for rank, name, loss, about in (
        (40, "zlpr", "zlpr", "zero-bounded log-sum-exp and pairwise ranking"),
        (41, "bce", "bce", "one logistic choice per label"),
        (42, "asymmetric", "asymmetric", "logistic choices with fewer easy negatives"),
        (43, "sparsemax_labels", "sparsemax", "one sparse distribution over the labels"),
    )),
]  # fmt: skip
