"""Values of a spec, read by what the constructor says they are."""

import types
from collections.abc import Sequence
from typing import Any, Literal, Union, get_args, get_origin

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class Choice(tuple[str, ...]):
    """One of these words."""


class Pairs:
    """``2000x64,8000x16``: pairs of whole numbers."""


def parse_value(text: str, kind: Any) -> Any:
    """The value that ``text`` writes, or a ValueError that says what was expected."""
    for each in _kinds(kind):
        try:
            return _as(text, each)
        except ValueError:
            continue
    raise ValueError(f"expected {type_words(kind)}, got {text!r}")


def type_words(kind: Any) -> str:
    """What a value is, for people."""
    return "|".join(dict.fromkeys(_word(each) for each in _kinds(kind))) or "value"


def _kinds(kind: Any) -> list[Any]:
    """The kinds of a union, the narrowest first; tensors and other objects cannot be written."""
    if isinstance(kind, Choice) or kind is Pairs:
        return [kind]
    if get_origin(kind) in (Union, types.UnionType):
        parts = [part for each in get_args(kind) for part in _kinds(each)]
    elif get_origin(kind) is Literal:
        parts = [Choice(map(str, get_args(kind)))]
    elif get_origin(kind) in (list, tuple, Sequence):
        nested = get_origin(get_args(kind)[0]) in (list, tuple, Sequence)
        parts = [Pairs] if nested else [types.GenericAlias(list, get_args(kind)[:1])]
    else:
        parts = [kind]
    order = [type(None), bool, int, float]
    known = [each for each in parts if each in (*order, str, Pairs) or get_origin(each) is list]
    known += [each for each in parts if isinstance(each, Choice)]
    plain = known or [bool, int, float, str]
    return sorted(plain, key=lambda each: order.index(each) if each in order else len(order))


def _as(text: str, kind: Any) -> Any:
    if isinstance(kind, Choice):
        if text in kind:
            return text
        raise ValueError
    if kind is type(None):
        if text.lower() == "none":
            return None
        raise ValueError
    if kind is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError
    if kind is Pairs:
        return [_pair(each) for each in text.split(",")]
    if get_origin(kind) is list:
        return [] if not text else [_as(each, get_args(kind)[0]) for each in text.split(",")]
    if kind is int and "_" not in text:
        return int(text)
    if kind is float:
        return float(text)
    if kind is str and text:
        return text
    raise ValueError


def _pair(text: str) -> list[int]:
    first, cross, second = text.partition("x")
    if not cross:
        raise ValueError
    return [int(first), int(second)]


def _word(kind: Any) -> str:
    if isinstance(kind, Choice):
        return "|".join(kind)
    if get_origin(kind) is list:
        inner = _word(get_args(kind)[0])
        return f"{inner},{inner},…"
    names = {type(None): "none", bool: "true|false", Pairs: "INTxINT,…", str: "text"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))
