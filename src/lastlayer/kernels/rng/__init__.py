"""Counter-based random numbers: the same (seed, step) gives the same ids on every device.

Random words, integers and log-uniform ids from Philox; and draws from an integer alias table, whose
probabilities are exactly proportional to the weights of the classes.
"""

import math
from functools import partial

import torch
from torch import Tensor

from lastlayer.kernels._registry import operation

# Coefficients of a polynomial for 2^x with |x| <= 1/2, highest power first. It has additions and
# multiplications only, which every device rounds alike; its remainder is below float64 rounding.
SERIES = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(13, -1, -1))
SQRT_2 = math.sqrt(2.0)
# Step that derives the seed of fork 0.
FORKS = -(2**63)
# Kinds of proposals in kernels that draw: ids are given, or drawn by one of the functions here.
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
    """A counter with the same step, and a new seed derived from the seed and ``number``."""
    # These negative steps are reserved for forks.
    marked = torch.stack([counter[0], counter.new_full((), FORKS + number)])
    made = words("auto", marked, 1)[0]
    return torch.stack([made[0] << 32 | made[1], counter[1]])
