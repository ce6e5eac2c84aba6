"""``python -m benchmarks``: what is refused before any work, a quick run, and the structure."""

import pytest
import torch
from torch.nn import functional

from benchmarks import contrastive, driver, plot, structure
from benchmarks.__main__ import main
from benchmarks.record import read
from lastlayer import heads


@pytest.fixture
def no_work(monkeypatch):
    monkeypatch.setattr(driver, "run", lambda *_, **__: pytest.fail("work was done"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device: expected auto, cpu or cuda, got 'tpu'"),
        (["--json", "."], "--json: expected a file, got the folder '.'"),
        (["--json", "no/r.jsonl"], "--json: the folder of 'no/r.jsonl' does not exist"),
        (["--only", "none"], "--only: expected part of one of [symmetric"),
    ],
)
def test_bad_options_are_refused_before_any_work(no_work, capsys, arguments, message):
    assert main(["contrastive", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_cuda_is_refused_where_there_is_none(no_work, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["maps", "--device", "cuda"]) == 2
    assert "expected a CUDA GPU, got none with torch" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(no_work, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert main(["maps", "--device", "cpu", "--plot", str(tmp_path / "p.png")]) == 2
    assert 'pip install "lastlayer[lab]"' in capsys.readouterr().err


def test_an_unknown_family_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["trees"])
    assert "invalid choice: 'trees'" in capsys.readouterr().err


def test_a_run_prints_tables_and_appends_records(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(contrastive.SHAPES, ("cpu", True), {contrastive.SYMMETRIC: [(24, 8)]})
    path = tmp_path / "r.jsonl"
    files = ["--json", str(path), "--plot", str(tmp_path / "p.png"), "--commit", "abc"]
    assert main(["contrastive", "--quick", "--device", "cpu", "--no-peers", *files]) == 0
    assert {r.label for r in read(path)} == {
        "torch eager", "lastlayer info_nce", "lastlayer info_nce, low memory"
    }  # fmt: skip
    assert {r.commit for r in read(path)} == {"abc"}
    assert "symmetric 24×8 float32 forward+backward" in capsys.readouterr().out
    assert (tmp_path / "p.png").exists()


def test_a_wrong_result_of_ours_is_the_exit_code(monkeypatch, capsys):
    monkeypatch.setitem(contrastive.SHAPES, ("cpu", True), {contrastive.ONE_WAY: [(24, 8)]})
    monkeypatch.setattr(contrastive, "_ours", lambda q, k, t, **_: contrastive._one_way(k, q, t))
    assert main(["contrastive", "--quick", "--device", "cpu", "--no-peers"]) == 1
    assert "2 of our results failed verification" in capsys.readouterr().err


def test_operations_and_files_of_a_step():
    scores = torch.randn(32, 100, requires_grad=True)
    target = torch.randint(100, (32,))
    plain = lambda: functional.cross_entropy(scores, target).backward()  # noqa: E731
    assert structure.operations(plain) == structure.operations(plain, eager=True) == 8
    assert structure.files(plain) == set()
    head, hidden = heads.FullSoftmax(16, 100), torch.randn(4, 16)
    seen = structure.files(lambda: head(hidden, target[:4]).backward())
    assert all("lastlayer" in name for name in seen)
    assert any("heads" in name for name in seen)


def test_the_figures_of_structure_have_targets(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(structure, "_in_new_process", lambda program: "0.5")
    monkeypatch.setattr(structure, "microseconds", lambda step: step() or 300.0)
    assert main(["structure", "--markdown", "--json", str(tmp_path / "s.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "| core: files |" in shown
    assert "| operations of a step: F.cross_entropy | 8 | 8 |" in shown
    assert "| CPU seconds of first calls, Numba's cache warm | 0.5 | 2.5 |" in shown
    assert read(tmp_path / "s.jsonl") == []
