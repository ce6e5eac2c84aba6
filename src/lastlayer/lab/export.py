"""A trained run as a folder that stands alone."""

import shutil
from pathlib import Path

from lastlayer.lab.errors import LabError
from lastlayer.lab.files import check_writable
from lastlayer.lab.trained import (
    CONFIG,
    HEAD,
    MODEL,
    TOKENIZER,
    VOCABULARY,
    run_folder,
    vocabulary_path,
)

_FEATURES, _RESULT = "features.json", "result.json"


def export(run: Path, to: Path) -> list[Path]:
    """Copies weights, head, settings, result and vocabulary; ``load_trained`` reads them back.

    Args:
        run: the folder of a finished run.
        to: a folder that is new or empty.

    Returns:
        The files.
    """
    folder = run_folder(run)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise LabError(f"--to: expected a folder that is new or empty, got '{to}'")
    vocabulary = vocabulary_path(folder)
    needed = [*(folder / name for name in (MODEL, CONFIG, _RESULT, HEAD)), vocabulary]
    missing = [str(each) for each in needed if not each.exists()]
    if missing:
        raise LabError(f"RUN: expected a whole run, got '{folder}' without {', '.join(missing)}")
    check_writable(to, option="--to")
    for name in (MODEL, CONFIG, _RESULT):
        shutil.copyfile(folder / name, to / name)
    shutil.copytree(folder / HEAD, to / HEAD)
    shutil.copyfile(vocabulary, to / VOCABULARY)
    for name in (_FEATURES, TOKENIZER):
        if (vocabulary.parent / name).is_file():
            shutil.copyfile(vocabulary.parent / name, to / name)
    return sorted(each for each in to.rglob("*") if each.is_file())
