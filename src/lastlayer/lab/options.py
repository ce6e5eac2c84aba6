"""The options of ``lastlayer compare``. This module does not import torch."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lastlayer.lab.budget import Budget
from lastlayer.lab.errors import LabError

if TYPE_CHECKING:
    from lastlayer.lab.data import Data

# Tasks whose heads choose among classes; pairs have none.
CLASS_TASKS = ("lm", "classification", "multilabel")
TASKS = (*CLASS_TASKS, "pairs")
MODELS = ("lstm", "transformer", "bag")
IDENTITY = "identity"
"""The backbone for precomputed hidden states."""
OWN = "own"
"""The user's backbone, in a comparison from Python."""
DEVICES = ("auto", "cpu", "cuda")
# Options for reading data, besides the task.
READING = (
    "vocab_size", "min_count", "limit", "encoding", "text", "label", "features", "tokenizer"
)  # fmt: skip
MOST_SEEDS, MOST_SEED, MOST_THREADS = 10_000, 2**31, 1024
AUTO = "auto"
DEFAULT_BUDGET = "400steps"
# The most frequent tokens of the embedded corpus.
EMBEDDED_VOCABULARY = 8_000

# Learning rate for each backbone with Adam: near the best for almost every head after 400 steps on
# the embedded corpus.
_RATES = {"lstm": 1.2e-2, "transformer": 1.8e-3, "bag": 1.2e-2}


_DATA, _TRAINING = "Data", "Training"


def _option(
    help_: str,
    metavar: str | None = None,
    *,
    flag: str = "",
    panel: str | None = None,
    kind: Callable[..., Any] = typer.Option,
) -> Any:
    """A dataclass field with its command-line option."""
    names = [flag] if flag else []
    cli = kind(*names, help=help_, metavar=metavar, rich_help_panel=panel, show_default=False)
    return field(default=None, metadata={"cli": cli})


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison as given on the command line; None for those that were not given.

    :meth:`settled` checks them and fills in the defaults.
    """

    data: str | None = _option(
        "A file, a folder or hf:name; without it, the source of Python's own library.", "DATA",
        kind=typer.Argument,
    )  # fmt: skip
    heads: tuple[str, ...] | None = _option(
        "A head and its arguments, such as adaptive:cutoffs=2000,10000 or mymodule:MyHead; "
        "repeatable. Without it, one of every family. lastlayer heads lists them.", "SPEC",
        flag="--head",
    )  # fmt: skip
    budget: str | None = _option(
        "Training of each run, the same number of steps for every head; a time applies to the "
        "slowest head. 400 steps by default.", "2000steps|3epochs|30s",
    )  # fmt: skip
    seeds: int | None = _option("Seeds of each head; 3 by default.")
    task: str | None = _option(
        "What is predicted; by default inferred from the data and printed.", "|".join(TASKS)
    )
    device: str | None = _option("auto takes a CUDA GPU if there is one.", "|".join(DEVICES))
    tolerance: float | None = _option(
        "The cheapest head whose quality is within this share of the best is recommended; 0.03, "
        "which is 3%, by default."
    )
    text: str | None = _option("Column of the text; guessed by default.", "NAME,…", panel=_DATA)
    label: str | None = _option(
        "Column of the classes or labels, guessed by default; or the XML file of an ARFF set.",
        "NAME", panel=_DATA,
    )  # fmt: skip
    features: str | None = _option("Columns of numbers in place of text.", "NAME,…", panel=_DATA)
    tokenizer: str | None = _option(
        "A tokenizer.json, or a folder with one, in place of words between white space.", "PATH",
        panel=_DATA,
    )  # fmt: skip
    vocab_size: int | None = _option("Size of the vocabulary, <unk> included.", panel=_DATA)
    min_count: int | None = _option("Rarer words become <unk>.", panel=_DATA)
    limit: int | None = _option("Largest number of tokens or rows for training.", panel=_DATA)
    encoding: str | None = _option("Encoding of text files; utf-8 by default.", panel=_DATA)
    model: str | None = _option(
        "Backbone; lstm for text, bag for rows.", "|".join(MODELS), panel=_TRAINING
    )
    batch: int | None = _option(
        "Batch size: 32 windows of text by default, or 128 rows.", panel=_TRAINING
    )
    length: int | None = _option("Tokens per window; 32 by default.", panel=_TRAINING)
    width: int | None = _option("Hidden size; 128 by default.", panel=_TRAINING)
    layers: int | None = _option(
        "Layers of the backbone: 1 of an LSTM by default, 2 of a transformer.", panel=_TRAINING
    )
    lr: str | None = _option(
        "Learning rate; auto, the default, tries three or more for each head and takes the best.",
        "auto|NUMBER", panel=_TRAINING,
    )  # fmt: skip
    seed: int | None = _option("The first seed; the others follow. 1 by default.", panel=_TRAINING)
    threads: int | None = _option("CPU threads of torch.", panel=_TRAINING)

    def as_json(self) -> dict[str, Any]:
        """The options that were given, for JSON."""
        given = {name: each for name, each in asdict(self).items() if each is not None}
        return {**given, **({"heads": list(self.heads)} if self.heads else {})}

    def command(self) -> list[str]:
        """The command line that gives these options."""
        words = ["lastlayer", "compare", *([self.data] if self.data else [])]
        for head in self.heads or ():
            words += ["--head", head]
        for name, value in self.as_json().items():
            if name not in ("data", "heads"):
                words += [_flag(name), str(value)]
        return words

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "CompareOptions":
        """The options that :meth:`as_json` wrote."""
        known = {each.name for each in fields(cls)}
        values = {name: each for name, each in record.items() if name in known}
        return cls(**{**values, **({"heads": tuple(values["heads"])} if "heads" in values else {})})

    def resumed(self, before: "CompareOptions", folder: Path) -> "CompareOptions":
        """The recorded options ``before`` of a folder, which these options must not contradict."""
        now, then = self.as_json(), before.as_json()
        other = [
            f"{_flag(name)} was {then.get(name, 'not given')} and is {value}"
            for name, value in now.items()
            if then.get(name) != value
        ]
        if other:
            raise LabError(
                f"--resume: expected the options of the comparison in '{folder}', got others: "
                f"{'; '.join(other)}; leave them out, or choose another --out"
            )
        return before

    def settled(self, task: str | None = None) -> "Settled":
        """Check the options and fill in defaults; ``task`` is that of the data, if it is read."""
        asked = None if self.task is None else one_of("--task", self.task, TASKS)
        task = task or asked or ("lm" if self.data is None else None)
        usual = "lstm" if task in (None, "lm") else "bag"
        model = one_of("--model", self.model or usual, MODELS)
        if task not in (None, "lm") and model != usual:
            raise LabError(
                f"--model: expected bag for --task {task}, got {model!r}; rows of features "
                "have no order to read them in"
            )
        if self.layers is not None and model == "bag":
            raise LabError(
                f"--layers: expected none for a bag backbone, which has one, got {self.layers}"
            )
        finds_rate = self.lr in (None, AUTO)
        first = whole("--seed", self.seed, 1, least=0, most=MOST_SEED)
        seeds = whole("--seeds", self.seeds, 3, most=MOST_SEEDS)
        whole("--threads", self.threads, 1, most=MOST_THREADS)
        tolerance = 0.03 if self.tolerance is None else self.tolerance
        if not 0 <= tolerance < 1:
            raise LabError(f"--tolerance: expected a share from 0 to 1, got {tolerance}")
        # Small defaults for the embedded corpus: some hundred steps take a few seconds.
        small = self.data is None
        rows = 128 if task not in (None, "lm") else 16 if small else 32
        return Settled(
            data=self.data,
            heads=list(self.heads or ()),
            budget=Budget.parse(self.budget or DEFAULT_BUDGET),
            seeds=list(range(first, first + seeds)),
            model=model,
            task=task,
            device=one_of("--device", self.device or "auto", DEVICES),
            reading=self._reading(),
            batch=whole("--batch", self.batch, rows),
            length=whole("--length", self.length, 16 if small else 32),
            width=whole("--width", self.width, 64 if small else 128),
            layers=whole("--layers", self.layers, 2 if model == "transformer" else 1),
            lr=_RATES[model] if finds_rate else _rate(self.lr),
            finds_rate=finds_rate,
            tolerance=tolerance,
            threads=self.threads,
        )

    def _reading(self) -> dict[str, Any]:
        for name, least in (("vocab_size", 2), ("min_count", 1), ("limit", 2)):
            whole(_flag(name), getattr(self, name), least, least=least)
        given = {name: getattr(self, name) for name in READING}
        if self.data is None and self.vocab_size is None:
            given["vocab_size"] = EMBEDDED_VOCABULARY
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class Settled:
    """Options of a comparison with all defaults filled in."""

    data: str | None
    heads: list[str]
    budget: Budget
    seeds: list[int]
    model: str
    task: str | None
    """None if it is inferred from the data, which is not read yet."""
    device: str
    reading: dict[str, Any]
    """Keyword arguments of :func:`lastlayer.lab.data.load`."""
    batch: int
    length: int
    width: int
    layers: int
    lr: float
    finds_rate: bool
    tolerance: float
    threads: int | None

    def read(self) -> "Data":
        """Read the data; raises DataError or LabError if that is not possible."""
        from lastlayer.lab.data import DataError, load

        try:
            return load(self.data, task=self.task, **self.reading)
        except DataError:
            raise
        except (ValueError, TypeError, LookupError, OSError, ImportError) as error:
            raise LabError(f"DATA: {error}") from error


def _flag(name: str) -> str:
    return {"data": "DATA", "heads": "--head"}.get(name, "--" + name.replace("_", "-"))


def one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    """Return ``value``, or raise LabError if it is not one of ``known``."""
    if value not in known:
        raise LabError(f"{option}: expected one of {', '.join(known)}, got {value!r}")
    return value


def whole(
    option: str, value: int | None, usual: int = 0, *, least: int = 1, most: int = sys.maxsize
) -> int:
    """Return ``value``, or ``usual`` if it is None; raise LabError if it is out of bounds."""
    if value is None:
        return usual
    if value < least:
        raise LabError(f"{option}: expected at least {least}, got {value}")
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
