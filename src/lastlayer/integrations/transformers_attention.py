"""Sparse attention for Hugging Face Transformers, through its attention registry."""

import functools
from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_alpha
from lastlayer.attention import sparse_attention

# Options of some models that only softmax attention supports.
_REFUSED = ("softcap", "s_aux", "position_bias")
ALPHA = "lastlayer_alpha"


def register_attention(name: str = "lastlayer_entmax", *, alpha: float = 1.5) -> str:
    """Register :func:`lastlayer.attention.sparse_attention` as an attention of Transformers.

    Select it with ``from_pretrained(..., attn_implementation=name)`` or
    ``model.set_attn_implementation(name)``; it works in training, evaluation and generation.
    Transformers does not save this choice. The mask function is registered too, since without it
    a model would attend to padding and to other sequences. Models that do not take their attention
    from the registry, such as Bloom, raise a ValueError when they run.

    To learn alpha, add a parameter ``lastlayer_alpha`` with one value per attention head to an
    attention module before the optimiser is created.

    Args:
        name: the name for ``attn_implementation``.
        alpha: 1 is softmax, 1.5 the usual choice, 2 sparsemax.

    Returns:
        The name.

    Raises:
        ImportError: if Transformers is missing or older than 5.10.
    """
    check_alpha(alpha)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            'register_attention needs transformers 5.10 or newer: pip install "lastlayer[hf]"'
        ) from error

    given: Any = name
    own = getattr(AttentionInterface().get(name), "__module__", None) == __name__
    if not isinstance(given, str) or (name in ("eager", *AttentionInterface()) and not own):
        raise ValueError(
            f"name: expected a string that is not yet an attention of Transformers, got {name!r}; "
            "choose another name, since models with that attention would change"
        )

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        for option in _REFUSED:
            if more.get(option) is not None:
                raise ValueError(
                    f"{option}: expected none with attn_implementation={name!r}, got one from "
                    f"{type(module).__name__}; sparse attention does not support it"
                )
        options: dict[str, Any] = {
            "alpha": getattr(module, ALPHA, alpha), "scale": scaling, "attn_mask": attention_mask,
        }  # fmt: skip
        if attention_mask is None:
            # The mask function returns None for a plain causal mask and for full attention.
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            options["is_causal"] = bool(causal) and query.shape[2] > 1
            cuts = more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k")
            if cuts[0] is not None and cuts[1] is not None:
                options["cu_seqlens"] = cuts
        out = sparse_attention(query, key, value, dropout_p=dropout, enable_gqa=True, **options)
        weights = _weights(query, key, **options) if more.get("output_attentions") else None
        return out.transpose(1, 2).contiguous(), weights

    AttentionInterface.register(name, attend)

    def make_mask(*given: Any, config: Any = None, **more: Any) -> Tensor | None:
        # While a compiler traces, the check would read source code.
        if config is not None and not torch.compiler.is_compiling():
            kind: Any = type(config)
            _check_architecture(kind, name)
        mask: Tensor | None = sdpa_mask(*given, config=config, **more)
        return mask

    AttentionMaskInterface.register(name, make_mask)
    return name


@functools.cache
def _check_architecture(config_type: Any, name: str) -> None:
    """Refuses models that compute softmax themselves, and would add the bool mask to scores."""
    from transformers import MODEL_MAPPING

    kind: Any = MODEL_MAPPING.get(config_type, None)
    kind = kind[0] if isinstance(kind, (tuple, list)) else kind
    if kind is not None and not kind._can_set_attn_implementation():
        raise ValueError(
            f"attn_implementation: expected a model that takes its attention from the registry of "
            f"Transformers, got {name!r} for {kind.__name__}, which always computes softmax; use "
            "attn_implementation='eager'"
        )


def _weights(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    """The attention weights of all keys, for ``output_attentions``."""
    eye = torch.eye(key.shape[2], dtype=key.dtype, device=key.device)
    return sparse_attention(
        query, key, eye.expand(*key.shape[:2], -1, -1), enable_gqa=True, **options
    )
