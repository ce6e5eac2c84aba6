"""A folder of the user's for what takes long to make and is made again when it is lost."""

import os
import sys
from pathlib import Path

VARIABLE = "LASTLAYER_CACHE"


def cache_folder() -> Path:
    """``$LASTLAYER_CACHE``, or ``lastlayer`` where the system keeps such things; not created."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lastlayer"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "lastlayer"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lastlayer"
