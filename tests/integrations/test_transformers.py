"""Heads in causal language models of Transformers, on tiny random models of ten families."""

import copy
import importlib.util
import json
import logging
import warnings

import pytest
import torch
from torch.nn.functional import pad

from lastlayer import heads, trees
from lastlayer.integrations.transformers import (
    AutoModelForCausalLM,
    count_tokens,
    generate_with,
    head_of,
    supports,
    swap_head,
    unswap_head,
)

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed: pip install lastlayer[hf]", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForMaskedLM
    from transformers.loss.loss_utils import LOSS_MAPPING

N, D = 101, 16
# Whether logits_to_keep may name positions of each row.
SLICES_ROWS = hasattr(transformers.modeling_utils, "slice_logits_to_keep")
SIZES = {
    "vocab_size": N, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
GPT2 = {"n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.0,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip
FAMILIES = {
    "llama": {}, "qwen2": {}, "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 20.0},
    "granite": {"logits_scaling": 4.0}, "cohere": {"logit_scale": 0.25}, "phi3": {},
    "mistral": {}, "gpt2": GPT2, "opt": {"ffn_dim": 32, "word_embed_proj_dim": D, "dropout": 0.0},
}  # fmt: skip
COUNTS = torch.arange(N, 0, -1) ** 2
HEADS = {
    "full": {}, "entmax": {}, "topk": {"k": 7}, "self_normalized": {},
    "hierarchical": {"counts": COUNTS}, "adaptive": {"counts": COUNTS},
    "differentiated": {"counts": COUNTS}, "char_cnn": {"spellings": [f"w{i}" for i in range(N)]},
    "sampled": {"counts": COUNTS}, "nce": {"counts": COUNTS}, "negative": {"counts": COUNTS},
    "importance": {"counts": COUNTS}, "adaptive_importance": {"counts": COUNTS},
}  # fmt: skip
LINEAR = ("full", "entmax", "topk", "self_normalized", "sampled", "nce", "negative", "importance")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    yield
    logging.getLogger("transformers").setLevel(logging.WARNING)


def make(family="llama", auto=transformers.AutoModelForCausalLM, **options):
    """A random model whose logits are large enough for a soft cap to matter."""
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES.get(family, {}), **options})
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model.train()


def pair(family="llama", head="full", *, how=(), **options):
    """A stock model and a swapped copy of it."""
    stock = make(family, **options)
    return stock, swap_head(copy.deepcopy(stock), head, **dict(how))


def tokens(rows=3, length=9):
    ids = torch.randint(3, N, (rows, length))
    labels = ids.clone()
    labels[0, : length // 2] = -100
    return ids, labels


def shifted(labels):
    return pad(labels, (0, 1), value=-100)[:, 1:].contiguous()


def gradients(model, **inputs):
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs, {name: each.grad.clone() for name, each in model.named_parameters()}


def assert_trains_alike(stock, swapped, other=None, *, atol=2e-6, **inputs):
    """Loss and all gradients; ``other`` is what the stock model is given instead."""
    expected, wanted = gradients(stock, **(other or inputs))
    outputs, found = gradients(swapped, **inputs)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss, atol=1e-6, rtol=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            found[name] / scale, gradient / scale, atol=atol, rtol=0.0, msg=name
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_as_its_stock_model(family):
    stock, swapped = pair(family)
    ids, labels = tokens()
    assert_trains_alike(stock, swapped, input_ids=ids, labels=labels)
    n_items = {"num_items_in_batch": torch.tensor(37)}
    assert_trains_alike(stock, swapped, input_ids=ids, labels=labels, **n_items)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_labels_that_are_shifted_already(family):
    stock, swapped = pair(family)
    ids, labels = tokens()
    given = {"labels": labels, "shift_labels": shifted(labels)}
    assert_trains_alike(stock, swapped, input_ids=ids, **given)
    given["shift_labels"] = labels.roll(-3, 1)
    assert_trains_alike(stock, swapped, input_ids=ids, **given)


def test_another_ignore_index():
    stock, swapped = pair()
    ids, labels = tokens()
    labels[labels == -100] = -7
    assert_trains_alike(stock, swapped, input_ids=ids, labels=labels, ignore_index=-7)


@pytest.mark.parametrize(
    "keep",
    [4, torch.tensor([1, 2, 7])] + [torch.tensor([[0, 1], [3, 4], [6, 2]])] * SLICES_ROWS,
)
def test_logits_to_keep_keeps_their_labels(keep):
    stock, swapped = pair()
    ids, labels = tokens()
    target = shifted(labels)
    if isinstance(keep, int):
        target = target[:, -keep:].contiguous()
    else:
        target = target[:, keep] if keep.dim() == 1 else target.gather(1, keep)
    given = {"input_ids": ids, "labels": labels, "logits_to_keep": keep}
    # The stock model needs labels that are cut like the hidden states.
    assert_trains_alike(stock, swapped, {**given, "shift_labels": target}, **given)


@pytest.mark.skipif(
    not SLICES_ROWS, reason="this Transformers keeps the same positions of all rows"
)
def test_a_mask_keeps_the_labels_of_its_positions():
    stock, swapped = pair()
    ids, labels = tokens()
    mask = torch.rand(ids.shape) < 0.5
    target = shifted(labels)[mask]
    given = {"input_ids": ids, "labels": labels, "logits_to_keep": mask}
    assert_trains_alike(stock, swapped, {**given, "shift_labels": target}, **given)


def test_a_batch_without_labels_that_count_has_loss_0():
    _, swapped = pair()
    ids, _ = tokens()
    outputs, found = gradients(swapped, input_ids=ids, labels=torch.full_like(ids, -100))
    assert outputs.loss == 0
    assert not any(each.any() for each in found.values())


def test_labels_by_position_and_outputs_as_a_tuple():
    stock, swapped = pair()
    ids, labels = tokens()
    given = (ids, None, None, None, None, labels)
    loss, *others = swapped(*given, return_dict=False, use_cache=False)
    torch.testing.assert_close(loss, stock(*given).loss)
    assert others == []
    swapped.eval()
    loss, logits = swapped(*given, return_dict=False, use_cache=False)
    torch.testing.assert_close(logits, stock(ids).logits)
    (logits,) = swapped(ids, return_dict=False, use_cache=False)
    assert logits.shape == (*ids.shape, N)


@pytest.mark.parametrize("how", ["eval", "never", "always"])
def test_logits_are_there_when_asked_for(how):
    stock, swapped = pair(how={"logits": how})
    ids, labels = tokens()
    for training in (True, False):
        swapped.train(training)
        outputs = swapped(input_ids=ids, labels=labels)
        assert (outputs.logits is None) == (how == "never" or (how == "eval" and training))
        assert ("logits" in outputs) == (outputs.logits is not None)
        # Always without labels: this is how models generate.
        logits = swapped(input_ids=ids).logits
        torch.testing.assert_close(logits, stock(input_ids=ids).logits)
        if outputs.logits is not None:
            torch.testing.assert_close(outputs.logits, logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_every_head_trains_predicts_and_generates(name, tied):
    stock = make(tie_word_embeddings=tied)
    model = swap_head(copy.deepcopy(stock), name, statistics=True, **HEADS[name])
    ids, labels = tokens()
    outputs, found = gradients(model, input_ids=ids, labels=labels)
    assert outputs.logits is None
    assert torch.isfinite(outputs.loss)
    assert all(torch.isfinite(each).all() for each in found.values())

    head, hidden = head_of(model.eval()), []
    hook = model.model.register_forward_hook(lambda _m, _a, out: hidden.append(out[0]))
    with torch.no_grad():
        outputs = model(input_ids=ids, labels=labels)
        hook.remove()
        target = shifted(labels)
        torch.testing.assert_close(outputs.loss, head.eval()(hidden[0], target))
        torch.testing.assert_close(outputs.logits.log_softmax(-1), head.log_prob(hidden[0]))
        logs, counts = outputs.logits.log_softmax(-1), target != -100
        chosen = logs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(outputs.log_prob, torch.where(counts, chosen, 0.0))
        entropy = torch.special.entr(logs.exp()).sum(-1)
        torch.testing.assert_close(outputs.entropy, torch.where(counts, entropy, 0.0))
        hits = (logs.argmax(-1) == target)[counts].float().mean()
        torch.testing.assert_close(outputs.token_accuracy, hits)

    options = {"max_new_tokens": 4, "attention_mask": torch.ones_like(ids)}
    greedy = model.generate(ids, do_sample=False, **options)
    by_head = {"custom_generate": generate_with(head)}
    assert torch.equal(model.generate(ids, do_sample=False, **options, **by_head), greedy)
    for more in (
        {"num_beams": 2, "do_sample": False},
        {"do_sample": True},
        by_head | {"do_sample": True},
    ):
        assert model.generate(ids, **options, **more).shape[0] == 3

    unswap_head(model)
    assert type(model) is type(stock)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_saved_and_loaded(name, tied, tmp_path):
    model = swap_head(make(tie_word_embeddings=tied), name, logits="always", **HEADS[name]).eval()
    ids, labels = tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(head_of(loaded)) is type(head_of(model))
    assert loaded._lastlayer.logits == "always"
    with torch.no_grad():
        expected, found = (each(input_ids=ids, labels=labels) for each in (model, loaded))
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    shared = getattr(head_of(loaded), "weight", None) is loaded.get_input_embeddings().weight
    assert shared == (tied and name in (*LINEAR, "adaptive_importance"))
    # And it trains: tables that are not saved were made again.
    loss, again = (each.train()(input_ids=ids, labels=labels).loss for each in (model, loaded))
    assert torch.equal(loss, again)


@pytest.mark.parametrize("name", HEADS)
def test_every_head_is_loaded_in_half_precision(name, tmp_path):
    model = swap_head(make(), name, **HEADS[name])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {each.dtype for each in loaded.parameters()} == {torch.bfloat16}
    ids, labels = tokens()
    loaded.train()(input_ids=ids, labels=labels).loss.backward()
    exact, loss = (each.eval()(input_ids=ids, labels=labels).loss for each in (model, loaded))
    torch.testing.assert_close(loss, exact, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("name", ["full", "entmax"])
def test_stock_transformers_opens_heads_with_one_vector_per_class(name, tmp_path):
    stock, swapped = pair(head=name)
    swapped.save_pretrained(tmp_path)
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids, _ = tokens()
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, stock(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["adaptive", "hierarchical"])
def test_stock_transformers_refuses_other_heads_aloud(name, tmp_path):
    swap_head(make(), name, **HEADS[name]).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_without_a_head_is_opened_and_swapped(tmp_path):
    make().save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "LlamaForCausalLM"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, head="entmax", dtype=torch.bfloat16)
    assert isinstance(head_of(model), heads.EntmaxHead)
    assert head_of(model).weight.dtype == torch.bfloat16


def test_a_state_of_another_tree_is_an_error(tmp_path):
    swap_head(make(), "hierarchical", counts=COUNTS).save_pretrained(tmp_path)
    other = heads.HierarchicalSoftmax(D, trees.huffman(COUNTS.flip(0)))
    other.save_config(tmp_path / "lastlayer")
    with pytest.raises(ValueError, match=r"name: expected the state of the head .* same tree"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["full", "entmax"])
def test_a_damaged_configuration_is_an_error(name, tmp_path):
    swap_head(make(), name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    entry = whole["lastlayer"]
    damaged = [{k: v for k, v in entry.items() if k != key} for key in entry]
    for each in [*damaged, {**entry, "layer": 3}, {**entry, "shape": [1.0]}, {}, "entmax"]:
        path.write_text(json.dumps({**whole, "lastlayer": each}))
        with pytest.raises(ValueError, match=r"name: expected an entry 'lastlayer' .*; save"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
    path.write_text(json.dumps(whole))
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["full", "entmax"])
def test_resizing_is_followed(name, tied):
    stock, swapped = pair(head=name, tie_word_embeddings=tied)
    for model in (stock, swapped):
        torch.manual_seed(0)
        model.resize_token_embeddings(N + 7)
    head = head_of(swapped)
    assert head.n_classes == N + 7
    assert torch.equal(head.weight, stock.get_output_embeddings().weight)
    assert (head.weight is swapped.get_input_embeddings().weight) == tied
    ids = torch.full((1, 3), N + 6)
    loss = swapped(input_ids=ids, labels=ids).loss
    if name == "full":
        torch.testing.assert_close(loss, stock(input_ids=ids, labels=ids).loss)
    unswap_head(swapped)
    with torch.no_grad():
        assert torch.equal(swapped(input_ids=ids).logits, stock(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["adaptive", "hierarchical", "sampled"])
def test_resizing_is_refused_with_advice(name):
    model = swap_head(make(), name, **HEADS[name])
    with pytest.raises(ValueError, match=r"resize_token_embeddings: .*call unswap_head"):
        model.resize_token_embeddings(N + 1)
    assert model.get_input_embeddings().weight.shape[0] == N
    assert head_of(model).n_classes == N


def test_a_head_with_parameters_of_its_own_is_not_resized():
    model = make()
    old = model.lm_head.weight.detach().clone()
    own = heads.FullSoftmax(D, N, bias=False)
    swap_head(model, own)
    assert torch.equal(head_of(model).weight, own.weight)
    with pytest.raises(ValueError, match="FullSoftmax with its own parameters"):
        model.resize_token_embeddings(N + 1)
    assert torch.equal(unswap_head(model).lm_head.weight, old)


def test_tied_embeddings_stay_tied_after_a_step():
    stock, swapped = pair("gpt2", head="entmax")
    ids, labels = tokens()
    optimiser = torch.optim.SGD(swapped.parameters(), 0.1)
    swapped(input_ids=ids, labels=labels).loss.backward()
    optimiser.step()
    swapped.tie_weights()
    assert head_of(swapped).weight is swapped.get_input_embeddings().weight
    assert len([*swapped.parameters()]) == len([*stock.parameters()])


@pytest.mark.parametrize("name", ["full", "entmax"])
def test_a_copy_of_a_model_is_whole(name):
    _, swapped = pair(head=name)
    twin, (ids, labels) = copy.deepcopy(swapped), tokens()
    first, second = (each(input_ids=ids, labels=labels).loss for each in (swapped, twin))
    assert torch.equal(first, second)
    second.backward()
    assert all(each.grad is None for each in swapped.parameters())
    unswap_head(twin)
    assert twin(input_ids=ids).logits.shape == (*ids.shape, N)
    assert swapped(input_ids=ids, labels=labels).logits is None


@pytest.mark.parametrize("name", ["full", "adaptive"])
def test_the_state_goes_into_another_swapped_model(name):
    first = swap_head(make(), name, **HEADS[name]).eval()
    second = swap_head(make(), name, **HEADS[name]).eval()
    ids, _ = tokens()
    result = second.load_state_dict(first.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    with torch.no_grad():
        assert torch.equal(second(input_ids=ids).logits, first(input_ids=ids).logits)


def test_gradient_checkpointing():
    stock, swapped = pair()
    for model in (stock, swapped):
        # Transformers 5.23 has a new name for it.
        old = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", old)()
    ids, labels = tokens()
    assert_trains_alike(stock, swapped, input_ids=ids, labels=labels, use_cache=False)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16(family):
    stock, swapped = pair(family)
    ids, labels = tokens()
    exact = stock(input_ids=ids, labels=labels).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = swapped(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(loss, exact, atol=0.05, rtol=0.02)
    loss.backward()
    half = swap_head(unswap_head(swapped).to(torch.bfloat16), "full")
    loss = half(input_ids=ids, labels=labels).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, atol=0.05, rtol=0.02)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
@pytest.mark.parametrize("name", ["full", "entmax"])
def test_compiles_without_a_break(name):
    torch._dynamo.reset()
    _, swapped = pair(head=name, how={"statistics": True})
    ids, labels = tokens()
    expected, wanted = gradients(swapped, input_ids=ids, labels=labels)
    compiled = torch.compile(swapped, fullgraph=True, backend="aot_eager")
    swapped.zero_grad()
    outputs = compiled(input_ids=ids, labels=labels)
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.entropy, expected.entropy)
    for parameter, gradient in zip(swapped.parameters(), wanted.values(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert type(head_of(compiled)) is type(head_of(swapped))


def test_nothing_global_changes():
    before = dict(LOSS_MAPPING), transformers.LlamaForCausalLM.forward, torch.nn.Linear.forward
    cross_entropy = torch.nn.functional.cross_entropy
    stock, swapped = pair()
    kinds = {type(each) for each in stock.modules()}
    assert before == (
        dict(LOSS_MAPPING), transformers.LlamaForCausalLM.forward, torch.nn.Linear.forward
    )  # fmt: skip
    assert torch.nn.functional.cross_entropy is cross_entropy
    assert isinstance(swapped, transformers.LlamaForCausalLM)
    unswap_head(swapped)
    assert {type(each) for each in swapped.modules()} == kinds
    assert vars(swapped).keys() == vars(stock).keys()
    assert not swapped._forward_hooks
    assert not swapped._forward_pre_hooks
    assert swapped.config.to_dict() == stock.config.to_dict()


def test_only_the_plain_softmax_looks_like_a_linear_layer():
    layer = pair()[1].get_output_embeddings()
    assert isinstance(layer, torch.nn.Linear)
    for name, options in (
        ("entmax", {}),
        ("full", {"label_smoothing": 0.1}),
        ("sampled", HEADS["sampled"]),
    ):
        layer = swap_head(make(), name, **options).get_output_embeddings()
        assert not hasattr(layer, "weight")
        with pytest.raises(
            AttributeError, match=r"weight: expected .* softmax of a linear .*head_of\(model\)"
        ):
            _ = layer.weight


def test_sampling_by_the_head_draws_from_the_same_distribution(full):
    _, model = pair(head="hierarchical", how={"counts": COUNTS})
    model.eval()
    prompt = torch.tensor([[5, 9, 7]]).expand(4000 if full else 1000, 3)
    options = {"max_new_tokens": 1, "attention_mask": torch.ones_like(prompt), "do_sample": True}
    for more in ({"top_k": 5, "temperature": 0.7}, {"top_k": 0}):
        made = model.generate(
            prompt, custom_generate=generate_with(head_of(model)), **options, **more
        )
        with torch.no_grad():
            logs = model(input_ids=prompt[:1]).logits[0, -1]
        if more["top_k"]:
            logs = torch.where(logs >= logs.topk(5).values[-1], logs / 0.7, -torch.inf)
        share = torch.bincount(made[:, -1], minlength=N) / len(made)
        assert (share - logs.softmax(-1)).abs().max() < 4 * 0.5 / len(made) ** 0.5


def test_generation_by_the_head_stops_and_pads():
    _, model = pair()
    ids, _ = tokens()
    options = {"max_new_tokens": 6, "attention_mask": torch.ones_like(ids), "do_sample": False}
    free = model.eval().generate(ids, eos_token_id=None, **options)
    # The first token of the first row ends it.
    options["eos_token_id"] = int(free[0, ids.shape[1]])
    by_head = {"custom_generate": generate_with(head_of(model))}
    assert torch.equal(model.generate(ids, **options, **by_head), model.generate(ids, **options))


def test_generation_by_the_head_streams_its_tokens():
    _, model = pair()
    ids, _ = tokens(rows=1)
    usual = {"max_new_tokens": 3, "attention_mask": torch.ones_like(ids), "do_sample": False}

    class Streamer:
        def __init__(self):
            self.seen, self.ended = [], False

        def put(self, values):
            self.seen += values.flatten().tolist()

        def end(self):
            self.ended = True

    stock, own = Streamer(), Streamer()
    model.eval().generate(ids, **usual, streamer=stock)
    model.generate(ids, **usual, custom_generate=generate_with(head_of(model), streamer=own))
    assert own.seen == stock.seen
    assert own.ended


@pytest.mark.parametrize("name", ["full", "entmax", "hierarchical"])
def test_generation_with_an_assistant_and_with_other_caches(name):
    model, assistant = (swap_head(make(), name, **HEADS[name]).eval() for _ in range(2))
    ids, _ = tokens(rows=1)
    usual = {"max_new_tokens": 5, "attention_mask": torch.ones_like(ids), "do_sample": False}
    by_head = {"custom_generate": generate_with(head_of(model))}
    expected = model.generate(ids, **usual)
    for options in (
        {"assistant_model": assistant},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
        {"use_cache": False, **by_head},
        {"cache_implementation": "static", **by_head},
    ):
        assert torch.equal(model.generate(ids, **usual, **options), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "custom_generate: expected greedy search or sampling"),
        ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor"),
        ({"do_sample": True, "temperature": 0.5, "top_k": 0}, "top_k: expected a number of tokens"),
    ],
)
def test_generation_that_needs_all_classes_is_refused(options, message):
    _, model = pair()
    ids, _ = tokens()
    with pytest.raises(ValueError, match=message):
        model.generate(
            ids, custom_generate=generate_with(head_of(model)), max_new_tokens=2, **options
        )


def test_counts_tokens():
    data = [{"input_ids": [1, 2, 2]}, {"input_ids": []}, {"input_ids": torch.tensor([0])}]
    assert count_tokens(data, 4).tolist() == [1, 1, 2, 0]
    assert count_tokens([[3], [3, 0]], 4).tolist() == [1, 0, 0, 2]
    with pytest.raises(
        ValueError, match="dataset: expected token ids from 0 to 3, got 4 in example 1"
    ):
        count_tokens([[3], [4]], 4)
    with pytest.raises(TypeError, match=r"dataset: expected integer .*float32 in example 1"):
        count_tokens([[], [1.5]], 4)
    with pytest.raises(ValueError, match="column: expected one of 'text', got 'input_ids'"):
        count_tokens([{"text": [1]}], 4)


class Odd(transformers.LlamaForCausalLM):
    """Does to logits what no configuration says."""

    def forward(self, labels=None, **kwargs):
        outputs = super().forward(**kwargs)
        outputs.logits = outputs.logits.clamp(max=10.0)
        if labels is not None:
            outputs.loss = self.loss_function(outputs.logits, labels, N)
        return outputs


class Penalised(transformers.LlamaForCausalLM):
    """Adds something to the loss."""

    def forward(self, labels=None, **kwargs):
        outputs = super().forward(labels=labels, **kwargs)
        if labels is not None:
            outputs.loss = outputs.loss + 1e-2 * outputs.logits.float().square().mean()
        return outputs


@pytest.mark.parametrize("kind", [Odd, Penalised])
def test_unknown_things_done_to_logits_or_loss_are_found(kind):
    model = kind(CONFIG_MAPPING["llama"](**SIZES))
    before = vars(model).keys()
    with pytest.raises(ValueError, match=f"model: expected .* {kind.__name__}"):
        swap_head(model, "full")
    assert type(model) is kind
    assert vars(model).keys() == before
    assert not model._forward_hooks
    assert not model.get_output_embeddings()._forward_hooks


def test_models_that_cannot_be_swapped_are_named_with_the_reason():
    bert = make("bert", AutoModelForMaskedLM)
    assert not supports(bert)
    with pytest.raises(ValueError, match="BertForMaskedLM"):
        swap_head(bert, "full")
    for model, why in (
        (torch.nn.Linear(2, 2), "not a PreTrainedModel"),
        (make(auto=transformers.AutoModel), "no output embeddings"),
    ):
        assert why in supports(model).why
        with pytest.raises(ValueError, match=f"model: expected a causal .*{why}"):
            swap_head(model, "full")
    assert supports(make()) == (True, "")
    _, swapped = pair(head="entmax")
    with pytest.raises(ValueError, match="swapped before; call unswap_head first"):
        swap_head(swapped, "full")


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        ("no_such", {}, "head: expected one of full, .*got 'no_such'"),
        (3, {}, "head: expected the name of a head"),
        ("zlpr", {}, "one class per token, got MultiLabel"),
        ("hierarchical", {}, r"counts: expected the count of each token.*count_tokens"),
        ("sampled", {"counts": [1, 2]}, "counts: expected"),
        ("full", {"logits": "sometimes"}, "logits: expected"),
        ("full", {"statistics": 1}, "statistics: expected True or False"),
        ("full", {"n_classes": 3}, "n_classes: expected none"),
        ("full", {"logit": "eval"}, "logit: expected an option of FullSoftmax, .* options: "),
        (heads.AdaptiveSoftmax, {"k": 3}, "k: expected an option of Adaptive.* cutoffs"),
        (heads.FullSoftmax(D + 1, N), {}, f"head: expected in_features={D}"),
        (heads.FullSoftmax(D, N + 1), {}, f"head: expected n_classes={N}"),
        (heads.FullSoftmax(D, N, dtype=torch.float64), {}, "head: expected parameters on cpu"),
        (heads.FullSoftmax(D, N, ignore_index=0), {}, "head: expected ignore_index=-100"),
        (heads.FullSoftmax(D, N), {"z_loss": 0.1}, "z_loss: expected options only with the name"),
    ],
)
def test_bad_arguments(head, options, message):
    model = make()
    with pytest.raises((ValueError, TypeError), match=message):
        swap_head(model, head, **options)
    assert type(model) is transformers.LlamaForCausalLM
    assert not hasattr(model.config, "lastlayer")


def test_a_cap_that_a_head_cannot_have_is_not_dropped():
    model = make("gemma2")
    with pytest.raises(ValueError, match=r"head: expected one with the option softcap.*EntmaxHead"):
        swap_head(model, "entmax")
    with pytest.raises(ValueError, match=r"head: expected softcap=30\.0"):
        swap_head(model, heads.FullSoftmax.from_linear(model.lm_head))
    with pytest.raises(ValueError, match=r"softcap: expected 30\.0"):
        swap_head(model, "full", softcap=5.0)
    swap_head(model, heads.EntmaxHead.from_linear(model.lm_head))
    ids, _ = tokens()
    # Log-probabilities are not capped on their way out.
    assert torch.equal(
        model.eval()(input_ids=ids).logits.exp().sum(-1).round(decimals=4), torch.ones(ids.shape)
    )
    with pytest.raises(RuntimeError, match=r"call model\(\.\.\.\)"):
        model.forward(input_ids=ids)


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_labels_that_are_no_class_are_an_error(name, statistics):
    model = swap_head(make(), name, statistics=statistics, **HEADS[name])
    ids, _ = tokens()
    for wrong in (N, -1):
        with pytest.raises(ValueError, match=f"target: expected .* {N - 1}, .*got {wrong} at"):
            model(input_ids=ids, labels=torch.full_like(ids, wrong))


def test_bad_labels():
    _, swapped = pair()
    ids, _ = tokens()
    with pytest.raises(ValueError, match=r"labels: expected shape \(3, 9\)"):
        swapped(input_ids=ids, labels=ids[:, :5])
    with pytest.raises(RuntimeError, match=r"call model\(\.\.\.\), not model\.forward"):
        swapped.forward(input_ids=ids, labels=ids)
    # Nothing of a call that failed is left.
    assert swapped._lastlayer.call is None
    assert swapped(input_ids=ids, labels=ids).loss > 0


def test_replicas_of_data_parallel_are_refused():
    _, swapped = pair()
    swapped._is_replica = True
    ids, labels = tokens()
    with pytest.raises(RuntimeError, match=r"one process per GPU, got torch\.nn\.DataParallel"):
        swapped(input_ids=ids, labels=labels)


def test_a_model_without_a_head_is_an_error():
    for function in (head_of, unswap_head):
        with pytest.raises(ValueError, match="model: expected one that swap_head has changed"):
            function(make())


def test_a_loaded_structured_head_cannot_be_unswapped(tmp_path):
    swap_head(make(), "adaptive", counts=COUNTS).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="model: expected one whose original output layer is known"
    ):
        unswap_head(loaded)
    ids, labels = tokens()
    assert loaded(input_ids=ids, labels=labels).loss > 0
