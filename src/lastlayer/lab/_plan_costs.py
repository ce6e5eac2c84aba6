"""How long a training step of each head takes, by what it computes and moves.

Every head is made of the same few things: products, scores that are exponentiated, vectors that are
read and gradients that are written, and the small operations around them. How many of each follows
from the sizes, but for the calls, the weight of a score and of a gathered vector: these were fitted
by hand to the steps in benchmarks/results/heads-cpu.jsonl and to a few more on one thread. What
each costs is measured where the plan is made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lastlayer.heads.layout import MatrixCost, tail_widths
from lastlayer.lab._machine import Machine

if TYPE_CHECKING:
    from lastlayer.trees import Tree

Shares = NDArray[np.float64]
# Larger blocks of a CPU's memory are handed out anew each time: the most that glibc keeps.
_ANEW = 2**25
# In scores of torch's softmax: the loss and its gradient; the search of entmax on flat rows; the
# logistic losses of sampled classes, operation by operation; the search of the k best, and what
# goes with each of these.
SOFTMAX, ENTMAX, LOGISTIC, SEARCH, KEPT = 2.5, 14.0, 30.0, 3.0, 400.0
# The same for many labels: fused ZLPR and logistic losses; the others operation by operation.
LABELS, ASYMMETRIC, SPARSE_LABELS = 7.0, 140.0, 220.0
# On a GPU all nodes of a tree with several children are one pass: what it takes beside the rest.
_GROUPED_CALLS = 165.0
# Times that a gathered vector moves: read twice, its gradient written, sorted and summed.
_GATHERED = 6
# In scores: a class that one row draws for itself from the proposal of its context, with what the
# proposal learns from it. Calls of a block of such draws. Draws of a fresh head beside those of
# scores that are all equal. By hand, from a few steps on one thread.
ALONE, _BLOCK_CALLS, _UNEVEN = 900.0, 350.0, 1.4
# Letters of a word through all filters, forward and backward, at the rate of large products.
_SPELLING = 14e6


@dataclass(frozen=True)
class Work:
    """Of one training step.

    Attributes:
        flops: of products.
        scores: that are exponentiated, weighed by how much is done with each.
        moved: bytes of vectors and gradients.
        anew: bytes that the system hands out anew.
        calls: of small operations.
        parameters: numbers that are learned.
        gradient: bytes of gradients.
        held: bytes beside parameters and gradients while it runs.
    """

    flops: float
    scores: float
    moved: float
    anew: float
    calls: float
    parameters: int
    gradient: float
    held: float

    def seconds(self, machine: Machine) -> float:
        """One after the other; but a GPU works while the host makes the next calls."""
        work = (
            self.flops * machine.flop
            + self.scores * machine.score
            + self.moved * machine.byte
            + self.anew * machine.fresh
        )
        calls = self.calls * machine.call
        return max(work, calls) if machine.device == "cuda" else work + calls


@dataclass(frozen=True)
class Problem:
    """Rows of hidden states, classes by how often they occur, and bytes of a number."""

    rows: int
    width: int
    shares: Shares
    number: int
    device: str

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.shares)

    @property
    def kept(self) -> int:
        """Bytes that a kept row of scores of all classes is allowed, as the fused pass does it."""
        import torch

        from lastlayer.fused.scores import rows_at_a_time

        dtype = torch.float32 if self.number == 4 else torch.bfloat16
        # The rule asks for the kind of a device alone: a plan for a GPU needs none.
        place = "cpu" if self.device == "cpu" else "meta"
        hidden = torch.empty(self.rows, self.width, dtype=dtype, device=place)
        return rows_at_a_time("auto", hidden, self.classes) * self.classes * self.number


def flat(problem: Problem, *, per_score: float = SOFTMAX, calls: float = 90.0) -> Work:
    """All classes, three products: full, self-normalised, entmax before rows are sparse."""
    n, d, v = problem.rows, problem.width, problem.classes
    weight = float(v * d * problem.number)
    return Work(
        flops=6.0 * n * d * v,
        scores=per_score * n * v,
        moved=3 * weight,
        anew=weight if weight > _ANEW else 0.0,
        calls=calls,
        parameters=v * (d + 1),
        gradient=weight + v * problem.number,
        held=float(problem.kept),
    )


def best_of(problem: Problem, k: int) -> Work:
    """All classes, of which the k best of each row stay."""
    n, v = problem.rows, problem.classes
    each = SEARCH + KEPT * min(k, v) / v
    return replace(flat(problem, per_score=each), held=float(problem.kept + n * min(k, v) * 12))


def bands(problem: Problem, layout: Sequence[tuple[int, int]]) -> Work:
    """All classes, those of a band with vectors of its width."""
    n, v = problem.rows, problem.classes
    numbers = sum(classes * width for classes, width in layout)
    weight = float(numbers * problem.number)
    return Work(
        flops=6.0 * n * numbers,
        scores=SOFTMAX * n * v,
        moved=3 * weight,
        anew=weight if weight > _ANEW else 0.0,
        calls=90.0 + 10.0 * len(layout),
        parameters=numbers + v,
        gradient=weight + v * problem.number,
        held=float(problem.kept),
    )


def adaptive(problem: Problem, cutoffs: Sequence[int]) -> Work:
    """The top on all rows, and each cluster on those it expects."""
    n, d, b = problem.rows, problem.width, problem.number
    parts = list(adaptive_parts(problem.shares, cutoffs, d, n))
    numbers = sum(k * width for k, _, width in parts)
    projections = sum(width * d for _, _, width in parts[1:])
    spread = sum(k * rows for k, rows, _ in parts)
    return Work(
        flops=6.0
        * sum(rows * width * (k + d * (i > 0)) for i, (k, rows, width) in enumerate(parts)),
        scores=SOFTMAX * spread,
        moved=3.0 * b * (numbers + projections),
        anew=float(sum(k * w * b for k, _, w in parts if k * w * b > _ANEW)),
        calls=75.0 + 30.0 * len(cutoffs),
        parameters=numbers + projections,
        gradient=float(b * (numbers + projections)),
        held=float(b * max(k * rows for k, rows, _ in parts)),
    )


def adaptive_parts(
    shares: Shares, cutoffs: Sequence[int], width: int, rows: int
) -> list[tuple[int, float, int]]:
    """Classes, rows and width of the top and of each cluster."""
    below = np.concatenate([[0.0], np.cumsum(shares)])
    ends = [*cutoffs, len(shares)]
    widths = tail_widths(width, len(cutoffs), 4.0, 8)
    top = (ends[0] + len(cutoffs), float(rows), width)
    inside = zip(ends[:-1], ends[1:], widths, strict=True)
    return [top, *((b - a, rows * float(below[b] - below[a]), w) for a, b, w in inside)]


def adaptive_microseconds(
    cost: MatrixCost, shares: Shares, cutoffs: Sequence[int], width: int, rows: int
) -> float:
    """A step by the cost model with which cutoffs are chosen."""
    top, *inside = adaptive_parts(shares, cutoffs, width, rows)
    work = cost.work(*top)
    for k, some, narrow in inside:
        work += cost.work(k, some, narrow) + cost.product * some * narrow * width
    return cost.step(1 + len(inside), float(work))


def tree_paths(problem: Problem, tree: "Tree") -> Work:
    """The nodes on the way to each target: binary ones gathered, wide ones each a small softmax."""
    n, d, b = problem.rows, problem.width, problem.number
    chance = tree.sums_below(problem.shares)
    met = 1.0 - (1.0 - np.minimum(chance, 1.0)) ** n
    wide = tree.arity > 2
    steps = float(chance[~wide].sum())
    sizes = tree.arity[wide].astype(np.float64)
    groups = float(met[wide].sum())
    on_cuda = problem.device == "cuda"
    vectors = float((met[wide] * sizes).sum())
    scored = float((chance[wide] * sizes).sum()) * n
    touched = float(met[~wide].sum()) + vectors
    return Work(
        flops=6.0 * d * (n * steps + scored),
        scores=SOFTMAX * (scored + n * steps),
        moved=b * d * (_GATHERED * n * steps + 4.0 * vectors),
        anew=0.0,
        calls=55.0 + (min(_GROUPED_CALLS, 18.0 * groups) if on_cuda else 18.0 * groups),
        parameters=int(np.where(wide, tree.arity, 1).sum()) * (d + 1),
        gradient=touched * (d + 1) * b,
        held=b * d * (vectors + 4.0 * n) + b * scored,
    )


def drawn(
    problem: Problem, samples: int, *, per_score: float = SOFTMAX, calls: float = 170.0
) -> Work:
    """The target and the drawn classes; gradients of these alone."""
    n, d, b = problem.rows, problem.width, problem.number
    vectors = samples + n
    return Work(
        flops=6.0 * n * d * (samples + 1),
        scores=per_score * n * samples,
        moved=float(_GATHERED * vectors * d * b),
        anew=0.0,
        calls=calls,
        parameters=problem.classes * (d + 1),
        gradient=float(vectors * (d + 1) * b),
        held=float(b * (n * samples + vectors * d)),
    )


def draws_at_first(problem: Problem, size: float, block: int) -> int:
    """Draws by frequency until equal scores have an effective sample size, in whole blocks.

    Weights are then 1 / share, and n draws are worth n V² / Σ (1 / share).
    """
    worth = problem.classes**2 / float((1.0 / problem.shares).sum())
    return block * math.ceil(_UNEVEN * size / worth / block)


def drawn_alone(problem: Problem, draws: int, block: int) -> Work:
    """Each row draws for itself, block by block; gradients of what was drawn."""
    n, d, b = problem.rows, problem.width, problem.number
    vectors = n * (draws + 1)
    touched = min(vectors, problem.classes)
    return Work(
        flops=6.0 * vectors * d,
        scores=ALONE * n * draws,
        moved=float(_GATHERED * vectors * d * b),
        anew=0.0,
        calls=_BLOCK_CALLS * draws / block,
        parameters=problem.classes * (d + 1),
        gradient=float(touched * (d + 1) * b),
        # Class ids of eight bytes, their log-probabilities and their scores.
        held=float(n * draws * (8 + 2 * b) + vectors * d * b),
    )


def spelled(problem: Problem) -> Work:
    """Vectors of all classes from their spelling, and then all classes."""
    base = flat(problem)
    v, d, b = problem.classes, problem.width, problem.number
    filters = 1_000
    return Work(
        flops=base.flops + v * _SPELLING,
        scores=base.scores,
        moved=base.moved,
        anew=base.anew,
        calls=base.calls + 100.0,
        parameters=filters * 24 + v * (d + 1),
        gradient=base.gradient,
        held=base.held + 12.0 * v * filters * b,
    )


def zipf_shares(classes: int) -> Any:
    """One over the rank, to the sum 1."""
    shares = 1.0 / np.arange(1, classes + 1)
    return shares / shares.sum()
