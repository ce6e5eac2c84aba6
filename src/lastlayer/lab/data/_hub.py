"""Sets of the Hugging Face hub, or of a folder like one, through the datasets package."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lastlayer.lab.data._assemble import enough
from lastlayer.lab.data._layout import part_named
from lastlayer.lab.data._records import Record
from lastlayer.lab.data.errors import DataError, broken

PREFIX = "hf:"
# Seconds until the hub counts as out of reach. The package itself tries for half a minute.
_PATIENCE = 5
# What `save_to_disk` leaves in a folder.
_SAVED = ("dataset_dict.json", "state.json")


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
    splits = _loaded(source, parsed(source))
    # Sets have splits such as "unsupervised" beside the three.
    if not any(map(part_named, splits)):
        what = f"no split for training; it has {', '.join(map(repr, splits)) or 'none'}"
        raise broken(what, "give a set with a split 'train'", path=source)
    for name, rows in splits.items():
        part = part_named(name)
        if part is not None:
            for number, fields in enumerate(_read(source, rows, enough(part, limit)), 1):
                yield Record(part, f"{source} ({name})", number, _plain(rows, fields))


def _read(source: str, rows: Any, most: int | None) -> Iterator[dict[str, Any]]:
    try:
        yield from islice(rows, most)
    except Exception as error:  # a connection that breaks, a file of the set that is damaged
        raise _failed(source, error) from error


def _failed(source: str, error: Exception) -> DataError:
    # The second line of a message names the configs; what follows are examples in Python.
    told = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    remedy = "check the name, its config and the connection"
    return broken(f"{type(error).__name__}: {told.rstrip('.')}", remedy, path=source)


def _loaded(source: str, wanted: HubName) -> Mapping[str, Any]:
    package = _package(source)
    folder = Path(wanted.name).expanduser()
    if wanted.name.startswith((".", "/", "~")) and not folder.exists():
        raise broken("no such file or folder", "check the spelling", path=source)
    if not folder.exists():
        _check_connection(source, package)
    try:
        if any((folder / name).is_file() for name in _SAVED):
            made = package.load_from_disk(str(folder))
        else:
            name = str(folder) if folder.exists() else wanted.name
            made = package.load_dataset(name, wanted.config, streaming=True)
    except Exception as error:  # whatever the hub, the network and the set raise
        raise _failed(source, error) from error
    return made if isinstance(made, Mapping) else {"train": made}


def _package(source: str) -> Any:
    try:
        return import_module("datasets")
    except ImportError:
        what = "needs the datasets package, which is not installed"
        raise broken(what, 'pip install "lastlayer[hub]"', path=source) from None


def _check_connection(source: str, package: Any) -> None:
    """One request, through the same proxies as those that follow."""
    if package.config.HF_HUB_OFFLINE:
        return
    address = package.config.HF_ENDPOINT
    try:
        import_module("huggingface_hub.utils").get_session().head(address, timeout=_PATIENCE)
    except Exception as error:  # each version of the hub's package has its own client
        what = f"no such folder, and {address} is out of reach ({error})"
        raise broken(what, "check the name and the connection", path=source) from error


def _plain(rows: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """With the names of labels that the set keeps as numbers, where it has names."""
    features = getattr(rows, "features", None) or {}
    return {name: _named(features.get(name), value) for name, value in fields.items()}


def _named(feature: Any, value: Any) -> Any:
    inner = getattr(feature, "feature", feature)
    name_of = getattr(inner, "int2str", None)
    if name_of is None or value is None:
        return value
    # Test rows whose labels are kept secret have -1.
    known = [each for each in (value if isinstance(value, list) else [value]) if each != -1]
    return [name_of(each) for each in known]
