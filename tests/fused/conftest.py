"""Problems of tests are small: they take the ways of large ones unless a test says otherwise."""

import pytest

from lastlayer.fused import labels, sparse


@pytest.fixture(autouse=True)
def _no_problem_is_small(monkeypatch):
    monkeypatch.setattr(sparse, "_SMALL", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(labels, "_SMALL", 0)
