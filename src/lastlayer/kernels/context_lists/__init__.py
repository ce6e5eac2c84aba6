"""A proposal of n-grams that learns: draws from it, its probabilities, and how it is moved.

``proposal`` is the parts of :class:`lastlayer.samplers.AdaptiveNGram` in this order: the mixture
``(order,)`` in units of 1 / ``PARTS``; table and weight of the unigram, as of :mod:`rng`; and for
each length of context the keys ``(places + 1,)`` of a hash table, and at each place a list of
classes ``(places + 1, width)``, ascending, where the share of each ends, in units of 1 /
``SHARES``, and the weight of all together ``(places + 1,)``. The last place is that of no context.
``context`` are the words before, int64 ``(rows, order - 1)``, the nearest one last, -1 for none.

``draw`` gives ids and log-probabilities in float32, ``log_prob`` those of given ids in float64.
``draw_until_`` draws and scores, a block at a time, until each row has its effective sample size.
``learn_`` moves the proposal towards scores. README.md has how.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation

# The parts of the mixture, and the shares of a list, sum to these.
PARTS, SHARES = 1 << 32, 1 << 40
# No part of the mixture falls below this: an n-gram that is of no use now may be of use later.
LEAST_PART = 0.01
# Places for contexts whose hashes agree.
WAYS = 8
# What an unused place of a list holds, above every class; and one of the table.
UNUSED, NO_KEY = 2**31 - 1, -1
GOLDEN = -7046029254386353131


def _draw(
    context: Tensor, _counter: Tensor, _proposal: Sequence[Tensor], n: int
) -> tuple[Tensor, Tensor]:
    ids = context.new_empty(context.shape[0], n)
    return ids, torch.empty_like(ids, dtype=torch.float32)


def _draw_until(
    hidden: Tensor, _weight: Tensor, _bias: Tensor | None, context: Tensor, _counter: Tensor,
    _proposal: Sequence[Tensor], _used: Tensor, _ess: Tensor, _sums: Tensor, _first: int,
    blocks: int, n: int, _enough: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ids = context.new_empty(hidden.shape[0], blocks * n)
    made = torch.empty_like(ids, dtype=accumulation_dtype(hidden.dtype))
    return ids, made, torch.empty_like(made)


_operation = partial(operation, integers=True)
draw = _operation("context_lists.draw", "ngram_draw", _draw)
log_prob = _operation(
    "context_lists.log_prob", "ngram_log_prob",
    lambda _context, ids, _proposal: torch.empty_like(ids, dtype=torch.float64),
)  # fmt: skip
draw_until_ = operation(
    "context_lists.draw_until_", "ngram_draw_until_", _draw_until, writes=("used", "ess", "sums")
)
learn_ = _operation("context_lists.learn_", "ngram_learn_", writes=("proposal",))
