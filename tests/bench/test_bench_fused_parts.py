"""The truth, the inputs and the memory of the bench of fused losses."""

import pytest
import torch
from lastlayer.bench import memory
from lastlayer.bench.fused import truth as truths
from lastlayer.bench.fused.scores import FLAT, TRAINED, VERY_FLAT_SCORES
from lastlayer.bench.maps.cases import TOPK, K
from torch.nn import functional

from lastlayer import losses

CPU = torch.device("cpu")
ON_SCORES = {
    "cross_entropy": functional.cross_entropy,
    "sparsemax": losses.sparsemax_loss,
    "entmax 1.5": losses.entmax_loss,
    TOPK: lambda scores, target: losses.topk_softmax_loss(scores, target, K),
}


@pytest.mark.parametrize("computes", ON_SCORES)
@pytest.mark.parametrize("bytes_held", [2**27, 4 * 8 * 70])
def test_the_truth_is_the_loss_on_stored_scores(computes, bytes_held, monkeypatch):
    monkeypatch.setattr(truths, "_BYTES", {"cpu": bytes_held})
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(70, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(70, (9,))
    loss = ON_SCORES[computes](hidden @ weight.T, target)
    expected = torch.autograd.grad(loss, (hidden, weight))
    truth = truths.truth_of(computes, hidden.detach(), weight.detach(), target)
    assert truth.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(truth.gradients, expected, rtol=1e-9, atol=1e-12)


def scores_of(kind, shape=(400, 256, 3000)):
    hidden, weight, target = kind.draw(shape, torch.Generator().manual_seed(5))
    assert hidden.shape == shape[:2]
    assert weight.shape == (shape[2], shape[1])
    assert target.shape == shape[:1]
    return hidden @ weight.T, target


@pytest.mark.parametrize(("kind", "scale"), [(FLAT, 1.0), (VERY_FLAT_SCORES, 0.01)])
def test_flat_scores_have_the_scale_they_name(kind, scale):
    scores, target = scores_of(kind)
    assert float(scores.std()) == pytest.approx(scale, rel=0.05)
    assert float(target.double().mean()) == pytest.approx(1500, rel=0.2)


def test_in_trained_like_scores_the_target_mostly_leads():
    scores, target = scores_of(TRAINED, (400, 2048, 3000))
    at_target = scores.gather(-1, target.unsqueeze(-1))
    ahead = (scores > at_target).sum(-1)
    assert float((ahead < 33).double().mean()) > 0.95
    assert float((ahead == 0).double().mean()) > 0.1
    # By Zipf's law the first ten of 3000 classes are a third of all targets.
    assert 0.2 < float((target < 10).double().mean()) < 0.5


def test_trained_like_scores_work_with_few_classes():
    scores_of(TRAINED, (4, 3, 2))
    scores_of(TRAINED, (4, 3, 1))


def test_a_draw_repeats_with_its_seed():
    first, again = scores_of(TRAINED), scores_of(TRAINED)
    assert torch.equal(first[0], again[0])


@pytest.mark.skipif(not memory._reset_peak(), reason="this system does not reset its peaks")
def test_memory_that_is_freed_again_is_counted():
    megabytes = 64

    def call():
        torch.ones(megabytes * 2**20, dtype=torch.int8)
        return "done"

    result, peak = memory.with_peak(call, CPU)
    assert result == "done"
    # Pages that the process gives up meanwhile are taken off.
    assert 0.9 * megabytes * 2**20 < peak < 1.5 * megabytes * 2**20
    _, nothing = memory.with_peak(lambda: None, CPU)
    assert nothing < megabytes * 2**20 / 2


def test_a_system_without_peaks_measures_none(monkeypatch):
    monkeypatch.setattr(memory, "_reset_peak", lambda: False)
    assert memory.with_peak(lambda: 3, CPU) == (3, None)


def test_free_memory_is_known_or_none(tmp_path, monkeypatch):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 100 kB\nMemAvailable:   40 kB\n")
    monkeypatch.setattr(memory, "_SYSTEM", told)
    assert memory.free_bytes(CPU) == 40 * 1024
    told.write_text("MemTotal: 100 kB\n")
    assert memory.free_bytes(CPU) is None
    monkeypatch.setattr(memory, "_SYSTEM", tmp_path / "none")
    assert memory.free_bytes(CPU) is None
