"""The explorer of rows with labels: the same rows for every head, and what each says of them."""

import json

import numpy as np
import pytest
import torch
from made_runs import make

from lastlayer.heads.multi_label import MultiLabel
from lastlayer.lab.data import LabelData, LabelPart, Lists, SparseRows
from lastlayer.lab.errors import LabError
from lastlayer.lab.explorer import BEST, MOST_FEATURES, MOST_LABELS, ROWS, explore_labels
from lastlayer.lab.feeding import RowFeed
from lastlayer.lab.models import FeatureBody
from lastlayer.lab.report import explorer as shown
from lastlayer.lab.results import read_results

WIDTH, CPU = 4, torch.device("cpu")
EVERYWHERE, LARGE = 0, 100.0


def _lists(rng, rows: int, most: int, n: int, least: int = 0) -> Lists:
    made = [np.sort(rng.permutation(n)[: rng.integers(least, most + 1)]) for _ in range(rows)]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in made])])
    return Lists(np.concatenate([*made, np.empty(0)]).astype(np.int64), offsets.astype(np.int64))


def _sparse(rng, rows: int, features: int) -> SparseRows:
    """Every row has the first feature, and it is by far the largest."""
    listed = _lists(rng, rows, 5, features - 1, least=1)
    indices = np.insert(listed.indices + 1, listed.offsets[:-1], EVERYWHERE)
    values = np.where(indices == EVERYWHERE, LARGE, 1 + rng.random(len(indices)))
    offsets = listed.offsets + np.arange(rows + 1)
    return SparseRows(indices, offsets, values.astype(np.float32), features)


def made_data(seed: int, *, dense: bool = False, rows: int = 60, labels: int = 25) -> LabelData:
    rng = np.random.default_rng(seed)

    def part() -> LabelPart:
        features = rng.standard_normal((rows, 30)) * 50 + 7 if dense else _sparse(rng, rows, 30)
        features = features.astype(np.float32) if dense else features
        return LabelPart(features, _lists(rng, rows, min(6, labels), labels))

    train = part()
    counts = np.bincount(train.labels.indices, minlength=labels)
    features = tuple(f"feature {i}" for i in range(30))
    names = tuple(f"label {i}" for i in range(labels))
    return LabelData("made", train, part(), part(), features, names, counts, {})


def explored(data: LabelData, loss: str = "zlpr", batch: int = 8):
    torch.manual_seed(0)
    dense = not isinstance(data.train.features, SparseRows)
    body = FeatureBody(data.n_features, WIDTH, dense=dense)
    if dense:
        body.fit(torch.from_numpy(data.train.features))
    head = MultiLabel(WIDTH, data.n_classes, loss)
    return explore_labels(data, body, head, RowFeed(data, batch, CPU))


@pytest.mark.parametrize("dense", [False, True])
def test_rows_are_the_same_for_every_head_and_batch(seed, dense):
    data = made_data(seed, dense=dense)
    found = [explored(data, loss, batch) for loss, batch in (("zlpr", 8), ("sparsemax", 60))]
    same = ("features", "labels", "n_labels", "standardised")
    rows = [[{key: entry[key] for key in same} for entry in each] for each in found]
    assert rows[0] == rows[1]
    assert len(rows[0]) == ROWS
    assert all(entry["standardised"] == dense for entry in rows[0])
    # Enough rows have labels, so only these are shown.
    assert all(entry["n_labels"] == len(entry["labels"]) > 0 for entry in rows[0])
    assert all(0 < len(entry["features"]) <= MOST_FEATURES for entry in rows[0])


@pytest.mark.parametrize("loss", ["zlpr", "bce", "asymmetric", "sparsemax"])
def test_labels_are_the_best_and_the_right_ones(seed, loss):
    for entry in explored(made_data(seed), loss):
        names = [each["label"] for each in entry["top"]]
        assert len(names) == len(set(names)) <= BEST
        chances = [each["p"] for each in entry["top"]]
        assert chances == pytest.approx(sorted(chances, reverse=True), abs=1e-6)
        assert all(0 <= p <= 1 for p in chances)
        # Each label of the row is in one of the lists, once.
        told = [*entry["top"], *entry["below"]]
        assert sorted(e["label"] for e in told if e["right"]) == sorted(entry["labels"])
        found = [each for each in told if each["right"] and each["predicted"]]
        assert len(found) == entry["n_found"] <= min(entry["n_predicted"], entry["n_labels"])
        assert not set(names) & {each["label"] for each in entry["below"]}
        if loss != "sparsemax":
            # Predicted where the score is above 0, which is a probability above one half.
            assert all(each["predicted"] == (each["p"] > 0.5) for each in told)


def test_a_feature_that_every_row_has_tells_least(seed):
    for entry in explored(made_data(seed)):
        names = [each["name"] for each in entry["features"]]
        assert names[-1] == f"feature {EVERYWHERE}" or f"feature {EVERYWHERE}" not in names
        assert len(names) > 1


def test_dense_features_are_told_by_their_distance_from_the_mean(seed):
    data = made_data(seed, dense=True)
    for entry in explored(data):
        values = [abs(each["value"]) for each in entry["features"]]
        assert values == sorted(values, reverse=True)
        # Standardised: with their own unit they would be some 50.
        assert 0 < values[0] < 10


def test_rows_without_labels_are_shown_where_there_are_no_others():
    data = made_data(0, rows=5)
    none = data.test._replace(labels=Lists(np.empty(0, np.int64), np.zeros(6, np.int64)))
    bare = LabelData(
        "bare", data.train, data.valid, none, data.feature_names, data.label_names, data.counts, {}
    )
    entries = explored(bare)
    assert len(entries) == 5
    assert all(entry["labels"] == entry["below"] == [] for entry in entries)
    assert shown.labels_seen(entries[0])["option"].endswith("→ no label")


def test_very_many_labels_are_counted_and_cut():
    labels = 200
    data = made_data(0, rows=3, labels=labels)
    every = Lists(np.tile(np.arange(labels), 3), np.arange(4) * labels)
    full = LabelData(
        "full", data.train, data.valid, data.test._replace(labels=every), data.feature_names,
        data.label_names, data.counts, {},
    )  # fmt: skip
    for entry in explored(full):
        assert entry["n_labels"] == labels
        assert len(entry["labels"]) == len(entry["below"]) == MOST_LABELS
        assert shown.labels_seen(entry)["more"] == labels - MOST_LABELS


def test_a_file_that_was_changed_by_hand_is_refused(tmp_path):
    path = make(tmp_path, heads=1, seeds=1, task="multilabel") / "runs/full-s0/result.json"
    result = json.loads(path.read_text())
    assert len(shown.contexts(read_results(tmp_path))) == len(result["explorer"])
    result["explorer"][0]["top"].append(None)
    path.write_text(json.dumps(result))
    with pytest.raises(LabError, match="expected predictions as a run writes them"):
        shown.contexts(read_results(tmp_path))
