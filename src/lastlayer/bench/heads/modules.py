"""What our heads are compared with, written plainly in torch."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from lastlayer.bench.heads.problem import Problem
from lastlayer.heads import TopK
from lastlayer.trees import Tree


class FlatLayer(torch.nn.Linear):
    """``nn.Linear`` with ``cross_entropy``, and with ``torch.topk`` on its scores."""

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # a head has targets
        """The mean loss, from scores in float32, or in float64 from float64."""
        return functional.cross_entropy(_wide(self._scores(hidden)), target)

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Of all classes."""
        return torch.log_softmax(self._scores(hidden), -1)

    def topk(self, hidden: Tensor, k: int) -> TopK:
        """The best scores, which are not normalised, and their classes."""
        return TopK(*torch.topk(self._scores(hidden), k))

    def _scores(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight, self.bias)


class GatheredPaths(torch.nn.Module):
    """The hierarchical softmax of a binary tree by gathering: paths are padded to the longest.

    Gradients are sparse: one row for each node of each path.
    """

    nodes: Tensor
    signs: Tensor

    def __init__(self, tree: Tree, problem: Problem) -> None:
        super().__init__()
        self.tree = tree
        self.weight = torch.nn.Embedding(tree.n_inner, problem.width, sparse=True, **problem.made)
        self.bias = torch.nn.Embedding(tree.n_inner, 1, sparse=True, **problem.made)
        bound = problem.width**-0.5
        for each in (self.weight, self.bias):
            torch.nn.init.uniform_(each.weight, -bound, bound)
        place = np.arange(tree.max_depth)
        inside = place < tree.class_depth[:, None]
        entry = np.where(inside, tree.path_start[:-1, None] + place, 0)
        # Towards the second child the sign is 1, and 0 beyond the end of a path.
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
