"""A few words of a person's, cut into tokens as data of a format is."""

import io
import tokenize
from collections.abc import Iterator
from contextlib import suppress

from lastlayer.lab.data._stdlib import NEWLINE, source_tokens
from lastlayer.lab.data.errors import broken
from lastlayer.lab.data.vocabulary import END

LINE_ENDS = (END, NEWLINE)
"""Tokens that stand for the end of a line."""
# What tokenize says of source that is not at its end yet, as a prompt need not be.
_GOES_ON = "EOF in multi-line"


def cut(text: str, format_: str) -> list[str]:
    r"""The tokens of a text; a line ends where it says so, and not at its end.

    Args:
        text: what a person wrote.
        format_: of the data, as its description has it.

    Example:
        >>> cut("import os\nos.path", "python source")
        ['import', 'os', '<newline>', 'os', '.', 'path']
        >>> cut("one day\nthe", "text")
        ['one', 'day', '<eos>', 'the']
    """
    if format_ != "python source":
        return text.replace("\n", f" {END} ").split()
    made: list[str] = []
    try:
        made.extend(_checked(text))
    except (tokenize.TokenError, SyntaxError) as error:
        if not str(error.args[0]).startswith(_GOES_ON):
            what = f"--prompt: expected Python source, got {text!r}: {error.args[0]}"
            raise broken(what, "the run was trained on Python source") from None
    # Tokenize ends the last line where the source does not.
    return made[:-1] if made[-1:] == [NEWLINE] and not text.endswith("\n") else made


def _checked(text: str) -> Iterator[str]:
    """Tokens of source; Python 3.11 tells what is none by its kind, later ones by an error."""
    kinds = (each.type for each in tokenize.generate_tokens(io.StringIO(text).readline))
    with suppress(tokenize.TokenError):
        if tokenize.ERRORTOKEN in kinds:
            raise SyntaxError("it has something that is no token, such as half a string")
    yield from source_tokens(text)
