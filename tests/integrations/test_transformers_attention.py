"""Sparse attention in models of Transformers: softmax at alpha 1, and dense entmax above it."""

import math

import pytest
import torch

from lastlayer import entmax
from lastlayer.integrations.transformers import register_attention

transformers = pytest.importorskip("transformers", minversion="5.10")
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 4}),
    "gemma3": ("Gemma3", {"num_key_value_heads": 1, "sliding_window": 4, "head_dim": 8}),
    "gpt2": ("GPT2", {}),
}


def model(family="llama", attention="eager", **more):
    name, options = FAMILIES[family]
    prefix = "Gemma3Text" if family == "gemma3" else name
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **options, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM"
    made = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for each in made.parameters():
            each.mul_(3.0 if each.dim() == 2 else 1.0)
    made.set_attn_implementation(attention)
    return made


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_attention("test_softmax", alpha=1.0)
    register_attention("test_entmax", alpha=1.5)

    def dense(module, query, key, value, attention_mask, scaling=None, **_):
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if attention_mask is None and query.shape[2] > 1:
            attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, -math.inf)
        weights = entmax(scores, 1.5)
        return (weights @ value).transpose(1, 2), weights

    transformers.AttentionInterface.register("test_dense", dense)
    masks = transformers.AttentionMaskInterface
    masks.register("test_dense", transformers.masking_utils.sdpa_mask)


def batch():
    ids = torch.randint(3, 61, (3, 11), generator=torch.Generator().manual_seed(1))
    padded = torch.ones_like(ids)
    padded[0, :4] = 0
    return ids.masked_fill(padded == 0, 0), padded


def run(attention, family, **inputs):
    made = model(family, attention)
    there = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    labels = inputs["input_ids"].masked_fill(there == 0, -100)
    # What is padding predicts nothing: eager attention lets it look everywhere, ours nowhere.
    labels[:, 1:].masked_fill_(there[:, :-1] == 0, -100)
    out = made(**inputs, labels=labels)
    out.loss.backward()
    return out.logits[labels != -100].detach(), [each.grad for each in made.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pair", [("test_softmax", "eager"), ("test_entmax", "test_dense")])
@pytest.mark.parametrize("inputs", ["plain", "left padding", "packed"])
def test_logits_and_gradients(family, pair, inputs):
    if inputs == "packed" and family == "gpt2":
        pytest.skip("GPT-2 does not tell sequences apart by their positions")
    ids, padded = batch()
    given = {"input_ids": ids}
    if inputs == "left padding":
        given["attention_mask"] = padded
    elif inputs == "packed":
        places = torch.cat([torch.arange(5), torch.arange(6)])
        # With a cache Transformers takes them for one sequence.
        given = {"input_ids": ids[1:2], "position_ids": places[None], "use_cache": False}
    ours, theirs = (run(each, family, **given) for each in pair)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-4)


def test_packed_sequences_do_not_see_each_other():
    made, (ids, _) = model("llama", "test_entmax"), batch()
    places, cuts = torch.cat([torch.arange(5), torch.arange(6)])[None], torch.tensor([0, 5, 11])
    alone = torch.cat([made(each).logits for each in ids[1:2].split([5, 6], 1)], 1)
    for more in (
        {"use_cache": False},
        {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": 6, "max_length_k": 6},
    ):
        packed = made(ids[1:2], position_ids=places, **more).logits
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation(family, beams):
    ids, padded = batch()
    tokens = {}
    for name in ("test_entmax", "test_dense"):
        for cached in (True, False):
            tokens[name, cached] = model(family, name).generate(
                ids, attention_mask=padded, max_new_tokens=8, do_sample=False, num_beams=beams,
                use_cache=cached,
            )  # fmt: skip
    first, *others = tokens.values()
    assert all(torch.equal(first, each) for each in others)


def test_gradient_checkpointing():
    ids, padded = batch()
    grads = []
    for checkpointed in (False, True):
        made = model("llama", "test_entmax").train()
        if checkpointed:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        made(ids, attention_mask=padded, labels=ids).loss.backward()
        grads.append([each.grad for each in made.parameters()])
    torch.testing.assert_close(*grads)


def test_weights_are_there_when_asked_for():
    ids, _ = batch()
    made = model("llama", "test_entmax")
    found = made(ids, output_attentions=True).attentions
    truth = model("llama", "test_dense")(ids, output_attentions=True).attentions
    assert len(found) == 2
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)
    assert bool((found[0] == 0).any())


def test_an_alpha_per_head_is_learned():
    made = model("llama", "test_entmax")
    for layer in made.model.layers:
        layer.self_attn.lastlayer_alpha = torch.nn.Parameter(torch.full((4,), 1.5))
    ids, padded = batch()
    made(ids, attention_mask=padded, labels=ids).loss.backward()
    grads = [layer.self_attn.lastlayer_alpha.grad for layer in made.model.layers]
    assert all(bool((each != 0).any()) for each in grads)


def test_what_softmax_alone_can_do_is_refused():
    attend = transformers.AttentionInterface()["test_entmax"]
    given = torch.randn(3, 1, 2, 5, 8).unbind()
    for option in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=f"{option}: expected none"):
            attend(torch.nn.Identity(), *given, None, **{option: torch.ones(())})
    with pytest.raises(ValueError, match="alpha"):
        register_attention("test_wrong", alpha=0.3)


def test_models_with_their_own_softmax_are_refused():
    """They would add the bool mask to the scores, and see later tokens."""
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    made = transformers.BloomForCausalLM._from_config(config, attn_implementation="test_entmax")
    with pytest.raises(ValueError, match=r"attn_implementation: .* for BloomModel"):
        made(batch()[0])


@pytest.mark.parametrize("name", ["sdpa", "eager", None, 3])
def test_attention_of_transformers_is_not_replaced(name):
    before = {**transformers.AttentionInterface()}
    with pytest.raises(ValueError, match=f"name: expected a string .* got {name!r}"):
        register_attention(name)
    assert {**transformers.AttentionInterface()} == before
    assert register_attention("test_softmax", alpha=1.0) == "test_softmax"


def test_continuous_batching_is_refused():
    """As the docs say; where it works one day, they and this test change."""
    register_attention("lastlayer_entmax")
    asked = transformers.GenerationConfig(max_new_tokens=2, eos_token_id=2, pad_token_id=0)
    how = transformers.ContinuousBatchingConfig(auto_switch_to_flash=False)
    with pytest.raises(ValueError, match="lastlayer_entmax is not supported for continuous"):
        model(attention="lastlayer_entmax").generate_batch(
            [[3, 4, 5]], generation_config=asked, continuous_batching_config=how
        )
