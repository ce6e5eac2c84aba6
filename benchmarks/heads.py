"""Training steps and top-k of heads, draws of samplers, and tree builders."""

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import driver
from benchmarks import heads_reference as references
from benchmarks.driver import BACKWARD, FORWARD, Case, Family, Inputs, Method, Results, Work
from benchmarks.heads_reference import Losses, in_float64
from benchmarks.record import OURS
from lastlayer import heads, optim, samplers, trees
from lastlayer.heads import TopK
from lastlayer.trees import Tree

Counts = NDArray[np.float64]
# All runs draw the same numbers.
SEED = 1949
K, SPREADS = 10, (1.0, 2.0)
STEP, TOP, AGAINST, DRAWS, TREES = "step", f"top {K}", "cost against V", "draws", "trees"
# The cases of an entry: the step on a CPU, the step on a GPU, the step with few classes that have
# spellings, and the cost over the number of classes.
CPU, CUDA, WORDS, SWEEP = "cpu", "cuda", "words", "sweep"
# Arity of collapsed trees; for built trees, the number of groups, the size of the class vectors,
# and the overlap.
WIDE, GROUPS, NUMBERS, OVERLAP = 64, 1000, 64, 0.3
# Draws per call, draws per verification, and its number of groups of classes.
DRAWN, VERIFIED, DRAWN_GROUPS = 8192, 1 << 18, 50
# Rows whose top classes are compared with a full sort, and rows per chunk of this comparison.
COMPARED, _AT_A_TIME = {"cuda": 256, "cpu": 16}, 16


class Sizes(NamedTuple):
    """Rows, hidden size and classes of each section; for draws and trees only the classes."""

    steps: tuple[tuple[int, int, int], ...]
    words: tuple[int, int, int]
    top: tuple[int, int, int]
    against: tuple[int, int]
    classes: tuple[int, ...]
    draws: int
    trees: int = 0
    clustered: int = 0


_MANY = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
# By device and whether the run is quick.
SIZES = {
    ("cpu", False): Sizes(
        ((256, 256, 50_000),), (256, 256, 5_000), (256, 512, 1_000_000), (64, 64), _MANY,
        draws=10_000_000, trees=1_000_000, clustered=100_000,
    ),
    ("cuda", False): Sizes(
        ((8192, 512, 50_000), (8192, 512, 1_000_000)), (8192, 512, 5_000), (256, 512, 1_000_000),
        (8192, 512), _MANY, draws=1_000_000,
    ),
    ("cpu", True): Sizes(
        ((64, 64, 10_000),), (64, 64, 100), (32, 64, 20_000), (32, 32), (1_000, 4_000, 16_000),
        draws=10_000, trees=10_000, clustered=2_000,
    ),
    ("cuda", True): Sizes(
        ((2048, 256, 30_000),), (512, 256, 500), (256, 256, 100_000), (2048, 256),
        (1_000, 10_000, 100_000), draws=100_000,
    ),
}  # fmt: skip

NOTES = f"""\
- A shape is rows × hidden size × classes. Hidden states are N(0, 1), and targets follow Zipf's law:
  the class of rank r is drawn with p ∝ 1/r. The seed is fixed.
- A *step* is forward + backward, with the gradients of hidden states and all parameters. Verified:
  loss and all gradients, against plain formulas in float64; *weight* is the parameter with the
  largest error. With *+ RowAdagrad* each timed step includes a step of that optimiser. Memory is
  beyond inputs and parameters; gradients count.
- *Sparse* heads have row-sparse gradients. Trees are built from counts by Zipf's law: Huffman,
  Huffman collapsed to {WIDE} children per node, `two_level`, and √V equal groups. *Gathered paths*
  is the obvious hierarchical softmax in torch: embeddings with sparse gradients, gathered along
  padded paths. torch's adaptive softmax has the cutoffs of ours of the same name.
- *{TOP}* is the exact `topk({K})` of heads that imitate trained ones: biases are the log counts,
  and random class vectors add a standard deviation of *spread* to the scores. Verified: the classes
  are those of a sort of all log-probabilities in float64, except for ties within rounding.
- *Draws* are {DRAWN:,} classes with replacement and their log-probabilities (torch returns none),
  by Zipf's law in random order. Verified by a χ² test of {DRAWN_GROUPS} groups of classes.
- *Trees* are built from counts by Zipf's law in random order, clusters from class vectors of size
  {NUMBERS}. Verified: with uniform choices at each node, the class probabilities sum to 1.
"""


@dataclass(frozen=True)
class Problem:
    """The sizes of a classification problem, its dtype and its device."""

    rows: int
    width: int
    classes: int
    dtype: torch.dtype
    device: torch.device

    @property
    def made(self) -> dict[str, Any]:
        """Factory arguments of a module."""
        return {"device": self.device, "dtype": self.dtype}

    @property
    def counts(self) -> Counts:
        """Relative class frequencies, the most frequent class first."""
        return zipf(self.classes)

    def draw(self, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Hidden states ~ N(0, 1), and targets drawn by the counts."""
        generator = torch.Generator(device).manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "device": device}
        hidden = torch.randn(self.rows, self.width, **options)
        chance = torch.rand(self.rows, dtype=torch.float64, **options)
        target = torch.searchsorted(_cumulative(self.classes, device), chance)
        return hidden.to(self.dtype), target.clamp(max=self.classes - 1)


@lru_cache(maxsize=2)
def zipf(classes: int) -> Counts:
    """Counts by Zipf's law with the exponent 1: one over the rank."""
    return 1.0 / np.arange(1, classes + 1)


def _shuffled(classes: int, seed: int = SEED) -> Counts:
    return np.random.default_rng(seed).permutation(zipf(classes))


@lru_cache(maxsize=2)
def _cumulative(classes: int, device: torch.device) -> Tensor:
    sums = np.cumsum(zipf(classes))
    return torch.from_numpy(sums / sums[-1]).to(device)


@lru_cache(maxsize=2)
def huffman(classes: int) -> Tree:
    """Huffman's tree of these counts."""
    return trees.huffman(zipf(classes))


class FlatLayer(nn.Linear):
    """``nn.Linear`` with ``cross_entropy`` and ``torch.topk`` on its scores."""

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # a head has targets
        """The mean loss, from scores in float32, or in float64 from float64."""
        return functional.cross_entropy(_wide(super().forward(hidden)), target)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all classes."""
        return torch.log_softmax(super().forward(hidden), -1)

    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The k largest scores, not normalised, and their classes."""
        return TopK(*torch.topk(super().forward(hidden), k))


class GatheredPaths(nn.Module):
    """A hierarchical softmax of a binary tree that gathers along paths padded to the longest.

    Gradients are sparse: one row for each node of each path.
    """

    nodes: Tensor
    signs: Tensor

    def __init__(self, tree: Tree, problem: Problem) -> None:
        super().__init__()
        self.tree = tree
        self.weight = nn.Embedding(tree.n_inner, problem.width, sparse=True, **problem.made)
        self.bias = nn.Embedding(tree.n_inner, 1, sparse=True, **problem.made)
        bound = problem.width**-0.5
        for each in (self.weight, self.bias):
            nn.init.uniform_(each.weight, -bound, bound)
        place = np.arange(tree.max_depth)
        inside = place < tree.class_depth[:, None]
        entry = np.where(inside, tree.path_start[:-1, None] + place, 0)
        # The sign is 1 towards the second child, -1 towards the first, and 0 beyond a path's end.
        signs = np.where(inside, 2 * tree.path_position[entry] - 1, 0)
        nodes = torch.from_numpy(np.where(inside, tree.path_node[entry], 0))
        self.register_buffer("nodes", nodes.to(problem.device))
        self.register_buffer("signs", torch.from_numpy(signs).to(problem.device, torch.int8))

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """The mean loss."""
        nodes, signs = self.nodes[target], self.signs[target]
        scores = torch.bmm(self.weight(nodes), hidden.unsqueeze(-1)) + self.bias(nodes)
        steps = functional.logsigmoid(signs * _wide(scores.squeeze(-1)))
        return -(steps * (signs != 0)).sum(-1).mean()


def _wide(scores: Tensor) -> Tensor:
    return scores if scores.dtype == torch.float64 else scores.float()


def _flat(p: Problem) -> nn.Module:
    return FlatLayer(p.width, p.classes, **p.made)


def _adaptive(p: Problem, *parts: int) -> Any:
    """Cutoffs at V/part for each of ``parts``; by default chosen from the counts."""
    if not parts:
        return heads.AdaptiveSoftmax(p.width, counts=p.counts, **p.made)
    cutoffs = [p.classes // part for part in parts]
    return heads.AdaptiveSoftmax(p.width, cutoffs=cutoffs, n_classes=p.classes, **p.made)


def _torch_adaptive(p: Problem, *parts: int) -> nn.Module:
    cutoffs = _adaptive(p, *parts).cutoffs.tolist()
    return nn.AdaptiveLogSoftmaxWithLoss(p.width, p.classes, cutoffs, **p.made)


def _differentiated(p: Problem, variant: Any) -> nn.Module:
    widths = [3 * p.width // 4, 3 * p.width // 16, p.width // 16]
    classes = [p.classes // 25, 4 * p.classes // 25]
    bands = [*zip(classes, widths, strict=False), (p.classes - sum(classes), widths[-1])]
    return heads.DifferentiatedSoftmax(p.width, bands, variant=variant, **p.made)


def _char_cnn(p: Problem) -> nn.Module:
    words = [f"word{number:07d}" for number in range(p.classes)]
    return heads.CharCNNSoftmax(p.width, words, **p.made)


def _sampled(
    p: Problem, kind: Any = heads.SampledSoftmax, n_samples: int | None = None
) -> nn.Module:
    """Draws by class frequency, by default as many as there are rows."""
    sampler, n = samplers.Unigram(p.counts), n_samples or p.rows
    made: nn.Module = kind(p.width, p.classes, sampler, n, sparse=True, **p.made)
    return made


def _described(module: Any) -> str:
    """The settings of a head: the shape of its tree, cutoffs, bands, or number of draws."""
    if hasattr(module, "tree"):
        return _tree_in_words(module.tree)
    if hasattr(module, "cutoffs"):
        made = module.cutoffs
        starts = made.tolist() if isinstance(made, Tensor) else made[:-1]
        return "cutoffs " + (", ".join(f"{each:,}" for each in starts) or "none")
    if hasattr(module, "bands"):
        return "bands " + ", ".join(f"{classes:,} of {width}" for classes, width in module.bands)
    return f"{module.n_samples:,} drawn" if hasattr(module, "n_samples") else ""


def _tree_in_words(tree: Tree) -> str:
    return f"{tree.max_depth} deep" + ("" if tree.is_binary else f", up to {tree.max_arity} wide")


def _facts(module: nn.Module) -> Callable[[Any], dict[str, Any]]:
    numbers = sum(each.numel() for each in module.parameters())
    settings = _described(module)
    return lambda _: {"settings": settings, "parameters": numbers}


@dataclass(frozen=True)
class Entry:
    """A head whose training step is measured.

    Attributes:
        name: name in tables.
        build: constructs it for a problem; classes are in order of decreasing frequency.
        on: the cases that it is part of.
        losses: its loss in float64.
        source: the distribution it is from.
        computes: the function it computes, if other entries compute it too.
        score_bytes: bytes that it stores per row and class; 0 if it stores no scores.
        tolerances: tolerances that differ from the default.
        optimizer: an optimiser of the parameters, whose step is then part of each call.
    """

    name: str
    build: Callable[[Problem], nn.Module]
    on: Iterable[str] = (CPU, CUDA)
    losses: Losses = references.by_log_prob
    source: str = OURS
    computes: str = ""
    score_bytes: int = 0
    tolerances: Mapping[str, float] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None

    def method(self, problem: Problem) -> Method:
        """The method for the driver."""
        return Method(
            self.name, self.source, partial(self.load, problem), self.computes,
            scratch=problem.rows * problem.classes * self.score_bytes, tolerances=self.tolerances,
        )  # fmt: skip

    def load(self, problem: Problem) -> Work:
        """Forward and backward, and a step of the optimiser if there is one."""
        module = seeded(lambda: self.build(problem), problem.device)
        parameters = dict(module.named_parameters())

        def loss_of(hidden: Tensor, target: Tensor) -> Any:
            made = module(hidden, target)
            # torch's adaptive softmax returns a named tuple with the loss.
            return getattr(made, "loss", made)

        def errors(results: Results, inputs: Inputs) -> dict[str, float]:
            exact = references.step(module, self.losses, problem.classes, *inputs)
            found = {
                name: driver.relative_error(results[name], each) for name, each in exact.items()
            }
            # np.max is NaN if any error is.
            worst = float(np.max([found[name] for name in parameters]))
            return {"loss": found["loss"], "hidden": found["hidden"], "weight": worst}

        update = None if self.optimizer is None else self.optimizer(parameters.values()).step
        step = driver.loss_step(loss_of, "hidden", parameters=parameters, update=update)
        return replace(step, errors=errors, facts=_facts(module))


def seeded(build: Callable[[], nn.Module], device: torch.device, seed: int = SEED) -> nn.Module:
    """A module with the same parameters in every run."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return build()


LINEAR, FULL = "linear + cross_entropy", "full (fused)"
HUFFMAN, TWO_LEVEL = "hierarchical, Huffman, sparse", "hierarchical, √V groups, sparse"
ADAPTIVE = "adaptive, automatic cutoffs"
ADAPTIVE_50, ADAPTIVE_25 = "adaptive, cutoffs V/50, V/5", "adaptive, cutoffs V/25, V/5"
SAMPLED, NCE = "sampled softmax, sparse", "noise contrastive, sparse"
FEW_NCE = "noise contrastive, 1024 drawn, sparse"
FEW_NEGATIVE = "negative sampling, 16 drawn, sparse"
UPDATED, SLICES = " + RowAdagrad", "differentiated, slices"


def _tree(name: str, make: Callable[[Problem], Tree], *on: str, sparse: bool = True) -> Entry:
    def build(p: Problem) -> nn.Module:
        return heads.HierarchicalSoftmax(p.width, make(p), sparse=sparse, **p.made)

    return Entry(name, build, on, references.paths)


# Add a head here: a name and a function that builds it are enough.
ENTRIES = (
    Entry(LINEAR, _flat, (CPU, CUDA, WORDS), references.flat, "torch", "full", score_bytes=14),
    Entry(
        FULL, lambda p: heads.FullSoftmax(p.width, p.classes, **p.made), (CPU, CUDA, WORDS, SWEEP),
        references.flat, computes="full",
    ),
    _tree(HUFFMAN, lambda p: huffman(p.classes), CPU, CUDA, SWEEP),
    _tree("hierarchical, Huffman, dense", lambda p: huffman(p.classes), CPU, sparse=False),
    _tree(
        f"hierarchical, collapsed to {WIDE}, sparse", lambda p: huffman(p.classes).collapse(WIDE),
        CPU, CUDA,
    ),
    _tree("hierarchical, two_level, sparse", lambda p: trees.two_level(p.counts), CPU),
    _tree(TWO_LEVEL, lambda p: trees.two_level(p.classes), SWEEP),
    Entry(
        "gathered paths, Huffman, sparse", lambda p: GatheredPaths(huffman(p.classes), p),
        losses=references.gathered, source="torch", computes=HUFFMAN,
    ),
    Entry(ADAPTIVE, _adaptive, (CPU, CUDA, SWEEP), references.clusters),
    Entry(ADAPTIVE, _torch_adaptive, (CPU,), source="torch"),
    Entry(ADAPTIVE_50, lambda p: _adaptive(p, 50, 5), (CPU,), references.clusters),
    Entry(ADAPTIVE_50, lambda p: _torch_adaptive(p, 50, 5), (CPU,), source="torch"),
    Entry(ADAPTIVE_25, lambda p: _adaptive(p, 25, 5), (CUDA,), references.clusters),
    Entry(ADAPTIVE_25, lambda p: _torch_adaptive(p, 25, 5), (CUDA,), source="torch"),
    *(
        Entry(f"differentiated, {kind}", partial(_differentiated, variant=kind),
              losses=references.bands)
        for kind in ("slices", "projections")
    ),
    Entry(SAMPLED, _sampled, (CPU, CUDA, SWEEP), references.sampled),
    Entry(NCE, partial(_sampled, kind=heads.NoiseContrastive), losses=references.noise),
    Entry(
        FEW_NCE, partial(_sampled, kind=heads.NoiseContrastive, n_samples=1024), (CUDA,),
        references.noise,
    ),
    Entry(
        FEW_NEGATIVE, partial(_sampled, kind=heads.NegativeSampling, n_samples=16), (CUDA,),
        references.negatives,
    ),
    Entry(
        SAMPLED + UPDATED, _sampled, (CUDA,), references.sampled,
        optimizer=lambda parameters: optim.RowAdagrad(parameters, lr=1e-3),
    ),
    # Rounding decides ties between characters, and only one of them gets the gradient.
    Entry("char_cnn", _char_cnn, (WORDS,), tolerances={"hidden": 1e-3, "weight": 1e-3}),
)  # fmt: skip


def _step_case(section: str, place: str, shape: tuple[int, int, int], device: torch.device) -> Case:
    # The maxima of a character CNN can differ between bfloat16 and float64.
    dtype = "float32" if place == WORDS else driver.USUAL_DTYPE[device.type]
    baseline = LINEAR if place in (CPU, WORDS) else FULL
    problem = Problem(*shape, driver.DTYPES[dtype], device)
    found = sorted(
        (entry.method(problem) for entry in ENTRIES if place in entry.on),
        key=lambda method: (method.name != baseline, method.source != OURS),
    )
    return Case(
        section, shape, dtype, BACKWARD, tuple(found), problem.draw, ("hidden",), results_count=True
    )


@torch.no_grad()
def _trained(p: Problem, build: Callable[[Problem], nn.Module], spread: float) -> Any:
    """A head that imitates a trained one: biases from the counts, vectors scaled by ``spread``."""
    head: Any = build(p)
    if isinstance(head, FlatLayer):
        head.bias.copy_(torch.from_numpy(np.log(p.counts)))
    else:
        # Scaled, because the head treats counts below 0.5 as 0.5.
        head.init_bias_from_counts(p.classes * p.counts)
    # Initialised like nn.Linear; with this factor, hidden states ~ N(0, 1) give scores of this
    # standard deviation.
    for name, parameter in head.named_parameters():
        if parameter.dim() == 2:
            parameter.mul_(math.sqrt(3.0) * (1.0 if "projection" in name else spread))
    return head


DENSE, TREE_TOP, ADAPTIVE_TOP = "linear + topk", "hierarchical, Huffman", "adaptive"
FULL_TOP, SAMPLED_TOP = "full", "sampled softmax"
_TOP_HEADS: dict[str, Callable[[Problem], nn.Module]] = {
    DENSE: _flat,
    TREE_TOP: lambda p: heads.HierarchicalSoftmax(p.width, huffman(p.classes), **p.made),
    ADAPTIVE_TOP: lambda p: heads.AdaptiveSoftmax(
        p.width, counts=p.counts, head_bias=True, **p.made
    ),
    FULL_TOP: lambda p: heads.FullSoftmax(p.width, p.classes, **p.made),
    SAMPLED_TOP: _sampled,
}


def _load_top(problem: Problem, kind: str, spread: float) -> Work:
    build = _TOP_HEADS[kind]
    module: Any = seeded(lambda: _trained(problem, build, spread), problem.device)

    @torch.no_grad()
    def call(hidden: Tensor) -> Results:
        values, classes = module.topk(hidden, K)
        return {"values": values, "classes": classes}

    @torch.no_grad()
    def errors(results: Results, inputs: Inputs) -> dict[str, float]:
        """Compare the classes with a sort of all log-probabilities in float64."""
        (hidden,), twin = inputs, in_float64(module)
        compared = results["classes"][: COMPARED[hidden.device.type]]
        worst = []
        for rows, found in zip(hidden.split(_AT_A_TIME), compared.split(_AT_A_TIME), strict=False):
            log_prob = twin.log_prob(rows[: len(found)].double())
            reached = log_prob.gather(-1, found).sort(-1, descending=True).values
            worst.append((log_prob.topk(K).values - reached).abs().max())
            if bool((found.sort(-1).values.diff(dim=-1) == 0).any()):
                worst.append(log_prob.new_tensor(torch.inf))
        return {"log_prob": float(torch.stack(worst).max())}

    return Work(call, errors=errors, facts=_facts(module))


def top_name(kind: str, spread: float) -> str:
    """The name in tables of a head with this spread."""
    return kind if kind == DENSE else f"{kind}, spread {spread:g}"


def _top_case(shape: tuple[int, int, int], device: torch.device) -> Case:
    dtype = driver.USUAL_DTYPE[device.type]
    problem = Problem(*shape, driver.DTYPES[dtype], device)
    # Smaller differences are ties within rounding.
    exact = {"log_prob": {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2}[dtype]}
    # The time of the dense ones does not depend on the scores.
    kinds = [(k, SPREADS[0]) for k in (DENSE, FULL_TOP, SAMPLED_TOP)]
    kinds += [(k, s) for k in (TREE_TOP, ADAPTIVE_TOP) for s in SPREADS]
    found = tuple(
        Method(top_name(kind, spread), "torch" if kind == DENSE else OURS,
               partial(_load_top, problem, kind, spread), tolerances=exact)
        for kind, spread in kinds
    )  # fmt: skip
    return Case(
        TOP, shape, dtype, FORWARD, found, lambda on, seed: problem.draw(on, seed)[:1],
        results_count=True,
    )  # fmt: skip


ALIAS, MULTINOMIAL = "unigram by alias", "multinomial"


def load_draws(name: str, classes: int, device: torch.device) -> Work:
    """Prepares a distribution over ``classes`` classes; the work draws from it."""
    probs = _shuffled(classes)
    probs /= probs.sum()
    if name == MULTINOMIAL:
        weight = torch.from_numpy(probs).to(device)
        return draw_work(lambda n: (torch.multinomial(weight, n, replacement=True), None), probs)
    sampler: Any
    if name == "log-uniform":
        sampler = samplers.LogUniform(classes)
        probs = np.log1p(1.0 / np.arange(1.0, classes + 1.0)) / np.log1p(classes)
    elif name == "uniform":
        sampler, probs = samplers.Uniform(classes), np.full(classes, 1.0 / classes)
    else:
        sampler = samplers.Unigram(probs)
    return draw_work(sampler.to(device).sample_with_log_prob, probs)


def draw_work(draw: Callable[[int], tuple[Tensor, Tensor | None]], probs: Counts) -> Work:
    """Draws with replacement, verified by class frequencies and log-probabilities."""

    def call(_: Tensor) -> Results:
        ids, log_prob = draw(DRAWN)
        return {"ids": ids} if log_prob is None else {"ids": ids, "log_prob": log_prob}

    def errors(_: Results, __: Inputs) -> dict[str, float]:
        ids, log_prob = draw(VERIFIED)
        found = ids.cpu().numpy()
        if found.min() < 0 or found.max() >= len(probs):
            return {"chi_square": math.inf}
        group = np.minimum((np.cumsum(probs) * DRAWN_GROUPS).astype(np.int64), DRAWN_GROUPS - 1)
        expected = np.bincount(group, probs, DRAWN_GROUPS) * len(found)
        counted = np.bincount(group[found], minlength=DRAWN_GROUPS)
        some = expected > 0
        errors = {"chi_square": float(((counted - expected)[some] ** 2 / expected[some]).sum())}
        if log_prob is not None:
            off = log_prob.double().cpu().numpy() - np.log(probs[found])
            errors["log_prob"] = float(np.abs(off).max())
        return errors

    return Work(call, errors=errors)


def _draws_case(classes: int, device: torch.device) -> Case:
    # For 49 degrees of freedom, exceeded by chance once in 10^12 verifications.
    exact = {"chi_square": 170.0, "log_prob": 1e-4}
    found = tuple(
        Method(name, "torch" if name == MULTINOMIAL else OURS,
               partial(load_draws, name, classes, device), f"draws, {name}", tolerances=exact)
        for name in (MULTINOMIAL, ALIAS, "log-uniform", "uniform")
    )  # fmt: skip
    return Case(
        DRAWS, (classes,), "float64", FORWARD, found, lambda on, _: (torch.zeros(1, device=on),),
        results_count=True,
    )  # fmt: skip


def _from_codes(classes: int, *, strings: bool) -> Any:
    tree = trees.huffman(_shuffled(classes))
    chosen, start = tree.path_position.tolist(), tree.path_start.tolist()
    lists = [chosen[start[c] : start[c + 1]] for c in range(classes)]
    codes = ["".join(map(str, code)) for code in lists] if strings else lists
    return lambda _: trees.from_codes(codes)


def _from_parents(classes: int) -> Any:
    """A taxonomy of names."""
    groups = min(GROUPS, classes)
    parents = {f"word{i}": f"group{i % groups}" for i in range(classes)}
    parents |= {f"group{i}": "root" for i in range(groups)}
    return lambda _: trees.from_parents(parents)


def _with_paths(counts: Counts) -> Tree:
    tree = trees.huffman(counts)
    _ = tree.path_node
    return tree


def _saved(classes: int) -> Any:
    """Saves a tree with class labels and loads it again."""
    tree = trees.huffman(_shuffled(classes), labels=[f"word{i}" for i in range(classes)])

    def build(_: Counts) -> Tree:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tree.safetensors")
            tree.save(path)
            return Tree.load(path)

    return build


def _clustered(classes: int, **options: Any) -> Any:
    vectors = torch.randn(classes, NUMBERS, generator=torch.Generator().manual_seed(SEED))
    return lambda _: trees.cluster(vectors, progress=False, **options)


# By name, a function from the number of classes to a builder of trees from counts.
BUILDERS: dict[str, Callable[[int], Callable[[Counts], Tree]]] = {
    "huffman": lambda _: trees.huffman,
    "huffman, arity 16": lambda _: lambda counts: trees.huffman(counts, 16),
    "balanced": lambda _: lambda counts: trees.balanced(len(counts)),
    "two_level": lambda _: trees.two_level,
    f"huffman, collapsed to {WIDE}": lambda _: lambda c: trees.huffman(c).collapse(WIDE),
    "huffman with all paths": lambda _: _with_paths,
    "from_parents, names": _from_parents,
    "from_codes, strings": partial(_from_codes, strings=True),
    "from_codes, lists": partial(_from_codes, strings=False),
    "save and load, with labels": _saved,
}
CLUSTERED: dict[str, Callable[[int], Callable[[Counts], Tree]]] = {
    "cluster": _clustered,
    f"cluster, overlap {OVERLAP:g}": partial(_clustered, kind="adaptive", overlap=OVERLAP),
}


def tree_work(prepare: Callable[[int], Callable[[Counts], Tree]], classes: int) -> Work:
    """A tree from counts, verified with uniform choices: class probabilities sum to 1."""
    build = prepare(classes)

    def errors(results: dict[str, Tree], _: Inputs) -> dict[str, float]:
        tree = results["tree"]
        if tree.n_classes != classes:
            return {"sums": math.inf}
        choices = np.log(tree.arity.astype(np.float64))[tree.path_node]
        log_prob = -np.add.reduceat(choices, tree.path_start[:-1])
        return {"sums": abs(float(np.exp(log_prob).sum()) - 1)}

    return Work(
        lambda counts: {"tree": build(counts.numpy())},
        errors=errors,
        facts=lambda results: {"settings": _tree_in_words(results["tree"])},
    )


def _trees_case(classes: int, builders: Mapping[str, Any]) -> Case:
    found = tuple(
        Method(name, OURS, partial(tree_work, prepare, classes), f"tree, {name}",
               tolerances={"sums": 1e-9})
        for name, prepare in builders.items()
    )  # fmt: skip
    return Case(
        TREES, (classes,), "float64", FORWARD, found,
        lambda on, seed: (torch.from_numpy(_shuffled(classes, seed)).to(on),),
        baseline=False, results_count=True,
    )  # fmt: skip


def _cases(device: torch.device, quick: bool) -> list[Case]:
    sizes = SIZES[device.type, quick]
    cases = [
        *(_step_case(STEP, device.type, shape, device) for shape in sizes.steps),
        _step_case(STEP, WORDS, sizes.words, device),
        _top_case(sizes.top, device),
        *(_step_case(AGAINST, SWEEP, (*sizes.against, n), device) for n in sizes.classes),
        _draws_case(sizes.draws, device),
    ]
    if sizes.trees:
        cases.append(_trees_case(sizes.trees, BUILDERS))
        cases.append(_trees_case(sizes.clustered, CLUSTERED))
    return cases


FAMILY = Family(
    "heads", "Heads", _cases, NOTES, {AGAINST: "classes"}, pictured=(AGAINST,), seed=SEED
)
