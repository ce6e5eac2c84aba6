"""Sets of the Hugging Face hub, through the datasets package."""

from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

from lastlayer.lab.data._assemble import enough
from lastlayer.lab.data._layout import part_named
from lastlayer.lab.data._records import Record
from lastlayer.lab.data.errors import DataError, broken

PREFIX = "hf:"


class HubName(NamedTuple):
    """``hf:name``, ``hf:name:config``, ``hf:name:config:column`` or ``hf:name::column``."""

    name: str
    config: str | None
    column: str | None


def parsed(source: str) -> HubName:
    """The parts of such a source."""
    name, *rest = source.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise DataError(
            f"{source}: expected hf:name, hf:name:config or hf:name:config:column; "
            "leave the config empty to name a column alone"
        )
    config, column = [*rest, "", ""][:2]
    return HubName(name, config or None, column or None)


def hub_records(source: str, limit: int | None) -> Iterator[Record]:
    """Records as they stream in; no more than a limit of tokens or rows can need."""
    wanted = parsed(source)
    for name, rows in _loaded(source, wanted).items():
        part = part_named(name)
        # Sets have splits such as "unsupervised" beside the three.
        if part is not None:
            for number, fields in enumerate(_read(source, rows, enough(part, limit)), 1):
                yield Record(part, f"{source} ({name})", number, _plain(rows, fields))


def _read(source: str, rows: Any, most: int | None) -> Iterator[dict[str, Any]]:
    try:
        yield from islice(rows, most)
    except Exception as error:  # a connection that breaks, a file of the set that is damaged
        raise _failed(source, error) from error


def _failed(source: str, error: Exception) -> DataError:
    first = str(error).strip().partition("\n")[0]
    remedy = "check the name, its config and the connection"
    return broken(f"{type(error).__name__}: {first}", remedy, path=source)


def _loaded(source: str, wanted: HubName) -> Any:
    try:
        package = import_module("datasets")
    except ImportError:
        what = "needs the datasets package, which is not installed"
        raise broken(what, 'pip install "lastlayer[hub]"', path=source) from None
    try:
        return package.load_dataset(wanted.name, wanted.config, streaming=True)
    except Exception as error:  # whatever the hub, the network and the set raise
        raise _failed(source, error) from error


def _plain(rows: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """With the names of labels that the set keeps as numbers, where it has names."""
    features = getattr(rows, "features", None) or {}
    return {name: _named(features.get(name), value) for name, value in fields.items()}


def _named(feature: Any, value: Any) -> Any:
    inner = getattr(feature, "feature", feature)
    name_of = getattr(inner, "int2str", None)
    if name_of is None:
        return value
    return [name_of(each) for each in value] if isinstance(value, list) else name_of(value)
