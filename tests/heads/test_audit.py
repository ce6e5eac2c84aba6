"""What a sampled gradient is worth, against draws that are all kept."""

import builtins
import copy
import math

import pytest
import torch

from lastlayer import samplers
from lastlayer.heads import (
    AdaptiveImportanceSampling,
    ImportanceSampling,
    NegativeSampling,
    NoiseContrastive,
    PartialSoftmax,
    SampledSoftmax,
    TargetSampling,
)
from lastlayer.heads.sampled.audit import GradientSums

D, V = 5, 40
COUNTS = 1.0 / torch.arange(1, V + 1).double()
every_head = pytest.mark.parametrize("kind", [NoiseContrastive, NegativeSampling, SampledSoftmax])


def make(kind=NoiseContrastive, n=16, dtype=torch.float64, **options):
    head = kind(D, V, samplers.Unigram(COUNTS), n, dtype=dtype, **options)
    torch.nn.init.normal_(head.weight)
    return head


def batch(n=7):
    return torch.randn(n, D, dtype=torch.float64), torch.randint(V, (n,))


def gradients(head, loss, hidden):
    made = torch.autograd.grad(loss, [hidden, head.weight, head.bias])
    return [each.to_dense().flatten() for each in made]


@every_head
@pytest.mark.parametrize("sparse", [True, False])
def test_bias_and_deviation_are_those_of_all_draws(kind, sparse):
    head = make(kind, sparse=sparse)
    hidden, target = batch()
    found = head.audit(hidden, target, n_draws=20)
    leaf = hidden.clone().requires_grad_()
    head.eval()
    exact = gradients(head, head(leaf, target), leaf)
    head.train()
    draws = [gradients(head, head(leaf, target), leaf) for _ in range(20)]
    assert list(found.gradients) == ["hidden", "weight", "bias"]
    for place, of in enumerate(found.gradients.values()):
        all_draws = torch.stack([each[place] for each in draws])
        mean, variance = all_draws.mean(0), all_draws.var(0).sum()
        away = (mean - exact[place]).square().sum() - variance / 20
        torch.testing.assert_close(of.norm, exact[place].norm().item())
        torch.testing.assert_close(of.deviation, variance.sqrt().item())
        torch.testing.assert_close(of.bias, away.clamp(min=0).sqrt().item(), atol=1e-8, rtol=1e-6)
        torch.testing.assert_close(of.least_bias, (variance / 20).sqrt().item())
        cosine = torch.cosine_similarity(mean, exact[place], 0)
        torch.testing.assert_close(of.cosine, cosine.item())
        assert of.relative_bias == of.bias / of.norm
        assert of.relative_deviation == of.deviation / of.norm


@pytest.mark.parametrize("kind", [NoiseContrastive, NegativeSampling])
def test_effective_sample_sizes_and_log_z(kind):
    head = make(kind)
    hidden, target = batch()
    target[2] = -100
    rows = hidden[target != -100]
    found = head.audit(hidden, target, n_draws=5)
    scores = torch.nn.functional.linear(rows, head.weight, head.bias)
    sizes, errors = [], []
    for step in range(5):
        ids = head.sampler.sample(16, rng_counter=(0, step))
        weights = (scores[:, ids] - head.sampler.log_prob(ids)).exp()
        sizes.append(weights.sum(-1) ** 2 / weights.square().sum(-1))
        errors.append(weights.mean(-1).log() - torch.logsumexp(scores, -1))
    sizes, errors = torch.stack(sizes).detach(), torch.stack(errors).detach()
    assert found.n_rows == 6
    torch.testing.assert_close(found.ess, sizes.mean(0))
    torch.testing.assert_close(found.mean_ess, sizes.mean().item())
    torch.testing.assert_close(found.least_ess, sizes.min().item())
    torch.testing.assert_close(found.log_z_error.mean, errors.mean().item())
    torch.testing.assert_close(found.log_z_error.deviation, errors.std(correction=0).item())
    if kind is NegativeSampling:
        scores = scores + head.sampler.log_prob(torch.arange(V)) + math.log(16)
    log_z = torch.logsumexp(scores, -1).detach()
    torch.testing.assert_close(found.log_z, log_z, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.drift.mean, log_z.mean().item(), rtol=1e-6, atol=1e-6)


@every_head
def test_the_head_is_left_as_it_was(kind):
    head = make(kind, reduction="none", seed=9).eval()
    hidden, target = batch()
    before = copy.deepcopy(head)
    head.audit(hidden, target, n_draws=3)
    for name, value in before.state_dict().items():
        assert torch.equal(head.state_dict()[name], value), name
    assert (head.training, head.reduction, head.sparse) == (False, "none", False)
    assert head.ess is None
    assert all(each.grad is None for each in head.parameters())
    again = head.audit(hidden, target, n_draws=3)
    assert again.gradients == head.audit(hidden, target, n_draws=3).gradients
    with torch.no_grad():
        assert head.audit(hidden, target, n_draws=3).gradients == again.gradients


def test_an_error_leaves_the_head_as_it_was(monkeypatch):
    head = make().eval()

    def fails(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(head, "_sampled_loss", fails)
    with pytest.raises(RuntimeError, match="no"):
        head.audit(*batch(), n_draws=3)
    assert not head.training
    assert head.reduction == "mean"


def test_more_samples_are_better():
    torch.manual_seed(1)
    state = make(SampledSoftmax).state_dict()
    hidden, target = batch()
    found = []
    for n in (4, 64):
        head = make(SampledSoftmax, n)
        head.load_state_dict(state)
        found.append(head.audit(hidden, target, n_draws=300))
    few, many = (each.gradients["hidden"] for each in found)
    assert many.deviation < few.deviation
    assert many.bias < few.bias
    assert found[1].mean_ess > found[0].mean_ess


def test_frozen_parameters_are_not_audited():
    head = make(bias=False)
    head.weight.requires_grad_(False)
    assert list(head.audit(*batch(), n_draws=2).gradients) == ["hidden"]


def test_heads_that_leave_nothing_to_chance_have_a_bias_alone():
    """And none where all classes count."""
    hidden, target = batch()
    target[2] = -100
    biases = []
    for k in (2, 10, V):
        head = PartialSoftmax(D, V, k, dtype=torch.float64)
        torch.nn.init.normal_(head.weight)
        before = {name: each.clone() for name, each in head.state_dict().items()}
        found = head.audit(hidden, target, n_draws=2)
        assert (found.n_rows, found.n_samples, found.n_classes) == (6, k, V)
        leaf = hidden.clone().requires_grad_()
        exact = gradients(head.eval(), head(leaf, target), leaf)
        made = gradients(head.train(), head(leaf, target), leaf)
        for of, right, got in zip(found.gradients.values(), exact, made, strict=True):
            assert of.deviation <= 1e-6 * of.norm
            torch.testing.assert_close(of.bias, (got - right).norm().item(), atol=1e-10, rtol=1e-9)
        assert all(torch.equal(each, before[name]) for name, each in head.state_dict().items())
        biases.append(found.gradients["hidden"].bias)
    assert min(biases[:2]) > 1e-6
    assert biases[2] < 1e-10


def test_a_part_of_the_data():
    head = TargetSampling(D, V, dtype=torch.float64)
    hidden, target = batch()
    found = head.audit(hidden, target, n_draws=2)
    assert found.n_samples == V
    assert found.mean_ess == V
    assert found.gradients["weight"].bias <= 1e-10
    head.use(target.unique())
    found = head.audit(hidden, target, n_draws=2)
    assert found.n_samples == len(target.unique())
    assert 1.0 <= found.least_ess <= found.n_samples
    assert found.gradients["weight"].bias > 1e-6
    assert "TargetSampling" in found.table()
    assert torch.equal(head.classes, target.unique())


def test_an_estimate_without_chance_has_neither_bias_nor_deviation():
    exact = torch.randn(8, 3, dtype=torch.float64)
    sums = GradientSums(exact)
    for _ in range(4):
        sums.add(exact)
    of = sums.compared()
    assert of.bias < 1e-6
    assert of.deviation < 1e-6
    assert abs(of.cosine - 1) < 1e-12
    nothing = GradientSums(torch.zeros(3))
    nothing.add(torch.zeros(3))
    nothing.add(torch.zeros(3))
    assert nothing.compared().relative_bias == 0.0


def test_the_table_has_the_numbers():
    found = make().audit(*batch(), n_draws=4)
    table = found.table()
    assert str(found) == table
    assert "NoiseContrastive: 16 of 40 classes per step, 4 draws on 7 rows" in table
    for name, of in found.gradients.items():
        (line,) = [each for each in table.splitlines() if each.startswith(name)]
        assert f"{of.norm:.3g}" in line
        assert f"{of.relative_deviation:.3f}" in line
    assert f"{found.mean_ess:.1f} per row on average, {found.least_ess:.1f} at least" in table
    assert f"log Z: {found.drift.mean:+.3f}" in table


def test_the_plot_shows_and_saves(tmp_path):
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    found = make().audit(*batch(), n_draws=4)
    figure = found.plot(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 0
    left = figure.axes[0]
    heights = [bar.get_height() for bar in left.patches]
    expected = [x for of in found.gradients.values()
                for x in (of.relative_bias, of.relative_deviation)]  # fmt: skip
    assert heights == pytest.approx(expected)
    plt.close(figure)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    found = make().audit(*batch(), n_draws=2)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "lastlayer\[lab\]"'):
        found.plot()


@pytest.mark.parametrize("sparse", [True, False])
def test_explain_counts_what_a_step_costs(sparse):
    head = make(dtype=torch.float32, sparse=sparse)
    told = head.explain(n_rows=10)
    assert told.sampled.flops == 6 * 10 * (16 + 1) * D
    assert told.full.flops == 6 * 10 * V * D
    assert told.speedup == pytest.approx(V / 17)
    assert told.sampled.gathered == 26
    written = 26 if sparse else V
    assert told.sampled.traffic == (26 + written) * 4 * D
    assert told.sampled.optimizer == written * 7 * 4 * D
    assert told.full.traffic == 3 * V * 4 * D
    text = str(told)
    assert "a step of 10 rows against 16 of 40 classes" in text
    assert f"{V / 17:.1f} times fewer operations" in text
    assert ("with sparse=True" in text) == (not sparse)


def test_explain_suggests_from_the_number_of_classes_or_from_an_audit():
    many = NoiseContrastive(2, 100_000, samplers.Uniform(100_000), n_samples=100)
    guess = many.explain()
    assert guess.suggested == 1024
    assert "first guess" in guess.reason
    torch.nn.init.zeros_(many.weight)
    found = many.audit(torch.randn(3, 2), torch.arange(3), n_draws=2)
    # All weights are equal: a sample is worth a sample, and 100 are enough.
    assert found.mean_ess == pytest.approx(100, rel=1e-3)
    assert many.explain(found).suggested == 128
    few = make()
    poor = few.explain(few.audit(*batch(), n_draws=4))
    assert poor.suggested == V
    assert "full softmax" in poor.reason
    with pytest.raises(ValueError, match="audit: expected one of a head with 40 classes"):
        few.explain(found)
    with pytest.raises(TypeError, match=r"audit: expected what .* gives, got int"):
        few.explain(3)


def test_bad_arguments_are_named():
    head = make()
    hidden, target = batch()
    with pytest.raises(ValueError, match="n_draws: expected at least 2, got 1; a variance"):
        head.audit(hidden, target, n_draws=1)
    with pytest.raises(TypeError, match="n_draws: expected an int, got float"):
        head.audit(hidden, target, n_draws=4.0)
    with pytest.raises(ValueError, match="hidden: expected shape"):
        head.audit(hidden[:, 1:], target)
    with pytest.raises(ValueError, match="target: expected class ids"):
        head.audit(hidden, target + V)
    with pytest.raises(ValueError, match="n_rows: expected at least 1"):
        head.explain(n_rows=0)


@pytest.mark.parametrize("own", [True, False])
def test_draws_beside_an_exact_head(own):
    """What is always counted is no draw; a sampler of the tail alone draws its own ids."""
    head_classes, n = 8, 4000
    sampler = samplers.Uniform(V - head_classes if own else V)
    head = SampledSoftmax(D, V, sampler, n, head_classes=head_classes, dtype=torch.float64)
    torch.nn.init.normal_(head.weight)
    hidden, target = batch()
    # Of the head, so that no draw is a hit, which would not count.
    target %= head_classes
    ids, log_prob = head._draw(torch.tensor([3, 4]), torch.float32)
    assert ((ids >= head_classes) == (log_prob > -math.inf)).all()
    ratio = torch.exp(hidden @ head.weight[head_classes:].mT + head.bias[head_classes:]).detach()
    # With so many draws from a uniform proposal the size is that of the tail's own weights.
    share = 1.0 if own else (V - head_classes) / V
    expected = share * n * ratio.mean(-1).square() / ratio.square().mean(-1)
    found = head.audit(hidden, target, n_draws=3)
    assert found.ess.mean().item() == pytest.approx(expected.mean().item(), rel=0.1)


def test_an_audit_counts_what_each_row_drew():
    hidden, target = torch.randn(64, D), torch.randint(V, (64,))
    head = ImportanceSampling(D, V, samplers.Unigram(COUNTS), 4, target_ess=100.0)
    found = head.audit(8.0 * hidden, target, n_draws=2)
    assert found.n_samples > 64
    assert found.took_all > 0.5
    assert "all classes taken by" in found.table()
    explained = head.explain(found, n_rows=64)
    assert explained.n_samples == found.n_samples
    assert explained.speedup < 1.0
    assert "took all classes" in explained.reason
    assert "an audit counts" in head.explain().reason


def test_what_is_always_counted_or_drawn_for_each_row_is_part_of_the_cost():
    some = SampledSoftmax(D, V, samplers.Unigram(COUNTS), 4, head_classes=10).explain(n_rows=8)
    assert some.sampled.gathered == 4 + 10 + 8
    assert some.speedup == pytest.approx(V / (4 + 10 + 1))
    own = AdaptiveImportanceSampling(D, V, COUNTS, n_samples=4, target_ess=4.0)
    assert own.explain(n_rows=8).sampled.gathered == 4 * 8 + 8


@pytest.mark.parametrize("rows", [0, 5])
def test_an_audit_where_no_row_counts(rows):
    head = AdaptiveImportanceSampling(D, V, COUNTS)
    target, context = torch.full((rows,), -100), torch.zeros(rows, 1, dtype=torch.int64)
    found = head.audit(torch.randn(rows, D), target, n_draws=2, context=context)
    assert found.n_rows == 0
    assert found.mean_ess == 0.0


def test_an_audit_does_not_tell_of_an_older_step():
    hidden, target = torch.randn(8, D), torch.randint(V, (8,))
    head = TargetSampling(D, V)
    head.use([1, 2, 3])
    head(hidden, target)
    head.use(None)
    assert (head.audit(hidden[:6], target[:6], 2).ess == V).all()
    head.use([3])
    assert (head.audit(hidden, torch.full((8,), 3), 2).ess == 0).all(), "all hits"
    sampled = SampledSoftmax(D, 1, samplers.Uniform(1), n_samples=3)
    assert sampled.audit(hidden, torch.zeros(8, dtype=torch.int64), 2).log_z_error is None
