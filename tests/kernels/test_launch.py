"""Kernels are launched with prepared arguments: what that asks of each launch."""

import ast
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lastlayer
from lastlayer import kernels

FOLDER = Path(kernels.__file__).parent


def is_constant(argument):
    return (
        isinstance(argument.annotation, ast.Attribute) and argument.annotation.attr == "constexpr"
    )


def decorated(function, name):
    named = [each.func if isinstance(each, ast.Call) else each for each in function.decorator_list]
    return any(isinstance(each, ast.Name) and each.id == name for each in named)


def launches_and_kernels():
    for path in sorted(FOLDER.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        made = {each.name: each for each in functions if decorated(each, "kernel")}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = getattr(node.func.value, "id", None)
                if name in made:
                    yield path, node, made[name]


def test_everything_that_changes_is_positional_and_keywords_keep_their_order():
    orders = {}
    for path, launch, kernel in launches_and_kernels():
        changing = [each.arg for each in kernel.args.args if not is_constant(each)]
        named = [each.arg for each in launch.keywords if each.arg is not None]
        assert not set(named) & set(changing), f"{path}: {kernel.name}: by keyword"
        if not any(isinstance(each, ast.Starred) for each in launch.args):
            assert len(launch.args) == len(changing), f"{path}: {kernel.name}: constants by place"
        if len(named) == len(launch.keywords):
            order = orders.setdefault((path, kernel.name), named)
            assert named == order, f"{path}: {kernel.name}: keywords in another order"
    assert len(orders) > 40


def scaled(x, n, m, SIZE: "tl.constexpr"):  # noqa: F821, N803
    pass


def test_numbers_that_are_not_specialized_on_share_a_prepared_launch(monkeypatch):
    launch = pytest.importorskip("lastlayer.kernels._launch")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    kernel, made, ran = launch.Kernel(scaled, do_not_specialize=["n"]), [], []
    compiled = SimpleNamespace(run=lambda *a: ran.append(a), function=0, packed_metadata=0)
    monkeypatch.setattr(kernel, "run", lambda *a, **_: made.append(a) or compiled)
    x = torch.zeros(4)
    for n, m in ((5, 3), (7, 3), (1, 3), (7, 4), (1 << 40, 3), (1 << 41, 3)):
        kernel[(1,)](x, n, m, SIZE=8)
    # One for each m, and one for an n of 64 bits.
    assert [each[1:] for each in made] == [(5, 3), (7, 4), (1 << 40, 3)]
    assert [each[-3:-1] for each in ran] == [(7, 3), (1, 3), (1 << 41, 3)]


def test_what_is_launched_stays_loaded(monkeypatch):
    """Triton 3.9 unloads a compiled kernel that nothing refers to."""
    launch = pytest.importorskip("lastlayer.kernels._launch")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)

    class Compiled:
        run, function, packed_metadata = print, 0, 0

    kernel, made = launch.Kernel(scaled), []

    def run(*_, **__):
        compiled = Compiled()
        made.append(weakref.ref(compiled))
        return compiled

    monkeypatch.setattr(kernel, "run", run)
    kernel[(1,)](torch.zeros(4), 5, 3, SIZE=8)
    gc.collect()
    assert made[0]() is not None


@pytest.mark.gpu
def test_sizes_layouts_and_dtypes_change_from_call_to_call():
    for _ in range(2):
        for n in (1, 16, 17, 100, 1000):
            for dtype in (torch.float32, torch.bfloat16):
                memory = torch.randn(3 * n + 1, device="cuda").to(dtype)
                for rows in (memory[:-1].view(3, n), memory[1:].view(3, n)):
                    made = lastlayer.sparsemax(rows).cpu().double()
                    expected = lastlayer.sparsemax(rows.cpu().double())
                    torch.testing.assert_close(made, expected, atol=8e-3, rtol=0)


@pytest.mark.gpu
def test_a_profiler_s_hook_sees_every_launch():
    from triton import knobs

    rows, seen = torch.randn(3, 100, device="cuda"), []
    lastlayer.sparsemax(rows)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        lastlayer.sparsemax(rows)
        lastlayer.sparsemax(rows)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 2
