"""Text from a trained run, and what the head expected at each step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from lastlayer.lab.data.load import LINE_ENDS, cut
from lastlayer.lab.data.text import END, Tokenizer
from lastlayer.lab.errors import LabError
from lastlayer.lab.explorer import readable
from lastlayer.lab.trained import Trained


@dataclass(frozen=True)
class Step:
    """One token.

    Attributes:
        token: what was taken.
        p: its probability.
        top: the most probable tokens and their probabilities.
    """

    token: str
    p: float
    top: list[tuple[str, float]]


def prompt_tokens(trained: Trained, prompt: str) -> list[str]:
    """A prompt in tokens, as the data that the run was trained on was cut."""
    described = (trained.config.get("data") or {}).get("description") or {}
    return cut(prompt, str(described.get("format", "text")), trained.tokenizer)


def unknown_words(trained: Trained, prompt: Sequence[str]) -> list[str]:
    """The tokens of a prompt that the run does not know, each once."""
    known = trained.vocabulary.ids
    return list(dict.fromkeys(word for word in prompt if word not in known))


@torch.no_grad()
def generate(
    trained: Trained, prompt: Sequence[str], *, tokens: int, top: int, temperature: float, seed: int
) -> Iterator[Step]:
    """One token after the other, drawn from the head's own probabilities.

    Args:
        trained: a language model.
        prompt: tokens that the text begins with; none for a new line.
        tokens: how many to make.
        top: how many of the most probable to show.
        temperature: 1 draws as the head says, less prefers the probable ones, 0 takes the best.
        seed: of the draws.
    """
    config, words = trained.config, trained.vocabulary
    if config["model"]["task"] != "lm":
        task = config["model"]["task"]
        raise LabError(f"RUN: expected a run of --task lm, got one of --task {task}")
    device = next(trained.body.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    length = int(config["model"]["length"])
    ids = words.encode(prompt or [END]).tolist()
    for _ in range(tokens):
        window = torch.tensor([ids[-length:]], device=device)
        hidden = trained.body(window)[:, -1]
        log_prob = trained.head.log_prob(hidden)[0]
        best = trained.head.topk(hidden, min(top, trained.head.n_classes))
        if temperature == 0:
            chosen = int(log_prob.argmax())
        else:
            weights = torch.softmax(log_prob.double() / temperature, 0)
            chosen = int(torch.multinomial(weights, 1, generator=generator))
        ids.append(chosen)
        pairs = zip(best.classes[0].tolist(), best.values[0].exp().tolist(), strict=True)
        yield Step(
            readable(words.tokens[chosen]),
            float(log_prob[chosen].exp()),
            [(readable(words.tokens[i]), p) for i, p in pairs],
        )


def table_of(steps: list[Step], top: int) -> Table:
    """A row per token: how probable it was, and what was more so."""
    table = Table("token", "p", *(f"{i + 1}" for i in range(top)))
    for step in steps:
        best = [Text(f"{token} {p:.2f}") for token, p in step.top[:top]]
        table.add_row(Text(step.token), f"{step.p:.3f}", *best)
    return table


def as_text(tokens: list[str], tokenizer: Tokenizer | None = None) -> str:
    """Tokens with spaces between them, or as a tokenizer joins them; a line ends at its token."""
    if tokenizer is not None:
        return tokenizer.joined(["\n" if token in LINE_ENDS else token for token in tokens])
    ended = ["\n" if token in LINE_ENDS else token for token in tokens]
    return " ".join(ended).replace(" \n", "\n").replace("\n ", "\n").strip()
