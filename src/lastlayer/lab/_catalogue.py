"""Heads whose recipes are still to move into their own files."""

from typing import Any, Literal

from lastlayer import heads
from lastlayer.heads.recipes import Arguments, ClassData, Recipe, sampled_recipe


def _tree(data: ClassData, given: Arguments) -> Arguments:
    return {"tree": data.tree(given.get("tree", "huffman"), given.get("arity"))}


def _counts(data: ClassData, _given: Arguments) -> Arguments:
    return {"counts": data.positive_counts()}


REST: list[tuple[Any, Recipe]] = [
    (heads.HierarchicalSoftmax, Recipe(
        "hierarchical", "a path through a tree of small choices", defaults={"sparse": True},
        extra={"tree": Literal["huffman", "balanced", "two_level"], "arity": int},
        filled=frozenset({"tree"}), from_data=_tree,
        compared=("hierarchical", "hierarchical:tree=two_level"), rank=20,
    )),
    (heads.SampledSoftmax, sampled_recipe(
        "sampled", "softmax against drawn classes", compared=("sampled",), rank=30
    )),
    (heads.ImportanceSampling, sampled_recipe(
        "importance", "self-normalised importance sampling", rank=33
    )),
    (heads.AdaptiveImportanceSampling, Recipe(
        "adaptive_importance", "importance sampling whose proposal learns",
        defaults={"sparse": True}, from_data=_counts, rank=34,
    )),
    (heads.NoiseContrastive, sampled_recipe(
        "nce", "noise-contrastive estimation", compared=("nce",), rank=31
    )),
    (heads.NegativeSampling, sampled_recipe(
        "negative", "negative sampling of word2vec", n_samples=64, power=0.75,
        compared=("negative",), rank=32,
    )),
]  # fmt: skip
