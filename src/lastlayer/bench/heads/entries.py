"""The table of all heads whose training step is measured. A head is added here, and only here."""

from collections.abc import Callable
from typing import Any

import torch

from lastlayer import heads, optim, samplers, trees
from lastlayer.bench.heads import truth
from lastlayer.bench.heads.entry import CPU, CUDA, SWEEP, WORDS, Entry
from lastlayer.bench.heads.modules import FlatLayer, GatheredPaths
from lastlayer.bench.heads.problem import WIDE, Problem, huffman
from lastlayer.trees import Tree


def _hierarchical(make: Callable[[Problem], Tree], **options: Any) -> Any:
    return lambda p: heads.HierarchicalSoftmax(p.width, make(p), **options, **p.made)


def _huffman(problem: Problem) -> Tree:
    return huffman(problem.classes)


def _adaptive(*parts: int) -> Any:
    """Cutoffs at these parts of the classes; without any, chosen from the counts."""
    if not parts:
        return lambda p: heads.AdaptiveSoftmax(p.width, counts=p.counts, **p.made)
    return lambda p: heads.AdaptiveSoftmax(
        p.width, cutoffs=[p.classes // part for part in parts], n_classes=p.classes, **p.made
    )


def _torch_adaptive(*parts: int) -> Any:
    def build(problem: Problem) -> torch.nn.Module:
        cutoffs = _adaptive(*parts)(problem).cutoffs.tolist()
        return torch.nn.AdaptiveLogSoftmaxWithLoss(
            problem.width, problem.classes, cutoffs, **problem.made
        )

    return build


def _differentiated(variant: str) -> Any:
    def build(p: Problem) -> torch.nn.Module:
        widths = [3 * p.width // 4, 3 * p.width // 16, p.width // 16]
        classes = [p.classes // 25, 4 * p.classes // 25]
        bands = [*zip(classes, widths, strict=False), (p.classes - sum(classes), widths[-1])]
        return heads.DifferentiatedSoftmax(p.width, bands, variant=variant, **p.made)

    return build


def _char_cnn(problem: Problem) -> torch.nn.Module:
    words = [f"word{number:07d}" for number in range(problem.classes)]
    return heads.CharCNNSoftmax(problem.width, words, **problem.made)


def _sampled(kind: Any) -> Any:
    """As many classes drawn as there are rows, by how often they occur."""
    return lambda p: kind(
        p.width, p.classes, samplers.Unigram(p.counts), p.rows, sparse=True, **p.made
    )


def _row_adagrad(parameters: Any) -> torch.optim.Optimizer:
    return optim.RowAdagrad(parameters, lr=1e-3)


def _draws_of(head: Any) -> str:
    return f"{head.n_samples:,} drawn"


def shape_of(head: Any) -> str:
    """The tree of a head in words."""
    tree: Tree = head.tree
    return f"{tree.max_depth} deep" + ("" if tree.is_binary else f", up to {tree.max_arity} wide")


def cutoffs_of(head: Any) -> str:
    """The cutoffs of an adaptive head in words, ours or torch's."""
    made = head.cutoffs
    starts = made.tolist() if isinstance(made, torch.Tensor) else made[:-1]
    return "cutoffs " + (", ".join(f"{each:,}" for each in starts) or "none")


def _bands_of(head: Any) -> str:
    return "bands " + ", ".join(f"{classes:,} of {width}" for classes, width in head.bands)


LINEAR = "linear + cross_entropy"
FULL = "full (fused)"
HUFFMAN = "hierarchical, Huffman, sparse"
TWO_LEVEL = "hierarchical, √V groups, sparse"
ADAPTIVE = "adaptive, automatic cutoffs"
SAMPLED, NCE = "sampled softmax, sparse", "noise contrastive, sparse"
UPDATED = " + RowAdagrad"
ADAPTIVE_50, ADAPTIVE_25 = "adaptive, cutoffs V/50, V/5", "adaptive, cutoffs V/25, V/5"


def _on(*places: str) -> frozenset[str]:
    return frozenset(places)


ENTRIES = (
    Entry(
        LINEAR,
        lambda p: FlatLayer(p.width, p.classes, **p.made),
        truth.flat,
        _on(CPU, CUDA, WORDS),
        source="torch",
        computes="full",
        score_bytes=14,
    ),
    Entry(
        FULL,
        lambda p: heads.FullSoftmax(p.width, p.classes, **p.made),
        truth.flat,
        _on(CPU, CUDA, WORDS, SWEEP),
        computes="full",
        op="softmax_rows_",
    ),
    Entry(
        HUFFMAN,
        _hierarchical(_huffman, sparse=True),
        truth.paths,
        _on(CPU, CUDA, SWEEP),
        settings=shape_of,
    ),
    Entry(
        "hierarchical, Huffman, dense",
        _hierarchical(_huffman),
        truth.paths,
        _on(CPU),
        settings=shape_of,
    ),
    Entry(
        f"hierarchical, collapsed to {WIDE}, sparse",
        _hierarchical(lambda p: huffman(p.classes).collapse(WIDE), sparse=True),
        truth.paths,
        _on(CPU, CUDA),
        settings=shape_of,
    ),
    Entry(
        "hierarchical, two_level, sparse",
        _hierarchical(lambda p: trees.two_level(p.counts), sparse=True),
        truth.paths,
        _on(CPU),
        settings=shape_of,
    ),
    Entry(
        TWO_LEVEL,
        _hierarchical(lambda p: trees.two_level(p.classes), sparse=True),
        truth.paths,
        _on(SWEEP),
        settings=shape_of,
    ),
    Entry(
        "gathered paths, Huffman, sparse",
        lambda p: GatheredPaths(huffman(p.classes), p),
        truth.gathered,
        _on(CPU, CUDA),
        source="torch",
        computes=HUFFMAN,
        settings=shape_of,
    ),
    Entry(ADAPTIVE, _adaptive(), truth.clusters, _on(CPU, CUDA, SWEEP), settings=cutoffs_of),
    Entry(
        ADAPTIVE,
        _torch_adaptive(),
        truth.torch_clusters,
        _on(CPU),
        source="torch",
        settings=cutoffs_of,
    ),
    Entry(ADAPTIVE_50, _adaptive(50, 5), truth.clusters, _on(CPU), settings=cutoffs_of),
    Entry(
        ADAPTIVE_50,
        _torch_adaptive(50, 5),
        truth.torch_clusters,
        _on(CPU),
        source="torch",
        settings=cutoffs_of,
    ),
    Entry(ADAPTIVE_25, _adaptive(25, 5), truth.clusters, _on(CUDA), settings=cutoffs_of),
    Entry(
        ADAPTIVE_25,
        _torch_adaptive(25, 5),
        truth.torch_clusters,
        _on(CUDA),
        source="torch",
        settings=cutoffs_of,
    ),
    Entry(
        "differentiated, slices",
        _differentiated("slices"),
        truth.bands,
        _on(CPU, CUDA),
        settings=_bands_of,
    ),
    Entry(
        "differentiated, projections",
        _differentiated("projections"),
        truth.bands,
        _on(CPU, CUDA),
        settings=_bands_of,
    ),
    Entry(
        SAMPLED,
        _sampled(heads.SampledSoftmax),
        truth.drawn,
        _on(CPU, CUDA, SWEEP),
        settings=_draws_of,
    ),
    Entry(
        NCE,
        _sampled(heads.NoiseContrastive),
        truth.noise,
        _on(CPU, CUDA),
        settings=_draws_of,
    ),
    Entry(
        SAMPLED + UPDATED,
        _sampled(heads.SampledSoftmax),
        truth.drawn,
        _on(CUDA),
        settings=_draws_of,
        optimizer=_row_adagrad,
    ),
    # Rounding decides between letters that are equally good, and the gradient goes to one of them.
    Entry("char_cnn", _char_cnn, truth.by_log_prob, _on(WORDS), slack=100.0),
)
