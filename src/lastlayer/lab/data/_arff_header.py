"""What an ARFF file says of its columns."""

import re
from typing import NamedTuple

from lastlayer.lab.data.errors import DataError

_ATTRIBUTE = re.compile(
    r"""@attribute\s+(?P<name>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s{]+)\s*(?P<kind>.+)""",
    re.IGNORECASE,
)
_NUMBERS = {"numeric", "real", "integer"}
_OTHERS = {"string", "date", "relational"}
POSITIVE = {"1", "1.0", "yes", "true", "y", "t"}
NEGATIVE = {"0", "0.0", "no", "false", "n", "f"}


class Attribute(NamedTuple):
    """A column: its name, and its values where they are a list, None for numbers."""

    name: str
    values: tuple[str, ...] | None
    used: bool = True

    @property
    def is_binary(self) -> bool:
        """Whether its values are a yes and a no."""
        words = {value.lower() for value in self.values or ()}
        return bool(words) and words <= POSITIVE | NEGATIVE and len(words) <= 2


def attribute(line: str) -> Attribute:
    """One line of the header."""
    match = _ATTRIBUTE.fullmatch(line.strip())
    if match is None:
        raise DataError("malformed; expected @attribute name type")
    name, kind = unquoted(match["name"]), match["kind"].strip()
    if kind.startswith("{"):
        if not kind.endswith("}"):
            raise DataError("malformed; expected a list of values that ends with }")
        return Attribute(name, tuple(split_values(kind[1:-1])))
    word = kind.split()[0].lower()
    if word in _NUMBERS:
        return Attribute(name, None)
    if word in _OTHERS:
        return Attribute(name, None, used=False)
    raise DataError(
        f"unknown type {kind!r}; expected numeric, real, integer, string, date or {{values}}"
    )


def split_values(text: str, *, keep_quotes: bool = False) -> list[str]:
    """Values between commas; those in quotes may hold commas."""
    if "'" not in text and '"' not in text and "\\" not in text:
        return [value.strip() for value in text.split(",")]
    plain = str.strip if keep_quotes else unquoted
    values, current, quote, escaped = [], "", "", False
    for c in text:
        if escaped or c == "\\":
            current += c
            escaped = not escaped
        elif quote or (c in "'\"" and (keep_quotes or not current.strip())):
            quote = "" if c == quote else quote or c
            current += c
        elif c == ",":
            values.append(plain(current))
            current = ""
        else:
            current += c
    return [*values, plain(current)]


def unquoted(text: str) -> str:
    """Without quotes around it and backslashes in it."""
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        text = text[1:-1]
    return unescaped(text)


def unescaped(text: str) -> str:
    """Without backslashes, but with what follows them."""
    return re.sub(r"\\(.)", r"\1", text) if "\\" in text else text
