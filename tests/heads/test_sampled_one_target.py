"""The pass of one target a row through its kernels, as on a GPU: against the general one."""

import pytest
import torch

from lastlayer import kernels
from lastlayer.fused import sampled
from lastlayer.fused.sampled import Rule, general, one_target

needs_triton = pytest.mark.skipif(
    kernels.available()["triton"] is not None, reason="neither a GPU nor Triton's interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = {
    "exact": Rule(average=True),
    "self-normalised": Rule(with_target=False, drop_hits=False),
    "logistic": Rule(logistic=True, drop_hits=False),
}


def problem(n, m, d, v, rule, full):
    """Rows of which some have no target; options that are only there in a ``full`` one."""
    generator = torch.Generator().manual_seed(n)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    target = torch.randint(0, v, (n, 1), generator=generator)
    target[::4] = -1
    counts = (target[:, 0] >= 0).float()
    given = sampled._Problem(
        hidden=numbers(n, d), weight=numbers(v, d), bias=numbers(v) if full else None,
        row_shift=numbers(n) if full else None, target=target,
        ids=torch.randint(0, v, (m,), generator=generator), log_expected=numbers(m) + 2.0,
        target_log_expected=numbers(n, 1) if full else None, shift=numbers(n), labels=None,
        target_labels=None, scores=None, scale=counts / 3, row_scale=counts / 3,
        factor=0.7 if full else 1.0,
        n_exact=3 if full else 0, rule=rule, chunk_rows="5", to_hidden=True, to_weight=True,
        to_bias=full,
    )  # fmt: skip
    if full:
        # Masked, and drawn: it counts as a draw, without any mass.
        given.bias[given.ids[5]] = -torch.inf
    return mapped(given, lambda x: x.to(DEVICE))


def mapped(given, change):
    return sampled._Problem(*(change(x) if isinstance(x, torch.Tensor) else x for x in given))


@needs_triton
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("full", [True, False])
def test_it_agrees_with_the_general_pass(monkeypatch, rule, dtype, full):
    given = problem(9, 20, 24, 30, rule, full)
    given = given._replace(hidden=given.hidden.to(dtype), weight=given.weight.to(dtype))
    wide = mapped(given, lambda x: x.cpu().double() if x.is_floating_point() else x.cpu())
    truth = general(wide)
    # What a row without a target holds comes into nothing.
    given.hidden[::4] = torch.nan
    monkeypatch.setattr(sampled, "_multiplies_narrow", lambda x: x.dtype != torch.float32)
    made = one_target(given, "triton")
    names = ("losses", "hidden", "columns", "slopes", *(["column_biases"] if full else []))
    if rule.logistic:
        names = (*names, "push")
    for name in names:
        result, right = getattr(made, name), getattr(truth, name)
        if name == "push" and not full:
            continue
        size = float(right.norm()) if right.numel() else 1.0
        bound = (1e-5 if dtype == torch.float32 else 1.2e-2) * max(size, 1e-3)
        assert float((result.cpu().double().view_as(right) - right).norm()) < bound, name
    if not rule.logistic:
        counts = given.scale.cpu() != 0
        rtol = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            made.ess.cpu().double()[counts], truth.ess[counts], rtol=rtol, atol=rtol
        )
    # Where there is no target the kernel names the first draw's class, the other pass none.
    entries = torch.where(truth.entries < 0, truth.entries[0], truth.entries)
    assert torch.equal(made.entries.cpu(), entries.int())


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float32, None)])
def test_slots_have_the_sums_of_classes(sparse, dtypes):
    """A GPU's way to sum what belongs to a class, which waits for nothing, against a CPU's."""
    n, m, d, v = 7, 9, 5, 6
    target = torch.randint(v, (n, 1))
    target[::3] = -1
    slopes = torch.where(target < 0, 0.0, torch.randn(n, 1))
    columns, biases, hidden = torch.randn(m, d), torch.randn(m), torch.randn(n, d)
    entries = torch.cat([torch.randint(v, (m,)), target.flatten()])
    given, factor = (columns, biases, slopes, hidden), torch.tensor(0.3)
    known, sums = sampled._summed((entries, *given, factor), v, dtypes)
    mapped = torch.where(entries < 0, entries[0], entries).int()
    keys, slots = sampled._slotted((mapped, *given, factor), ((v, d), (v,)), dtypes, sparse)
    for right, made, dtype in zip(sums, slots, dtypes, strict=True):
        if dtype is None:
            assert right is made is None
            continue
        expected = torch.zeros(v, *right.shape[1:], dtype=dtype).index_copy_(0, known, right)
        found = torch.zeros_like(expected).index_add_(0, keys, made) if sparse else made
        assert made.dtype == dtype
        torch.testing.assert_close(found, expected)
