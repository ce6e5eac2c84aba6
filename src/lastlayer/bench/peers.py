"""Packages that ours is compared with: imported at first use, never required."""

import importlib
from typing import Any

INSTALL_COMMAND = 'pip install "lastlayer[peers]"'


class PeerMissing(ImportError):  # noqa: N818 — absence is an answer here, not an error
    """A peer is not installed."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(reason)
        self.source = source


def attribute(source: str, module: str, name: str, install: str = INSTALL_COMMAND) -> Any:
    """A name from a peer's module.

    Args:
        source: the distribution.
        module: where it is.
        name: what is wanted.
        install: the command that installs the peer.

    Raises:
        PeerMissing: the peer is not installed.
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        # Something else missing below the peer is a fault of its installation, and is told as such.
        if error.name == package:
            raise PeerMissing(source, f"not installed: {install}") from error
        raise
    return getattr(importlib.import_module(module), name)
