"""The adaptive n-gram proposal: draws, log-probabilities, and updates.

``proposal`` has the tensors of :class:`lastlayer.samplers.AdaptiveNGram`, in this order:

- the mixture ``(order,)`` in units of 1 / ``PARTS``,
- alias table and weights of the unigram, as in :mod:`rng`,
- for each length of context: the keys ``(places + 1,)`` of a hash table; for each place a list of
  classes ``(places + 1, width)``, ascending; the cumulative shares of the classes in units of 1 /
  ``SHARES``; and the total unigram weight of the list ``(places + 1,)``. The last place is for
  contexts without a list.

``context`` has the preceding words, int64 ``(rows, order - 1)``, the nearest one last, -1 for none.

``draw`` returns ids and log-probabilities in float32, ``log_prob`` those of given ids in float64.
``draw_until_`` draws and scores blocks of ids until each row reaches its effective sample size.
``learn_`` updates the proposal from scores. README.md describes the algorithms.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation

# The sum of the integer parts of the mixture, and of the integer shares of a list.
PARTS, SHARES = 1 << 32, 1 << 40
# Lower bound on each part of the mixture: an n-gram that is useless now may become useful later.
LEAST_PART = 0.01
# Places per bucket of the hash table of contexts.
WAYS = 8
# Marks of an unused entry of a list, above every class, and of the hash table.
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
