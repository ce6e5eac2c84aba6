"""Swapped models in Trainer and PEFT, and swapped classifiers."""

import copy
import doctest
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from lastlayer import heads
from lastlayer.integrations.transformers import (
    AutoModelForSequenceClassification,
    head_of,
    swap_classifier,
    swap_head,
    unswap_head,
)

for package in ("transformers", "accelerate", "peft"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    import transformers
    from transformers import CONFIG_MAPPING, Trainer, TrainingArguments

N, D, LABELS = 101, 16, 7
SIZES = {
    "vocab_size": N, "hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_labels": LABELS,
}  # fmt: skip
OWN = {
    "gpt2": {"n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "distilbert": {"dim": D, "n_heads": 2, "n_layers": 2, "hidden_dim": 32},
}
CLASSIFIERS = ("llama", "bert", "roberta", "gpt2", "distilbert")


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()


def make(family="llama", auto=transformers.AutoModelForCausalLM, **options):
    torch.manual_seed(0)
    return auto.from_config(CONFIG_MAPPING[family](**{**SIZES, **OWN.get(family, {}), **options}))


def classifier(family="llama", **options):
    return make(family, transformers.AutoModelForSequenceClassification, **options).eval()


@pytest.fixture
def texts():
    """Sixteen token lists of different lengths."""
    lengths = torch.randint(3, 10, (16,)).tolist()
    return [{"input_ids": torch.randint(3, N, (each,))} for each in lengths]


def collate(examples):
    rows = [each["input_ids"] for each in examples]

    def padded(value):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    return {
        "input_ids": padded(0),
        "attention_mask": (padded(0) != 0).long(),
        "labels": padded(-100),
    }


def trainer(model, folder, data, **options):
    usual = {
        "max_steps": 3, "learning_rate": 0.1, "optim": "sgd", "report_to": [], "use_cpu": True,
        "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "remove_unused_columns": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    made = {key: options.pop(key) for key in ("compute_metrics",) if key in options}
    arguments = TrainingArguments(str(folder), **{**usual, **options})
    return Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, data_collator=collate,
        **made,
    )  # fmt: skip


def furthest(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.filterwarnings("ignore")  # of torch and accelerate
@pytest.mark.parametrize("name", [None, "full", "entmax", "hierarchical"])
def test_accumulated_batches_are_one_large_batch(name, tmp_path, texts):
    models = []
    for batch, steps in ((8, 1), (2, 4), (3, 3)):
        model = make()
        if name:
            counts = {"counts": range(1, N + 1)} if name == "hierarchical" else {}
            swap_head(model, name, **counts)
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
        trainer(model, tmp_path, texts, **sizes).train()
        models.append(model)
    assert furthest(models[0], models[1]) < 1e-7
    # Nine rows, and then seven: the last accumulation is shorter.
    assert furthest(models[0], models[2]) > 1e-5
    if name == "full":
        stock = make()
        trainer(stock, tmp_path, texts, per_device_train_batch_size=8).train()
        assert furthest(models[0], stock) < 1e-7


@pytest.mark.filterwarnings("ignore")
def test_evaluation_with_and_without_metrics(tmp_path, texts):
    model = swap_head(make(), "full", logits="never", statistics=True)
    stock = unswap_head(copy.deepcopy(model))
    wanted = trainer(stock, tmp_path, texts).evaluate()["eval_loss"]
    assert trainer(model, tmp_path, texts).evaluate()["eval_loss"] == pytest.approx(wanted, 1e-5)

    def metrics(found):
        accuracy, log_prob, _, argmax = found.predictions
        target = found.label_ids[:, 1:]
        counts = target != -100
        assert (log_prob[:, :-1][counts] < 0).all()
        assert accuracy.shape == (2,)
        return {"accuracy": float((argmax[:, :-1] == target)[counts].mean())}

    made = trainer(model, tmp_path, texts, compute_metrics=metrics).evaluate()
    assert 0.0 <= made["eval_accuracy"] <= 1.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["full", "entmax", "adaptive"])
def test_training_resumes_bit_for_bit(name, tmp_path, texts):
    counts = {"counts": range(N, 0, -1)} if name == "adaptive" else {}
    options = {"optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps"}
    torch.manual_seed(0)
    whole = swap_head(make(), name, **counts)
    trainer(whole, tmp_path, texts, save_steps=2, max_steps=4, **options).train()
    torch.manual_seed(0)
    again = swap_head(make(), name, **counts)
    other = trainer(again, tmp_path, texts, save_steps=4, max_steps=4, **options)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert furthest(whole, again) == 0.0


def with_adapters(model, **options):
    torch.manual_seed(1)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["body", "lm_head", "modules_to_save"],
)
def test_lora_trains_evaluates_merges_and_generates_as_stock(options, texts):
    stock = make()
    swapped = swap_head(copy.deepcopy(stock), "full")
    inputs, made = collate(texts[:4]), []
    for model in (stock, swapped):
        adapted = with_adapters(model, **options)
        outputs = adapted.train()(**inputs)
        outputs.loss.backward()
        found = {name: each.grad for name, each in adapted.named_parameters()}
        with torch.no_grad():
            logits = adapted.eval()(**inputs).logits
            with adapted.disable_adapter():
                plain = adapted(**inputs).logits
        tokens = adapted.generate(**inputs, max_new_tokens=3, do_sample=False)
        merged = adapted.merge_and_unload()
        with torch.no_grad():
            made.append((outputs, found, logits, plain, tokens, merged(**inputs).loss))
    (one, wanted, *first), (two, found, *second) = made
    assert two.logits is None
    torch.testing.assert_close(two.loss, one.loss)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    torch.testing.assert_close(second, first, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["entmax", "adaptive"])
def test_a_new_head_is_trained_and_saved_beside_adapters(name, texts, tmp_path):
    counts = {"counts": range(N, 0, -1)} if name == "adaptive" else {}
    model = swap_head(make(), name, **counts)
    base, inputs = copy.deepcopy(model), collate(texts[:4])
    adapted = with_adapters(model, target_modules=["q_proj"], modules_to_save=["lm_head"])
    optimiser = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], 0.1)
    losses = []
    for _ in range(3):
        outputs = adapted.train()(**inputs)
        assert outputs.logits is None
        losses.append(outputs.loss.item())
        outputs.loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert losses[2] < losses[0]
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        expected, found = (each.eval()(**inputs) for each in (adapted, loaded))
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


@pytest.mark.filterwarnings("ignore")
def test_adapters_that_cannot_be_fused_are_refused(texts):
    adapted = with_adapters(swap_head(make(), "full"), target_modules=["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match=r"target_modules: expected plain LoRA .*modules_to_save"):
        adapted(**collate(texts[:2]))
    other = peft.get_peft_model(
        swap_head(make(), "full"), peft.LoHaConfig(r=2, target_modules=["lm_head"])
    )
    with pytest.raises(
        ValueError, match=r"target_modules: expected plain LoRA .*got peft\.tuners\.loha"
    ):
        other(**collate(texts[:2]))
    with pytest.raises(ValueError, match="merge adapters first"):
        head_of(adapted)
    with pytest.raises(ValueError, match="swap its head before get_peft_model"):
        swap_head(with_adapters(make(), target_modules=["q_proj"]), "full")
    with pytest.raises(ValueError, match="ScoreHead"):
        with_adapters(swap_head(make(), "entmax"), target_modules=["lm_head"])


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_the_softmax_and_stops_at_other_heads(tmp_path):
    trl, datasets = (pytest.importorskip(each) for each in ("trl", "datasets"))
    words = {f"w{i}": i for i in range(N)}
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")),
        pad_token="w0", eos_token="w2", unk_token="w1",
    )  # fmt: skip
    rows = torch.randint(3, N, (8, 8)).tolist()
    data = datasets.Dataset.from_list([{"input_ids": row} for row in rows])
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=2, learning_rate=0.1, optim="sgd", report_to=[], use_cpu=True,
        bf16=False, save_strategy="no", logging_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, dataloader_pin_memory=False,
    )  # fmt: skip

    def train(model):
        trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train()
        return model

    assert furthest(train(swap_head(make(), "full")), train(make())) == 0.0
    for name, options in (("entmax", {}), ("hierarchical", {"counts": range(1, N + 1)})):
        with pytest.raises(AttributeError, match="weight: expected an output layer that is the"):
            train(swap_head(make(), name, **options))


@pytest.fixture
def batch():
    ids = torch.randint(3, N, (4, 6))
    ids[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


CLASSES = torch.tensor([0, 3, 6, 2])
LISTS = torch.tensor([[2, -100], [3, 5], [-100, -100], [0, -100]])
MATRIX = torch.zeros(4, LABELS)
MATRIX[[0, 1, 1, 3], [2, 3, 5, 0]] = 1.0


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_classifier_trains_as_its_stock_model(family, batch):
    stock = classifier(family)
    swapped = swap_classifier(copy.deepcopy(stock), "full", logits="always")
    expected, outputs = (each(**batch, labels=CLASSES) for each in (stock, swapped))
    torch.testing.assert_close(outputs.loss, expected.loss)
    torch.testing.assert_close(outputs.logits, expected.logits)
    torch.testing.assert_close(swapped(**batch).logits, expected.logits)
    for each in (expected, outputs):
        each.loss.backward()
    for (name, one), other in zip(stock.named_parameters(), swapped.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-6, rtol=1e-4, msg=name)
    unswap_head(swapped)
    assert type(swapped) is type(stock)
    assert torch.equal(swapped(**batch).logits, stock(**batch).logits)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_labels_that_do_not_compete(family, batch):
    stock = classifier(family, problem_type="multi_label_classification")
    swapped = swap_classifier(copy.deepcopy(stock), "bce")
    expected = stock(**batch, labels=MATRIX)
    for labels in (LISTS, MATRIX, MATRIX.bool()):
        outputs = swapped(**batch, labels=labels)
        # The sum over labels, where Transformers has the mean.
        torch.testing.assert_close(outputs.loss / LABELS, expected.loss)
    torch.testing.assert_close(outputs.logits, expected.logits)
    assert swapped.train()(**batch, labels=LISTS).logits is None
    swapped = swap_classifier(copy.deepcopy(stock), "zlpr")
    loss = swapped(**batch, labels=LISTS).loss
    zlpr = heads.MultiLabel.from_linear(stock.get_submodule(swapped._lastlayer.layer), loss="zlpr")
    torch.testing.assert_close(loss, swapped(**batch, labels=MATRIX).loss)
    assert loss > 0
    assert type(head_of(swapped)) is type(zlpr)


def test_accumulated_batches_of_labels_are_one_large_batch(batch):
    model = swap_classifier(classifier(), "zlpr")
    whole, loss = model(**batch, labels=MATRIX).loss, 0.0
    for part in (slice(0, 1), slice(1, 4)):
        some = {name: each[part] for name, each in batch.items()}
        # Trainer counts the entries of all batches that it accumulates.
        loss += model(
            **some, labels=MATRIX[part], num_items_in_batch=torch.tensor(MATRIX.numel())
        ).loss
    torch.testing.assert_close(loss, whole)


@pytest.mark.parametrize("name", ["full", "entmax", "adaptive", "zlpr"])
def test_a_classifier_is_saved_and_loaded(name, batch, tmp_path):
    counts = {"counts": range(LABELS, 0, -1)} if name == "adaptive" else {}
    model = swap_classifier(classifier("bert"), name, **counts)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    labels = LISTS if name == "zlpr" else CLASSES
    expected, found = (each(**batch, labels=labels) for each in (model, loaded))
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    if name != "zlpr":
        torch.testing.assert_close(found.logits.softmax(-1).sum(-1), torch.ones(4))


def test_bad_classifiers(batch):
    with pytest.raises(ValueError, match=r"model: expected a \.\.\.ForSequenceClassification"):
        swap_classifier(make(), "full")
    with pytest.raises(ValueError, match="that has not been swapped, got Linear"):
        swap_classifier(torch.nn.Linear(2, 2), "full")
    swapped = swap_classifier(classifier(), "zlpr")
    with pytest.raises(ValueError, match="that has not been swapped"):
        swap_classifier(swapped, "full")
    with pytest.raises(ValueError, match=f"labels: expected 0 and 1 for each of the {LABELS}"):
        swapped(**batch, labels=MATRIX[:, :5])
    with pytest.raises(ValueError, match=f"{LABELS}"):
        swap_classifier(classifier(), "entmax")(**batch, labels=CLASSES + LABELS)


@pytest.mark.filterwarnings("ignore")
def test_the_page_says_what_happens():
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    failed, tried = doctest.testfile(
        str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert tried > 30
    assert failed == 0


def test_processes_train_one_model(full, seed, tmp_path):
    if not full:
        pytest.skip("takes half a minute: LASTLAYER_TEST_FULL=1")
    script = Path(__file__).parent / "transformers_process.py"
    command = [sys.executable, script, tmp_path / "store", str(seed)]
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": source}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
