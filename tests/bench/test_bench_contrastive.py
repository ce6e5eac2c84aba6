"""The bench of contrastive losses: its truth, a small run, its page."""

import io

import pytest
import torch
from lastlayer.bench import contrastive, timing
from lastlayer.bench.contrastive import cases, family, methods, plot, tables, truth
from lastlayer.bench.contrastive.record import ContrastiveRecord
from lastlayer.bench.contrastive.truth import ONE_WAY, SYMMETRIC
from lastlayer.bench.losses import judge
from lastlayer.bench.record import append
from lastlayer.bench.results import read
from lastlayer.bench.timing import CpuTimer
from made_up_record import MADE_UP
from rich.console import Console
from torch.nn import functional

RECORD = MADE_UP | dict(
    family="contrastive",
    section=SYMMETRIC, method=methods.MAIN, computes=SYMMETRIC, shape=(32768, 768),
    dtype="bfloat16", direction="forward+backward", median_ms=12.0, p20_ms=11.9, p80_ms=12.1,
    samples=10, inputs_made="somehow", tflop_per_s=412.0, gemm_tflop_per_s=745.0,
    fraction_of_gemm=0.55, baseline="torch compiled", ratio_to_baseline=0.98,
    peak_bytes=390_000_000, loss_error=1e-6, query_error=1.7e-3, key_error=1.8e-3,
    temperature_error=1e-6,
)  # fmt: skip


def record(**changes) -> ContrastiveRecord:
    return ContrastiveRecord(**{**RECORD, **changes})


@pytest.mark.parametrize("section", [SYMMETRIC, ONE_WAY])
def test_the_truth_is_the_loss_on_stored_similarities(section, monkeypatch):
    monkeypatch.setattr(truth, "_BYTES", {"cpu": 8 * 11 * 3})
    query, key = (torch.randn(11, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    units = [functional.normalize(each, dim=-1) for each in (query, key)]
    scores, own = units[0] @ units[1].T / temperature, torch.arange(11)
    loss = functional.cross_entropy(scores, own)
    if section == SYMMETRIC:
        loss = (loss + functional.cross_entropy(scores.T, own)) / 2
    expected = torch.autograd.grad(loss, (query, key, temperature))
    found = truth.truth_of(section, query.detach(), key.detach(), temperature.detach())
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(found.gradients, expected)


def test_a_run_verifies_times_and_draws(monkeypatch, tmp_path):
    timer = CpuTimer(budget_s=0.0, fewest_samples=1, sample_ms=0.01)
    monkeypatch.setattr(family.Contrastive, "timer", lambda self, device, *, quick: timer)
    monkeypatch.setattr(timing, "_PRODUCT", {"cpu": (64, torch.float32)})
    shapes = {SYMMETRIC: ((24, 8),), ONE_WAY: ((24, 8),)}
    monkeypatch.setattr(cases, "QUICK_CPU_SHAPES", shapes)
    text, results, picture = io.StringIO(), tmp_path / "r.jsonl", tmp_path / "p.png"
    options = dict(device="cpu", quick=True, peers=False, out=Console(file=text, width=120))
    code = contrastive.run(**options, only="", json_path=results, plot_path=picture)
    assert code == 0, text.getvalue()
    records = read(results)
    assert all(each.verified and each.median_ms for each in records), text.getvalue()
    methods_of = {section: [r.label for r in records if r.section == section] for section in shapes}
    expected = {"torch eager", "lastlayer info_nce", "lastlayer info_nce, low memory"}
    assert all(set(each) == expected for each in methods_of.values())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert contrastive.run(**options, only="nothing", json_path=None, plot_path=None) == 2


def test_a_wrong_gradient_is_found():
    query, key, temperature = torch.randn(9, 4), torch.randn(9, 4), torch.tensor(0.2)
    leaves = [each.requires_grad_() for each in (query, key, temperature)]
    step = methods.of(ONE_WAY, "cpu", quick=True)[1].load()(*leaves)
    known = truth.truth_of(ONE_WAY, *(each.detach() for each in leaves))
    tolerances = family.Contrastive().tolerances(ONE_WAY, torch.float32)
    assert judge(step, known, tolerances, None).reason is None
    query, key, temperature = step.gradients
    wrong = step._replace(gradients=(query, key * 1.1, temperature))
    reason = judge(wrong, known, tolerances, None).reason
    assert reason is not None
    assert reason.startswith("gradient of key off by 1.0e-01")


def test_the_page_holds_it_against_its_goals(render, tmp_path):
    records = [
        record(source="torch", method="compiled", ratio_to_baseline=1.0, peak_bytes=4 * 10**9),
        record(),
        record(shape=(131072, 768), peak_bytes=4_100_000_000),
        record(quick=True, median_ms=5.55),
    ]
    for each in records:
        append(tmp_path / "r.jsonl", each)
    page = render.render(tmp_path)
    assert "## Contrastive losses: NVIDIA H200\n" in page
    row = "| lastlayer info_nce | 12.0 | 412 | 55% | 0.98 | 0.39 | 1e-06 | 2e-03 | 2e-03 | 1e-06 |"
    assert row in page
    assert "| symmetric info_nce: no slower than torch.compile | 32768×768 | 0.98× | met |" in page
    assert "at most 0.4 GB beyond inputs and gradients | 32768×768 | 0.39 GB | met |" in page
    assert "at most 4 GB beyond inputs and gradients | 131072×768 | 4.10 GB | **missed** |" in page
    assert "gradients within 0.004 of float64 | 8192×768 | · | not measured |" in page
    assert "5.55" not in page
    Console(file=io.StringIO(), width=120).print(tables.comparison(records))


def test_a_picture_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected timings of contrastive losses, got none"):
        plot.against_batch([record(median_ms=None)], tmp_path / "p.png")
