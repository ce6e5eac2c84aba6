"""entmax_support is the dense map with the zeros left out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastlayer import Support, entmax, entmax_support


def scattered(support: Support, n: int) -> torch.Tensor:
    dense = support.values.new_zeros(*support.values.shape[:-1], n)
    return dense.scatter_add(-1, support.indices, support.values)


@given(
    st.integers(1, 60),
    st.sampled_from([1.0, 1.3, 1.5, 2.0, 3.0]),
    st.floats(0.01, 30),
    st.integers(0, 10),
    st.integers(0, 2**31),
)
def test_equals_the_dense_result(n, alpha, scale, room, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(2, 3, n, generator=generator)
    dense = entmax(scores, alpha)
    size = (dense != 0).sum(-1)
    width = int(size.max()) + room
    support = entmax_support(scores, alpha, width)
    assert torch.equal(support.size, size)
    assert support.values.shape == support.indices.shape == (2, 3, width)
    assert (support.values.dtype, support.indices.dtype) == (torch.float32, torch.int64)
    assert (scattered(support, n) - dense).abs().max() <= 1e-6
    padding = torch.arange(width) >= size[..., None]
    assert (support.values[padding] == 0).all()
    assert (support.indices[padding] == 0).all()
    rising = support.indices.diff(dim=-1) > 0
    assert (rising | padding[..., 1:]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_keeps_the_dtype(dtype):
    scores = (3 * torch.randn(4, 30)).to(dtype)
    support = entmax_support(scores, 1.5, 30)
    assert support.values.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-3
    assert (scattered(support, 30) - entmax(scores)).abs().max() <= tolerance


def test_mask_and_empty_rows():
    scores, mask = torch.randn(4, 9), torch.rand(4, 9) > 0.4
    mask[2] = False
    support = entmax_support(scores, 2.0, 9, mask=mask)
    assert torch.equal(scattered(support, 9), entmax(scores, 2.0, mask=mask))
    assert support.size[2] == 0
    assert (support.values[2] == 0).all()


def test_a_nan_stays_in_its_row():
    scores = torch.randn(3, 8)
    clean = entmax_support(scores, 1.5, 8)
    scores[1, 5] = math.nan
    support = entmax_support(scores, 1.5, 8)
    assert support.values[1].isnan().all()
    for ours, expected in zip(support, clean, strict=True):
        assert torch.equal(ours[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_inputs(shape):
    support = entmax_support(torch.zeros(shape), 1.5, 4)
    assert support.values.shape == (shape[0], 4)
    assert (support.size == 0).all()
    assert (support.values == 0).all()


def test_too_narrow_names_the_width_that_is_needed():
    scores = torch.zeros(2, 40)
    with pytest.raises(ValueError, match=r"max_support: expected at least 40.*got 8; raise it"):
        entmax_support(scores, 1.5, 8)


@pytest.mark.parametrize("alpha", [1.0, 1.3, 1.5, 2.0])
def test_the_gradient_is_that_of_the_dense_map(alpha):
    scores = 2 * torch.randn(5, 12, dtype=torch.float64)
    weights = torch.randn(5, 12, dtype=torch.float64)
    compact, dense = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    support = entmax_support(compact, alpha, 12)
    here = torch.arange(12) < support.size[..., None]
    (support.values * weights.gather(-1, support.indices) * here).sum().backward()
    (entmax(dense, alpha) * weights).sum().backward()
    assert (compact.grad - dense.grad).abs().max() < 1e-10


def test_second_derivatives():
    scores = torch.tensor([[0.0, 0.4, -3.0, 0.9]], dtype=torch.float64, requires_grad=True)

    def values(x):
        return entmax_support(x, 1.5, 4).values

    assert torch.autograd.gradcheck(values, (scores,))
    assert torch.autograd.gradgradcheck(values, (scores,))


def test_alpha_as_a_tensor_is_used_as_it_is():
    scores = torch.randn(3, 10, dtype=torch.float64)
    alpha = torch.tensor([[1.2], [1.5], [2.0]], dtype=torch.float64)
    support = entmax_support(scores, alpha, 10)
    assert (scattered(support, 10) - entmax(scores, alpha)).abs().max() < 1e-12


def test_vmap_and_layouts():
    scores = 3 * torch.randn(4, 10, 3, dtype=torch.float64)
    rows = scores.transpose(1, 2)
    expected = entmax_support(rows.contiguous(), 1.5, 10)
    for ours in (
        entmax_support(rows, 1.5, 10),
        torch.func.vmap(lambda x: entmax_support(x, 1.5, 10))(rows),
    ):
        for left, right in zip(ours, expected, strict=True):
            assert torch.equal(left, right)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_in_one_graph():
    scores = torch.randn(3, 20, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: entmax_support(x, 1.5, 20), fullgraph=True, backend="aot_eager"
    )
    ours, expected = compiled(scores), entmax_support(scores, 1.5, 20)
    for left, right in zip(ours, expected, strict=True):
        assert torch.equal(left, right)
    (gradient,) = torch.autograd.grad(ours.values.square().sum(), scores)
    (eager,) = torch.autograd.grad(expected.values.square().sum(), scores)
    assert (gradient - eager).abs().max() < 1e-6
