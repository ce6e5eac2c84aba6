"""Plans are counted without memory, and what they say is what processes send."""

import json
import resource
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from lastlayer import heads, parallel, samplers, trees
from lastlayer.parallel.communication import planned_family
from lastlayer.parallel.families import _FAMILIES
from tests.processes import needs_processes, run_script

HERE = Path(__file__).parent


def softmax(n_classes=1000, width=16, **given):
    return heads.FullSoftmax(width, n_classes, device="meta", **given)


@needs_processes
@pytest.mark.parametrize("processes", [2, 3])
def test_what_is_sent_is_what_was_said(tmp_path, processes):
    run_script(HERE / "counting_process.py", processes, tmp_path)


def test_a_softmax_sends_one_number_per_row_in_one_round():
    made = parallel.communication(softmax(), 4, 32, device="cpu")
    sent = {each.what: each for each in made.exchanges}
    lse = sent["logsumexp"]
    assert (lse.call, lse.rounds, lse.floats_per_row) == ("all_gather", 1, 1)
    # One float32 of each of 4 · 32 rows from each of three others.
    assert lse.nbytes == 4 * (4 * 32) * 3
    assert sent["hidden states"].nbytes == sent["gradient of hidden"].nbytes == 3 * 32 * 16 * 4
    assert sent["loss"].nbytes == 2 * 4 * 3 / 4
    assert made.bytes_forward + made.bytes_backward == sum(e.nbytes for e in made.exchanges)


def test_scores_are_never_sent():
    few, many = (parallel.communication(softmax(n), 8, 16, device="cpu") for n in (100, 10_000))
    assert few.bytes_forward == many.bytes_forward


@pytest.mark.parametrize("loss", ["bce", "asymmetric"])
def test_binary_losses_send_nothing_per_row(loss):
    made = parallel.communication(heads.MultiLabel(16, 1000, loss, device="meta"), 4, 32)
    assert made.floats_per_row == 0
    assert {e.what for e in made.exchanges} == {
        "number of rows", "hidden states", "targets", "loss", "gradient of hidden"
    }  # fmt: skip


def test_noise_contrastive_sends_vectors_alone():
    head = heads.NoiseContrastive(16, 10**6, samplers.LogUniform(10**6), 100, device="meta")
    made = parallel.communication(head, 4, 32)
    vectors = 100 + 32
    (sent,) = [each for each in made.exchanges if each.what == "class vectors"]
    assert sent.nbytes == vectors * (16 + 1) * 4 * 3 / 4
    assert made.floats_per_row == 0


def test_the_table_of_the_page_has_every_family(monkeypatch):
    monkeypatch.syspath_prepend(HERE.parent.parent / "docs")
    tables = import_module("class_parallel_tables")
    covered = {type(planned_family(head)) for head, _ in tables._heads().values()}
    assert covered == {family for _, family in _FAMILIES}
    lines = tables.exchanges().splitlines()
    assert lines[2].startswith("| `FullSoftmax` | 1 | 1 | 28 |")
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert tables.volumes().count("class-parallel |") == len(tables._SIZES) + 1


def test_one_process_sends_nothing():
    made = parallel.communication(softmax(), 1, 32)
    assert made.exchanges == ()
    assert str(made) == "nothing is sent"
    assert parallel.plan(softmax(), 1, rows=32).layout == "replicate"


def test_memory_and_bytes_of_each_layout():
    made = parallel.plan(softmax(1000, 16, bias=False), 4, rows=8, device="cpu")
    whole = 1000 * 16 * 4
    replicate, fsdp, spread = made.layouts
    assert replicate.memory[:4] == (whole, whole, 2 * whole, 0)
    assert replicate.nbytes == 2 * whole * 3 / 4
    assert fsdp.memory[:4] == (whole / 4, whole / 4, whole / 2, 2 * whole)
    assert fsdp.nbytes == 3 * whole * 3 / 4
    assert (fsdp.rounds_forward, fsdp.rounds_backward) == (1, 2)
    assert spread.memory[:4] == (whole / 4, whole / 4, whole / 2, 2 * 32 * 16 * 4)
    assert spread.memory.scores == 32 * 250 * 4
    assert replicate.memory.scores == 8 * 1000 * 4
    assert spread.memory.total == sum(spread.memory)
    assert spread.nbytes == made.communication.bytes_forward + made.communication.bytes_backward


def test_parts_are_rounded_up():
    made = parallel.plan(softmax(10, 16, bias=False), 4, rows=8, optimizer_slots=0)
    assert made["class-parallel"].memory.weights == 3 * 16 * 4
    assert made["class-parallel"].memory.optimizer == 0


def test_fewer_rows_than_classes_are_sent_and_else_gradients():
    many = parallel.plan(softmax(100_000), 8, rows=128)
    assert many.layout == "class-parallel"
    assert "times less than replicate" in many.why
    few = parallel.plan(softmax(100), 8, rows=4096)
    assert few.layout == "replicate"


def test_memory_decides_first():
    head = softmax(1_000_000, 512)
    made = parallel.plan(head, 8, rows=2_000_000, memory=500)
    assert made.layout == "replicate"
    limit = (made["replicate"].memory.total + made["fsdp"].memory.total) / 2e9
    assert parallel.plan(head, 8, rows=2_000_000, memory=limit).layout == "fsdp"
    small = parallel.plan(head, 8, rows=8, memory=2)
    assert small.layout == "class-parallel"
    assert "more than the 2 GB" in small.why
    none = parallel.plan(head, 8, rows=8, memory=0.1)
    assert not any(each.fits for each in none.layouts)
    assert "none fits into 0.1 GB" in none.why


def test_shared_rows_share_the_work():
    made = parallel.plan(softmax(), 4, rows=64, shared=True)
    assert made.layout == "class-parallel"
    assert "same rows" in made.why
    assert made["replicate"].nbytes == 0
    sent = {each.what: each for each in made.communication.exchanges}
    assert sent["gradient of hidden"].call == "all_reduce"
    assert "hidden states" not in sent


def test_what_cannot_be_spread_is_said():
    made = parallel.plan(heads.PartialSoftmax(16, 1000, 5, device="meta"), 4, rows=8)
    assert "by the scores of all" in made["class-parallel"].refused
    assert made.communication is None
    assert "not possible" in str(made)
    with pytest.raises(ValueError, match="by the scores of all"):
        parallel.communication(heads.PartialSoftmax(16, 1000, 5, device="meta"), 4, rows=8)


def test_row_sparse_gradients():
    head = heads.SampledSoftmax(16, 10**6, samplers.Uniform(10**6), 100, sparse=True, device="meta")
    made = parallel.plan(head, 4, rows=8)
    assert made["replicate"].memory.gradients == 108 * 17 * 4
    assert made["replicate"].nbytes == 108 * (17 * 4 + 8) * 3
    assert "dense gradients" in made["fsdp"].refused
    assert "sparse=False" in made["class-parallel"].refused
    assert made.layout == "replicate"


HUGE = {
    "full": lambda n: heads.FullSoftmax(512, n, device="meta"),
    "entmax": lambda n: heads.EntmaxHead(512, n, device="meta"),
    "zlpr": lambda n: heads.MultiLabel(512, n, device="meta"),
    "sampled": lambda n: heads.SampledSoftmax(512, n, samplers.LogUniform(n), device="meta"),
    "adaptive": lambda n: heads.AdaptiveSoftmax(
        512, cutoffs=[n // 100, n // 10], n_classes=n, device="meta"
    ),
    "differentiated": lambda n: heads.DifferentiatedSoftmax(
        512, [(n // 100, 384), (n - n // 100, 128)], device="meta"
    ),
}


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is told in other units")
@pytest.mark.parametrize("name", HUGE)
def test_a_billion_classes_take_no_memory(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for device in ("cpu", "cuda"):
        made = parallel.plan(HUGE[name](10**9), 256, rows=128, memory=80, device=device)
        assert made.layout == "class-parallel"
        assert made.chosen.fits
    # In kilobytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_the_head_is_left_as_it_was():
    for head in (
        heads.SampledSoftmax(16, 100, samplers.Uniform(100), 10),
        heads.HierarchicalSoftmax(16, trees.two_level(100)),
        heads.CharCNNSoftmax(16, [f"w{i}" for i in range(100)]),
    ):
        before = {**vars(head)}
        parallel.plan(head, 4, rows=8)
        assert vars(head).keys() == before.keys()
        assert head(torch.randn(3, 16), torch.tensor([1, 2, 3])).isfinite()


def test_bandwidth_gives_seconds():
    made = parallel.plan(softmax(), 4, rows=8, gbps=8)
    assert made["replicate"].seconds == made["replicate"].nbytes / 1e9
    assert parallel.plan(softmax(), 4, rows=8)["replicate"].seconds is None


def test_a_plan_can_be_read_by_people_and_machines():
    made = parallel.plan(softmax(100_000), 8, rows=128, memory=80)
    text = str(made)
    assert text.splitlines()[0] == (
        "FullSoftmax(16, 100,000) in float32, 8 processes with 128 rows each"
    )
    assert text.splitlines()[-1] == f"class-parallel: {made.why}"
    again = json.loads(json.dumps(made.as_json()))
    assert again["layout"] == "class-parallel"
    assert again["layouts"][2]["memory"]["total"] == made.chosen.memory.total
    with pytest.raises(KeyError, match="expected one of"):
        made["dispatch"]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"mesh": 0}, ValueError, "mesh: expected at least 1, got 0"),
        ({"mesh": "8"}, TypeError, "mesh: expected an int"),
        ({"rows": 0}, ValueError, "rows: expected at least 1, got 0"),
        ({"rows": 1.5}, TypeError, "rows: expected an int, got float"),
        ({"gbps": 0}, ValueError, "gbps: expected a finite number above 0"),
        ({"memory": -1}, ValueError, "memory: expected a finite number above 0"),
        ({"optimizer_slots": -1}, ValueError, "optimizer_slots: expected at least 0"),
        ({"head": torch.nn.Linear(2, 3)}, TypeError, "head: expected a lastlayer head, got Linear"),
    ],
)
def test_arguments_are_checked(given, error, message):
    given = {"head": softmax(), "mesh": 4, "rows": 8, **given}
    with pytest.raises(error, match=message):
        parallel.plan(given.pop("head"), given.pop("mesh"), **given)
