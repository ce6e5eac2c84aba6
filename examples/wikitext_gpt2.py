"""Train a small GPT-2 from its configuration on text, with any head and a plain Trainer.

    python examples/wikitext_gpt2.py FOLDER [--head full] [--steps 300] [--save FOLDER]

FOLDER has ``train.txt`` and ``valid.txt``, packed with gzip or not, with words between spaces, as
WikiText-2 has them (Merity et al., 2016, arXiv:1609.07843, CC BY-SA; not part of this project). Its
33,278 words are all classes. Heads: full, entmax, topk, adaptive, hierarchical, sampled and others;
those that need counts get them. It prints the loss that the head is trained with and the
perplexity of the validation text, which for sparse heads may be infinite.
"""

import argparse
import gzip
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lastlayer.integrations.transformers import count_tokens, swap_head

LENGTH = 64


def words_of(folder: Path, part: str) -> list[str]:
    """The words of a file, with one at the end of each line."""
    path = next(folder.glob(f"{part}*.txt*"))
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        return [word for line in lines for word in [*line.split(), "<eos>"]]


def main() -> None:
    """Train, and say how well the validation text is predicted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with train.txt and valid.txt")
    parser.add_argument("--head", default="full")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()

    words = {part: words_of(options.folder, part) for part in ("train", "valid")}
    ids = {word: i for i, word in enumerate(sorted({*words["train"], "<unk>"}))}
    data = {}
    for part, given in words.items():
        stream = torch.tensor([ids.get(word, ids["<unk>"]) for word in given])
        rows = stream[: len(stream) // LENGTH * LENGTH].view(-1, LENGTH)
        data[part] = [{"input_ids": row, "labels": row} for row in rows]

    config = GPT2Config(
        vocab_size=len(ids), n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4,
        bos_token_id=ids["<eos>"], eos_token_id=ids["<eos>"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    made_of = {"counts": count_tokens(data["train"], len(ids))} if options.head in (
        "adaptive", "differentiated", "hierarchical", "sampled", "nce", "negative", "importance",
    ) else {}  # fmt: skip
    swap_head(model, options.head, logits="never", statistics=True, **made_of)

    arguments = TrainingArguments(
        "unused", max_steps=options.steps, per_device_train_batch_size=16, learning_rate=2e-3,
        warmup_steps=20, logging_steps=50, save_strategy="no", report_to=[], disable_tqdm=True,
        per_device_eval_batch_size=64, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data["train"], eval_dataset=data["valid"],
        compute_metrics=lambda found: {
            "perplexity": float(torch.tensor(-found.predictions[1][:, :-1].mean()).exp())
        },
    )  # fmt: skip
    trainer.train()
    found = trainer.evaluate()
    print(
        f"{len(ids)} words, {options.head}: loss {found['eval_loss']:.3f}, "
        f"perplexity {found['eval_perplexity']:.1f}"
    )
    if options.save:
        model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
