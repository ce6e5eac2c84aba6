"""Examples in the documentation run, and print what is shown."""

import doctest
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if ">>> " in page.read_text(encoding="utf-8")]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_print_what_is_shown(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        # Trainers warn of few workers and the like.
        warnings.simplefilter("ignore")
        found = doctest.testfile(
            str(page), module_relative=False, optionflags=FLAGS, encoding="utf-8"
        )
    assert found.attempted > 0
    assert found.failed == 0
