"""The best classes of heads of trained shape: made, called, and verified against a dense sort."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer import heads
from lastlayer.bench import memory
from lastlayer.bench.cases import OURS, Method
from lastlayer.bench.heads.entries import cutoffs_of, shape_of
from lastlayer.bench.heads.entry import seeded
from lastlayer.bench.heads.modules import FlatLayer
from lastlayer.bench.heads.problem import Problem, huffman
from lastlayer.bench.heads.truth import in_float64
from lastlayer.bench.heads.verdict import HeadVerdict

Build = Callable[[Problem, float], torch.nn.Module]
K = 10
SPREADS = (1.0, 2.0)
# How far the log-probability of a class that was found may be from that of the true one: less is
# a tie that rounding decides.
VALUE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2}
# Rows that are compared with a sort of all classes, and how many of them at a time.
COMPARED, _AT_A_TIME = {"cuda": 256, "cpu": 16}, 16


@dataclass
class Top:
    """The best classes of each row, from a head that has ``topk`` and ``log_prob``."""

    module: Any
    settings: str

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> heads.TopK:
        """Values and classes."""
        best: heads.TopK = self.module.topk(hidden, K)
        return best

    captured = __call__

    @torch.no_grad()
    def verify(self, inputs: tuple[Tensor, ...]) -> HeadVerdict:
        """Compare the classes with a sort of all log-probabilities in float64."""
        (hidden,) = inputs
        self(hidden)
        best, peak = memory.with_peak(lambda: self(hidden), hidden.device)
        twin, errors, differ = in_float64(self.module), [], 0
        compared = best.classes[: COMPARED[hidden.device.type]]
        for rows, found in zip(hidden.split(_AT_A_TIME), compared.split(_AT_A_TIME), strict=False):
            log_prob = twin.log_prob(rows[: len(found)].double())
            truth = log_prob.topk(K)
            reached = log_prob.gather(-1, found).sort(-1, descending=True).values
            errors.append((truth.values - reached).abs().max())
            differ += int((truth.indices != found).sum())
            if bool((found.sort(-1).values.diff(dim=-1) == 0).any()):
                errors.append(log_prob.new_tensor(math.inf))
        error = float(torch.stack(errors).max())
        # Written so that NaN never passes.
        right = error <= VALUE_TOLERANCE[hidden.dtype]
        return HeadVerdict(
            reason=None if right else f"classes whose log-probability is off by {error:.1e}",
            settings=self.settings,
            parameters=sum(each.numel() for each in self.module.parameters()),
            peak_bytes=peak,
            value_error=error,
            classes_differ=differ,
        )


def _flat(problem: Problem, spread: float) -> torch.nn.Module:
    layer = FlatLayer(problem.width, problem.classes, **problem.made)
    _spread(layer.weight, spread)
    _set(layer.bias, np.log(problem.counts))
    return layer


def _hierarchical(problem: Problem, spread: float) -> torch.nn.Module:
    tree = huffman(problem.classes)
    head = heads.HierarchicalSoftmax(problem.width, tree, **problem.made)
    _spread(head.weight, spread)
    # How often a path goes through each node, and on to its second child.
    passes = np.repeat(problem.counts, tree.class_depth)
    below = np.bincount(tree.path_node, passes, minlength=tree.n_inner)
    second = np.bincount(tree.path_node, passes * tree.path_position, minlength=tree.n_inner)
    _set(head.bias, np.log(second / (below - second)))
    return head


def _adaptive(problem: Problem, spread: float) -> torch.nn.Module:
    head = heads.AdaptiveSoftmax(
        problem.width, counts=problem.counts, head_bias=True, **problem.made
    )
    for projection in head.projections:
        _spread(projection, 1.0)
    for vectors in (head.head_weight, *head.tails):
        _spread(vectors, spread)
    first, *others = np.split(problem.counts, head.cutoffs.tolist())
    _set(head.head_bias, np.log(np.concatenate([first, [each.sum() for each in others]])))
    return head


@torch.no_grad()
def _spread(weight: Tensor, spread: float) -> None:
    """Vectors that were drawn as ``nn.Linear``'s, so that N(0, 1) gives them this deviation."""
    weight.mul_(spread * math.sqrt(3.0))


@torch.no_grad()
def _set(parameter: Tensor | None, values: NDArray[np.float64]) -> None:
    if parameter is None:
        raise RuntimeError("expected a head with biases")
    parameter.copy_(torch.from_numpy(values))


DENSE, HIERARCHICAL, ADAPTIVE = "linear + topk", "hierarchical, Huffman", "adaptive"


def methods(problem: Problem) -> list[Method]:
    """The baseline, then each head at each spread."""

    def method(
        name: str, source: str, build: Build, spread: float, settings: Callable[[Any], str]
    ) -> Method:
        def load() -> Top:
            module = seeded(partial(build, problem, spread), problem.device)
            return Top(module, settings(module))

        return Method(name, source, f"top {K}, {name}", load)

    ours = {HIERARCHICAL: (_hierarchical, shape_of), ADAPTIVE: (_adaptive, cutoffs_of)}
    return [
        method(DENSE, "torch", _flat, SPREADS[0], lambda _: f"spread {SPREADS[0]:g}"),
        *(
            method(named(name, spread), OURS, build, spread, settings)
            for name, (build, settings) in ours.items()
            for spread in SPREADS
        ),
    ]


def named(head: str, spread: float) -> str:
    """What the table calls a head of this spread."""
    return f"{head}, spread {spread:g}"
