"""The pass of one target a row through its kernels, as on a GPU: against the general one."""

import pytest
import torch

from lastlayer import kernels
from lastlayer.heads import _sampled_draws
from lastlayer.heads._sampled_one_target import one_target
from lastlayer.heads._sampled_pass import run
from lastlayer.heads._sampled_rule import Rule

needs_triton = pytest.mark.skipif(
    kernels.available()["triton"] is not None, reason="neither a GPU nor Triton's interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = {
    "exact": Rule(average=True),
    "self-normalised": Rule(with_target=False, drop_hits=False),
    "logistic": Rule(logistic=True, drop_hits=False),
}


def problem(n, m, d, v, full):
    generator = torch.Generator().manual_seed(n)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    target = torch.randint(0, v, (n, 1), generator=generator)
    target[::4] = -1
    counts = (target[:, 0] >= 0).float()
    given = {
        "hidden": numbers(n, d),
        "weight": numbers(v, d),
        "bias": numbers(v) if full else None,
        "row_shift": numbers(n) if full else None,
        "target": target,
        "ids": torch.randint(0, v, (m,), generator=generator),
        "log_expected": numbers(m) + 2.0,
        "target_log_expected": numbers(n, 1) if full else None,
        "shift": numbers(n),
        "scale": counts / 3,
        "row_scale": counts / 3,
    }
    return {name: None if x is None else x.to(DEVICE) for name, x in given.items()}


def expected(given, factor, n_exact, rule, wanted):
    """By the general pass, in float64 on the CPU."""
    wide = {
        name: x.cpu().double() if x is not None and x.is_floating_point() else x
        for name, x in given.items()
    }
    wide = {name: None if x is None else x.cpu() for name, x in wide.items()}
    rows = wide["scale"] != 0
    wide["hidden"] = torch.where(rows[:, None], wide["hidden"], 0.0)
    names = ("hidden", "weight", "bias", "row_shift", "target", "ids", "log_expected")
    first = [wide[name] for name in (*names, "target_log_expected", "shift")]
    rest = wide["scale"], wide["row_scale"], 1.0 / factor, n_exact, list(rule), "5", wanted
    return run(*first, None, None, *rest)


@needs_triton
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("full", [True, False])
def test_it_agrees_with_the_general_pass(monkeypatch, rule, dtype, full):
    given = problem(9, 20, 24, 30, full)
    # What a row without a target holds comes into nothing.
    given["hidden"] = given["hidden"].to(dtype)
    given["weight"] = given["weight"].to(dtype)
    factor, n_exact = 0.7 if full else 1.0, 3 if full else 0
    wanted = [True, True, full, False]
    truth = expected(given, factor, n_exact, rule, wanted)
    given["hidden"][::4] = torch.nan
    monkeypatch.setattr(_sampled_draws, "_multiplies_narrow", lambda x: x.dtype != torch.float32)
    shift = given.pop("shift")
    shift = shift if given["row_shift"] is None else shift + given["row_shift"]
    losses, made, slopes, entries = one_target(
        **given, shift=shift, factor=factor, n_exact=n_exact, rule=rule, chunk_rows="5",
        wanted=wanted, impl="triton",
    )  # fmt: skip
    ess = truth[1] if not rule.logistic else None
    results = losses, made.of_hidden, made.of_draws, made.of_bias, slopes[:, None]
    for result, right in zip(results, (truth[0], *truth[2:6]), strict=True):
        size = float(right.norm()) if right.numel() else 1.0
        bound = (1e-5 if dtype == torch.float32 else 1.2e-2) * max(size, 1e-3)
        assert float((result.cpu().double().view_as(right) - right).norm()) < bound
    if ess is not None:
        counts = given["scale"].cpu() != 0
        rtol = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            made.second.cpu().double()[counts], ess[counts], rtol=rtol, atol=rtol
        )
    assert torch.equal(entries.cpu(), truth[7])
