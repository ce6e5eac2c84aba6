"""Classes over 1 to 4 processes: losses, gradients and predictions are those of one process."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from lastlayer import parallel
from tests.processes import needs_processes, run_script

HERE = Path(__file__).parent
# Of each kind one, for what depends on the number of processes.
SOME = "full", "entmax", "adaptive", "differentiated", "char_cnn", "two_level", "sampled", "zlpr"
AT_FOUR = "few", "few words", "two_level", "overlap", "sampled"
# More processes than classes: the first alone, unless every case is asked for.
AT_EIGHT = "few, drawn", "few, ordered", "sampled", "ordered"

pytestmark = needs_processes


@pytest.mark.parametrize("processes", [2, 4])
def test_fused_losses_of_classes_that_are_spread(tmp_path, full, processes):
    run_script(HERE / "functional_process.py", processes, tmp_path, *(["all"] if full else []))


def test_sampled_heads_on_more_processes_than_classes(tmp_path, full):
    run_script(HERE / "heads_process.py", 8, tmp_path, *AT_EIGHT[: None if full else 1])


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_head_computes_what_one_process_does(tmp_path, full, processes):
    names = () if full or processes == 3 else AT_FOUR if processes == 4 else SOME
    run_script(HERE / "heads_process.py", processes, tmp_path, *names)


def test_heads_that_are_built_and_curves_do_not_depend_on_the_number_of_processes(tmp_path):
    for processes in (1, 2, 3):
        run_script(HERE / "use_process.py", processes, tmp_path, "build", "curve")
    alone = {each.parent.name: each for each in tmp_path.glob("1/*/model.safetensors")}
    assert len(alone) == 7
    for processes in (2, 3):
        for name, file in alone.items():
            other = tmp_path / str(processes) / name / file.name
            assert other.read_bytes() == file.read_bytes(), (processes, name)
    curves = [torch.load(tmp_path / f"curve of {processes}") for processes in (1, 2, 3)]
    for name, losses in curves[0].items():
        assert losses[-1] < losses[0], losses
        for other in curves[1:]:
            torch.testing.assert_close(torch.tensor(other[name]), torch.tensor(losses))


def test_shards_of_four_processes_are_gone_on_with_by_two(tmp_path):
    # FSDP2 of torch 2.8 sums gradients over gloo instead of averaging them, of any module.
    plane = () if torch.__version__.startswith("2.8.") else ("plane",)
    run_script(HERE / "use_process.py", 4, tmp_path, *plane, "shards")
    run_script(HERE / "use_process.py", 2, tmp_path, "shards", "training")


@pytest.mark.parametrize("wrong", [lambda m: m, lambda m: m.named_parameters(), lambda _: None])
def test_what_are_no_parameters_is_an_error(wrong):
    model = torch.nn.Linear(3, 3)
    for function in (parallel.parameter_groups, lambda each: parallel.clip_grad_norm_(each, 1.0)):
        with pytest.raises(TypeError, match=r"parameters: expected tensors, .*model\.parameters"):
            function(wrong(model))


def test_what_is_wrong_is_an_error_in_every_process_and_what_may_differ_is_none(tmp_path):
    run_script(HERE / "use_process.py", 3, tmp_path, "wrong", "unlike")


@pytest.mark.parametrize("what", ["die", "stall"])
def test_a_process_that_is_lost_is_named_by_the_others(tmp_path, what):
    # The one that is killed has an exit code of its own.
    with pytest.raises(AssertionError) if what == "die" else nullcontext():
        run_script(HERE / "fault_process.py", 3, tmp_path, what)
    for rank in (0, 2):
        assert (tmp_path / f"{what} {rank}").read_text() == "named"


@pytest.mark.gpu
def test_two_processes_that_share_a_gpu(tmp_path):
    run_script(HERE / "gpu_process.py", 2, tmp_path)


@pytest.mark.gpu
def test_one_process_with_nccl(tmp_path):
    run_script(HERE / "gpu_process.py", 1, tmp_path, "nccl")
