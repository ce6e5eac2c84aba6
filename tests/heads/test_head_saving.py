"""Heads on disk."""

import json
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch

from lastlayer import trees
from lastlayer.heads import (
    AdaptiveImportanceSampling,
    CharCNNSoftmax,
    EntmaxHead,
    FullSoftmax,
    Head,
    HierarchicalSoftmax,
    MultiLabel,
    TopKSoftmaxHead,
)


def heads():
    return [
        FullSoftmax(5, 11, False, label_smoothing=0.1, z_loss=1e-4, softcap=30.0, temperature=2.0),
        FullSoftmax(5, 11, class_weight=torch.rand(11), dtype=torch.bfloat16),
        EntmaxHead(5, 11, 1.3, ignore_index=None, chunk_rows=7),
        TopKSoftmaxHead(5, 11, 4, reduction="none", ignore_index=-1, chunk_rows="low"),
    ]


def assert_same_config(one, other):
    for name, value in other.config().items():
        same = one.config()[name]
        assert torch.equal(same, value) if isinstance(value, torch.Tensor) else same == value


@pytest.mark.parametrize("head", heads(), ids=repr)
def test_any_head_comes_back_whole(head, tmp_path):
    head.save(tmp_path / "a" / "b")
    loaded = Head.load(tmp_path / "a" / "b")
    assert type(loaded) is type(head)
    assert_same_config(loaded, head)
    assert_same_config(type(head)(**head.config()), head)
    assert repr(loaded) == repr(head)
    state = head.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for name, value in loaded.state_dict().items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name])
    hidden, target = torch.randn(6, 5, dtype=head.weight.dtype), torch.randint(11, (6,))
    assert torch.equal(loaded(hidden, target), head(hidden, target))
    loaded(hidden, target).sum().backward()
    assert loaded.weight.grad is not None


def test_the_files_are_json_and_safetensors(tmp_path):
    head = EntmaxHead(5, 11, 1.3)
    head.save(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["head"] == "EntmaxHead"
    assert EntmaxHead(**config["arguments"]).config() == head.config()


def test_options_that_are_numpy_numbers(tmp_path):
    """Any integer and real number is accepted, so it can also be saved."""
    third = np.float32(1 / 3)
    heads = [
        FullSoftmax(5, 11, label_smoothing=third, temperature=Fraction(1, 2)),
        MultiLabel(5, 11, "asymmetric", loss_options={"margin": third}, chunk_rows=np.int64(3)),
        AdaptiveImportanceSampling(
            5, 11, np.arange(11), order=np.int64(3), contexts=np.int64(4), width=np.int32(2),
            target_ess=np.float32(9),
        ),
    ]  # fmt: skip
    for head in heads:
        head.save(tmp_path / "one")
        Head.load(tmp_path / "one").save(tmp_path / "two")
        one, two = ((tmp_path / name / "config.json").read_text() for name in ("one", "two"))
        assert one == two


def test_a_tied_head_is_saved_with_its_vectors(tmp_path):
    embedding = torch.nn.Embedding(11, 5)
    FullSoftmax.from_linear(embedding).save(tmp_path)
    assert torch.equal(FullSoftmax.load(tmp_path).weight, embedding.weight)


def test_a_class_loads_itself_alone(tmp_path):
    FullSoftmax(5, 11).save(tmp_path)
    message = r"folder: expected a saved EntmaxHead, got 'FullSoftmax' in .*; import the class"
    with pytest.raises(ValueError, match=message):
        EntmaxHead.load(tmp_path)


def test_a_folder_without_a_head(tmp_path):
    message = r"folder: expected config.json and model.safetensors, .* has no config.json"
    with pytest.raises(FileNotFoundError, match=message):
        Head.load(tmp_path)


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (FullSoftmax(5, 11).save, Head.load):
        with pytest.raises(ImportError, match=r'pip install "lastlayer\[save\]"'):
            call(tmp_path)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda **how: HierarchicalSoftmax(8, trees.balanced(4), **how),
        lambda **how: HierarchicalSoftmax(8, trees.balanced(4).collapse(4), **how),
        lambda **how: CharCNNSoftmax(
            8, ["play", "plays", "walk", "walks"], filters=[(1, 4)], correction=3, **how
        ),
    ],
)
def test_heads_made_on_meta_take_a_state(make, assign):
    head, other = make(), make(device="meta")
    if not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(head.state_dict(), assign=assign)
    hidden, target = torch.randn(6, 8), torch.randint(4, (6,))
    torch.testing.assert_close(other(hidden, target), head(hidden, target))
    torch.testing.assert_close(other.log_prob(hidden), head.log_prob(hidden))
    assert torch.equal(other.topk(hidden, 2).classes, head.topk(hidden, 2).classes)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    FullSoftmax(5, 11).save(tmp_path)
    state = tmp_path / "model.safetensors"
    state.write_bytes(state.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"folder: expected model.safeten.*incomplete") as caught:
        Head.load(tmp_path)
    assert str(state) in str(caught.value)


def test_a_config_that_was_cut_off_is_named(tmp_path):
    FullSoftmax(5, 11).save(tmp_path)
    (tmp_path / "config.json").write_text('{"head": ')
    with pytest.raises(ValueError, match=r"folder: expected config.json as save writes it"):
        Head.load(tmp_path)
