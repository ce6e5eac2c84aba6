"""What commands say: mistakes of the user's, and tables."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


@contextmanager
def refusals() -> Iterator[None]:
    """A mistake of the user's is one message and exit code 2, without a traceback."""
    from lastlayer.lab.data import DataError
    from lastlayer.lab.errors import LabError

    try:
        yield
    except (LabError, DataError) as error:
        typer.echo(f"lastlayer: {as_flags(str(error))}", err=True)
        raise typer.Exit(2) from None


def as_flags(text: str) -> str:
    """Arguments of :func:`lastlayer.lab.data.load` as the options that they are here."""
    names = "task|encoding|vocab_size|min_count|limit|text|label|features|tokenizer"

    def flag(found: re.Match[str]) -> str:
        return " ".join([f"--{found[1].replace('_', '-')}", *found.groups()[1:]])

    # The name of a file may be one of these words: only what is said of an option is changed.
    text = re.sub(rf"\b({names})='?((?<=')[^']*)'?", flag, text)
    return re.sub(rf"(?<=another |; lower )({names})\b", flag, text)


def console() -> Any:
    """Where tables go."""
    from rich.console import Console

    return Console()
