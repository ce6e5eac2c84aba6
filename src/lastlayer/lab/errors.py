"""What a person did wrong: told in one message, before any work, with exit code 2."""


class LabError(ValueError):
    """A mistake in an option, a spec or a folder. The message says what was expected and came."""


class SpecError(LabError):
    """A spec of a head that cannot be built."""
