"""Attention layers: torch's own layer at alpha 1, sparse weights above it, and pooling."""

import pytest
import torch
from torch import nn

from lastlayer import entmax
from lastlayer.attention import (
    AttentionPooling,
    SparseMultiheadAttention,
    attention_weights,
    plot_attention,
    sparse_attention,
)

D, HEADS = 12, 3
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other sizes": {"kdim": 5, "vdim": 7},
    "added keys": {"add_bias_kv": True, "add_zero_attn": True},
}
causal = torch.ones(6, 8, dtype=torch.bool).triu(1)
padding = torch.zeros(2, 8, dtype=torch.bool)
padding[0, 5:] = True
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": padding},
    "bool": {"attn_mask": causal},
    "added": {"attn_mask": torch.randn(6, 8, generator=torch.Generator().manual_seed(2))},
    "per head": {"attn_mask": causal.expand(2 * HEADS, 6, 8)},
    "both": {"attn_mask": causal, "key_padding_mask": padding},
    "both, added": {
        "attn_mask": torch.zeros(6, 8).masked_fill(causal, -torch.inf),
        "key_padding_mask": torch.zeros(2, 8).masked_fill(padding, -torch.inf),
    },
}


def inputs(options):
    generator = torch.Generator().manual_seed(4)
    sizes = (6, D), (8, options.get("kdim", D)), (8, options.get("vdim", D))
    made = [torch.randn(2, *size, generator=generator) for size in sizes]
    return made if options.get("batch_first") else [each.transpose(0, 1) for each in made]


def layers(options, **more):
    torch.manual_seed(0)
    ours = SparseMultiheadAttention(D, HEADS, **options, **more)
    theirs = nn.MultiheadAttention(D, HEADS, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.thin(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_at_alpha_1_it_is_the_layer_of_torch(options, masks, need_weights):
    ours, theirs = layers(options, alpha=1.0)
    got = ours(*inputs(options), need_weights=need_weights, **masks)
    wanted = theirs(*inputs(options), need_weights=need_weights, **masks)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    one, two = (
        torch.autograd.grad(each[0].square().sum(), list(layer.parameters()))
        for each, layer in ((got, ours), (wanted, theirs))
    )
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("learn", [False, True])
def test_weights_do_not_change_the_output(options, is_causal, learn):
    torch.manual_seed(0)
    ours = SparseMultiheadAttention(D, HEADS, alpha=2.0, learn_alpha=learn, **options)
    with torch.no_grad():
        for each in ours.parameters():
            each.mul_(2.0)
    out, weights = ours(*inputs(options), is_causal=is_causal, average_attn_weights=False)
    alone, none = ours(*inputs(options), is_causal=is_causal, need_weights=False)
    assert none is None
    torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-5)
    assert bool((weights == 0).any())
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    if is_causal:
        assert not weights[..., :8][..., causal].any()


@pytest.mark.parametrize("learn", [False, True])
def test_arguments_and_weights_of_the_layer_of_torch(learn):
    """Options may be given by position; a state_dict without alphas leaves them as they are."""
    theirs = nn.MultiheadAttention(D, HEADS, 0.25, False, True)
    ours = SparseMultiheadAttention(D, HEADS, 0.25, False, True, alpha=1.7, learn_alpha=learn)
    assert (ours.dropout, ours.in_proj_bias) == (0.25, None)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.in_proj_weight, theirs.in_proj_weight)
    torch.testing.assert_close(ours.bias_k, theirs.bias_k)
    alpha = ours.alpha()
    assert alpha == 1.7 if not learn else bool((alpha.sub(1.7).abs() < 1e-6).all())
    if learn:
        with torch.no_grad():
            ours.alpha.log_excess.fill_(0.0)
        again = SparseMultiheadAttention(D, HEADS, 0.25, False, True, learn_alpha=True)
        again.load_state_dict(ours.state_dict())
        torch.testing.assert_close(again.alpha(), torch.full((HEADS,), 2.0))


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_mask_of_a_wider_dtype(need_weights):
    layer = SparseMultiheadAttention(D, HEADS, batch_first=True, dtype=torch.bfloat16)
    text, mask = torch.randn(2, 4, D), torch.randn(4, 4)
    out, _ = layer(*[text.bfloat16()] * 3, need_weights=need_weights, attn_mask=mask)
    wanted, _ = layer.float()(text, text, text, attn_mask=mask)
    torch.testing.assert_close(out.float(), wanted, rtol=0.05, atol=0.05)


def test_without_a_batch():
    ours, theirs = layers({}, alpha=1.0)
    text = torch.randn(5, D)
    torch.testing.assert_close(ours(text, text, text), theirs(text, text, text))


def test_alphas_are_learned():
    torch.manual_seed(1)
    layer = SparseMultiheadAttention(D, HEADS, learn_alpha=True, batch_first=True)
    text = torch.randn(2, 6, D)
    layer(text, text, text, need_weights=False)[0].square().sum().backward()
    assert layer.alpha.log_excess.grad.shape == (HEADS,)
    assert bool((layer.alpha.log_excess.grad != 0).all())
    with pytest.raises(ValueError, match="alpha: expected more than 1"):
        SparseMultiheadAttention(D, HEADS, alpha=1.0, learn_alpha=True)


def test_dropout_is_that_of_training():
    layer = SparseMultiheadAttention(D, HEADS, dropout=0.5, batch_first=True)
    text = torch.randn(2, 6, D)
    first, second = (layer(text, text, text, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(first, second)
    layer.eval()
    first, second = (layer(text, text, text, need_weights=need)[0] for need in (False, True))
    torch.testing.assert_close(first, second)


def test_an_encoder_layer_of_torch_takes_it_in_evaluation_too():
    """Its fast path would compute softmax from the parameters."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, HEADS, 16, batch_first=True)
    sparse = SparseMultiheadAttention(D, HEADS, alpha=2.0, batch_first=True)
    sparse.load_state_dict(layer.self_attn.state_dict())
    text = 3 * torch.randn(2, 6, D)
    layer.eval()
    with torch.no_grad():
        softmax = layer(text)
        layer.self_attn = sparse.eval()
        found = layer(text)
        expected = layer.norm1(text + sparse(text, text, text)[0])
        expected = layer.norm2(expected + layer._ff_block(expected))
    torch.testing.assert_close(found, expected)
    assert float((found - softmax).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("attn_mask", torch.ones(3, 3), "expected shape"),
        ("key_padding_mask", torch.zeros(2, 3, dtype=torch.bool), "expected shape"),
        # As a tokenizer makes them, with 1 for words: added to the scores they would do nothing.
        ("key_padding_mask", torch.ones(2, 8, dtype=torch.int64), "expected bool"),
        ("attn_mask", torch.ones(6, 8, dtype=torch.uint8), "expected bool"),
        ("attn_mask", [[True]], "expected a torch.Tensor"),
        ("query", torch.zeros(6, 2, D + 1), r"expected \(length, batch, 12\) or \(length, 12\)"),
        ("key", torch.zeros(8, 3, D), "expected the batch of query|expected the batch and length"),
        ("value", torch.zeros(7, 2, D), "expected the batch and length of key"),
        ("value", torch.zeros(8, 2, D, dtype=torch.int64), "expected a floating dtype"),
    ],
)
def test_wrong_inputs_are_named(name, given, message):
    arguments = dict(zip(("query", "key", "value"), inputs({}), strict=True)) | {name: given}
    with pytest.raises((ValueError, TypeError), match=message):
        SparseMultiheadAttention(D, HEADS)(**arguments)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_heads: expected a divisor of embed_dim=12, got 5"):
        SparseMultiheadAttention(D, 5)


@pytest.mark.parametrize("n_queries", [1, 2])
@pytest.mark.parametrize("learn", [False, True])
def test_pooling(n_queries, learn):
    torch.manual_seed(0)
    pool = AttentionPooling(D, n_queries, alpha=2.0, learn_alpha=learn)
    hidden, mask = 2 * torch.randn(3, 9, D), torch.ones(3, 9, dtype=torch.bool)
    mask[0, 4:] = False
    mask[2] = False
    out = pool(hidden, mask)
    scores = pool.query @ torch.tanh(pool.key(hidden)).mT
    wanted = entmax(scores, 2.0, mask=mask[:, None]) @ hidden
    torch.testing.assert_close(out, wanted if n_queries > 1 else wanted.squeeze(1))
    assert not out[2].any()
    out.sum().backward()
    assert all(each.grad is not None for each in pool.parameters())
    found = pool.weights(hidden, mask)
    assert found.counts.shape == ((3, n_queries) if n_queries > 1 else (3,))
    assert torch.equal(found.counts, (found.values > 0).sum(-1))
    assert not found.counts[2].any()
    # Padding has weight 0, so that any place will do for it.
    seen = [each[keys.clamp(min=0)] for each, keys in zip(hidden, found.keys, strict=True)]
    torch.testing.assert_close((found.values.unsqueeze(-1) * torch.stack(seen)).sum(-2), out)
    hidden[0, 4:] = 7.0
    torch.testing.assert_close(pool(hidden, mask), out)


@pytest.mark.parametrize(
    ("hidden", "mask", "message"),
    [
        (torch.zeros(3, D), None, r"hidden: expected \(batch, length, 12\)"),
        (torch.zeros(3, 9, D + 1), None, r"hidden: expected \(batch, length, 12\)"),
        # It would be added to the scores.
        (torch.zeros(3, 9, D), torch.ones(3, 9), "mask: expected bool"),
        (torch.zeros(3, 9, D), torch.ones(3, 8, dtype=torch.bool), r"mask: expected .*\(3, 9\)"),
    ],
)
def test_wrong_inputs_of_pooling_are_named(hidden, mask, message):
    for call in (AttentionPooling(D), AttentionPooling(D).weights):
        with pytest.raises(ValueError, match=message):
            call(hidden, mask)


def test_pooling_under_autocast():
    """Keys come from a layer, in the dtype of autocast; the query is a parameter."""
    pool, hidden = AttentionPooling(D), torch.randn(2, 5, D)
    with torch.autocast("cpu", torch.bfloat16):
        out = pool(hidden)
        out.float().sum().backward()
        assert pool.weights(hidden).counts.shape == (2,)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), pool(hidden), rtol=0.05, atol=0.05)


def test_a_picture_of_what_was_found():
    query, key = torch.randn(2, 1, 2, 4, 8).unbind()
    found = attention_weights(query, key, alpha=2.0)
    dense = found.to_dense(4)
    values = torch.eye(4).expand(1, 2, 4, 4)
    torch.testing.assert_close(dense, sparse_attention(query, key, values, alpha=2.0))
    pyplot = pytest.importorskip("matplotlib.pyplot")
    # A dollar sign would begin a formula.
    ax = plot_attention(dense[0, 1], list("abcd"), ["it", "costs", "$5_", "$^"])
    ax.figure.canvas.draw()
    assert len(ax.texts) == int(found.counts[0, 1].sum())
    pyplot.close(ax.figure)
    with pytest.raises(TypeError, match=r"weights: expected a torch\.Tensor, got Att"):
        plot_attention(found, list("abcd"), list("abcd"))


def test_a_picture_of_words():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    weights = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])
    ax = plot_attention(weights, ["cats", "sleep"], ["the", "cat", "rests"])
    assert [each.get_text() for each in ax.get_xticklabels()] == ["the", "cat", "rests"]
    # A number in every cell that is not zero.
    assert sorted(each.get_text() for each in ax.texts) == [".30", ".70", "1.00"]
    pyplot.close(ax.figure)
    with pytest.raises(ValueError, match="weights: expected shape"):
        plot_attention(weights, ["cats"], ["the", "cat", "rests"])
