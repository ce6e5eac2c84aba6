"""The pages on several processes and on export run as they are."""

import doctest
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("page", ["distributed", "export"])
def test_the_examples_of_a_page(page):
    found = doctest.testfile(str(DOCS / f"{page}.md"), module_relative=False, encoding="utf-8")
    assert found.attempted > 5
    assert not found.failed
