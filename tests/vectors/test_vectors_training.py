"""Training takes the steps of gradient descent that the formulas say, wherever the text is cut."""

import numpy as np
import one_by_one
import pytest
import torch

from lastlayer import trees, vectors
from lastlayer.vectors import training

N_WORDS = 13


def text(seed, n=400, n_words=N_WORDS):
    """Sentences of 1 to 30 words, the lower ids more frequent; each word occurs."""
    draw = np.random.default_rng(seed)
    ids = np.minimum(draw.geometric(0.2, n) - 1, n_words - 1)
    ids[draw.random(n) < 0.07] = -1
    return np.concatenate([np.arange(n_words), [-1, -1], ids]).astype(np.int32)


def made_tree(kind):
    if kind == "binary":
        return trees.balanced(N_WORDS)
    if kind == "wide":
        return trees.huffman(np.arange(1, N_WORDS + 1), arity=4)
    # Classes with several leaves, one of them at the root, in wide and in binary nodes.
    codes = [[[(c >> 2) & 3, c & 3, 0]] for c in range(N_WORDS)]
    codes[2] += [[4], [3, 1]]
    codes[5] += [[c >> 2, c & 3, 1] for c in range(N_WORDS)]
    return trees.from_codes(codes)


CASES = [
    {"objective": "negative"},
    {"objective": "negative", "share": 0},
    {"objective": "negative", "share": 4, "n_negatives": 11, "power": 0.3},
    {"objective": "softmax"},
    {"objective": "softmax", "n_negatives": 20, "share": 2},
    {"objective": "hierarchical"},
    {"objective": "hierarchical", "tree": "binary"},
    {"objective": "hierarchical", "tree": "wide"},
    {"objective": "hierarchical", "tree": "overlapping"},
]


@pytest.mark.parametrize("model", ["skipgram", "cbow"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_every_window_is_a_step_along_the_gradient(case, model, seed):
    if model == "cbow" and case.get("share") == 0:
        pytest.skip("CBOW has no pairs")
    tokens = text(seed, 150)
    options = case | {"dim": 11, "window": 3, "model": model, "subsample": 0.05, "epochs": 2}
    options |= {"lr": 0.1, "seed": seed}
    if "tree" in case:
        options["tree"] = made_tree(case["tree"])
    found = vectors.train(tokens, threads=1, dtype=torch.float64, **options)
    x, y = one_by_one.train(tokens, N_WORDS, **options)
    assert (y != 0).any(1).float().mean() > 0.8
    torch.testing.assert_close(found.input, x, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.output, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 16, 100])
def test_float32_follows_float64(dim, seed):
    tokens = text(seed, 2000)
    options = {"dim": dim, "epochs": 1, "threads": 1, "seed": seed, "lr": 0.1}
    exact = vectors.train(tokens, dtype=torch.float64, **options)
    found = vectors.train(tokens, **options)
    # Rounding of 2^-24 adds up over about 2000 steps of size 0.1.
    torch.testing.assert_close(found.input.double(), exact.input, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(found.output.double(), exact.output, rtol=1e-4, atol=2e-6)


def test_vectors_are_the_same_however_the_text_is_cut(seed, monkeypatch):
    tokens = text(seed, 500)
    options = {"dim": 8, "window": 4, "threads": 1, "seed": seed, "subsample": 0.05}
    whole = vectors.train(tokens, dtype=torch.float64, **options)
    assert torch.equal(vectors.train(tokens, dtype=torch.float64, **options).input, whole.input)
    other = vectors.train(tokens, dtype=torch.float64, **options | {"seed": seed + 1})
    assert not torch.equal(other.input, whole.input)
    for size in (1, 7, 64):
        monkeypatch.setattr(training, "_JOB", size)
        cut = vectors.train(tokens, dtype=torch.float64, **options)
        assert torch.equal(cut.input, whole.input)
        assert torch.equal(cut.output, whole.output)


def test_no_sentence_is_cut(seed, monkeypatch):
    # A sentence longer than a job: a word at each border sees what is beyond it.
    monkeypatch.setattr(training, "_JOB", 10)
    tokens = text(seed, 300)
    tokens = np.append(tokens[tokens >= 0], -1).astype(np.int32)
    options = {"dim": 6, "window": 5, "subsample": 0.0, "epochs": 1, "lr": 0.3, "seed": seed}
    options |= {"model": "skipgram", "objective": "negative"}
    found = vectors.train(tokens, threads=1, dtype=torch.float64, **options)
    x, _ = one_by_one.train(tokens, N_WORDS, **options)
    torch.testing.assert_close(found.input, x, rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", ["negative", "softmax"])
def test_shared_negatives_leave_the_expected_gradient_unchanged(objective, seed):
    # From the same start, over many seeds of the draws.
    tokens = np.array([0, 1, 2, 3, -1, 4, 5], np.int32)
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    moved = {}
    for share in (0, 1, 8):
        steps = []
        for draw in range(600):
            made_x, made_y = x.clone(), y.clone()
            plan = training._plan(
                np.ones(10, np.int64), None, objective, seed=seed * 1000 + draw, window=3,
                cbow=False, n_negatives=3, power=0.75, share=share, subsample=0.0,
            )[0]  # fmt: skip
            step_once(tokens, plan, made_x, made_y)
            steps.append(torch.cat([(made_x - x).flatten(), (made_y - y).flatten()]))
        moved[share] = torch.stack(steps) / 1e-6
    assert not torch.equal(moved[0], moved[1])
    for share in (1, 8):
        difference = moved[share].mean(0) - moved[0].mean(0)
        error = (moved[share].var(0) / 600 + moved[0].var(0) / 600).sqrt()
        # 80 numbers: 4.5 deviations are exceeded by chance once in 1800 runs.
        assert (difference.abs() <= 4.5 * error + 1e-5).all()


def step_once(tokens, plan, x, y):
    """One pass at a learning rate so small that steps add up."""
    from lastlayer.vectors import _windows

    wide = [torch.zeros(len(each), 8, dtype=torch.float64) for each in (x, y)]
    for padded, each in zip(wide, (x, y), strict=True):
        padded[:, : each.shape[1]] = each
    copies = torch.zeros(2 * plan.window + 1, 8, dtype=torch.float64).numpy()
    text = tokens.view()
    text.flags.writeable = False
    arrays = wide[0].numpy(), wide[1].numpy(), copies
    _windows.train_span(text, 0, len(text), 0, 1e-6, 0.0, *arrays, plan)
    for padded, each in zip(wide, (x, y), strict=True):
        each.copy_(padded[:, : each.shape[1]])


def test_threads_learn_what_one_learns(seed):
    # Words of a topic occur together: their vectors are alike, with any number of threads.
    draw = np.random.default_rng(seed)
    topics = draw.integers(0, 4, 3000)
    ids = topics[:, None] * 10 + draw.integers(0, 10, (3000, 8))
    tokens = np.hstack([ids, np.full((3000, 1), -1)]).ravel()
    for threads in (1, 3):
        found = vectors.train(torch.from_numpy(tokens), dim=16, threads=threads, seed=seed)
        similar = [
            [int(word) // 10 for word, _ in found.most_similar(str(i), 9)] for i in range(40)
        ]
        assert all(each == [i // 10] * 9 for i, each in enumerate(similar))


def test_a_file_is_read_in_place(tmp_path, seed):
    tokens = text(seed)
    np.save(tmp_path / "text.npy", tokens)
    mapped = np.load(tmp_path / "text.npy", mmap_mode="r")
    options = {"dim": 5, "threads": 1, "epochs": 1}
    assert torch.equal(
        vectors.train(mapped, **options).input, vectors.train(tokens, **options).input
    )


def test_progress_is_shown_when_asked_for(capsys, seed):
    vectors.train(text(seed), dim=4, threads=1, progress=True)
    assert "word vectors" in capsys.readouterr().err
    vectors.train(text(seed), dim=4, threads=1)
    assert capsys.readouterr().err == ""
