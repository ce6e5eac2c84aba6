"""Sparse attention layers: a drop-in for ``nn.MultiheadAttention``, and attention pooling."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from lastlayer._checks import check_alpha, check_int
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

    def forward(self) -> float | Tensor:
        return self.fixed if self.log_excess is None else 1.0 + self.log_excess.exp()

    def extra_repr(self) -> str:
        return f"alpha={self.fixed:g}, learn_alpha={self.log_excess is not None}"


class SparseMultiheadAttention(nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` with entmax weights instead of softmax.

    Constructor, arguments, results and parameters are those of torch's layer, so that its
    ``state_dict`` loads. As in that layer, True in a bool mask means *not* allowed.

    Args:
        embed_dim: size of inputs and outputs.
        num_heads: number of heads, each of size ``embed_dim // num_heads``.
        alpha: 1 is softmax, 1.5 the usual choice, 2 sparsemax.
        learn_alpha: whether to learn an alpha per head, initialised with ``alpha``.
        options: options of ``nn.MultiheadAttention``: dropout, bias, add_bias_kv, add_zero_attn,
            kdim, vdim, batch_first, device, dtype.

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
        *,
        alpha: float = 1.5,
        learn_alpha: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        # In eval mode torch's encoder layer reads this, and would use its own softmax if True.
        self._qkv_same_embed_dim = False
        factory: dict[str, Any] = {k: options[k] for k in ("device", "dtype") if k in options}
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
            out = torch.dropout(weights, dropout, self.training) @ value
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
        with torch.no_grad():
            found = attention_weights(*self._query_and_key(hidden), **self._options(mask))
        values, keys, counts = found.values.squeeze(2), found.keys.squeeze(2), found.counts
        parts = values, keys, counts.squeeze(2)
        return AttentionWeights(*(parts if self.n_queries > 1 else (x.squeeze(1) for x in parts)))

    def _query_and_key(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        query = self.query[:, None].expand(len(hidden), -1, -1, -1)
        return query, torch.tanh(self.key(hidden)).unsqueeze(1)

    def _options(self, mask: Tensor | None) -> dict[str, Any]:
        mask = mask if mask is None else mask[:, None, None]
        return {"alpha": self.alpha(), "attn_mask": mask, "scale": 1.0, "enable_gqa": True}

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, n_queries={self.n_queries}"
