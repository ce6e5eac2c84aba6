"""Sparse attention: attention weights that are exactly zero for most keys."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import (
    DTYPES,
    broadcasts,
    check_alpha,
    check_choice,
    check_device,
    check_dtype,
    check_int,
    check_positive,
    check_scores,
    check_share,
)
from lastlayer._torch import (
    accumulation_dtype,
    apply_of,
    autocast_dtype,
    in_dtype,
    in_functorch,
    is_eager,
    transforms_are_active,
    values_are_checked,
    without_autocast,
)
from lastlayer.kernels.attention import Kept, Problem, grouped, part_of, reference, scores
from lastlayer.maps.entmax import entmax

Implementation = Literal["auto", "triton", "chunked"]
Window = int | tuple[int | None, int | None]
Lengths = Tensor | tuple[Tensor, Tensor]
# Number of tensor fields of a Problem, which come first; plain numbers follow.
_TENSORS = 9
# The largest head size of the kernels, and the bytes of scores in a chunk of queries.
_WIDEST, _CHUNK_BYTES = 256, 1 << 24
# The largest offset; a window is cut to twice that, so that sums with it fit in int32.
_FARTHEST = 1 << 29


class AttentionWeights(NamedTuple):
    """The non-zero attention weights of each query, in descending order.

    Attributes:
        values: weights ``(..., heads, n, k)``, padded with 0; k is the largest number of keys that
            any query attends to.
        keys: indices of their keys, int64 of the same shape, padded with -1.
        counts: number of keys that each query attends to, ``(..., heads, n)``.
    """

    values: Tensor
    keys: Tensor
    counts: Tensor

    def to_dense(self, n_keys: int) -> Tensor:
        """All weights, ``(..., heads, n, n_keys)``, with their zeros."""
        dense = self.values.new_zeros(*self.values.shape[:-1], n_keys)
        # What is padded with -1 has a value of 0.
        return dense.scatter_add_(-1, self.keys.clamp(min=0), self.values)


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor = 1.5,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    enable_gqa: bool = False,
    cu_seqlens: Lengths | None = None,
    query_offset: int = 0,
    impl: Implementation = "auto",
) -> Tensor:
    r"""Scaled dot-product attention with entmax instead of softmax.

    .. math:: \operatorname{entmax}_\alpha(s\, Q K^\top + \text{mask})\, V

    The conventions are those of :func:`torch.nn.functional.scaled_dot_product_attention`. Weights
    below a threshold, which is solved to convergence for each query, are exactly zero. The matrix
    of weights is never stored: memory grows linearly with the number of queries and keys. It is
    stored for second derivatives, and in transforms of ``torch.func``.

    Choose ``alpha=1.5`` as the sparse replacement of softmax attention, 2 (sparsemax) if a query
    should attend to very few keys, and a tensor with one learned alpha per head if each head should
    learn its own sparsity. 1 is softmax; use torch's own function for that.

    Args:
        query: ``(..., heads, n, d)``.
        key: ``(..., heads, m, d)``; with ``enable_gqa`` it may have fewer heads.
        value: ``(..., heads, m, d_value)``, with as many heads as ``key``.
        alpha: at least 1; or a floating tensor ``(heads,)``, or one that broadcasts to
            ``(..., heads, 1, 1)``, which gets a gradient.
        attn_mask: broadcasts to ``(..., heads, n, m)``; bool, True if a query may attend to a key,
            or floating, added to the scores. Unlike torch's it may be combined with ``is_causal``.
        dropout_p: the probability that a weight is dropped; the others are divided by
            ``1 - dropout_p``. The seed is drawn from torch's generator of the query's device.
        is_causal: whether query i attends to keys up to i + query_offset only.
        scale: factor of the scores, by default 1/sqrt(d).
        window: sliding window: ``w`` for keys at a distance less than w, or ``(left, right)`` for
            that many keys before and after the position of the query, None for no limit.
        enable_gqa: whether query heads may share key heads.
        cu_seqlens: cumulative lengths of packed sequences, starting with 0: integers
            ``(sequences + 1,)``, for queries and keys, or a pair of such tensors. A query attends
            to keys of its own sequence only. All other batch dimensions must have size 1.
        query_offset: position of the first query among the keys: ``m - n`` when decoding with a
            key cache. Not with ``cu_seqlens``.
        impl: "auto", or a specific implementation: "triton" or "chunked".

    Returns:
        ``(..., heads, n, d_value)`` in the dtype of ``query``. A fully masked query gets zeros, and
        has no gradient. A NaN in a query affects only that query.

    Raises:
        ValueError: for inconsistent shapes, dtypes or options.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 16, 64).unbind()  # 2 texts, 8 heads, 16 words
        >>> sparse_attention(query, key, value, alpha=2.0, is_causal=True).shape
        torch.Size([2, 8, 16, 64])

    Reference:
        Martins and Astudillo, From Softmax to Sparsemax, ICML 2016, arXiv:1602.02068; Correia,
        Niculae and Martins, Adaptively Sparse Transformers, EMNLP 2019, arXiv:1909.00015.
    """
    check_choice("impl", impl, ("auto", "triton", "chunked"))
    dropout = check_share("dropout_p", dropout_p)
    problem, batch = _problem(
        query, key, value, alpha, attn_mask, dropout, is_causal, scale, window, enable_gqa,
        cu_seqlens, query_offset,
    )  # fmt: skip
    by_kernel = _by_kernel(problem, impl)
    out: Tensor
    if in_functorch():
        if impl != "auto":
            raise ValueError(f"impl: expected 'auto' in a transform of torch.func, got {impl!r}")
        with without_autocast(query):
            out = reference.forward(
                problem, lambda s, a: torch.dropout(entmax(s, a), dropout, True)
            )
    else:
        wanted = _NOTHING
        if torch.is_grad_enabled():
            wanted = _Wanted._make(
                [each is not None and each.requires_grad for each in problem[:5]]
            )
        if True not in wanted and is_eager(problem.query):
            # Without autograd, which costs host time.
            out, _ = _forward(by_kernel, problem, False)
        else:
            apply = _Attention.apply if transforms_are_active() else _apply
            out = apply(by_kernel, wanted, problem[_TENSORS:], *problem[:_TENSORS])
    return out.view(*batch, *out.shape[1:]) if len(batch) != 1 else out


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    alpha: float | Tensor = 1.5,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    enable_gqa: bool = False,
    cu_seqlens: Lengths | None = None,
    query_offset: int = 0,
) -> AttentionWeights:
    """The non-zero weights of :func:`sparse_attention`, for inspection; without gradients.

    The arguments are those of :func:`sparse_attention`.

    Example:
        >>> found = attention_weights(torch.randn(8, 16, 64), torch.randn(8, 16, 64), alpha=2.0)
        >>> bool((found.values.sum(-1) - 1).abs().max() < 1e-5)
        True
    """
    with torch.no_grad():
        p, batch = _problem(
            query, key, key, alpha, attn_mask, 0.0, is_causal, scale, window, enable_gqa,
            cu_seqlens, query_offset,
        )  # fmt: skip
        parts = []
        for rows, keys in _chunks(p):
            with without_autocast(query):
                weights = _weights(p, rows, keys)
            counts = (weights != 0).sum(-1)
            size = int(counts.max()) if counts.numel() else 0
            values, found = weights.topk(size, dim=-1)
            found = torch.where(values == 0, -1, found + keys.start)
            parts.append((values, found, counts))
        width = max(each[0].shape[-1] for each in parts)
        padded = [
            torch.cat([
                torch.nn.functional.pad(each[i], (0, width - each[i].shape[-1]), value=fill)
                for each in parts
            ], 2)
            for i, fill in ((0, 0.0), (1, -1))
        ]  # fmt: skip
        joined = *padded, torch.cat([each[2] for each in parts], 2)
        values, found, counts = (each.reshape(*batch, *each.shape[1:]) for each in joined)
        return AttentionWeights(values.to(query.dtype), found, counts)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    window: Window | None,
    enable_gqa: bool,
    cu_seqlens: Lengths | None,
    query_offset: int,
) -> tuple[Problem, Sequence[int]]:
    """Checked arguments with a single batch dimension, and the original batch dimensions."""
    for name, each in (("query", query), ("key", key), ("value", value)):
        check_scores(each, name=name)
        if each.is_nested:
            raise TypeError(
                f"{name}: expected a dense tensor, got a nested one; concatenate the sequences and "
                "pass cu_seqlens"
            )
        if each.dim() < 3:
            raise ValueError(
                f"{name}: expected (..., heads, length, size), got {tuple(each.shape)}; "
                "add a dimension for the heads"
            )
        check_device(name, each, query, "query")
        check_dtype(name, each, query, "query")
    if (dtype := autocast_dtype(query)) is not None:
        query, key, value = (in_dtype(each, dtype) for each in (query, key, value))
    batch, (heads, n, d), m = query.shape[:-3], query.shape[-3:], key.shape[-2]
    _check_shapes(query, key, value, enable_gqa)
    left, right = _window(window, is_causal)
    rows = (*batch, heads, n, m)
    flat = (math.prod(batch), heads, n, m)
    number, of_heads = _alpha(alpha, (*batch, heads), flat[:2], query)
    first = stop = place = None
    offset = check_int("query_offset", query_offset, least=-_FARTHEST, most=_FARTHEST)
    if cu_seqlens is not None:
        if offset or flat[0] != 1:
            raise ValueError(
                "cu_seqlens: expected batch dimensions of size 1 and no query_offset, got "
                f"query of shape {tuple(query.shape)} and query_offset={offset}; pack all "
                "sequences along the length"
            )
        first, stop, place = _sequences(cu_seqlens, n, m, query.device)
    if mask is not None:
        mask = _mask(mask, rows, query).expand(rows).reshape(flat) if len(batch) != 1 else (
            _mask(mask, rows, query).expand(rows)
        )  # fmt: skip
    seed = None
    if dropout and not in_functorch():
        seed = torch.randint(2**62, (1,), device=query.device)
    scale = max(1, d) ** -0.5 if scale is None else check_positive("scale", scale)
    if len(batch) != 1:
        query, key, value = (
            each.reshape(flat[0], *each.shape[-3:]) for each in (query, key, value)
        )
    problem = Problem(
        query, key, value, of_heads, mask, seed, first, stop, place, number, scale, left, right,
        offset, dropout,
    )  # fmt: skip
    return problem, batch


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shape, of_keys, of_values = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    if of_keys[:-3] != shape[:-3] or of_keys[-1] != shape[-1]:
        raise ValueError(
            f"key: expected batch {shape[:-3]} and size {shape[-1]} as in query, got {of_keys}"
        )
    if of_values[:-1] != of_keys[:-1]:
        raise ValueError(
            f"value: expected {of_keys[:-1]} before the size, as in key, got {of_values}"
        )
    heads, key_heads = shape[-3], of_keys[-3]
    if heads != key_heads and not (enable_gqa and key_heads and heads % key_heads == 0):
        wanted = f"a divisor of query's {heads}" if enable_gqa else f"query's {heads}"
        remedy = "" if enable_gqa else "; enable_gqa=True lets query heads share key heads"
        raise ValueError(f"key: expected {wanted} heads, got {key_heads}{remedy}")


def _window(window: Window | None, is_causal: bool) -> tuple[int, int]:
    """Number of keys before and after the query's position that it attends to, -1 for all."""
    expected = "a number of keys, (left, right) or None"
    if window is None:
        left = right = -1
    elif isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(f"window: expected {expected}, got {window}")
        left, right = (-1 if x is None else check_int("window", x, least=0) for x in window)
    else:
        left = right = check_int("window", window) - 1
    return min(left, 2 * _FARTHEST), 0 if is_causal else min(right, 2 * _FARTHEST)


def _alpha(
    alpha: float | Tensor, heads: tuple[int, ...], flat: tuple[int, ...], query: Tensor
) -> tuple[float, Tensor | None]:
    check_alpha(alpha)
    if not isinstance(alpha, Tensor):
        return float(alpha), None
    check_device("alpha", alpha, query, "query")
    if alpha.dim() > 1:
        if alpha.shape[-2:] != (1, 1) or not broadcasts(alpha.shape[:-2], heads):
            raise ValueError(
                f"alpha: expected ({heads[-1]},) or a shape that broadcasts to {(*heads, 1, 1)}, "
                f"got {tuple(alpha.shape)}"
            )
        alpha = alpha[..., 0, 0]
    if not broadcasts(alpha.shape, heads):
        raise ValueError(f"alpha: expected one per head, ({heads[-1]},), got {tuple(alpha.shape)}")
    return math.nan, alpha.expand(heads).reshape(flat)


def _mask(mask: Any, shape: tuple[int, ...], query: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *DTYPES):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            "attn_mask: expected bool (True if a query may attend) or a floating tensor that is "
            f"added to the scores, got {got}"
        )
    if not broadcasts(mask.shape, shape):
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to {shape}, got {tuple(mask.shape)}"
        )
    check_device("attn_mask", mask, query, "query")
    checked: Tensor = mask
    return checked


def _sequences(lengths: Any, n: int, m: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each query: first key of its sequence, end of the sequence, and key at its position."""
    pair = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    if len(pair) != 2 or any(
        not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or x.dim() != 1
        or not x.numel()
        for x in pair
    ) or pair[0].shape != pair[1].shape:  # fmt: skip
        raise ValueError(
            "cu_seqlens: expected an int32 or int64 tensor (sequences + 1,), such as "
            "torch.tensor([0, 5, 12]), or a pair of them of the same length, for queries and keys; "
            f"got {lengths!r}"
        )
    starts, of_keys = (x.to(device=device, dtype=torch.int64) for x in pair)
    if values_are_checked(starts):
        for name, ends, length in (("query", starts, n), ("key", of_keys, m)):
            if ends[0] != 0 or ends[-1] != length or bool((ends.diff() < 0).any()):
                raise ValueError(
                    f"cu_seqlens: expected ascending numbers from 0 to {length}, the length of "
                    f"{name}, got {ends.tolist()}"
                )
    number = torch.arange(n, device=device)
    # Skips sequences of length 0.
    which = torch.searchsorted(starts, number, right=True) - 1
    first, stop = of_keys[which], of_keys[(which + 1).clamp(max=len(of_keys) - 1)]
    return first.int(), stop.int(), (number - starts[which] + first).int()


def _by_kernel(problem: Problem, impl: Implementation) -> bool:
    """Whether to use the Triton kernels; raises an error if impl="triton" is not possible."""
    query, mask = problem.query, problem.mask
    size = max(query.shape[-1], problem.value.shape[-1])
    reason = None
    if query.dtype == torch.float64:
        reason = "the kernels do not support float64"
    elif size > _WIDEST:
        reason = f"the head size is {size}, and the kernels support up to {_WIDEST}"
    elif mask is not None and mask.requires_grad:
        reason = "attn_mask needs a gradient, which the kernels do not compute"
    if impl == "triton":
        reason = reason or kernels.available()["triton"]
        if reason is not None:
            raise ValueError(f"impl: 'triton' cannot run here: {reason}; use impl='auto'")
        return query.numel() > 0
    on_gpu = query.device.type == "cuda" and impl == "auto" and reason is None
    return on_gpu and query.numel() > 0 and kernels.selected("entmax", "cuda") == "triton"


def _chunks(p: Problem) -> list[tuple[slice, slice]]:
    """Chunks of queries, with the range of keys that they may attend to."""
    batch, heads, n, _ = p.query.shape
    m = p.key.shape[2]
    size = accumulation_dtype(p.query.dtype).itemsize
    rows = max(1, _CHUNK_BYTES // max(1, batch * heads * m * size))
    if p.left >= 0 or p.right >= 0:
        # Smaller chunks: keys outside the window of a whole chunk are skipped.
        rows = min(rows, max(128, -(-n // 8)))
    chunks = []
    for start in range(0, max(n, 1), rows):
        stop, low, high = min(n, start + rows), 0, m
        if p.first is not None and p.stop is not None:
            if p.first.device.type == "cpu" and stop > start and is_eager(p.first):
                low, high = int(p.first[start]), int(p.stop[stop - 1])
        else:
            low = max(0, start + p.offset - p.left) if p.left >= 0 else 0
            high = min(m, stop + p.offset + p.right) if p.right >= 0 else m
        chunks.append((slice(start, stop), slice(min(low, m), max(min(low, m), high))))
    return chunks


def _row_alpha(p: Problem, n: int) -> Tensor | None:
    return None if p.head_alpha is None else p.head_alpha.unsqueeze(-1).expand(-1, -1, n)


def _weights(p: Problem, rows: slice, keys: slice) -> Tensor:
    logits = scores(p, rows, keys)
    alphas = _row_alpha(p, logits.shape[2])
    alphas = None if alphas is None else alphas.contiguous()
    weights: Tensor = kernels.entmax.forward("auto", logits, p.alpha, alphas)
    return weights


def _kept_weights(p: Problem, like: Tensor, rows: slice) -> Tensor | None:
    """The factors of dropout for the weights of a chunk, the same in forward and backward."""
    if p.seed is None:
        return None
    generator = torch.Generator(like.device)
    generator.manual_seed((int(p.seed) + rows.start) % 2**62)
    drawn = torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)
    return (drawn >= p.dropout).to(like.dtype).mul_(_kept_factor(p.dropout))


def _kept_factor(dropout: float) -> float:
    """The factor of the weights that are not dropped."""
    return 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0


def _saves_weights(p: Problem) -> bool:
    """Whether the weights are few: no more than the inputs have numbers, and one chunk.

    They are then saved for backward, and memory is linear all the same.
    """
    batch, heads, n, _ = p.query.shape
    few = batch * heads * n * p.key.shape[2]
    size = accumulation_dtype(p.query.dtype).itemsize
    inputs = p.query.numel() + p.key.numel() + p.value.numel()
    return few <= inputs and few * size <= _CHUNK_BYTES


def _whole(p: Problem) -> list[tuple[slice, slice]]:
    return [(slice(0, p.query.shape[2]), slice(0, p.key.shape[2]))]


def _chunked_forward(p: Problem, keeps: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and the weights if backward needs them and they are few."""
    value = in_dtype(p.value, accumulation_dtype(p.query.dtype))
    parts: list[Tensor] = []
    saved: tuple[Tensor, ...] = ()
    few = keeps and _saves_weights(p)
    for rows, keys in _whole(p) if few else _chunks(p):
        weights = _weights(p, rows, keys)
        if few:
            saved = (weights,)
        if (kept := _kept_weights(p, weights, rows)) is not None:
            weights = weights * kept
        out = grouped(weights, value.shape[1]) @ part_of(value, keys)
        parts.append(in_dtype(out.view(*weights.shape[:3], value.shape[3]), p.query.dtype))
    return _joined(parts), saved


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class _Wanted(NamedTuple):
    query: bool
    key: bool
    value: bool
    alpha: bool
    mask: bool


_NOTHING = _Wanted(*[False] * 5)


def _chunked_backward(
    p: Problem, saved: Sequence[Tensor], grad: Tensor, wanted: _Wanted
) -> list[Tensor | None]:
    dtype, key_heads = accumulation_dtype(p.query.dtype), p.key.shape[1]
    query, key, value, upstream = (in_dtype(x, dtype) for x in (p.query, p.key, p.value, grad))
    of_query: list[Tensor] = []
    of_key = of_value = of_alpha = of_mask = None
    if wanted.mask and p.mask is not None:
        of_mask = p.mask.new_zeros(p.mask.shape, dtype=dtype)
    for rows, keys in _whole(p) if saved else _chunks(p):
        weights = saved[0] if saved else _weights(p, rows, keys)
        kept = _kept_weights(p, weights, rows)
        mine = grouped(part_of(upstream, rows), key_heads)
        if wanted.value:
            used = grouped(weights if kept is None else weights * kept, key_heads)
            of_value = _accumulated(of_value, used.transpose(-1, -2) @ mine, keys, value)
        of_weights = (mine @ part_of(value, keys).transpose(-1, -2)).view(weights.shape)
        if kept is not None:
            of_weights *= kept
        alphas = _row_alpha(p, weights.shape[2])
        alphas = None if alphas is None else alphas.contiguous()
        if alphas is None or not wanted.alpha:
            slopes = kernels.entmax.backward("auto", weights, of_weights, p.alpha, alphas)
        else:
            slopes, by_row = kernels.entmax.gradients("auto", weights, of_weights, alphas)
            by_head = by_row.sum(-1)
            of_alpha = by_head if of_alpha is None else of_alpha + by_head
        if of_mask is not None:
            of_mask[:, :, rows, keys] = slopes
        slopes = grouped(slopes, key_heads)
        if wanted.query:
            out = (slopes @ part_of(key, keys)).mul_(p.scale)
            of_query.append(out.view(*weights.shape[:3], key.shape[3]))
        if wanted.key:
            out = slopes.transpose(-1, -2) @ grouped(part_of(query, rows), key_heads)
            of_key = _accumulated(of_key, out.mul_(p.scale), keys, key)
    return [_joined(of_query) if wanted.query else None, of_key, of_value, of_alpha, of_mask]


def _accumulated(total: Tensor | None, part: Tensor, keys: slice, like: Tensor) -> Tensor:
    """``total`` plus the gradient that a chunk of queries gives to its keys."""
    if total is None:
        if part.shape == like.shape:
            return part
        total = torch.zeros_like(like, memory_format=torch.contiguous_format)
    part_of(total, keys).add_(part)
    return total


def _forward(by_kernel: bool, p: Problem, keeps: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and what backward needs."""
    if not by_kernel:
        with without_autocast(p.query):
            return _chunked_forward(p, keeps)
    from lastlayer.kernels.attention import triton

    out, kept = triton.forward(p, keeps)
    return out, kept or ()


def _backward(
    by_kernel: bool, p: Problem, kept: Sequence[Tensor], grad: Tensor, wanted: _Wanted
) -> list[Tensor | None]:
    if not by_kernel:
        with without_autocast(p.query):
            return _chunked_backward(p, kept, grad, wanted)
    from lastlayer.kernels.attention import triton

    return triton.backward(p, Kept(*kept), grad, wanted)


def _differentiable_backward(p: Problem, grad: Tensor, wanted: _Wanted) -> list[Tensor | None]:
    """The gradients as differentiable functions of inputs and ``grad``; stores all weights."""
    if p.seed is not None:
        raise RuntimeError(
            "sparse_attention: second derivatives are not supported with dropout; set dropout_p=0"
        )
    tensors = p.query, p.key, p.value, p.head_alpha, p.mask
    inputs = [
        each for each, asked in zip(tensors, wanted, strict=True) if asked and each is not None
    ]
    with without_autocast(p.query):
        out = reference.forward(p, entmax)
    made = iter(torch.autograd.grad(out, inputs, grad, create_graph=True))
    return [next(made) if asked else None for asked in wanted]


_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? head_alpha, Tensor? mask, Tensor? seed, "
    "Tensor? first, Tensor? stop, Tensor? place, float alpha, float scale, int left, int right, "
    "int offset, float dropout, bool by_kernel"
)
_library = torch.library.Library("lastlayer", "FRAGMENT")
_library.define(f"sparse_attention({_SCHEMA}, bool keeps) -> Tensor[]")
_library.define(
    f"sparse_attention_backward({_SCHEMA}, Tensor grad, Tensor[] kept, bool[] wanted) -> Tensor[]"
)
_NUMBERS = len(Problem._fields)


def _registered(*given: Any) -> list[Tensor]:
    *parts, by_kernel, keeps = given
    out, kept = _forward(by_kernel, Problem(*parts), keeps)
    return [out, *kept]


def _registered_backward(*given: Any) -> list[Tensor]:
    *parts, by_kernel, grad, kept, wanted = given
    p = Problem(*parts)
    grads = _backward(by_kernel, p, kept, grad, _Wanted(*wanted))
    return [p.query.new_empty(0) if each is None else each for each in grads]


def _fake(*given: Any) -> list[Tensor]:
    *parts, by_kernel, keeps = given
    p = Problem(*parts)
    batch, heads, n, _ = p.query.shape
    out = p.query.new_empty(batch, heads, n, p.value.shape[-1])
    if not keeps:
        return [out]
    if not by_kernel:
        few, dtype = _saves_weights(p), accumulation_dtype(p.query.dtype)
        return [out, out.new_empty(batch, heads, n, p.key.shape[2], dtype=dtype)] if few else [out]
    from lastlayer.kernels.attention.triton import kept_shapes, mixed_dtype

    numbers, blocks = kept_shapes(p)
    return [
        out, torch.empty_like(out, dtype=mixed_dtype(p)),
        out.new_empty(numbers, dtype=torch.float32), out.new_empty(blocks, dtype=torch.uint8),
    ]  # fmt: skip


def _fake_backward(*given: Any) -> list[Tensor]:
    *parts, by_kernel, _grad, _kept, wanted = given
    p = Problem(*parts)
    dtype = p.query.dtype if by_kernel else accumulation_dtype(p.query.dtype)
    sources = p.query, p.key, p.value, p.head_alpha, p.mask
    return [
        p.query.new_empty(each.shape, dtype=torch.float32 if i == 3 and by_kernel else dtype)
        if asked and each is not None
        else p.query.new_empty(0)
        for i, (asked, each) in enumerate(zip(wanted, sources, strict=True))
    ]


for _name, _impl, _shape in (
    ("sparse_attention", _registered, _fake),
    ("sparse_attention_backward", _registered_backward, _fake_backward),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lastlayer::{_name}", _shape, lib=_library)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, by_kernel: bool, wanted: _Wanted, numbers: tuple[Any, ...], *tensors: Any
    ) -> Tensor:
        p = Problem(*tensors, *numbers)
        keeps = any(wanted)
        if is_eager(p.query):
            out, pieces = _forward(by_kernel, p, keeps)
        else:
            out, *pieces = torch.ops.lastlayer.sparse_attention(*p, by_kernel, keeps)
        ctx.given = by_kernel, wanted, numbers
        ctx.save_for_backward(*tensors, *pieces)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        by_kernel, wanted, numbers = ctx.given
        # Read once: non-reentrant checkpointing allows no more.
        saved = ctx.saved_tensors
        tensors, kept = saved[:_TENSORS], saved[_TENSORS:]
        p = Problem(*tensors, *numbers)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            computed = _differentiable_backward(p, grad, wanted)
        elif is_eager(grad):
            computed = _backward(by_kernel, p, kept, grad, wanted)
        else:
            computed = torch.ops.lastlayer.sparse_attention_backward(
                *p, by_kernel, grad, kept, list(wanted)
            )
        grads = [
            in_dtype(each, source.dtype) if asked and each is not None else None
            for asked, each, source in zip(wanted, computed, tensors, strict=False)
        ]
        return None, None, None, *grads, None, None, None, None


_apply = apply_of(_Attention)
