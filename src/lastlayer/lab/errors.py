"""User errors: one message before any work starts, and exit code 2."""

from importlib.util import find_spec


class LabError(ValueError):
    """An invalid option, spec or folder. The message says what was expected and what was given."""


class SpecError(LabError):
    """A spec of a head that cannot be built."""


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require(*modules: str) -> None:
    """Raise a LabError if modules of the extra ``lab`` are not installed."""
    if missing := [name for name in modules if find_spec(name) is None]:
        listed = ", ".join(missing)
        raise LabError(f'needs {listed}, not installed; pip install "lastlayer[lab]"')
