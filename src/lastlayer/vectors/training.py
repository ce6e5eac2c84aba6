"""Training of word vectors: checks of arguments, the input of the compiled loops, threads."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._checks import (
    as_array,
    check_choice,
    check_int,
    check_not_negative,
    check_positive,
    check_seed,
)
from lastlayer.samplers import Unigram
from lastlayer.trees import Tree, huffman
from lastlayer.vectors.corpus import encode
from lastlayer.vectors.table import Vectors, check_words

MODELS, OBJECTIVES = ("skipgram", "cbow"), ("negative", "hierarchical", "softmax")
# Tokens per job: about 20 ms, after which a thread checks whether to stop.
_JOB = 1 << 15
# The final learning rate relative to the first: 0.0001 for 0.025, as in word2vec.
_LAST_RATE = 0.004
_RATE = {"skipgram": 0.025, "cbow": 0.075}
# Tokens counted per step; of a memory-mapped file no more than these are in memory.
_PART = 1 << 22
_SHOWN_AFTER, _REDRAWN = 2.0, 0.2


def train(
    tokens: Any,
    *,
    words: Sequence[str] | None = None,
    dim: int = 100,
    window: int = 5,
    model: str = "skipgram",
    objective: str = "negative",
    n_negatives: int | None = None,
    power: float | None = None,
    share: int | None = None,
    tree: Tree | None = None,
    subsample: float = 1e-3,
    epochs: int = 5,
    lr: float | None = None,
    threads: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    progress: bool | None = None,
) -> Vectors:
    """Trains word vectors on a text (word2vec), by skip-gram or CBOW, on the CPU.

    Around each centre word is a window of b words on either side, b drawn from 1 to ``window``.
    Skip-gram predicts the centre word from each word around it, CBOW from the mean of their
    vectors. Let x be that vector, and y the output vectors. The loss of predicting word w is

    - ``"negative"``: −log σ(x·y_w) − Σ log σ(−x·y_d) over ``n_negatives`` drawn words d;
    - ``"softmax"``: the sampled softmax, log(e^(x·y_w) + Σ e^(x·y_d) / w_d) − x·y_w, with the
      weights of :class:`lastlayer.heads.SampledSoftmax`;
    - ``"hierarchical"``: −log p(w), with one decision at each node of the path to w in a tree.

    Each window is one step of gradient descent. Draws equal to w are ignored.

    With one thread the result is the same in every run on a machine. Several threads update the
    same vectors without locks (Hogwild): about as good, but different in each run.

    Args:
        tokens: word ids as one integer array or tensor, in which a negative number ends a sentence;
            int32, including a memory-mapped file, is read in place. Or an iterable of sentences,
            each an iterable of words, which are passed to :func:`encode`.
        words: the word of each id; by default the ids as text. Not with sentences.
        dim: size of a vector.
        window: maximum number of words on either side. Long sentences are not cut.
        model: "skipgram" or "cbow".
        objective: "negative", "softmax" or "hierarchical".
        n_negatives: negatives drawn per window, by default 5. Not for "hierarchical".
        power: negatives are drawn in proportion to ``counts ** power``; by default 0.75. Not for
            "hierarchical".
        share: the number of neighbouring tokens whose windows share their negatives. With 1, the
            default, all words of a window share them; 0 draws negatives for each pair of words,
            which is 2 to 3 times slower. The expected gradient is the same. Not for
            "hierarchical".
        tree: tree for "hierarchical"; by default a Huffman tree.
        subsample: words whose share of the text is above this are dropped at random, as in
            word2vec; 0 keeps all.
        epochs: number of passes over the text.
        lr: initial learning rate, which decreases linearly to 1/250 of it; by default 0.025 for
            skip-gram and 0.075 for CBOW.
        threads: number of threads, by default that of torch. Each trains on its own part of the
            text.
        seed: random seed.
        dtype: torch.float32 or torch.float64.
        progress: whether to show a progress bar; by default in a terminal after 2 seconds.

    Reference:
        Mikolov et al., Distributed representations of words and phrases and their
        compositionality, 2013. Windows as small matrix products: Ji et al., Parallelizing word2vec
        in shared and distributed memory, 2016. The gradient of CBOW's mean: İrsoy et al., Corrected
        CBOW performs as well as skip-gram, 2021.

    Example:
        >>> from lastlayer import vectors
        >>> text = [["the", "cat", "sat"], ["the", "dog", "sat"], ["a", "cat", "ran"]] * 20
        >>> found = vectors.train(text, dim=8, epochs=2, threads=1)
        >>> found, found.input.shape, "dog" in found
        (Vectors(n_words=6, dim=8), torch.Size([6, 8]), True)
    """
    dim, window = check_int("dim", dim), check_int("window", window)
    check_choice("model", model, MODELS)
    check_choice("objective", objective, OBJECTIVES)
    _check_objective(model, objective, n_negatives, power, share, tree)
    n_negatives = check_int("n_negatives", 5 if n_negatives is None else n_negatives)
    power = check_not_negative("power", 0.75 if power is None else power)
    share = check_int("share", 1 if share is None else share, least=0)
    subsample = check_not_negative("subsample", subsample)
    epochs = check_int("epochs", epochs)
    lr = check_positive("lr", _RATE[model] if lr is None else lr)
    threads = check_int("threads", torch.get_num_threads() if threads is None else threads)
    seed = check_seed(seed)
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")
    text, names, counts = _read(tokens, words)
    if tree is not None and tree.n_classes != len(names):
        raise ValueError(f"tree: expected {len(names)} classes, one per word, got {tree.n_classes}")
    if objective == "hierarchical" and tree is None:
        tree = huffman(counts)

    from lastlayer.vectors._vectorized import LANES_BYTES

    plan, n_outputs = _plan(
        counts, tree, objective, seed=seed, window=window, cbow=model == "cbow",
        n_negatives=n_negatives, power=power, share=share, subsample=subsample,
    )  # fmt: skip
    lanes = LANES_BYTES // dtype.itemsize
    width = -(-dim // lanes) * lanes
    # torch aligns memory to cache lines.
    inputs, outputs = (torch.zeros(n, width, dtype=dtype) for n in (len(names), n_outputs))
    start = np.random.default_rng(seed % 2**64).random((len(names), dim))
    inputs[:, :dim] = torch.from_numpy((start - 0.5) / dim)
    del start
    _run(text, plan, inputs, outputs, epochs, lr, threads, progress)
    if not all(bool(torch.isfinite(each).all()) for each in (inputs, outputs)):
        raise FloatingPointError(
            f"lr: expected finite vectors, got NaN or infinity with lr={lr}; use a smaller lr"
        )
    return Vectors(names, inputs[:, :dim].contiguous(), outputs[:, :dim].contiguous())


def _check_objective(
    model: str, objective: str, n_negatives: Any, power: Any, share: Any, tree: Any
) -> None:
    if objective == "hierarchical":
        given = {"n_negatives": n_negatives, "power": power, "share": share}
        for name, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{name}: expected None for objective='hierarchical', which has no negatives, "
                    f"got {value}"
                )
    elif tree is not None:
        raise ValueError(
            f"tree: expected None for objective={objective!r}, got a tree; use "
            "objective='hierarchical'"
        )
    if tree is not None and not isinstance(tree, Tree):
        raise TypeError(f"tree: expected a lastlayer.trees.Tree, got {type(tree).__name__}")
    if model == "cbow" and share == 0:
        raise ValueError("share: expected at least 1 for model='cbow', which has no pairs, got 0")


def _read(
    tokens: Any, words: Sequence[str] | None
) -> tuple[NDArray[np.int32], tuple[str, ...], NDArray[np.int64]]:
    """Word ids (read-only), words, and the count of each word."""
    if not isinstance(tokens, (np.ndarray, Tensor)):
        if words is not None:
            raise ValueError(
                "words: expected None with sentences, got words; they are for tokens given as one "
                "integer array of word ids"
            )
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable):
            raise TypeError(
                "tokens: expected an integer array or an iterable of sentences, got "
                f"{type(tokens).__name__}"
            )
        tokens, words = encode(tokens)
    expected = "word ids, in which a negative number ends a sentence"
    text = as_array("tokens", tokens, expected)
    if text.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, {expected}, got {text.dtype}")
    if text.ndim != 1:
        raise ValueError(f"tokens: expected one dimension, got shape {text.shape}")
    names = None if words is None else check_words(words)
    limit = 2**31 - 1 if names is None else len(names)
    counts, has_pair = np.zeros(0 if names is None else limit, np.int64), False
    for first in range(0, len(text), _PART):
        # One more token, for a pair of words across the border of two parts.
        more = text[first : first + _PART + 1]
        part = more[:_PART]
        if int(part.max()) >= limit:
            place = first + int(part.argmax())
            raise ValueError(
                f"tokens: expected ids below {limit}, the number of words, got {text[place]} at "
                f"position {place}"
            )
        found = np.bincount(part[part >= 0])
        counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
        counts[: len(found)] += found
        has_pair = has_pair or bool(((more[1:] >= 0) & (more[:-1] >= 0)).any())
    if np.count_nonzero(counts) < 2:
        raise ValueError(
            f"tokens: expected at least 2 different words, got {np.count_nonzero(counts)}"
        )
    if not has_pair:
        raise ValueError("tokens: expected a sentence of at least 2 words, got none")
    if names is None:
        names = tuple(map(str, range(len(counts))))
    return _read_only(np.asarray(text, np.int32)), names, counts


def _plan(
    counts: NDArray[np.int64], tree: Tree | None, objective: str, *, seed: int, window: int,
    cbow: bool, n_negatives: int, power: float, share: int, subsample: float,
) -> tuple[Any, int]:  # fmt: skip
    """The constant input of the compiled loops, and the number of output rows."""
    from lastlayer.vectors import _windows

    keep = np.ones(len(counts))
    if subsample:
        # subsample relative to the frequency of each word. Words with count 0 do not matter.
        whole = subsample * counts.sum() / np.maximum(counts, 1)
        keep = np.minimum(1.0, np.sqrt(whole) + whole)
    threshold = np.minimum(np.floor(keep * 2.0**32), 2.0**32 - 1).astype(np.uint32)
    whole_numbers, positions = np.empty(0, np.int64), np.empty(0, np.int32)
    alias, log_q, bits = whole_numbers, np.empty(0), 0
    class_start = path_start = node_row = whole_numbers
    path_node = path_position = positions
    if tree is None:
        sampler = Unigram(counts, power)
        alias, bits = sampler.table.numpy(), int(sampler.table.numel()).bit_length() - 1
        log_q = sampler.log_prob(torch.arange(len(counts))).double().numpy()
        kind = _windows.NEGATIVE if objective == "negative" else _windows.SOFTMAX
        most, n_rows = n_negatives + 1, len(counts)
    else:
        # A binary node has one vector, since one score decides; a wider node has one per child.
        sizes = np.where(tree.arity == 2, 1, tree.arity).astype(np.int64)
        class_start, path_start, node_row = (
            tree.class_start,
            tree.path_start,
            np.append(0, np.cumsum(sizes)),
        )
        path_node, path_position = tree.path_node, tree.path_position
        simple = tree.is_binary and not tree.overlaps
        kind = _windows.PATHS if simple else _windows.TREE
        on_path = np.add.reduceat(sizes[path_node], path_start[:-1])
        most = int(np.add.reduceat(on_path, class_start[:-1]).max())
        n_rows = int(node_row[-1])
    plan = _windows.Plan(
        keep=_read_only(threshold), alias=_read_only(alias), log_q=_read_only(log_q),
        class_start=_read_only(class_start), path_start=_read_only(path_start),
        path_node=_read_only(path_node), path_position=_read_only(path_position),
        node_row=_read_only(node_row), seed=np.uint64(seed % 2**64), alias_bits=bits,
        objective=kind, most_outputs=most, window=window, cbow=cbow, n_negatives=n_negatives,
        share=share,
    )  # fmt: skip
    return plan, n_rows


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view. Numba would compile all loops again for writable arrays."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _run(
    text: NDArray[np.int32], plan: Any, inputs: Tensor, outputs: Tensor, epochs: int, lr: float,
    threads: int, progress: bool | None,
) -> None:  # fmt: skip
    """Runs the threads. Each makes all epochs over its own part of the text."""
    from lastlayer.vectors import _windows

    spans = np.linspace(0, len(text), min(threads, len(text)) + 1).astype(np.int64).tolist()
    stop = threading.Event()
    done = [0] * (len(spans) - 1)

    def work(number: int) -> None:
        first, last = spans[number], spans[number + 1]
        # The rate is linear in the position, over all epochs, whatever the sizes of jobs.
        slope = -lr * (1 - _LAST_RATE) / (epochs * (last - first))
        # Buffers for copies of the vectors of a window, and for CBOW's gradient.
        copies = torch.zeros(2 * plan.window + 1, inputs.shape[1], dtype=inputs.dtype).numpy()
        tables = inputs.numpy(), outputs.numpy(), copies
        for epoch in range(epochs):
            rate = lr + slope * (epoch * (last - first) - first)
            for start in range(first, last, _JOB):
                if stop.is_set():
                    return
                end = min(last, start + _JOB)
                _windows.train_span(text, start, end, epoch, rate, slope, *tables, plan)
                done[number] += end - start

    shown = _shown(progress, epochs * len(text))
    with shown as show, ThreadPoolExecutor(len(done), "lastlayer-vectors") as pool:
        running = [pool.submit(work, number) for number in range(len(done))]
        try:
            while wait(running, _REDRAWN, FIRST_EXCEPTION).not_done:
                show(sum(done))
                if any(each.done() and each.exception() for each in running):
                    break
            show(sum(done))
        finally:
            # After an interrupt or an error in one thread, the others finish their job and stop.
            stop.set()
        for each in running:
            each.result()


@contextmanager
def _shown(progress: bool | None, total: int) -> Iterator[Any]:
    """A progress bar: yields a function that takes the number of finished tokens."""
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    began = time.monotonic()
    columns = *Progress.get_default_columns()[:3], TextColumn("{task.fields[speed]}")
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=False)
    task = bar.add_task("word vectors", total=total, speed="")

    def show(done: int) -> None:
        seconds = time.monotonic() - began
        if progress or seconds > _SHOWN_AFTER:
            bar.start()
            bar.update(task, completed=done, speed=f"{done / seconds / 1000:,.0f}k words/s")

    try:
        yield show
    finally:
        bar.stop()
