"""Random numbers from a counter: the same (seed, step) gives the same ids on every device.

Philox's words, integers and log-uniform ids; and draws from an alias table of integers, whose
probabilities are the classes' weights to the bit.
"""

import math
from functools import partial

import torch
from torch import Tensor

from lastlayer.kernels._registry import operation

# 2^x for |x| <= 1/2 as a polynomial, the highest power of x first: sums and products alone, which
# every device rounds alike; what follows is below the rounding of float64.
SERIES = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(13, -1, -1))
SQRT_2 = math.sqrt(2.0)
# The step of fork 0.
FORKS = -(2**63)
# How a kernel that draws by itself does it: ids are given, or drawn as the functions here do.
GIVEN, UNIFORM, LOG_UNIFORM, ALIAS = range(4)
_operation = partial(operation, integers=True)


def _ids_and_log_prob(like: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return like.new_empty(n), like.new_empty(n, dtype=torch.float32)


def _per_target(target: Tensor, wide: bool) -> Tensor:
    return target.new_empty(target.shape, dtype=torch.float64 if wide else torch.float32)


words = _operation("rng.words", "philox_words", lambda counter, n: counter.new_empty(n, 2))
integers = _operation(
    "rng.integers", "philox_integers", lambda counter, n, _below: counter.new_empty(n)
)
log_uniform = _operation(
    "rng.log_uniform",
    "philox_log_uniform",
    lambda counter, _order, n, _n_classes: _ids_and_log_prob(counter, n),
)
log_uniform_share = _operation(
    "rng.log_uniform_share",
    "log_uniform_share",
    lambda target, _rank, _n_classes, _complement, wide: _per_target(target, wide),
    has_cpu=False,
)
draw = _operation(
    "rng.draw", "alias_draw", lambda table, _weight, _counter, n: _ids_and_log_prob(table, n)
)
log_complement = _operation(
    "rng.log_complement",
    "alias_log_complement",
    lambda _weight, target, _bits, wide: _per_target(target, wide),
)


def fork(counter: Tensor, number: int) -> Tensor:
    """Another seed, made from the seed and the number, and the same step."""
    # Negative steps below all that a run reaches are kept for this.
    marked = torch.stack([counter[0], counter.new_full((), FORKS + number)])
    made = words("auto", marked, 1)[0]
    return torch.stack([made[0] << 32 | made[1], counter[1]])
