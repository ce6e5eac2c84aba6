"""A heap of log-probabilities and what has them, the largest first, in two arrays.

Of equal ones the larger number comes first. Nodes are numbers from 0 on and class c is ``~c``: so
nodes come before leaves, which their leaves might equal, and lower classes before higher ones.
"""

from numba import njit


@njit(nogil=True)
def _before(log_probs, ids, i, j):
    if log_probs[i] == log_probs[j]:
        return ids[i] > ids[j]
    return log_probs[i] > log_probs[j]


@njit(nogil=True)
def _swap(log_probs, ids, i, j):
    log_probs[i], log_probs[j] = log_probs[j], log_probs[i]
    ids[i], ids[j] = ids[j], ids[i]


@njit(nogil=True)
def push(heap, size, log_prob, at):
    """Adds one; how many there are now."""
    log_probs, ids = heap
    log_probs[size], ids[size] = log_prob, at
    i = size
    while i > 0 and _before(log_probs, ids, i, (i - 1) >> 1):
        _swap(log_probs, ids, i, (i - 1) >> 1)
        i = (i - 1) >> 1
    return size + 1


@njit(nogil=True)
def pop(heap, size):
    """Takes the first away; how many there are now."""
    log_probs, ids = heap
    size -= 1
    log_probs[0], ids[0] = log_probs[size], ids[size]
    i = 0
    while True:
        best = 2 * i + 1
        if best >= size:
            return size
        if best + 1 < size and _before(log_probs, ids, best + 1, best):
            best += 1
        if not _before(log_probs, ids, best, i):
            return size
        _swap(log_probs, ids, i, best)
        i = best
