"""Problems of tests are small: they take the ways of large ones unless a test says otherwise.

tests/heads/test_few_scores.py holds both ways equal.
"""

import pytest

from lastlayer.fused import labels, scores, sparse


@pytest.fixture(autouse=True)
def _no_problem_is_small(monkeypatch):
    monkeypatch.setattr(sparse, "_SMALL", {"cpu": 0, "cuda": 0})
    monkeypatch.setattr(labels, "_ONE_SLAB_BYTES", 0)
    monkeypatch.setattr(scores, "_ONE_PRODUCT_SCORES", -1)
