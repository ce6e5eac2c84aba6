"""Multi-label classification with BERT and 100,000 labels: ZLPR with a plain Trainer.

    python examples/many_label_classifier.py [--labels 100000] [--steps 400] [--seed 0]

The data is synthetic: a text contains one or two codes, written as digits among other words, and
its labels are these codes. Some codes are much more frequent than others, as is usual for labels.
The labels of a text are a list of two ids; a dense matrix would have 100,000 columns.
"""

import argparse

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from lastlayer.integrations.transformers import head_of, swap_classifier

DIGITS, CLS, WORD, N_WORDS = 10, 10, 11, 100


def texts(n: int, n_labels: int) -> list[dict[str, Tensor]]:
    """Token ids and label lists, which are padded with -100."""
    places = len(str(n_labels - 1))
    # The frequency of the label of rank r is proportional to about 1/r.
    codes = (n_labels ** torch.rand(n, 2)).long().clamp(max=n_labels) - 1
    codes[torch.rand(n) < 0.5, 1] = -100
    powers = 10 ** torch.arange(places - 1, -1, -1)
    digits = codes[:, :, None] // powers % 10
    other = torch.randint(WORD, WORD + N_WORDS, (n, 2, places))
    digits = torch.where(codes[:, :, None] < 0, other, digits)
    ids = torch.cat([torch.full((n, 1), CLS), digits[:, 0], other[:, 0], digits[:, 1]], 1)
    return [{"input_ids": row, "labels": labels} for row, labels in zip(ids, codes, strict=True)]


def main() -> None:
    """Train, and print the recall of the top five labels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)

    config = BertConfig(
        vocab_size=WORD + N_WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=32, num_labels=options.labels,
    )  # fmt: skip
    model = swap_classifier(BertForSequenceClassification(config), "zlpr")
    arguments = TrainingArguments(
        "unused", max_steps=options.steps, per_device_train_batch_size=128, learning_rate=2e-3,
        logging_steps=100, save_strategy="no", report_to=[], disable_tqdm=True,
        seed=options.seed, dataloader_pin_memory=False,
    )  # fmt: skip
    train = texts(128 * min(options.steps, 400), options.labels)
    Trainer(model=model, args=arguments, train_dataset=train).train()

    held_out = texts(1000, options.labels)
    ids, labels = (torch.stack([row[key] for row in held_out]) for key in ("input_ids", "labels"))
    model.eval()
    with torch.no_grad():
        hidden = model.bert(ids).pooler_output
        best = head_of(model).topk(hidden, 5).classes
    hits = (labels[:, :, None] == best[:, None]).any(-1)[labels >= 0]
    print(f"{options.labels} labels: recall@5 {hits.double().mean():.3f}")


if __name__ == "__main__":
    main()
