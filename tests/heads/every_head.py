"""One head of every kind, small, for tests of what torch does to all modules."""

from functools import partial

import torch

from lastlayer import heads, samplers, trees

WIDTH, N_CLASSES = 8, 23
COUNTS = list(range(N_CLASSES, 0, -1))
ORDER = [*range(N_CLASSES - 1, -1, -1)]


def _tree(build, **given):
    return heads.HierarchicalSoftmax(WIDTH, build(), **given)


def _sampled(kind, sampler=lambda: samplers.Unigram(COUNTS), **given):
    return kind(WIDTH, N_CLASSES, sampler(), 6, **given)


def _target(**given):
    head = heads.TargetSampling(WIDTH, N_CLASSES, **given)
    head.use(range(0, N_CLASSES, 2))
    return head


# Each takes device, dtype and, where the head has it, sparse.
EVERY_HEAD = {
    "full": partial(heads.FullSoftmax, WIDTH, N_CLASSES, softcap=3.0),
    "entmax": partial(heads.EntmaxHead, WIDTH, N_CLASSES),
    "topk": partial(heads.TopKSoftmaxHead, WIDTH, N_CLASSES, 5),
    "self_normalized": partial(heads.SelfNormalized, WIDTH, N_CLASSES),
    "adaptive": partial(
        heads.AdaptiveSoftmax, WIDTH, cutoffs=[5, 12], n_classes=N_CLASSES, order=ORDER
    ),
    "differentiated": partial(
        heads.DifferentiatedSoftmax, WIDTH, [(5, 5), (18, 3)], order=ORDER
    ),
    "char_cnn": partial(heads.CharCNNSoftmax, WIDTH, [f"word{i}" for i in range(N_CLASSES)]),
    "huffman": partial(_tree, lambda: trees.huffman(COUNTS)),
    "two_level": partial(_tree, lambda: trees.two_level(N_CLASSES)),
    "sampled": partial(_sampled, heads.SampledSoftmax),
    "uniform": partial(_sampled, heads.SampledSoftmax, lambda: samplers.Uniform(N_CLASSES)),
    "log_uniform": partial(
        _sampled, heads.SampledSoftmax, lambda: samplers.LogUniform(N_CLASSES, order=ORDER)
    ),
    "unique": partial(_sampled, heads.SampledSoftmax, unique=True),
    "tail": partial(
        _sampled, heads.SampledSoftmax, lambda: samplers.Uniform(20), head_classes=[1, 5, 9]
    ),
    "noise": partial(_sampled, heads.NoiseContrastive),
    "negative": partial(_sampled, heads.NegativeSampling),
    "importance": partial(_sampled, heads.ImportanceSampling),
    "adaptive_importance": partial(
        heads.AdaptiveImportanceSampling, WIDTH, N_CLASSES, COUNTS, n_samples=6, contexts=16,
        width=4, target_ess=3.0,
    ),
    "partial": partial(heads.PartialSoftmax, WIDTH, N_CLASSES, 5),
    "target": _target,
    "zlpr": partial(heads.MultiLabel, WIDTH, N_CLASSES),
    "sparsemax_labels": partial(heads.MultiLabel, WIDTH, N_CLASSES, "sparsemax"),
}  # fmt: skip
LABELS = "zlpr", "sparsemax_labels"
SPARSE = (
    "huffman", "two_level", "sampled", "unique", "tail", "noise", "negative", "importance",
    "adaptive_importance", "partial", "target",
)  # fmt: skip
# Draws for each row, which differ where another process has that row.
OWN_DRAWS = "importance", "adaptive_importance"


def make(name: str, **given):
    """A head in float64, the same each time."""
    torch.manual_seed(0)
    return EVERY_HEAD[name](**{"dtype": torch.float64, **given})


def batch(name: str, n: int):
    """Hidden states and targets of ``n`` rows."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(n, WIDTH, dtype=torch.float64, generator=generator)
    shape = (n, 3) if name in LABELS else (n,)
    return hidden, torch.randint(N_CLASSES, shape, generator=generator)
