"""One function for all data."""

from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from lastlayer.lab.data import _hub, _jsonl, _mulan, _svmlight
from lastlayer.lab.data._fasttext import marked_records
from lastlayer.lab.data._files import existing, plain_suffix
from lastlayer.lab.data._layout import files_with
from lastlayer.lab.data._records import labelled_records, text_records
from lastlayer.lab.data._stdlib_labels import stdlib_labels
from lastlayer.lab.data._stdlib_text import stdlib_text
from lastlayer.lab.data._text import text_data
from lastlayer.lab.data.errors import broken
from lastlayer.lab.data.label_data import LabelData
from lastlayer.lab.data.text_data import TextData
from lastlayer.lab.data.vocabulary import check_vocabulary_options

TASKS = ("lm", "multilabel")


class Options(TypedDict, total=False):
    """What :func:`load` takes beside the source and the task."""

    vocab_size: int | None
    min_count: int | None
    limit: int | None
    encoding: str
    text_field: str
    labels_field: str
    labels: str | Path | None
    cache: bool


Source = str | Path | None


@overload
def load(
    source: Source = None, *, task: Literal["lm"] = "lm", **options: Unpack[Options]
) -> TextData: ...
@overload
def load(
    source: Source = None, *, task: Literal["multilabel"], **options: Unpack[Options]
) -> LabelData: ...
@overload
def load(
    source: Source = None, *, task: str, **options: Unpack[Options]
) -> TextData | LabelData: ...
def load(
    source: Source = None,
    *,
    task: str = "lm",
    vocab_size: int | None = None,
    min_count: int | None = None,
    limit: int | None = None,
    encoding: str = "utf-8",
    text_field: str = "text",
    labels_field: str = "labels",
    labels: str | Path | None = None,
    cache: bool = True,
) -> TextData | LabelData:
    """Read data for a task, in three parts: train, valid and test.

    Args:
        source: a file, a folder, ``hf:name[:config][:column]``, or None for what is always there:
            the source of Python's standard library.
        task: ``"lm"`` for text of which each token is predicted, ``"multilabel"`` for rows with
            any number of labels.
        vocab_size: the most words, ``<unk>`` among them. For a language model all that come often
            enough; as features of documents, 20,000.
        min_count: words that come less often in the training part become ``<unk>``. By default 2,
            and 1 where the text has an ``<unk>`` of its own.
        limit: the most tokens, or rows, of the training part; valid and test have an eighth of it
            at most.
        encoding: of text files.
        text_field: where JSON lines and sets of the hub have their text; several with commas.
        labels_field: where they have their labels.
        labels: the XML file of a MULAN set, where its name does not tell.
        cache: whether the tokens of the embedded corpus are kept, in ``$LASTLAYER_CACHE`` or the
            user's folder for caches.

    Raises:
        DataError: what is wrong, where, and what to do.

    Example:
        >>> data = load(limit=10_000, cache=False)
        >>> len(data.train), data.vocabulary.decode(data.train[-1:])[0] in data.vocabulary.tokens
        (10000, True)
    """
    if task not in TASKS:
        raise ValueError(f"task: expected one of {TASKS}, got {task!r}")
    check_vocabulary_options(vocab_size, min_count)
    _check_limit(limit)
    words: dict[str, Any] = {"vocab_size": vocab_size, "min_count": min_count, "limit": limit}
    if source is None:
        embedded = stdlib_text if task == "lm" else stdlib_labels
        return embedded(cache=cache, **words)
    if str(source).startswith(_hub.PREFIX):
        name = str(source)
        records = _hub.hub_records(name, limit)
        described = {"source": name, "format": "hub"}
        words |= {"text_field": _hub.parsed(name).column or text_field, "where": name}
        if task == "lm":
            return text_records(name, records, described, **words)
        return labelled_records(name, records, described, labels_field=labels_field, **words)
    path = existing(str(source))
    kind = _kind(path)
    if kind in _svmlight.SUFFIXES or kind in _mulan.SUFFIXES:
        if task == "lm":
            what = f"{kind[1:]} has rows with labels, not text"
            raise broken(what, "give task='multilabel'", path=path)
        if kind in _mulan.SUFFIXES:
            return _mulan.mulan_data(path, encoding=encoding, limit=limit, labels=labels)
        return _svmlight.svmlight_data(path, encoding=encoding, limit=limit)
    if kind not in _jsonl.SUFFIXES and task == "lm":
        return text_data(path, encoding=encoding, **words)
    words |= {"text_field": text_field, "where": str(path)}
    if kind in _jsonl.SUFFIXES:
        records = _jsonl.json_records(path, encoding)
        described = {"source": str(path), "format": "json lines", "encoding": encoding}
        if task == "lm":
            return text_records(path.name, records, described, **words)
    else:
        records = marked_records(path, encoding, text_field, labels_field)
        described = {"source": str(path), "format": "marked text", "encoding": encoding}
    return labelled_records(path.name, records, described, labels_field=labels_field, **words)


def _kind(path: Path) -> str:
    """The suffix of a file, or of files in a folder that have a format of their own."""
    if not path.is_dir():
        return plain_suffix(path)
    special = (*_mulan.SUFFIXES, *_svmlight.SUFFIXES, *_jsonl.SUFFIXES)
    files = [file for file in files_with(path, special) if file.parent == path]
    kinds = {plain_suffix(file) for file in files}
    if len(kinds) > 1:
        what = f"files of several formats, {' and '.join(sorted(kinds))}"
        raise broken(what, "name one of them", path=path)
    return kinds.pop() if kinds else ""


def _check_limit(limit: Any) -> None:
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise TypeError(f"limit: expected an int or None, got {type(limit).__name__}")
    if limit < 2:
        raise ValueError(f"limit: expected at least 2, got {limit}; leave it out for all")
