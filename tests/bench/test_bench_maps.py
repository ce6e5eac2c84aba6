import io
import re
import sys
from pathlib import Path

import pytest
import torch
from lastlayer.bench import maps as bench_maps
from lastlayer.bench import peers, plot, session
from lastlayer.bench.cases import Method
from lastlayer.bench.maps import cases as map_cases
from lastlayer.bench.maps import peers as map_peers
from lastlayer.bench.maps.family import Maps
from rich.console import Console

from lastlayer import maps

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def test_a_run_verifies_times_and_writes_down(small_run):
    outcome = small_run()
    assert outcome.code == 0
    assert {(r.shape, r.direction) for r in outcome.records} == {
        (shape, direction)
        for shape in ((8, 16), (6, 96))
        for direction in ("forward", "forward+backward")
    }
    for record in outcome.records:
        assert record.verified, record
        assert record.median_ms > 0
        assert record.tb_per_s == pytest.approx(record.bytes / record.median_ms / 1e9)
        assert record.fraction_of_copy == pytest.approx(record.tb_per_s / record.copy_tb_per_s)
    assert "6×96 float32 forward+backward" in outcome.text
    assert len({record.seed for record in outcome.records}) == 4


def test_ratios_are_to_the_same_case(small_run):
    found = {(r.shape, r.direction, r.source, r.method): r for r in small_run().records}
    key = ((6, 96), "forward")
    softmax = found[*key, "torch", "softmax"]
    ours = found[*key, "lastlayer", "entmax 1.5"]
    compact = found[*key, "lastlayer", "entmax_support 1.5, 128"]
    assert softmax.ratio_to_softmax == 1
    assert ours.ratio_to_softmax == pytest.approx(ours.median_ms / softmax.median_ms)
    assert ours.ratio_to_ours is None
    assert compact.ratio_to_ours == pytest.approx(compact.median_ms / ours.median_ms)
    assert compact.bytes < ours.bytes + 6 * 128 * 12 + 6 * 8
    assert found[(6, 96), "forward+backward", "torch", "softmax"].bytes == 5 * 6 * 96 * 4


def test_a_wrong_map_is_not_timed_and_fails_the_run(small_run, monkeypatch):
    monkeypatch.setattr(maps, "sparsemax", lambda scores: torch.softmax(scores, -1))
    outcome = small_run()
    assert outcome.code == 1
    wrong = [r for r in outcome.records if r.method == "sparsemax"]
    assert wrong
    for record in wrong:
        assert not record.verified
        assert record.median_ms is None
        assert record.status.startswith("wrong: ")
    assert all(r.verified for r in outcome.records if r.method != "sparsemax")
    assert f"{len(wrong)} of our results failed verification" in outcome.text


def test_a_map_of_ours_that_raises_fails_the_run(small_run, monkeypatch):
    def broken(scores):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(maps, "sparsemax", broken)
    outcome = small_run()
    assert outcome.code == 1
    assert {r.status for r in outcome.records if r.method == "sparsemax"} == {
        "failed: RuntimeError: no kernel"
    }


def with_peer(monkeypatch, load, computes="sparsemax"):
    monkeypatch.setattr(map_cases, "ENTMAX_SPARSEMAX", Method("peer", "entmax", computes, load))


def test_a_peer_that_raises_is_a_row(small_run, monkeypatch):
    def refuses(scores):
        raise ValueError("rows over 15 columns are refused\nsecond line")

    with_peer(monkeypatch, lambda: refuses)
    outcome = small_run(peers=True)
    assert outcome.code == 0
    refused = [r for r in outcome.records if r.method == "peer"]
    assert len(refused) == 4
    assert {r.status for r in refused} == {"failed: ValueError: rows over 15 columns are refused"}
    assert "entmax peer" in outcome.text
    assert re.search(r"failed:\s+ValueError", outcome.text)


def test_a_peer_that_cannot_be_imported_is_a_row(small_run, monkeypatch):
    def load():
        raise ImportError("undefined symbol")

    with_peer(monkeypatch, load)
    outcome = small_run(peers=True)
    assert outcome.code == 0
    assert {r.status for r in outcome.records if r.method == "peer"} == {
        "failed: ImportError: undefined symbol"
    }


def test_a_peer_that_is_inexact_is_timed_and_says_so(small_run, monkeypatch):
    with_peer(monkeypatch, lambda: lambda scores: 1.5 * maps.sparsemax(scores))
    outcome = small_run(peers=True)
    assert outcome.code == 0
    for record in [r for r in outcome.records if r.method == "peer"]:
        assert not record.verified
        assert record.median_ms > 0
        assert record.ratio_to_ours > 0
        assert record.row_sum_error == pytest.approx(0.5)
        assert record.status == "inexact: row sums off by 5.0e-01"


def test_an_absent_peer_is_listed_with_the_command_that_adds_it(small_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "entmax", None)
    outcome = small_run(peers=True)
    assert outcome.code == 0
    assert not [r for r in outcome.records if r.source == "entmax"]
    assert 'entmax: not installed: pip install "lastlayer[peers]"' in outcome.text


def test_a_package_missing_below_a_peer_is_not_the_peer_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(peers.PeerMissing):
        map_peers.liger_sparsemax().load()
    with pytest.raises(ModuleNotFoundError, match="no_such_part") as caught:
        peers.attribute("rich", "rich.no_such_part", "name")
    assert not isinstance(caught.value, peers.PeerMissing)


def test_the_entmax_package_agrees_with_us(small_run):
    pytest.importorskip("entmax")
    outcome = small_run(peers=True)
    theirs = [r for r in outcome.records if r.source == "entmax"]
    assert {r.method for r in theirs} == {"sparsemax", "entmax15"}
    assert all(r.verified and r.source_version for r in theirs)


def test_a_full_run_adds_scales_widths_and_lines(small_run):
    outcome = small_run(quick=False, dtypes=("float64",))
    assert outcome.code == 0
    assert {r.scale for r in outcome.records if r.section == "scales"} == set(map_cases.SCALES)
    assert {r.shape for r in outcome.records if r.section == "widths"} == {
        (16, 16),
        (8, 32),
        (4, 64),
    }
    assert {r.dtype for r in outcome.records} == {"float64"}
    assert re.search(r"^\d\d:\d\d:\d\d shapes 8×16 float64 scale 2 forward", outcome.text, re.M)
    assert "B/s against width" in outcome.text
    assert "6×96 float64 scale 0.01" in outcome.text


def test_the_plot_is_a_png(small_run):
    outcome = small_run(plot=True)
    assert outcome.plot_path.read_bytes().startswith(PNG_SIGNATURE)
    assert {r.shape[-1] for r in outcome.records if r.section == "widths"} == {16, 64}


def test_a_case_that_does_not_fit_in_memory_is_noted(small_run, monkeypatch):
    draw = Maps.draw

    def too_large(self, case, device, seed):
        if case.shape == (6, 96):
            raise torch.OutOfMemoryError
        return draw(self, case, device, seed)

    monkeypatch.setattr(Maps, "draw", too_large)
    outcome = small_run()
    assert {r.shape for r in outcome.records} == {(8, 16)}
    assert "skipped 6×96 float32, scale 2, forward: not enough memory" in outcome.text


def test_the_full_plan_for_cuda_is_what_the_goals_need():
    cases = map_cases.plan(torch.device("cuda"), quick=False, peers=True)
    shapes = [case for case in cases if case.section == "shapes"]
    assert {case.shape for case in shapes} == set(map_cases.CUDA_SHAPES)
    assert {case.dtype for case in shapes} == {"float32", "bfloat16"}
    for case in cases:
        sources = [method.source for method in case.methods]
        assert sources == sorted(sources, key=lambda s: s not in ("torch", "lastlayer")), sources
        if case.section in ("shapes", "widths"):
            assert case.methods[0] is map_cases.SOFTMAX
        assert any(method.source == "adasplash" for method in case.methods)
    widest = max(case.shape[1] for case in cases if case.section == "widths")
    assert widest == 2**20
    for case in cases:
        if case.section == "widths" and case.shape[1] > map_peers.LIGER_WIDEST:
            assert all(method.source != "liger-kernel" for method in case.methods)


def ask(**changes):
    text = io.StringIO()
    settings = {
        "device": "cpu",
        "dtypes": (),
        "quick": True,
        "peers": False,
        "json_path": None,
        "plot_path": None,
        "out": Console(file=text, width=200),
    }
    return bench_maps.run(**{**settings, **changes}), text.getvalue()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "tpu"}, "device: expected 'cpu' or 'cuda', got 'tpu'"),
        ({"dtypes": ("int8",)}, "dtypes: expected names among float32"),
        ({"json_path": Path("/no/such/folder/r.jsonl")}, "json_path: the folder /no/such/folder"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_work(changes, message, monkeypatch):
    monkeypatch.setattr(session, "measure", lambda *_, **__: pytest.fail("work was done"))
    code, text = ask(**changes)
    assert code == 2
    assert message in text


def test_cuda_without_a_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, text = ask(device="cuda")
    assert code == 2
    assert "torch sees no CUDA device; use 'cpu'" in text


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    code, text = ask(plot_path=tmp_path / "p.png")
    assert code == 2
    assert 'pip install "lastlayer[lab]"' in text
