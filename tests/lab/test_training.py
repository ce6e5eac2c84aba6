"""Steps, batches, bodies, checkpoints and memory: what makes a comparison fair and resumable."""

import copy
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lastlayer import heads, samplers
from lastlayer.lab.data import LabelData, LabelPart, Lists, SparseRows, TextData, Vocabulary
from lastlayer.lab.errors import LabError
from lastlayer.lab.feeding import PADDING, RowFeed, TextFeed
from lastlayer.lab.models import MODELS, FeatureBody, ModelSettings, build_body
from lastlayer.lab.records import JsonLines, finite, write_json
from lastlayer.lab.training import (
    Progress,
    Stepper,
    clip_,
    load_checkpoint,
    save_checkpoint,
    words_before,
)

CPU = torch.device("cpu")
CLASSES, WIDTH = 30, 8


@pytest.fixture(scope="module")
def data() -> TextData:
    ids = np.random.default_rng(0).integers(0, CLASSES, 700).astype(np.int32)
    words = Vocabulary(("<unk>", *(f"w{i}" for i in range(1, CLASSES))), np.arange(CLASSES, 0, -1))
    return TextData("made", words, ids[:500], ids[500:600], ids[600:], {})


@pytest.fixture
def feed(data) -> TextFeed:
    return TextFeed(data, 4, 10, CPU)


def body_of(kind: str) -> torch.nn.Module:
    return build_body(ModelSettings(kind, "lm", CLASSES, WIDTH, layers=2, length=10))


def test_the_same_seed_gives_the_same_order_and_another_one_another(feed):
    steps = range(2 * feed.steps_per_epoch)
    one, again, other = (
        [feed.batch(seed, step).inputs.tolist() for step in steps] for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other
    first, second = one[: feed.steps_per_epoch], one[feed.steps_per_epoch :]
    assert first != second


def test_a_target_is_the_token_after(feed, data):
    batch = feed.batch(3, 0)
    assert batch.size == batch.target.numel() == feed.batch_size
    assert torch.equal(batch.inputs[:, 1:], batch.target[:, :-1])
    text = " ".join(map(str, data.train))
    for row in torch.cat([batch.inputs, batch.target[:, -1:]], 1).tolist():
        assert " ".join(map(str, row)) in text


def test_an_epoch_sees_every_window_at_most_once(feed):
    seen = [
        tuple(row)
        for step in range(feed.steps_per_epoch)
        for row in feed.batch(1, step).inputs.tolist()
    ]
    assert len(seen) == len(set(seen))


def test_held_out_rows_are_always_the_same(feed):
    one, other = ([batch.target.tolist() for batch in feed.held_out("test", 50)] for _ in range(2))
    assert one == other
    assert sum(len(row) for batch in one for row in batch) == 50


def test_a_text_without_a_next_token_is_refused(data):
    short = TextData("short", data.vocabulary, data.train, data.valid[:1], data.test, {})
    with pytest.raises(LabError, match="at least 2 tokens in each part of short, got 1"):
        TextFeed(short, 4, 10, CPU)


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_come_with_their_own_labels(sparse):
    dense = np.eye(5, dtype=np.float32)
    features = SparseRows(np.arange(5), np.arange(6), np.ones(5, np.float32), 5)
    labels = Lists(np.array([0, 1, 2, 0]), np.array([0, 1, 1, 3, 3, 4]))
    part = LabelPart(features if sparse else dense, labels)
    made = LabelData(
        "made", part, part, part, tuple("abcde"), tuple("xyz"), np.array([2, 1, 1]), {}
    )
    batch = RowFeed(made, 5, CPU).batch(1, 0)
    body = FeatureBody(5, 5, dense=not sparse)
    with torch.no_grad():
        body.bag.weight.copy_(torch.eye(5))
        row_of = body(batch.inputs).argmax(1).tolist()
    expected = [[0, PADDING], [PADDING, PADDING], [1, 2], [PADDING, PADDING], [0, PADDING]]
    assert batch.target.tolist() == [expected[i] for i in row_of]


@pytest.mark.parametrize("kind", MODELS)
def test_a_body_does_not_look_ahead(kind):
    body, tokens = body_of(kind), torch.randint(CLASSES, (2, 10))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % CLASSES
    with torch.no_grad():
        one, other = body(tokens), body(changed)
    assert one.shape == (2, 10, WIDTH)
    torch.testing.assert_close(one[:, :6], other[:, :6])
    assert not torch.allclose(one[:, 6:], other[:, 6:])


def test_dense_features_of_all_units_count_alike():
    features = torch.randn(50, 3) * torch.tensor([1e-3, 1e4, 0.0]) + torch.tensor([5.0, -1e5, 7.0])
    body = FeatureBody(3, 3, dense=True)
    body.fit(features)
    scaled = (features - body.shift) * body.scale
    spread, mean = torch.var_mean(scaled, 0, correction=0)
    torch.testing.assert_close(mean, torch.zeros(3), atol=0.02, rtol=0)
    torch.testing.assert_close(spread, torch.tensor([1.0, 1.0, 0.0]), atol=0.02, rtol=0)
    settings = ModelSettings("bag", "multilabel", 3, 3, dense=True)
    again = build_body(settings)
    again.load_state_dict(body.state_dict())
    assert torch.equal(again(features), body(features))


def test_a_model_that_the_task_does_not_have_is_refused():
    with pytest.raises(
        LabError, match="--model: expected one of bag, identity for --task multilabel"
    ):
        build_body(ModelSettings("lstm", "multilabel", 10, 4))


def test_gradients_are_clipped_together_rows_counted_once():
    dense = torch.nn.Parameter(torch.zeros(3))
    rows = torch.nn.Parameter(torch.zeros(4, 2))
    dense.grad = torch.tensor([3.0, 0.0, 0.0])
    ids = torch.tensor([[1, 1, 2]])
    values = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
    rows.grad = torch.sparse_coo_tensor(ids, values, (4, 2), check_invariants=True)
    whole = torch.cat([dense.grad, rows.grad.to_dense().flatten()])
    clip_([dense, rows], 1.0)
    found = torch.cat([dense.grad, rows.grad.to_dense().flatten()])
    torch.testing.assert_close(found, whole / whole.norm(), atol=1e-5, rtol=1e-5)
    clip_([dense, rows], 5.0)
    torch.testing.assert_close(found, torch.cat([dense.grad, rows.grad.to_dense().flatten()]))


def test_rows_without_a_gradient_stay_as_they_are(feed):
    head = heads.SampledSoftmax(WIDTH, CLASSES, samplers.Uniform(CLASSES), 2, sparse=True)
    stepper = Stepper(body_of("bag"), head, 0.1, 1.0)
    before = copy.deepcopy(stepper.body.embedding.weight)
    batch = feed.batch(1, 0)
    stepper.step(batch)
    moved = (stepper.body.embedding.weight != before).any(1)
    assert set(moved.nonzero().flatten().tolist()) == set(batch.inputs.flatten().tolist())


def test_words_before_are_the_last_ones():
    made = words_before(torch.tensor([[5, 6, 7]]), 2)
    assert made.tolist() == [[[-1, 5], [5, 6], [6, 7]]]


def test_a_head_that_wants_context_gets_it(feed):
    counts = torch.arange(CLASSES, 0, -1)
    head = heads.AdaptiveImportanceSampling(WIDTH, CLASSES, counts, order=3, n_samples=4)
    stepper = Stepper(body_of("bag"), head, 0.01, 1.0)
    state = copy.deepcopy(head.sampler.state_dict())
    assert stepper.step(feed.batch(1, 0)).isfinite()
    learned = head.sampler.state_dict()
    assert any(not torch.equal(state[name], learned[name]) for name in state)


def test_a_checkpoint_brings_everything_back(feed, tmp_path):
    def fresh() -> Stepper:
        sampler = samplers.Unigram(torch.arange(CLASSES, 0, -1))
        head = heads.SampledSoftmax(WIDTH, CLASSES, sampler, 4, sparse=True, seed=7)
        return Stepper(body_of("lstm"), head, 0.01, 1.0)

    one = fresh()
    for step in range(3):
        one.step(feed.batch(1, step))
    progress = Progress(step=3, seconds=1.5, tokens=120, loss_sum=2.0, loss_count=1, lines=10)
    save_checkpoint(tmp_path, one, progress, [1.0, 2.0])
    save_checkpoint(tmp_path, one, progress, [1.0, 2.0])
    drawn = torch.rand(3)
    other = fresh()
    loaded = load_checkpoint(tmp_path, other)
    assert loaded == (progress, [1.0, 2.0])
    assert torch.equal(torch.rand(3), drawn)
    for step in range(3, 6):
        assert torch.equal(one.step(feed.batch(1, step)), other.step(feed.batch(1, step)))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["state-3.safetensors", "state.json"]
    assert "head/rng_counter" in load_file(str(tmp_path / "state-3.safetensors"))


def test_a_checkpoint_that_is_cut_off_counts_for_nothing(feed, tmp_path):
    stepper = Stepper(body_of("bag"), heads.FullSoftmax(WIDTH, CLASSES), 0.01, 1.0)
    assert load_checkpoint(tmp_path, stepper) is None
    save_checkpoint(tmp_path, stepper, Progress(), [])
    path = tmp_path / "state-0.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert load_checkpoint(tmp_path, stepper) is None


def test_lines_after_the_checkpoint_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines.append({"step": 1, "loss": float("inf")})
    kept = lines.size
    lines.append({"step": 2})
    lines.close()
    again = JsonLines(path, keep=kept)
    again.append({"step": 3})
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": None},
        {"step": 3},
    ]


def test_json_has_no_infinite_numbers(tmp_path):
    write_json(tmp_path / "made.json", {"a": [float("nan"), 1.5], "b": {"c": -float("inf")}})
    assert json.loads((tmp_path / "made.json").read_text()) == {"a": [None, 1.5], "b": {"c": None}}
    assert finite((1, float("inf"))) == [1, None]


PEAK = """
import torch
from lastlayer.lab.machine import PeakMemory

model = torch.nn.Linear(1000, 1000)
memory = PeakMemory(torch.device("cpu"), model)
memory.start()
grown = torch.ones(10_000_000)
memory.stop()
between = torch.ones(30_000_000)
del between
memory.start()
memory.stop()
print(memory.megabytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the peak of a process")
def test_the_peak_counts_training_and_not_what_came_between():
    # In its own process: here, memory of earlier tests may be freed between start and stop.
    ran = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    # Parameters of 4 MB, and 40 MB that are written.
    assert 44 <= float(ran.stdout) < 100
