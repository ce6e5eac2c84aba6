"""What the driver does with results that are right, wrong, slow, absent or too large."""

import io
import math
import sys

import pytest
import torch
from rich.console import Console

from benchmarks import driver, timing
from benchmarks.driver import Case, Family, Method, PeerMissing, Work, relative_error
from benchmarks.record import read

CPU = torch.device("cpu")


def squares(factor=1.0):
    """The loss ``sum(x²)`` with its gradient, off by a factor."""
    return lambda: driver.loss_step(lambda x: (x * x).sum() * factor, "x")


def reference(computes, inputs):
    (x,) = inputs
    assert computes == "squares"
    return {"loss": x.double().square().sum(), "x": 2 * x.double()}


@pytest.fixture
def measured(tmp_path):
    """Measures methods on one small case; returns the run and their records by label."""

    def run(*methods, json_path=None, **changes):
        made = [m if isinstance(m, Method) else Method(*m, "squares") for m in methods]
        settings = dict(
            section="one", shape=(3, 4), dtype="float32", direction="forward+backward",
            methods=tuple(made), gradients=("x",), reference=reference, flop=24,
            draw=lambda on, seed: (
                torch.randn(3, 4, generator=torch.Generator(on).manual_seed(seed)),
            ),
        )  # fmt: skip
        case = Case(**settings | changes)
        family = Family("fused", "Squares", lambda *_: [case], "")
        out = Console(file=io.StringIO())
        found = driver.run(family, [case], CPU, quick=True, out=out, json_path=json_path)
        return found, {record.label: record for record in found.records}

    return run


BASE, OURS = ("base", "torch", squares()), ("main", "lastlayer", squares())


def test_a_right_result_is_timed_and_written_down(measured, tmp_path):
    run, found = measured(BASE, OURS, json_path=tmp_path / "r.jsonl")
    ours = found["lastlayer main"]
    assert not run.failures
    assert ours.verified
    assert ours.status == "ok"
    assert ours.median_ms > 0
    assert ours.errors["loss"] < 1e-6
    assert ours.errors["x"] < 1e-6
    assert ours.baseline == "torch base"
    assert ours.rate(ours.median_ms) == pytest.approx(24 / ours.median_ms / 1e9)
    assert ours.commit
    assert read(tmp_path / "r.jsonl") == run.records


@pytest.mark.parametrize("factor", [1.01, math.nan])
def test_a_wrong_result_of_ours_fails_loudly_and_is_not_timed(measured, factor):
    run, found = measured(BASE, ("main", "lastlayer", squares(factor)))
    ours = found["lastlayer main"]
    assert run.failures == [ours]
    assert ours.median_ms is None
    assert ours.status.startswith("wrong: loss off by ")
    assert found["torch base"].verified


def test_a_wrong_gradient_is_named(measured):
    halved = driver.loss_step(lambda x: (x * (x / 2 + x.detach() / 2)).sum(), "x")
    _, found = measured(("main", "lastlayer", lambda: halved))
    assert found["lastlayer main"].status == "wrong: x off by 2.5e-01"


def test_a_wrong_peer_is_timed_and_marked(measured):
    run, found = measured(OURS, ("peer", "liger-kernel", squares(1.5)))
    peer = found["liger-kernel peer"]
    assert not run.failures
    assert peer.median_ms > 0
    assert not peer.verified
    assert peer.status == "inexact: loss off by 5.0e-01"


def test_whatever_a_peer_raises_is_its_status(measured):
    def refuses(x):
        raise ValueError("no such shape\nsecond line")

    def broken():
        raise ImportError("undefined symbol")

    run, found = measured(OURS, ("one", "entmax", lambda: refuses), ("two", "adasplash", broken))
    assert not run.failures
    assert found["entmax one"].status == "failed: ValueError: no such shape"
    assert found["adasplash two"].status == "failed: ImportError: undefined symbol"
    assert found["lastlayer main"].verified


def test_a_result_that_nothing_was_compared_with_fails_the_run(measured):
    run, _ = measured(("main", "lastlayer", lambda: Work(lambda x: {})))
    assert [r.status for r in run.failures] == [
        "failed: RuntimeError: no result was compared with a reference"
    ]


def test_ours_that_raises_fails_the_run(measured):
    run, _ = measured(("main", "lastlayer", lambda: lambda x: 1 / 0))
    assert [r.status for r in run.failures] == ["failed: ZeroDivisionError: division by zero"]


def test_an_absent_peer_is_listed_with_the_command_that_adds_it(measured, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    load = lambda: driver.peer("liger-kernel", "liger_kernel.ops", "name")  # noqa: E731
    run, found = measured(OURS, ("peer", "liger-kernel", load))
    assert list(found) == ["lastlayer main"]
    assert run.absent == {"liger-kernel": 'not installed: pip install "lastlayer[peers]"'}


def test_a_package_missing_below_a_peer_is_not_the_peer_missing():
    with pytest.raises(ModuleNotFoundError, match="no_such_part") as caught:
        driver.peer("rich", "rich.no_such_part", "name")
    assert not isinstance(caught.value, PeerMissing)


def test_what_would_not_fit_is_not_tried(measured, monkeypatch):
    monkeypatch.setattr(timing, "free_bytes", lambda device: 10**9)
    large = Method("large", "torch", lambda: pytest.fail("loaded"), "squares", scratch=3 * 10**9)
    _, found = measured(OURS, large)
    assert found["torch large"].status == "does not fit: needs about 3 GB, 1 GB are free"


def test_inputs_that_do_not_fit_are_noted(measured):
    def too_large(on, seed):
        raise torch.OutOfMemoryError

    run, found = measured(OURS, draw=too_large)
    assert not found
    assert run.notes == [
        "skipped one 3×4 float32 forward+backward: not enough memory for the inputs"
    ]


def test_what_is_verified_may_differ_from_what_is_timed(measured):
    calls = []
    right = squares()()
    work = Work(calls.append, verified=right.call, facts=lambda _: {"settings": "s"})
    _, found = measured(("main", "lastlayer", lambda: work))
    assert found["lastlayer main"].verified
    assert found["lastlayer main"].settings == "s"
    assert calls


@pytest.mark.parametrize("gradients", [("x",), ()])
def test_without_a_reference_the_first_method_in_float64_is_one(measured, gradients):
    plain = "base", "torch", lambda: lambda x: (x * x).sum()
    wrong = "main", "lastlayer", lambda: lambda x: (x * x).sum() * 1.1
    run, found = measured(plain, wrong, reference=None, gradients=gradients)
    assert found["torch base"].verified
    assert set(found["torch base"].errors) == {"loss", *gradients}
    assert found["torch base"].median_ms > 0
    assert [r.status for r in run.failures] == ["wrong: loss off by 1.0e-01"]


def test_missing_and_sparse_gradients_are_compared():
    exact = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    assert relative_error(None, exact) == 1
    assert relative_error(None, torch.zeros(2)) == 0
    twice = torch.sparse_coo_tensor([[1, 1]], exact[[1, 1]] / 2, (2, 2))
    assert relative_error(twice, exact) == 0


def test_only_chooses_by_title_and_peers_can_be_left_out():
    def case(section):
        peer = Method("p", "entmax", lambda: None)
        ours = Method("o", "lastlayer", lambda: None)
        return driver.Case(section, (1, 2), "float32", "forward", (ours, peer), lambda *_: ())

    cases = [case("wide"), case("narrow")]
    (found,) = driver.chosen(cases, ["WIDE", "no such"], peers=False)
    assert found.section == "wide"
    assert [m.source for m in found.methods] == ["lastlayer"]
    with pytest.raises(ValueError, match=r"expected part of one of \[wide 1×2 float32"):
        driver.chosen(cases, ["none"], peers=True)
