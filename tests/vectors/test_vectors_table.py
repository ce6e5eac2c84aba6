"""Vectors as a table: neighbours, analogies, and files."""

import re

import numpy as np
import pytest
import torch

from lastlayer import vectors

WORDS = ["the", "cat", "日本", "naïve", "a_b", "7"]


@pytest.fixture
def made(seed):
    generator = torch.Generator().manual_seed(seed)
    return vectors.Vectors(WORDS, torch.randn(len(WORDS), 5, generator=generator))


def test_neighbours_are_those_of_a_dense_sort(made):
    unit = made.input.double() / made.input.double().norm(dim=1, keepdim=True)
    similarity = (unit @ unit[1]).tolist()
    expected = sorted((s, w) for s, w in zip(similarity, WORDS, strict=True) if w != "cat")[::-1]
    found = made.most_similar("cat", 3)
    assert [word for word, _ in found] == [word for _, word in expected[:3]]
    assert [s for _, s in found] == pytest.approx([s for s, _ in expected[:3]], abs=1e-6)
    assert len(made.most_similar("cat", 100)) == len(WORDS) - 1
    assert made.most_similar(3 * made["cat"], 1)[0] == ("cat", pytest.approx(1.0))


def test_analogies_leave_the_question_out(made):
    unit = made.input / made.input.norm(dim=1, keepdim=True)
    query = unit[1] - unit[0] + unit[2]
    best = max((3, 4, 5), key=lambda i: (unit[i] @ query).item())
    assert made.analogy("the", "cat", "日本")[0][0] == WORDS[best]


def test_lookups(made):
    assert len(made) == 6
    assert "cat" in made
    assert "dog" not in made
    assert torch.equal(made["cat"], made.input[1])
    with pytest.raises(KeyError, match="word: expected one of the 6 words, got 'dog'"):
        made.most_similar("dog")
    with pytest.raises(ValueError, match="k: expected at least 1"):
        made.most_similar("cat", 0)
    with pytest.raises(ValueError, match=re.escape("word: expected shape (5,), got (4,)")):
        made.most_similar(torch.ones(4))


@pytest.mark.parametrize("binary", [False, True])
def test_files_keep_every_bit(made, tmp_path, binary):
    made.save(tmp_path / "v", binary=binary)
    found = vectors.Vectors.load(tmp_path / "v", binary=binary)
    assert found.words == tuple(WORDS)
    assert torch.equal(found.input, made.input)
    assert found.output is None


@pytest.mark.parametrize("binary", [False, True])
def test_gensim_reads_and_writes_the_same(made, tmp_path, binary):
    gensim = pytest.importorskip("gensim.models", reason="gensim is not installed")
    made.save(tmp_path / "v", binary=binary)
    theirs = gensim.KeyedVectors.load_word2vec_format(str(tmp_path / "v"), binary=binary)
    assert theirs.index_to_key == WORDS
    assert np.array_equal(theirs.vectors, made.input.numpy())
    theirs.save_word2vec_format(str(tmp_path / "w"), binary=binary)
    found = vectors.Vectors.load(tmp_path / "w", binary=binary)
    assert found.words == tuple(WORDS)
    assert torch.equal(found.input, made.input)


def test_gensim_and_back(made):
    pytest.importorskip("gensim.models", reason="gensim is not installed")
    keyed = made.to_gensim()
    assert keyed.most_similar("cat", topn=2) == [
        (word, pytest.approx(score, abs=1e-6)) for word, score in made.most_similar("cat", 2)
    ]
    back = vectors.Vectors.from_gensim(keyed)
    assert back.words == made.words
    assert torch.equal(back.input, made.input)


def test_what_is_not_of_gensim():
    with pytest.raises(TypeError, match=r"keyed_vectors: expected gensim.models.KeyedVectors"):
        vectors.Vectors.from_gensim({"a": [1.0]})


@pytest.mark.parametrize("binary", [False, True])
def test_truncated_files(made, tmp_path, binary):
    made.save(tmp_path / "v", binary=binary)
    whole = (tmp_path / "v").read_bytes()
    last = whole.rindex(b"\n7 ") + 1
    for end in range(0, len(whole) - 2, 5):
        (tmp_path / "w").write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"path: expected .*, got "):
            vectors.Vectors.load(tmp_path / "w", binary=binary)
    (tmp_path / "w").write_bytes(whole[:last])
    with pytest.raises(ValueError, match=r"expected 6 words, got 5 in .* which is truncated"):
        vectors.Vectors.load(tmp_path / "w", binary=binary)
    (tmp_path / "w").write_bytes(whole + b"more 1 2 3 4 5\n")
    with pytest.raises(ValueError, match="expected 6 words, got more"):
        vectors.Vectors.load(tmp_path / "w", binary=binary)


def test_paths_and_words(made, tmp_path):
    with pytest.raises(FileNotFoundError, match="path: expected a file of word vectors"):
        vectors.Vectors.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="path: expected a file in an existing folder"):
        made.save(tmp_path / "absent" / "v")
    with pytest.raises(ValueError, match=r"words: expected words without whitespace.* 'New York'"):
        vectors.Vectors(["New York"], torch.ones(1, 2)).save(tmp_path / "v")
    assert not (tmp_path / "v").exists()
    with pytest.raises(ValueError, match="words: expected one word per row, 1, got 2"):
        vectors.Vectors(["a", "b"], torch.ones(1, 2))
    with pytest.raises(
        ValueError, match=re.escape("output: expected shape (n_rows, 2), got (1, 3)")
    ):
        vectors.Vectors(["a"], torch.ones(1, 2), torch.ones(1, 3))
    with pytest.raises(ValueError, match="input: expected a floating"):
        vectors.Vectors(["a"], torch.ones(1, 2, dtype=torch.int64))
