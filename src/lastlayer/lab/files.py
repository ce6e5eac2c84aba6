"""Files that are whole or not there: a kill at any moment leaves the old one or the new one."""

import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import IO, Any

from lastlayer.lab.errors import LabError

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"


def finite(value: Any) -> Any:
    """The same with None for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


def write_text(path: Path, text: str) -> None:
    """Beside the place first, on the disk, and then into it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Infinite numbers and NaN become null."""
    made = json.dumps(finite(value), indent=2, allow_nan=False)
    write_text(path, made + "\n")


def read_json(path: Path) -> Any:
    """What :func:`write_json` wrote, or a refusal that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(f"{path}: expected a file, got none there") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LabError(f"{path}: expected JSON that can be read, got {error}") from error


class Lines:
    """A file of JSON lines that only grows; each line is there at once."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Goes on after the first ``keep`` bytes; what comes later is cut off."""
        self._file = path.open("a+b")
        self._file.truncate(keep)
        self._file.seek(0, os.SEEK_END)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def append(self, record: dict[str, Any]) -> None:
        """One line."""
        made = json.dumps(finite(record), allow_nan=False)
        self._file.write(made.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()


class Lock:
    """One comparison at a time in a folder.

    The system lets go of it when the process dies, however it does: the file that is left is taken
    over by the next one. Without such locks, as on Windows, there is none.

    Raises:
        LabError: another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: IO[str] | None = None
        while sys.platform != "win32" and self._file is None:
            file = self._path.open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another"
                file.close()
                raise LabError(
                    f"--out: expected a folder that no other process works on, got '{folder}', on "
                    f"which process {holder} does; wait for it, or choose another --out"
                ) from None
            except OSError:
                # Some network disks have no locks.
                file.close()
                return
            # Who had it before may have removed the file since it was opened.
            if self._path.exists() and self._path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                self._file = file
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            else:
                file.close()

    def release(self) -> None:
        """The next one may have it."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def check_writable(folder: Path, *, option: str = "--out") -> None:
    """Makes the folder and writes into it once, so that a run does not find out at its end."""
    probe = folder / ".probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"lastlayer")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise LabError(
            f"{option}: expected a folder that can be written, got '{folder}': {reason}"
        ) from error


def check_space(folder: Path, needed: int) -> None:
    """Whether the disk has so many bytes left."""
    _, _, free = shutil.disk_usage(folder)
    if free < needed:
        raise LabError(
            f"--out: expected {_size(needed)} of free disk for the models and checkpoints of all "
            f"runs, got {_size(free)} at '{folder}'; use fewer heads or seeds, or another disk"
        )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
