"""Text as tokens: words, or tokens of a tokenizer; their ids and the vocabulary."""

import hashlib
import json
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lastlayer.lab.data.files import PARTS, broken, existing, needed, text_blocks, text_files
from lastlayer.lab.records import write_text

UNKNOWN = "<unk>"
"""Replaces tokens that are not in the vocabulary; always included."""
END = "<eos>"
"""Ends each line of text, each document, each file of source."""
_SCHEMA = 1


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Tokens, ordered by falling count in the training part, and by spelling if counts are equal.

    Example:
        >>> words = Vocabulary(("a", "c", "<unk>"), np.array([3, 2, 1]))
        >>> words.encode(["c", "b"]).tolist(), words.decode([0, 2])
        ([1, 2], ['a', '<unk>'])
    """

    tokens: tuple[str, ...]  # the id of a token is its index
    # Count of each token in the training part, int64; <unk> has that of all tokens it replaces.
    counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @property
    def unknown(self) -> int:
        return self.ids[UNKNOWN]

    def encode(self, tokens: Iterable[str]) -> NDArray[np.int32]:
        """Ids of tokens; unknown tokens get the id of ``<unk>``."""
        ids, unknown = self.ids, self.unknown
        return np.fromiter((ids.get(token, unknown) for token in tokens), np.int32)

    def decode(self, ids: Iterable[int]) -> list[str]:
        return [self.tokens[int(i)] for i in ids]

    def save(self, path: Path | str) -> None:
        """Write JSON atomically."""
        content = {"schema": _SCHEMA, "tokens": self.tokens, "counts": self.counts.tolist()}
        write_text(Path(path), json.dumps(content, ensure_ascii=False), errors=_SURROGATES)

    @classmethod
    def load(cls, path: Path | str, *, unknown: bool = True) -> "Vocabulary":
        """Read a file of :meth:`save`; label names have no ``<unk>``, so ``unknown`` is False."""
        remedy = "give the vocabulary.json of a run"
        try:
            content = json.loads(Path(path).read_bytes().decode("utf-8", _SURROGATES))
            tokens, counts = content["tokens"], content["counts"]
            result = cls(tuple(tokens), np.asarray(counts, np.int64))
        except FileNotFoundError:
            raise broken("no such file", remedy, path=path) from None
        except (ValueError, KeyError, TypeError) as error:
            raise broken(f"not a vocabulary ({error})", remedy, path=path) from None
        alike = len(result.tokens) == len(result.counts) == len(result.ids)
        if not alike or (unknown and UNKNOWN not in result.ids):
            also = f", and {UNKNOWN}" if unknown else ""
            what = f"expected one count per token and unique tokens{also}"
            raise broken(what, remedy, path=path)
        return result


# Source code may contain lone surrogates in its strings.
_SURROGATES = "surrogatepass"


def choose(
    names: Sequence[str], counts: NDArray[np.int64], vocab_size: int | None, min_count: int | None
) -> tuple[Vocabulary, NDArray[np.int32]]:
    """The vocabulary of the most frequent tokens, and the id for each of the ``names``.

    ``vocab_size`` includes ``<unk>``. ``min_count`` is 2 by default, so that ``<unk>`` is learned
    from tokens that occur once, or 1 if the text contains ``<unk>`` already, as PTB and WikiText.
    """
    own = next((i for i, name in enumerate(names) if name == UNKNOWN), None)
    if min_count is None:
        min_count = 1 if own is not None and counts[own] else 2
    allowed = counts >= min_count
    if own is not None:
        allowed[own] = False
    by_spelling = sorted(np.flatnonzero(allowed).tolist(), key=names.__getitem__)
    candidates = np.array(by_spelling, np.int64)
    candidates = candidates[np.argsort(-counts[candidates], kind="stable")]
    candidates = candidates[: None if vocab_size is None else vocab_size - 1]
    left_out = int(counts.sum() - counts[candidates].sum())
    # After all tokens with the same count.
    place = int(np.searchsorted(-counts[candidates], -left_out, side="right"))
    chosen = [names[i] for i in candidates.tolist()]
    vocabulary = Vocabulary(
        (*chosen[:place], UNKNOWN, *chosen[place:]), np.insert(counts[candidates], place, left_out)
    )
    table = np.full(len(names), place, np.int32)
    table[candidates] = np.arange(len(candidates)) + (np.arange(len(candidates)) >= place)
    return vocabulary, table


Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TextData:
    """Text for a language model."""

    name: str  # display name
    vocabulary: Vocabulary  # all tokens, which are the classes of a head
    train: Ids  # int32 ids in the order of the text, one-dimensional; a memory map if very many
    valid: Ids  # for the choice of settings
    test: Ids  # for reported results
    description: dict[str, Any]  # source and options of reading, for JSON
    task: Literal["lm"] = "lm"

    @property
    def n_classes(self) -> int:
        return len(self.vocabulary)

    @property
    def sizes(self) -> dict[str, int]:
        """Tokens of each part."""
        return {part: len(getattr(self, part)) for part in PARTS}

    @property
    def counts(self) -> NDArray[np.int64]:
        """Count of each class in the training part."""
        return self.vocabulary.counts

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens of all parts."""
        return fingerprint(self.vocabulary.tokens, (self.train, self.valid, self.test))


def fingerprint(names: Iterable[str], arrays: Iterable[NDArray[Any]]) -> str:
    """A hash of names and numbers, the same on every machine."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        digest.update(name.encode("utf-8", _SURROGATES) + b"\0")
    for each in arrays:
        digest.update(each.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(each, each.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


# 256 MB of ids stay in memory; more are written to a memory-mapped file.
MEMORY_TOKENS = 2**26
# Number of ids that are renumbered per block.
_CHUNK = 2**22


class FirstCome(dict[str, int]):
    """Maps tokens to numbers in the order of their first occurrence."""

    def __missing__(self, token: str) -> int:
        number = self[token] = len(self)
        return number


class IdStream:
    """Collects ids of tokens; very long texts are spilled to an unnamed temporary file."""

    def __init__(self, numbers: FirstCome) -> None:
        self._number = numbers.__getitem__
        self._ids = array("i")
        self._file: IO[bytes] | None = None
        self.length = 0

    def add(self, tokens: Iterable[str]) -> None:
        before = len(self._ids)
        self._ids.extend(map(self._number, tokens))
        self.length += len(self._ids) - before
        if len(self._ids) >= MEMORY_TOKENS:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            # The system frees its space when its last memory map is closed.
            self._file = tempfile.TemporaryFile(prefix="lastlayer-")  # noqa: SIM115
        self._ids.tofile(self._file)
        self._ids = array("i")

    def finish(self, most: int | None = None) -> Ids:
        """All ids, or the first ``most``: an array, or a memory map that can be written to."""
        length = self.length if most is None else min(most, self.length)
        if self._file is None:
            return np.frombuffer(self._ids, np.int32)[:length]
        self._spill()
        self._file.flush()
        file: Any = self._file
        with file:
            # The memory map keeps its own handle.
            return np.memmap(file, np.int32, "r+", shape=(self.length,))[:length]


def _counted(ids: Ids, n: int) -> NDArray[np.int64]:
    """Count of each id."""
    counts = np.zeros(n, np.int64)
    for first in range(0, len(ids), _CHUNK):
        counts += np.bincount(ids[first : first + _CHUNK], minlength=n)
    return counts


def _renumber(ids: Ids, table: NDArray[np.int32]) -> None:
    """Replace each id by its entry in the table, in place."""
    for first in range(0, len(ids), _CHUNK):
        ids[first : first + _CHUNK] = table[ids[first : first + _CHUNK]]


# Valid and test each get 1/TENTH of the training part if they are missing, and are limited to
# 1/PER_LIMIT of a limit.
TENTH, PER_LIMIT = 10, 8


class Tokenizer:
    """A tokenizer.json of the tokenizers package, or a folder with one, such as that of a model."""

    def __init__(self, path: Path | str) -> None:
        file = existing(str(path))
        self.path = file / "tokenizer.json" if file.is_dir() else file
        if not self.path.is_file():
            what = "expected a folder with a tokenizer.json, got one without"
            raise broken(what, "save it with a fast tokenizer, or name the JSON file", path=file)
        package = needed("tokenizers")
        try:
            self._made = package.Tokenizer.from_file(str(self.path))
        except Exception as error:  # noqa: BLE001 - the package raises plain Exception
            what = f"not a tokenizer of the tokenizers package ({error})"
            remedy = "give its tokenizer.json, or the folder that it is in"
            raise broken(what, remedy, path=self.path) from None
        self._made.no_truncation()
        self._made.no_padding()
        ids = sorted(self._made.get_vocab().items(), key=lambda item: item[1])
        self.tokens = [token for token, _ in ids]

    def cut(self, text: str) -> list[str]:
        """The tokens of a text, without special tokens around it."""
        return self.cut_all([text])[0]

    def cut_all(self, texts: list[str]) -> list[list[str]]:
        return [each.tokens for each in self._made.encode_batch(texts, add_special_tokens=False)]

    def joined(self, tokens: Sequence[str]) -> str:
        """Decode tokens to text; strings that are not tokens of the tokenizer are kept."""
        made, run = "", list[int]()
        for token in [*tokens, None]:
            number = None if token is None else self._made.token_to_id(token)
            if number is not None:
                run.append(number)
                continue
            made += self._made.decode(run, skip_special_tokens=False)
            made, run = made + (token or ""), []
        return made


@dataclass(frozen=True)
class Reading:
    """Options of tokenization, vocabulary and size."""

    vocab_size: int | None = None  # largest size of the vocabulary
    min_count: int | None = None  # tokens that occur less often become <unk>
    limit: int | None = None  # of the training part, in tokens or rows
    encoding: str = "utf-8"  # of text files
    tokenizer: Tokenizer | None = None  # None for words between white space

    def cut(self, text: str) -> list[str]:
        return text.split() if self.tokenizer is None else self.tokenizer.cut(text)

    def numbers(self) -> FirstCome:
        """An empty map from tokens to numbers; with a tokenizer it contains all its tokens."""
        known = self.tokenizer.tokens if self.tokenizer else ()
        return FirstCome({token: i for i, token in enumerate(known)})

    def most(self, part: str) -> int | None:
        """The limit of a part; that of valid and test is an eighth of the training part's."""
        limit = self.limit
        return limit if limit is None or part == "train" else max(2, limit // PER_LIMIT)

    def enough(self, part: str) -> int | None:
        """How much of a part to read; valid and test may be split off the training part."""
        if self.limit is None or part != "train":
            return self.most(part)
        # A tenth of it must have at least two tokens.
        return max(self.limit * TENTH // PER_LIMIT, 2 * TENTH)

    @property
    def described(self) -> dict[str, Any]:
        made = {"vocab_size": self.vocab_size, "min_count": self.min_count, "limit": self.limit}
        return made | ({"tokenizer": str(self.tokenizer.path)} if self.tokenizer else {})


def language_data(
    names: Sequence[str], parts: dict[str, Ids], described: dict[str, Any], reading: Reading
) -> TextData:
    """Build the vocabulary from the training part, and renumber the tokens of all parts by it.

    The ids of ``parts``, which are indices of ``names``, are renumbered in place. Missing parts are
    split off the end of the training part, a tenth of it each.
    """
    total = sum(map(len, parts.values()))
    if not total:
        raise broken("no tokens", "give a file with text in it")
    train, each = parts["train"], len(parts["train"]) // TENTH
    for part in ("test", "valid"):
        if part not in parts:
            train, parts[part] = train[: len(train) - each], train[len(train) - each :]
    parts = {part: {**parts, "train": train}[part][: reading.most(part)] for part in PARTS}
    for part, ids in parts.items():
        if len(ids) < 2:
            what = f"too short: the {part} part has {len(ids)} of {total} token{'s' * (total > 1)}"
            raise broken(what, "give at least 20 tokens, or files of your own for all three parts")
    counts = _counted(parts["train"], len(names))
    special = [i for i, token in enumerate(names) if token in (UNKNOWN, END)]
    seen = int(np.count_nonzero(np.delete(counts, special)))
    if seen < 2:
        what = "one class: the training part has only one word" if seen else "no words"
        raise broken(what, "give a text with at least two different words")
    # All tokens of a tokenizer are classes, whether they occur or not.
    least = 0 if reading.tokenizer and reading.min_count is None else reading.min_count
    vocabulary, table = choose(names, counts, reading.vocab_size, least)
    if {*vocabulary.tokens} <= {UNKNOWN, END}:
        what = f"no word occurs {least or 2} times in the {len(parts['train'])} tokens"
        raise broken(what, "lower min_count")
    for ids in parts.values():
        _renumber(ids, table)
    description = {
        "task": "lm",
        "classes": len(vocabulary),
        "tokens": {part: len(ids) for part, ids in parts.items()},
        "types": seen,
        **reading.described,
        "unknown_share": float(vocabulary.counts[vocabulary.unknown] / len(parts["train"])),
        **described,
    }
    return TextData(
        described["name"], vocabulary, parts["train"], parts["valid"], parts["test"], description
    )


def text_data(path: Path, reading: Reading) -> TextData:
    """Read a file or a folder of files as tokens, with ``<eos>`` at the end of each line."""
    parts, layout = text_files(path)
    numbers, ids = reading.numbers(), dict[str, Ids]()
    for part, files in parts.items():
        most = reading.enough(part)
        stream = IdStream(numbers)
        for block in (block for file in files for block in _blocks(file, reading)):
            stream.add(block)
            if most is not None and stream.length >= most:
                break
        ids[part] = stream.finish(most)
    described = {
        "name": path.name, "source": str(path), "format": "text", "encoding": reading.encoding,
        "split": layout,
    }  # fmt: skip
    return language_data(list(numbers), ids, described, reading)


def _blocks(path: Path, reading: Reading) -> Iterator[list[str]]:
    """Tokens of a file in blocks; the last line ends with ``<eos>`` too."""
    block = ""
    for block in text_blocks(path, reading.encoding):
        if reading.tokenizer is None:
            yield block.replace("\n", f" {END} ").split()
            continue
        # The text after the last line end is the beginning of the next line, or empty.
        *whole, last = reading.tokenizer.cut_all(block.split("\n"))
        yield [token for line in whole for token in (*line, END)] + last
    if block and not block.endswith("\n"):
        yield [END]
