"""What ``lastlayer compare`` can be asked for. Torch is not needed to read it."""

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastlayer.lab.budget import Budget
from lastlayer.lab.errors import LabError

if TYPE_CHECKING:
    from lastlayer.lab.data import Data

TASKS = ("lm", "classification", "multilabel", "pairs")
MODELS = ("lstm", "transformer", "bag")
IDENTITY = "identity"
"""The backbone of hidden states that are already there."""
OWN = "own"
"""The backbone of a comparison that was asked for in Python."""
DEVICES = ("auto", "cpu", "cuda")
MOST_SEEDS, MOST_SEED = 10_000, 2**31
AUTO = "auto"
DEFAULT_BUDGET = "400steps"
# The most frequent tokens of the embedded corpus.
EMBEDDED_VOCABULARY = 8_000

# A learning rate for each model under Adam, for runs of seconds to minutes.
_RATES = {"lstm": 6e-3, "transformer": 2e-3, "bag": 8e-3}


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison; None for what was not given.

    Attributes:
        data: a file, a folder or ``hf:name``; None for the corpus that is always there.
        heads: specs; none for a selection of every family.
        budget: of each run, as text.
        seeds: how many runs each head gets.
        model: the body.
        task: one of :data:`TASKS`; None infers it from the data.
        device: ``auto``, ``cpu`` or ``cuda``.
        vocab_size: the most frequent tokens that are kept.
        min_count: how often a token has to come.
        batch: windows or rows in a step.
        length: tokens in a window.
        width: size of the hidden state.
        layers: of an LSTM or a transformer.
        lr: learning rate, or ``auto``, which finds that of each head.
        tolerance: how much worse than the best a head may be that is recommended for its cost.
        seed: the first one; the others follow.
        threads: of torch, on a CPU.
        limit: the most tokens or rows for training.
        encoding: of text files.
        text: columns of the text.
        label: the column of the classes or labels, or the XML file of an ARFF set.
        features: columns of numbers.
        tokenizer: a tokenizer.json, or a folder with one.
    """

    data: str | None = None
    heads: tuple[str, ...] | None = None
    budget: str | None = None
    seeds: int | None = None
    model: str | None = None
    task: str | None = None
    device: str | None = None
    vocab_size: int | None = None
    min_count: int | None = None
    batch: int | None = None
    length: int | None = None
    width: int | None = None
    layers: int | None = None
    lr: str | None = None
    tolerance: float | None = None
    seed: int | None = None
    threads: int | None = None
    limit: int | None = None
    encoding: str | None = None
    text: str | None = None
    label: str | None = None
    features: str | None = None
    tokenizer: str | None = None

    def as_json(self) -> dict[str, Any]:
        """What was given."""
        given = {name: each for name, each in asdict(self).items() if each is not None}
        return {**given, **({"heads": list(self.heads)} if self.heads else {})}

    def command(self) -> list[str]:
        """The command that asks for the same."""
        words = ["lastlayer", "compare", *([self.data] if self.data else [])]
        for head in self.heads or ():
            words += ["--head", head]
        for name, value in self.as_json().items():
            if name not in ("data", "heads"):
                words += [_flag(name), str(value)]
        return words

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "CompareOptions":
        """From what :meth:`as_json` gave."""
        known = {each.name for each in fields(cls)}
        made = {name: each for name, each in record.items() if name in known}
        return cls(**{**made, **({"heads": tuple(made["heads"])} if "heads" in made else {})})

    def resumed(self, before: "CompareOptions", folder: Path) -> "CompareOptions":
        """The options of a folder, where nothing that was given now says otherwise."""
        now, then = self.as_json(), before.as_json()
        other = [
            f"{_flag(name)} was {then.get(name, 'not given')} and is {value}"
            for name, value in now.items()
            if then.get(name) != value
        ]
        if other:
            raise LabError(
                f"--resume: expected the options that '{folder}' was made with, got others: "
                f"{'; '.join(other)}; leave them out, or choose another --out"
            )
        return before

    def settled(self, task: str | None = None) -> "Settled":
        """Everything decided, after a look at each option.

        Args:
            task: that of the data once it is read; before that, the one asked for or None.
        """
        asked = None if self.task is None else _one_of("--task", self.task, TASKS)
        task = task or asked or ("lm" if self.data is None else None)
        usual = "lstm" if task in (None, "lm") else "bag"
        model = _one_of("--model", self.model or usual, MODELS)
        if task not in (None, "lm") and model != usual:
            raise LabError(
                f"--model: expected bag for --task {task}, got {model!r}; rows of features "
                "have no order to read them in"
            )
        usual_rate, finds_rate = _RATES[model], self.lr in (None, AUTO)
        first = 1 if self.seed is None else self.seed
        if not 0 <= first <= MOST_SEED:
            raise LabError(f"--seed: expected 0 to {MOST_SEED:,}, got {first}")
        seeds = _count("--seeds", self.seeds, 3, most=MOST_SEEDS)
        tolerance = 0.03 if self.tolerance is None else self.tolerance
        if not 0 <= tolerance < 1:
            raise LabError(f"--tolerance: expected a share from 0 to 1, got {tolerance}")
        # A corpus that every head makes some hundred steps on in a few seconds.
        small = self.data is None
        rows = 128 if task not in (None, "lm") else 16 if small else 32
        return Settled(
            data=self.data,
            heads=list(self.heads or ()),
            budget=Budget.parse(self.budget or DEFAULT_BUDGET),
            seeds=list(range(first, first + seeds)),
            model=model,
            task=task,
            device=_one_of("--device", self.device or "auto", DEVICES),
            reading=self._reading(),
            batch=_count("--batch", self.batch, rows),
            length=_count("--length", self.length, 16 if small else 32),
            width=_count("--width", self.width, 64 if small else 128),
            layers=_count("--layers", self.layers, 2 if model == "transformer" else 1),
            lr=usual_rate if finds_rate else _rate(self.lr),
            finds_rate=finds_rate,
            tolerance=tolerance,
            threads=None if self.threads is None else _count("--threads", self.threads, 1),
        )

    def _reading(self) -> dict[str, Any]:
        for option, value, least in (
            ("--vocab-size", self.vocab_size, 2),
            ("--min-count", self.min_count, 1),
            ("--limit", self.limit, 2),
        ):
            if value is not None and value < least:
                raise LabError(f"{option}: expected at least {least}, got {value}")
        names = ("vocab_size", "min_count", "limit", "encoding", "text", "label", "features")
        given = {name: getattr(self, name) for name in (*names, "tokenizer")}
        if self.data is None and self.vocab_size is None:
            given["vocab_size"] = EMBEDDED_VOCABULARY
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Settled:
    """The same with nothing left open."""

    data: str | None
    heads: list[str]
    budget: Budget
    seeds: list[int]
    model: str
    task: str | None
    """None until the data is read."""
    device: str
    reading: dict[str, Any]
    """What the data is read with."""
    batch: int
    length: int
    width: int
    layers: int
    lr: float
    finds_rate: bool
    tolerance: float
    threads: int | None

    def read(self) -> "Data":
        """The data; whatever cannot be read is one message, a DataError or a LabError."""
        from lastlayer.lab.data import DataError, load

        try:
            return load(self.data, task=self.task, **self.reading)
        except DataError:
            raise
        except (ValueError, TypeError, LookupError, OSError, ImportError) as error:
            raise LabError(f"DATA: {error}") from error


def _flag(name: str) -> str:
    return {"data": "DATA", "heads": "--head"}.get(name, "--" + name.replace("_", "-"))


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise LabError(f"{option}: expected one of {', '.join(known)}, got {value!r}")
    return value


def _count(option: str, value: int | None, usual: int, most: int = sys.maxsize) -> int:
    if value is None:
        return usual
    if value < 1:
        raise LabError(f"{option}: expected at least 1, got {value}")
    if value > most:
        raise LabError(f"{option}: expected at most {most:,}, got {value:,}")
    return value


def _rate(text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise LabError(f"--lr: expected {AUTO} or a number above 0, got {text!r}")
    return value
