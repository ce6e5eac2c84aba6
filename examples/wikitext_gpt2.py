"""Train a small GPT-2 from scratch on text, with any head and a plain Trainer.

    python examples/wikitext_gpt2.py FOLDER [--head full] [--steps 300] [--save FOLDER]

FOLDER has ``train.txt`` and ``valid.txt`` with space-separated words, as in WikiText-2 (Merity et
al., 2016, arXiv:1609.07843, CC BY-SA; not part of this project). All its 33,278 words are classes.
Heads: full, entmax, topk, adaptive, hierarchical, sampled and others. The script prints the loss
of the head and the perplexity on the validation text; perplexity may be infinite for sparse heads.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lastlayer.integrations.transformers import count_tokens, swap_head

LENGTH = 64


def main() -> None:
    """Train, and print loss and perplexity on the validation text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with train.txt and valid.txt")
    parser.add_argument("--head", default="full")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=Path, help="folder for the trained model")
    options = parser.parse_args()

    texts = [(options.folder / f"{part}.txt").read_text("utf-8") for part in ("train", "valid")]
    train, valid = (text.replace("\n", " <eos> ").split() for text in texts)
    ids = {word: i for i, word in enumerate(sorted({*train, "<unk>", "<eos>"}))}

    def examples(words: list[str]) -> list[dict[str, torch.Tensor]]:
        stream = torch.tensor([ids.get(word, ids["<unk>"]) for word in words])
        rows = stream[: len(stream) // LENGTH * LENGTH].view(-1, LENGTH)
        return [{"input_ids": row, "labels": row} for row in rows]

    torch.manual_seed(0)
    size = {"n_positions": LENGTH, "n_embd": 128, "n_layer": 2, "n_head": 4}
    ends = {"bos_token_id": ids["<eos>"], "eos_token_id": ids["<eos>"]}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(ids), **size, **ends))
    # Trees, samplers and clusters are built from the counts; other heads ignore them.
    counts = count_tokens(examples(train), len(ids))
    swap_head(model, options.head, logits="never", statistics=True, counts=counts)

    arguments = TrainingArguments(
        "unused", max_steps=options.steps, per_device_train_batch_size=16, learning_rate=2e-3,
        warmup_steps=20, save_strategy="no", report_to=[], dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=examples(train))
    # predictions[1] is the log-probability of each token after the first.
    trainer.compute_metrics = lambda found: {"log_prob": found.predictions[1][:, :-1].mean()}
    trainer.train()
    found = trainer.evaluate(examples(valid))
    perplexity = torch.tensor(-found["eval_log_prob"]).exp()
    print(f"{len(ids)} words: loss {found['eval_loss']:.3f}, perplexity {perplexity:.1f}")
    if options.save:
        model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
