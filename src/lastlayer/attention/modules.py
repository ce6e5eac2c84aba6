"""Sparse attention layers: a drop-in for ``nn.MultiheadAttention``, and attention pooling."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lastlayer._checks import check_alpha, check_int, check_scores, check_tensor
from lastlayer.attention.functional import (
    AttentionWeights,
    attention_weights,
    sparse_attention,
)
from lastlayer.maps.entmax import entmax


class _Alpha(nn.Module):
    """A fixed alpha for all heads, or a learned one per head."""

    def __init__(self, alpha: float, learn: bool, n: int, factory: dict[str, Any]) -> None:
        super().__init__()
        check_alpha(alpha)
        self.fixed, self.log_excess = float(alpha), None
        if learn:
            if alpha <= 1.0:
                raise ValueError(
                    f"alpha: expected more than 1 with learn_alpha=True, got {alpha}; start at 1.5"
                )
            start = torch.full((n,), math.log(alpha - 1.0), **factory)
            # With log(alpha - 1) no optimiser step can make alpha 1 or less.
            self.log_excess = nn.Parameter(start)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        _missing: list[str], *more: Any,
    ) -> None:  # fmt: skip
        # A state_dict of torch's layer has no alphas: they keep their values.
        super()._load_from_state_dict(state, prefix, metadata, strict, [], *more)

    def forward(self) -> float | Tensor:
        return self.fixed if self.log_excess is None else 1.0 + self.log_excess.exp()

    def extra_repr(self) -> str:
        return f"alpha={self.fixed:g}, learn_alpha={self.log_excess is not None}"


class SparseMultiheadAttention(nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` with entmax weights instead of softmax.

    Constructor, arguments, results and parameters are those of torch's layer, so that its
    ``state_dict`` loads; learned alphas then keep their values. As in that layer, True in a bool
    mask means *not* allowed.

    Args:
        embed_dim: size of inputs and outputs.
        num_heads: number of heads, each of size ``embed_dim // num_heads``.
        dropout: the probability that a weight is dropped in training. The returned weights are
            those before dropout.
        bias: whether the projections have biases.
        add_bias_kv: whether to add a learned key and value.
        add_zero_attn: whether to add a key and value of zeros.
        kdim: size of keys, by default ``embed_dim``.
        vdim: size of values, by default ``embed_dim``.
        batch_first: whether inputs are ``(batch, length, size)`` and not ``(length, batch, size)``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        alpha: 1 is softmax, 1.5 the usual choice, 2 sparsemax.
        learn_alpha: whether to learn an alpha per head, initialised with ``alpha``.

    Example:
        >>> layer = SparseMultiheadAttention(32, 4, alpha=2.0, batch_first=True)
        >>> text = torch.randn(2, 10, 32)
        >>> out, weights = layer(text, text, text)
        >>> out.shape, bool((weights == 0).any())
        (torch.Size([2, 10, 32]), True)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        alpha: float = 1.5,
        learn_alpha: bool = False,
    ) -> None:
        if check_int("embed_dim", embed_dim) % check_int("num_heads", num_heads):
            raise ValueError(
                f"num_heads: expected a divisor of embed_dim={embed_dim}, got {num_heads}"
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
            batch_first, **factory,
        )  # fmt: skip
        # In eval mode torch's encoder layer reads this, and would use its own softmax if True.
        self._qkv_same_embed_dim = False
        self.alpha = _Alpha(alpha, learn_alpha, num_heads, factory)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As in torch's layer; ``need_weights=False`` never stores the weights, and is faster.

        Unlike there, ``is_causal`` needs no ``attn_mask``.
        """
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        if not batched:
            query, key, value = (each.unsqueeze(0) for each in (query, key, value))
        elif not self.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        query, key, value = self._projected(query, key, value)
        mask = self._allowed(attn_mask, key_padding_mask, query, key)
        if self.add_zero_attn:
            key, value = (pad(each, (0, 0, 0, 1)) for each in (key, value))
        n_added = int(self.add_zero_attn) + int(self.bias_k is not None)
        if n_added:
            # Every query may attend to the added keys.
            if is_causal:
                mask, is_causal = _with_causal(mask, query, key.shape[2] - n_added), False
            if mask is not None:
                mask = pad(mask, (0, n_added), value=mask.dtype == torch.bool)
        alpha, dropout = self.alpha(), self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            weights = self._weights(query, key, mask, is_causal, alpha)
            # A mask may have a wider dtype than the values.
            out = torch.dropout(weights, dropout, self.training).to(value.dtype) @ value
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = sparse_attention(
                query, key, value, alpha=alpha, attn_mask=mask, dropout_p=dropout,
                is_causal=is_causal,
            )  # fmt: skip
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        sizes = (query, self.embed_dim), (key, self.kdim), (value, self.vdim)
        for name, (each, size) in zip(("query", "key", "value"), sizes, strict=True):
            check_scores(each, name=name)
            if each.dim() not in (2, 3) or each.shape[-1] != size:
                batched = "batch, length" if self.batch_first else "length, batch"
                raise ValueError(
                    f"{name}: expected ({batched}, {size}) or (length, {size}), got "
                    f"{tuple(each.shape)}"
                )
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(
                f"value: expected the batch and length of key, {tuple(key.shape[:-1])}, got "
                f"{tuple(value.shape[:-1])}"
            )
        at = 0 if self.batch_first else 1
        if key.dim() != query.dim() or (key.dim() == 3 and key.shape[at] != query.shape[at]):
            raise ValueError(
                f"key: expected the batch of query, of shape {tuple(query.shape)}, got "
                f"{tuple(key.shape)}; batch_first={self.batch_first}"
            )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Projected queries, keys and values, ``(batch, heads, length, size)``."""
        # None if keys or values have other sizes, which torch's type annotations ignore.
        packed: Any = self.in_proj_weight
        bias: Any = self.in_proj_bias
        matrices = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        matrices = matrices if packed is None else packed.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        projected = [
            linear(each, matrix, shift)
            for each, matrix, shift in zip((query, key, value), matrices, biases, strict=True)
        ]
        if self.bias_k is not None and self.bias_v is not None:
            for i, more in ((1, self.bias_k), (2, self.bias_v)):
                projected[i] = torch.cat([projected[i], more.expand(len(query), -1, -1)], 1)
        return [each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in projected]

    def _allowed(
        self, mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor
    ) -> Tensor | None:
        """Both masks combined, in the format of :func:`sparse_attention`."""
        for name, each in (("attn_mask", mask), ("key_padding_mask", padding)):
            if each is not None:
                check_tensor(name, each)
                if each.dtype != torch.bool and not each.is_floating_point():
                    raise TypeError(
                        f"{name}: expected bool, True for what is not allowed, or floats that are "
                        f"added to the scores, got {each.dtype}; convert with {name} == 0 if 1 "
                        f"means allowed, else with {name}.bool()"
                    )
        n, m = query.shape[2], key.shape[2] - (self.bias_k is not None)
        if mask is not None:
            shapes = [(n, m), (len(query) * self.num_heads, n, m)]
            if tuple(mask.shape) not in shapes:
                raise ValueError(
                    f"attn_mask: expected shape {shapes[0]} or {shapes[1]}, got {tuple(mask.shape)}"
                )
            mask = mask.unflatten(0, (-1, self.num_heads)) if mask.dim() == 3 else mask
            mask = ~mask if mask.dtype == torch.bool else mask
        if padding is not None:
            padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
            if tuple(padding.shape) != (len(query), m):
                raise ValueError(
                    f"key_padding_mask: expected shape {(len(query), m)}, got "
                    f"{tuple(padding.shape)}"
                )
            padding = padding[:, None, None]
            if padding.dtype == torch.bool:
                padding = ~padding
            mask = padding if mask is None else _both(mask, padding)
        return mask

    def _weights(
        self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, alpha: Any
    ) -> Tensor:
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if is_causal:
            mask = _with_causal(mask, query, key.shape[2])
        if mask is not None and mask.dtype != torch.bool:
            scores, mask = scores + mask, None
        alpha = alpha[:, None, None] if isinstance(alpha, Tensor) else alpha
        return entmax(scores, alpha, mask=mask)


def _both(mask: Tensor, other: Tensor) -> Tensor:
    """Combines two masks; if one is floating, a bool one is converted."""
    if mask.dtype == other.dtype == torch.bool:
        return mask & other
    floating = [
        torch.zeros_like(each, dtype=like.dtype).masked_fill_(~each, -math.inf)
        if each.dtype == torch.bool
        else each
        for each, like in ((mask, other), (other, mask))
    ]
    return floating[0] + floating[1]


def _with_causal(mask: Tensor | None, query: Tensor, m: int) -> Tensor:
    """Combines a mask over ``m`` keys with the causal mask."""
    causal = torch.ones(query.shape[2], m, dtype=torch.bool, device=query.device).tril()
    return causal if mask is None else _both(mask, causal)


class AttentionPooling(nn.Module):
    """Pools a sequence into one vector: a learned query attends to few of its positions.

    Args:
        in_features: size of the hidden states, and of the result.
        n_queries: number of learned queries; with more than one the result has a vector per query.
        alpha: 1 is softmax, 1.5 the usual choice, 2 sparsemax.
        learn_alpha: whether to learn an alpha per query, initialised with ``alpha``.

    Example:
        >>> pool = AttentionPooling(16, alpha=2.0)
        >>> pool(torch.randn(3, 20, 16)).shape
        torch.Size([3, 16])
    """

    def __init__(
        self,
        in_features: int,
        n_queries: int = 1,
        *,
        alpha: float = 1.5,
        learn_alpha: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_int("in_features", in_features)
        self.n_queries = check_int("n_queries", n_queries)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.key = nn.Linear(in_features, in_features, **factory)
        self.query = nn.Parameter(torch.empty(n_queries, in_features, **factory))
        nn.init.normal_(self.query, std=in_features**-0.5)
        self.alpha = _Alpha(alpha, learn_alpha, n_queries, factory)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool ``(batch, length, in_features)``; ``mask`` ``(batch, length)`` is False for padding.

        Returns:
            ``(batch, in_features)``, or ``(batch, n_queries, in_features)``.
        """
        self._check(hidden, mask)
        # All queries share the same keys and values.
        out = sparse_attention(
            *self._query_and_key(hidden), hidden.unsqueeze(1), **self._options(mask)
        ).squeeze(2)
        return out if self.n_queries > 1 else out.squeeze(1)

    def weights(self, hidden: Tensor, mask: Tensor | None = None) -> AttentionWeights:
        """The non-zero attention weights of :meth:`forward`, for inspection; without gradients.

        Returns:
            ``values`` and ``keys`` (positions in the sequence) of shape ``(batch, k)``, in
            descending order of weight, and ``counts`` of shape ``(batch,)``; with more than one
            query ``(batch, n_queries, k)`` and ``(batch, n_queries)``.

        Example:
            >>> pool = AttentionPooling(16, alpha=2.0)
            >>> found = pool.weights(torch.randn(3, 20, 16))
            >>> bool((found.counts == (found.values > 0).sum(-1)).all())
            True
        """
        self._check(hidden, mask)
        with torch.no_grad():
            found = attention_weights(*self._query_and_key(hidden), **self._options(mask))
        values, keys, counts = found.values.squeeze(2), found.keys.squeeze(2), found.counts
        parts = values, keys, counts.squeeze(2)
        return AttentionWeights(*(parts if self.n_queries > 1 else (x.squeeze(1) for x in parts)))

    def _check(self, hidden: Tensor, mask: Tensor | None) -> None:
        check_scores(hidden, name="hidden")
        if hidden.dim() != 3 or hidden.shape[2] != self.in_features:
            raise ValueError(
                f"hidden: expected (batch, length, {self.in_features}), got {tuple(hidden.shape)}"
            )
        if mask is None:
            return
        check_tensor("mask", mask)
        if mask.dtype != torch.bool or mask.shape != hidden.shape[:2]:
            raise ValueError(
                f"mask: expected bool of shape {tuple(hidden.shape[:2])}, False for padding, got "
                f"{mask.dtype} of shape {tuple(mask.shape)}; convert numbers with mask.bool()"
            )

    def _query_and_key(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query[:, None].expand(len(hidden), -1, -1, -1)
        return query, torch.tanh(self.key(hidden)).unsqueeze(1)

    def _options(self, mask: Tensor | None) -> dict[str, Any]:
        mask = mask if mask is None else mask[:, None, None]
        return {"alpha": self.alpha(), "attn_mask": mask, "scale": 1.0, "enable_gqa": True}

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, n_queries={self.n_queries}"
