"""Heads whose recipes are still to move into their own files."""

from typing import Any

from lastlayer import heads
from lastlayer.heads.recipes import Arguments, ClassData, Recipe, sampled_recipe


def _counts(data: ClassData, _given: Arguments) -> Arguments:
    return {"counts": data.positive_counts()}


REST: list[tuple[Any, Recipe]] = [
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
