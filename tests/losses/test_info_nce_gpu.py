"""InfoNCE on CUDA: exact in half precision, in little memory, without waiting."""

import pytest
import torch
from dense_info_nce import dense_info_nce

from lastlayer.losses.contrastive import info_nce
from waits import no_waits

pytestmark = pytest.mark.gpu

# Of gradients at a temperature of 1; cosines in float16 are felt more at lower ones.
GRADIENTS = {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 1e-5}
ROUNDING = {torch.bfloat16: 2e-4, torch.float16: 2e-4, torch.float32: 1e-6}


def pairs(n: int, d: int, dtype: torch.dtype) -> list[torch.Tensor]:
    common = torch.randn(n, d)
    made = (common + 1.5 * torch.randn(n, d) for _ in range(2))
    return [each.to("cuda", dtype).requires_grad_() for each in made]


# Where one exponential serves both sides as it is, where it is raised, and where it does not do.
@pytest.mark.parametrize("temperature", [0.07, 0.016, 0.01])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", GRADIENTS)
def test_equals_float64(dtype, symmetric, temperature):
    query, key = pairs(700, 256, dtype)
    scale = torch.tensor(temperature, device="cuda", requires_grad=True)
    leaves = [query, key, scale]
    exact = [each.detach().double().cpu().requires_grad_() for each in leaves]
    expected = dense_info_nce(*exact[:2], temperature=exact[2], symmetric=symmetric).mean()
    wanted = torch.autograd.grad(expected * 2.0**12, exact)
    for chunk_rows in (256, "auto"):
        loss = info_nce(query, key, temperature=scale, symmetric=symmetric, chunk_rows=chunk_rows)
        torch.testing.assert_close(loss.double().cpu(), expected, rtol=1e-3, atol=1e-4)
        found = torch.autograd.grad(loss * 2.0**12, leaves)
        for one, other in zip(found[:2], wanted[:2], strict=True):
            most = GRADIENTS[dtype] + ROUNDING[dtype] / temperature
            assert float((one.double().cpu() - other).norm() / other.norm()) <= most
        torch.testing.assert_close(found[2].double().cpu(), wanted[2], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_host_does_not_wait_and_bits_repeat(symmetric):
    query, key = pairs(3000, 128, torch.bfloat16)
    groups = torch.randint(500, (3000,), device="cuda")

    def call():
        loss = info_nce(query, key, symmetric=symmetric, groups=groups, chunk_rows=1024)
        return torch.autograd.grad(loss, (query, key))

    first = call()
    with no_waits():
        again = call()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize(("n", "allowed"), [(32768, 0.4e9), (65536, 1.2e9)])
def test_peak_memory(n, allowed):
    query, key = pairs(n, 768, torch.bfloat16)

    def call():
        return torch.autograd.grad(info_nce(query, key, symmetric=True), (query, key))

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made = call()
    torch.cuda.synchronize()
    gradients = sum(each.numel() * each.element_size() for each in made)
    assert torch.cuda.max_memory_allocated() - before - gradients <= allowed
