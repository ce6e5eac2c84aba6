"""Compiled log-probabilities have the gradients of eager ones.

torch 2.11 drops gradients where ``lastlayer._torch.forward_result`` is missing.
"""

import pytest
import torch

from lastlayer import heads, trees
from lastlayer.samplers import Uniform

N, D = 40, 16
WORDS = [f"{7 * i:o}" for i in range(N)]
FILTERS = ((1, 8), (2, 8))
HEADS = {
    "full": lambda **made: heads.FullSoftmax(D, N, **made),
    "bent": lambda **made: heads.FullSoftmax(D, N, softcap=5.0, bias=False, **made),
    "entmax": lambda **made: heads.EntmaxHead(D, N, alpha=1.3, **made),
    "topk": lambda **made: heads.TopKSoftmaxHead(D, N, 5, **made),
    "adaptive": lambda **made: heads.AdaptiveSoftmax(D, N, [10, 20], **made),
    "differentiated": lambda **made: heads.DifferentiatedSoftmax(D, [(10, 8), (30, 8)], **made),
    "char_cnn": lambda **made: heads.CharCNNSoftmax(D, WORDS, filters=FILTERS, **made),
    "binary tree": lambda **made: heads.HierarchicalSoftmax(D, trees.balanced(N), **made),
    "two-level": lambda **made: heads.HierarchicalSoftmax(D, trees.two_level(N), **made),
    "nce": lambda **made: heads.NoiseContrastive(D, N, Uniform(N), 5, **made),
    "labels": lambda **made: heads.MultiLabel(D, N, **made),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_log_prob(make, dtype):
    head = make(dtype=dtype)
    hidden = torch.randn(9, D, dtype=dtype, requires_grad=True)
    classes = torch.randint(N, (9, 2))
    for given in ([], [classes]):
        torch.compiler.reset()
        compiled = torch.compile(head.log_prob, backend="eager")
        parts = []
        for function in (head.log_prob, compiled):
            logs = function(hidden, *given)
            # A head with a support gives -inf, and no gradient, outside of it.
            total = torch.where(logs.isfinite(), logs, 0.0).float().square().sum()
            parts.append(torch.autograd.grad(total, [hidden, *head.parameters()]))
        for found, expected in zip(*reversed(parts), strict=True):
            error = (found.double() - expected.double()).norm()
            assert error <= (0.02 if dtype == torch.bfloat16 else 1e-5) * expected.norm()
