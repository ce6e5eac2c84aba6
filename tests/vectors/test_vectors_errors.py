"""What a user may get wrong, and what the message says."""

import numpy as np
import pytest
import torch

from lastlayer import trees, vectors

TEXT = np.array([0, 1, 2, -1, 2, 1], np.int32)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"dim": 0}, ValueError, "dim: expected at least 1, got 0"),
        ({"window": 0}, ValueError, "window: expected at least 1, got 0"),
        ({"threads": 0}, ValueError, "threads: expected at least 1, got 0"),
        ({"epochs": 0}, ValueError, "epochs: expected at least 1, got 0"),
        ({"lr": 0.0}, ValueError, "lr: expected a finite number above 0, got 0.0"),
        ({"subsample": -1.0}, ValueError, "subsample: expected a finite number of at least 0"),
        ({"n_negatives": 0}, ValueError, "n_negatives: expected at least 1, got 0"),
        ({"share": -1}, ValueError, "share: expected at least 0, got -1"),
        ({"model": "glove"}, ValueError, "model: expected one of"),
        ({"objective": "nce"}, ValueError, "objective: expected one of"),
        ({"dtype": torch.float16}, ValueError, "dtype: expected torch.float32 or torch.float64"),
        ({"words": ["a", "b"]}, ValueError, "tokens: expected ids below 2, .* got 2 at position 2"),
        ({"words": ["a", "b", "a"]}, ValueError, "words: expected unique words, got 'a' twice"),
        ({"words": ["a", "b", 3]}, TypeError, "words: expected words of type str, got int"),
        ({"tree": trees.balanced(3)}, ValueError, "tree: expected None for objective='negative'"),
        (
            {"objective": "hierarchical", "tree": trees.balanced(5)},
            ValueError,
            "tree: expected 3 classes, one per word, got 5",
        ),
        ({"objective": "hierarchical", "tree": "huffman"}, TypeError, "tree: expected a lastlayer"),
        ({"objective": "hierarchical", "share": 2}, ValueError, "share: expected None for object"),
        ({"model": "cbow", "share": 0}, ValueError, "share: expected at least 1 for model='cbow'"),
        (
            {"lr": 1e30, "subsample": 0.0},
            FloatingPointError,
            "lr: expected finite vectors",
        ),
    ],
)
def test_options(options, kind, message):
    with pytest.raises(kind, match=message):
        vectors.train(TEXT, **{"epochs": 20, "threads": 1} | options)


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (np.array([0.0, 1.0]), TypeError, "tokens: expected integers.* got float64"),
        (np.array([[0, 1]]), ValueError, r"tokens: expected one dimension, got shape \(1, 2\)"),
        (np.array([], np.int64), ValueError, "tokens: expected at least 2 different words, got 0"),
        (np.array([3, 3, 3]), ValueError, "tokens: expected at least 2 different words, got 1"),
        (np.array([0, -1, 1]), ValueError, "tokens: expected a sentence of at least 2 words"),
        (np.array([0, 2**40]), ValueError, "tokens: expected ids below 2147483647"),
        ("a b a b", TypeError, "tokens: expected an integer array or an iterable of sentences"),
        (7, TypeError, "tokens: expected an integer array or an iterable of sentences, got int"),
        (["a b", "b a"], TypeError, r"got str at position 0; use sentence.split\(\)"),
        ([[1, 2], [2, 1]], TypeError, "expected words of type str, got int 1 in sentence 0"),
        ([["a", "b"]], ValueError, "expected at least 2 words that occur min_count=5 times"),
    ],
)
def test_tokens(tokens, kind, message):
    with pytest.raises(kind, match=message):
        vectors.train(tokens)


def test_words_belong_to_ids():
    with pytest.raises(ValueError, match="words: expected None with sentences"):
        vectors.train([["a", "b"]] * 9, words=["a", "b"])


def test_ids_must_fit_also_behind_the_first_part(monkeypatch):
    from lastlayer.vectors import training

    monkeypatch.setattr(training, "_PART", 4)
    with pytest.raises(ValueError, match="got 9 at position 6"):
        vectors.train(np.array([0, 1, 2, -1, 1, 0, 9, 1]), words=["a", "b", "c"])
    # The only pair lies across the border of two parts.
    vectors.train(np.array([0, -1, -1, 0, 1, -1]), dim=2, threads=1)


def test_encode():
    with pytest.raises(ValueError, match="min_count: expected at least 1"):
        vectors.encode([["a"]], min_count=0)
    with pytest.raises(TypeError, match=r"sentences: expected an iterable of sentences.* got str"):
        vectors.encode("a b")
    made = vectors.encode(iter([["b", "a", "x"], [], ["a"], ["b", "a"]]), min_count=2)
    assert made.words == ("a", "b")
    assert made.tokens.tolist() == [1, 0, -1, -1, 0, -1, 1, 0, -1]
    assert made.tokens.dtype == np.int32
