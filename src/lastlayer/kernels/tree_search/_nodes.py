"""Children of a node on the CPU: their scores, and the log-probabilities of these."""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_FLOATING, _BFLOAT16, _FLOAT16 = 0, 1, 2


def as_arrays(hidden: Tensor, weight: Tensor, bias: Tensor | None, *tables: Tensor):
    """Arrays that :func:`open_node` takes.

    A weight in half precision, which Numba does not know, is given as bits.
    """
    weight = weight.detach()
    numbers, bits, kind = np.empty((0, 0), np.float32), np.empty((0, 0), np.int16), _FLOATING
    if weight.dtype in (torch.float32, torch.float64):
        numbers = weight.numpy()
    else:
        kind = _BFLOAT16 if weight.dtype == torch.bfloat16 else _FLOAT16
        bits = weight.view(torch.int16).numpy()
    biases = hidden.new_empty(0) if bias is None else bias.detach().to(hidden).contiguous()
    return (
        hidden.detach().contiguous().numpy(), numbers, bits, kind, biases.numpy(),
        *(each.contiguous().numpy() for each in tables),
    )  # fmt: skip


@njit(nogil=True)
def open_node(state, weight, bits, kind, bias, first, n_rows, arity, widened, below):
    """Log-probabilities of the children into ``below``, none above 0; whether there is no NaN."""
    for i in range(n_rows):
        below[i] = _score(state, weight, bits, kind, bias, first + i, widened)
    return _to_log_probs(below, arity)


@njit(nogil=True)
def _score(state, weight, bits, kind, bias, at, widened):
    if kind == _FLOATING:
        score = _dot(state, weight[at])
    else:
        if kind == _BFLOAT16:
            _widen_bfloat16(bits[at], widened)
        else:
            _widen_float16(bits[at], widened)
        score = _dot(state, widened)
    return score + bias[at] if len(bias) else score


@njit(nogil=True, fastmath=_FAST)
def _dot(left, right):
    total = left.dtype.type(0.0)
    for i in range(len(left)):
        total += left[i] * right[i]
    return total


@njit(nogil=True)
def _widen_bfloat16(bits, out):
    """The upper half of a float32."""
    wide = out.view(np.int32)
    for i in range(len(bits)):
        wide[i] = np.int32(bits[i]) << np.int32(16)


@njit(nogil=True)
def _widen_float16(bits, out):
    """Exponents are 112 lower than in float32, until they are multiplied; subnormals too."""
    wide = out.view(np.int32)
    for i in range(len(bits)):
        size = np.int32(bits[i]) & np.int32(0x7FFF)
        # All ones in the exponent are inf or NaN, also in float32.
        special = np.int32(0x7F800000) if size >= np.int32(0x7C00) else np.int32(0)
        sign = (np.int32(bits[i]) & np.int32(0x8000)) << np.int32(16)
        wide[i] = sign | special | (size << np.int32(13))
    for i in range(len(bits)):
        out[i] *= np.float32(2.0**112)


@njit(nogil=True)
def _to_log_probs(below, arity):
    """From scores in place. One score of a binary node is enough."""
    if arity == 2:
        score = below[0]
        rest = math.log1p(math.exp(-abs(score)))
        below[0], below[1] = min(-score, 0.0) - rest, min(score, 0.0) - rest
        return not math.isnan(score)
    top = below[0]
    for i in range(1, arity):
        top = max(top, below[i])
    total = below.dtype.type(0.0)
    for i in range(arity):
        below[i] -= top
        total += math.exp(below[i])
    rest = math.log(total)
    for i in range(arity):
        below[i] -= rest
    return not math.isnan(total)
