"""``load`` reads data in all formats and infers its task."""

import io
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from lastlayer.lab.data import matrices, tables
from lastlayer.lab.data.columns import choose_columns, table_data
from lastlayer.lab.data.files import TEXT, broken, existing, files_with, placed, plain_suffix
from lastlayer.lab.data.rows import LabelData, PairData
from lastlayer.lab.data.stdlib import NEWLINE, source_tokens, stdlib_labels, stdlib_text
from lastlayer.lab.data.text import END, Reading, TextData, Tokenizer, text_data
from lastlayer.lab.options import TASKS


def load(
    source: str | Path | None = None,
    *,
    task: str | None = None,
    vocab_size: int | None = None,
    min_count: int | None = None,
    limit: int | None = None,
    encoding: str = "utf-8",
    text: str | None = None,
    label: str | None = None,
    features: str | None = None,
    tokenizer: str | Path | None = None,
    cache: bool = True,
) -> TextData | LabelData | PairData:
    """Read data for a task, in three parts: train, valid and test.

    Args:
        source: a file, a folder, ``hf:name[:config][:column]``, or None for the embedded corpus:
            the source of Python's standard library.
        task: ``"lm"`` for language models, ``"classification"`` for rows with one class each,
            ``"multilabel"`` for rows with any number of labels, ``"pairs"`` for queries that have
            to find their key. None infers it; ``description["task_reason"]`` of the result says
            how.
        vocab_size: largest size of the vocabulary, ``<unk>`` included. By default all tokens that
            reach ``min_count`` for a language model, and 20,000 words as features of documents.
        min_count: words that occur less often in the training part become ``<unk>``. By default 2,
            or 1 if the text contains ``<unk>`` already. All tokens of a tokenizer are kept.
        limit: largest number of tokens, or rows, in the training part; valid and test have at most
            an eighth of it each.
        encoding: encoding of text files.
        text: column of the text, or several with commas between them; guessed by default.
        label: column of the classes or labels; for ARFF an attribute, or MULAN's XML file.
        features: columns of numbers in place of text, with commas between them.
        tokenizer: a JSON file of the tokenizers package, or a folder with a tokenizer.json, in
            place of words between white space.
        cache: whether to cache the tokens of the embedded corpus, in ``$LASTLAYER_CACHE`` or the
            user's cache folder.

    Returns:
        A :class:`TextData` for language models, a :class:`LabelData` for classes and labels, a
        :class:`PairData` for pairs.

    Raises:
        DataError: the data cannot be used. The message says what is wrong, where, and what to do.

    Example:
        >>> data = load(limit=10_000, cache=False)
        >>> len(data.train), data.vocabulary.decode(data.train[-1:])[0] in data.vocabulary.tokens
        (10000, True)
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task: expected one of {TASKS}, got {task!r}")
    sizes: tuple[tuple[str, Any, int], ...] = (
        ("vocab_size", vocab_size, 2), ("min_count", min_count, 1), ("limit", limit, 2)
    )  # fmt: skip
    for name, value, least in sizes:
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name}: expected an int or None, got {type(value).__name__}")
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    with placed("the embedded corpus" if source is None else source):
        given = {"text": text, "label": label, "features": features, "tokenizer": tokenizer}
        cutter = None if tokenizer is None else Tokenizer(tokenizer)
        reading = Reading(vocab_size, min_count, limit, encoding, cutter)
        if source is None:
            given["task"] = f"task='{task}'" if task in ("classification", "pairs") else None
            _refuse(given)
            _refuse_encoding(reading)
            return (stdlib_labels if task == "multilabel" else stdlib_text)(reading, cache=cache)
        return _load(str(source), task, given, reading)


def _load(
    source: str, task: str | None, given: dict[str, Any], reading: Reading
) -> TextData | LabelData | PairData:
    described = {"name": source, "source": source, "format": "hub"}
    words = {"vocab_size": reading.vocab_size, "min_count": reading.min_count}
    if source.startswith(tables.HUB):
        _refuse_encoding(reading)
        held, column = tables.read_hub(source, reading)
        given["text"] = column or given["text"]
    else:
        path = existing(source)
        kind = _kind(path)
        if kind in _WITHOUT_ENCODING:
            _refuse_encoding(reading)
        if kind in matrices.SUFFIXES:
            label = given["label"]
            _refuse(given | words | ({"label": None} if kind in matrices.ARFF else {}))
            return matrices.matrix_data(path, kind, reading, task, label)
        if kind not in tables.SUFFIXES and not _is_table(path, task, reading.encoding, given):
            return _text(path, reading, task)
        held = tables.read_tables(path, reading.encoding)
        described = {
            "name": path.name, "source": str(path), "format": kind[1:] or "text",
            "encoding": reading.encoding,
        }  # fmt: skip
    tokenizer = given.pop("tokenizer")
    columns = choose_columns(held.get("train") or next(iter(held.values())), task, **given)
    if columns.features:
        _refuse({"tokenizer": tokenizer, **words})
    return table_data(held, columns, described, reading)


def _text(path: Path, reading: Reading, task: str | None) -> TextData:
    if task not in (None, "lm"):
        raise broken(
            f"expected a table for task='{task}', got text",
            "give CSV, TSV, JSON lines, Parquet or Arrow with a column of labels, lines with "
            "__label__ words, svmlight, ARFF, npz or safetensors",
        )
    data = text_data(path, reading)
    data.description["task_reason"] = "text without columns" if task is None else "as asked"
    return data


def _refuse(given: dict[str, Any]) -> None:
    """Refuse options that do not apply to the data."""
    for option, value in given.items():
        if value is not None:
            what = f"{option}: expected none for data without columns of text, got {value}"
            raise broken(what, "leave it out")


# Binary formats, and numbers.
_WITHOUT_ENCODING = (*matrices.STATES, *matrices.SVMLIGHT, *tables.PARQUET, *tables.ARROW)


def _refuse_encoding(reading: Reading) -> None:
    if reading.encoding != "utf-8":
        what = f"encoding: expected none for data that is no text file, got {reading.encoding}"
        raise broken(what, "leave it out")


def _is_table(path: Path, task: str | None, encoding: str, given: dict[str, Any]) -> bool:
    """Whether a text file is read as a table: with columns by tabs, or with ``__label__`` words."""
    columns = any(given[name] for name in ("text", "label", "features"))
    if columns or task == "lm":
        return columns
    files = files_with(path, TEXT) if path.is_dir() else [path]
    return bool(files) and all(tables.is_table(file, encoding) for file in files)


def _kind(path: Path) -> str:
    """The suffix of a file, or that of the files in a folder which are not plain text."""
    if not path.is_dir():
        return plain_suffix(path)
    kinds = {*map(plain_suffix, files_with(path, (*matrices.SUFFIXES, *tables.SUFFIXES)))}
    if len(kinds) > 1:
        raise broken(f"files of several formats, {' and '.join(sorted(kinds))}", "name one of them")
    return kinds.pop() if kinds else ""


LINE_ENDS = (END, NEWLINE)
"""Tokens that mark the end of a line."""
# Start of tokenize's error message for incomplete source, which is allowed in a prompt.
_GOES_ON = "EOF in multi-line"


def cut(text: str, format_: str, tokenizer: Tokenizer | None = None) -> list[str]:
    r"""Tokenize a prompt in the same way as data of this format; its last line may be incomplete.

    Example:
        >>> cut("import os\nos.path", "python source")
        ['import', 'os', '<newline>', 'os', '.', 'path']
        >>> cut("one day\nthe", "text")
        ['one', 'day', '<eos>', 'the']
    """
    if tokenizer is not None:
        lines = tokenizer.cut_all(text.split("\n"))
        return [token for line in lines for token in (END, *line)][1:]
    if format_ != "python source":
        return text.replace("\n", f" {END} ").split()
    made: list[str] = []
    try:
        made.extend(_checked(text))
    except (tokenize.TokenError, SyntaxError) as error:
        if not str(error.args[0]).startswith(_GOES_ON):
            what = f"--prompt: expected Python source, got {text!r}: {error.args[0]}"
            raise broken(what, "the run was trained on Python source") from None
    # tokenize adds an end to the last line if the source has none.
    return made[:-1] if made[-1:] == [NEWLINE] and not text.endswith("\n") else made


def _checked(text: str) -> Iterator[str]:
    """Tokens of source; invalid ones raise an error also in Python 3.11, which only marks them."""
    kinds = (each.type for each in tokenize.generate_tokens(io.StringIO(text).readline))
    with suppress(tokenize.TokenError):
        if tokenize.ERRORTOKEN in kinds:
            raise SyntaxError("it contains an invalid token, such as an unterminated string")
    yield from source_tokens(text)
