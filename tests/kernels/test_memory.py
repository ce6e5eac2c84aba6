"""Memory for large results."""

import pytest
import torch

from lastlayer.kernels import _cpu


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (_cpu.LARGE // 4,), (1031, 1033)], ids=str)
def test_it_is_what_torch_gives(shape):
    made = _cpu.empty(shape, torch.float32)
    assert (made.shape, made.dtype, made.device.type) == (shape, torch.float32, "cpu")
    assert made.fill_(2.0).sum().item() == 2.0 * made.numel()


def test_the_advice_covers_whole_pages_inside_the_result(monkeypatch):
    asked = []
    monkeypatch.setattr(_cpu, "_advise", lambda: lambda *given: asked.append(given))
    made = _cpu.empty((1 << 20,), torch.float64)
    ((start, length, advice),) = asked
    assert start % _cpu.mmap.PAGESIZE == 0
    assert made.data_ptr() <= start
    assert start + length == made.data_ptr() + made.nbytes
    assert advice == 14


def test_small_results_are_left_alone(monkeypatch):
    monkeypatch.setattr(_cpu, "_advise", lambda: pytest.fail("it was asked for"))
    _cpu.empty((100,), torch.float32)


def test_a_system_without_huge_pages_changes_nothing(monkeypatch):
    monkeypatch.setattr(_cpu, "_advise", lambda: lambda *_: -1)
    assert _cpu.empty((1 << 20,), torch.float32).zero_().sum() == 0
