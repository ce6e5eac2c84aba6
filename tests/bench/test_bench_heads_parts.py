"""The truths, the inputs, the trained shapes and the timer of the bench of heads."""

import numpy as np
import pytest
import torch
from lastlayer.bench.heads import builders, draws, entries, replay, top, truth
from lastlayer.bench.heads import timer as timers
from lastlayer.bench.heads.entries import ENTRIES
from lastlayer.bench.heads.entry import seeded
from lastlayer.bench.heads.modules import GatheredPaths
from lastlayer.bench.heads.problem import Problem, huffman, zipf
from lastlayer.bench.heads.step import Step
from lastlayer.bench.heads.timer import CudaWallTimer

from lastlayer import heads, trees

CPU = torch.device("cpu")
PROBLEM = Problem(20, 64, 3000, torch.float64, CPU)
WORDS = Problem(5, 8, 12, torch.float64, CPU)


# Whose log-probabilities of all classes are another way to the loss than its own truth.
ANOTHER_WAY = truth.flat, truth.paths, truth.clusters, truth.bands
WITH_ALL_CLASSES = [e for e in ENTRIES if e.losses in ANOTHER_WAY]


def labelled(entry) -> str:
    return f"{entry.source} {entry.name}"


@pytest.mark.parametrize("entry", ENTRIES, ids=labelled)
def test_a_step_in_float64_is_the_truth(entry):
    problem = WORDS if entry.name == "char_cnn" else PROBLEM
    verdict = entry.method(problem).load().verify(problem.draw(4))
    assert verdict.ok, verdict
    assert verdict.loss_error < 1e-13
    assert verdict.weight_error < 1e-10


@pytest.mark.parametrize("bytes_held", [2**29, 7 * 8 * 3000])
@pytest.mark.parametrize("entry", WITH_ALL_CLASSES, ids=labelled)
def test_the_truth_is_what_the_heads_probabilities_say(entry, bytes_held, monkeypatch):
    monkeypatch.setattr(truth, "_BYTES", {"cpu": bytes_held})
    module = seeded(lambda: entry.build(PROBLEM), CPU)
    hidden, target = PROBLEM.draw(5)
    made = truth.truth_of(module, entry.losses, PROBLEM.classes, hidden, target)
    leaf = hidden.clone().requires_grad_()
    log_prob = module.log_prob(leaf)
    assert float((log_prob.detach().exp().sum(-1) - 1).abs().max()) < 1e-12
    loss = -log_prob.gather(-1, target.unsqueeze(-1)).mean()
    loss.backward()
    assert made.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    torch.testing.assert_close(made.hidden, leaf.grad, rtol=1e-9, atol=1e-13)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(made.parameters[name], parameter.grad, rtol=1e-9, atol=1e-13)


def test_gathered_paths_are_a_hierarchical_softmax():
    ours = heads.HierarchicalSoftmax(64, huffman(3000), dtype=torch.float64)
    plain = GatheredPaths(huffman(3000), PROBLEM)
    with torch.no_grad():
        plain.weight.weight.copy_(ours.weight)
        plain.bias.weight.copy_(ours.bias.unsqueeze(-1))
    inputs = PROBLEM.draw(6)
    torch.testing.assert_close(plain(*inputs), ours(*inputs), rtol=1e-12, atol=0)


def test_gradients_that_are_missing_count_as_zeros():
    class Forgets(torch.nn.Linear):
        def forward(self, hidden, target):
            return torch.nn.functional.cross_entropy(hidden @ self.weight.t(), target)

    def losses(twin, hidden, target):
        return torch.nn.functional.cross_entropy(
            hidden @ twin.weight.t() + twin.bias, target, reduction="none"
        )

    layer = Forgets(64, 3000, dtype=torch.float64)
    layer.bias.data.zero_()
    verdict = Step(layer, losses, 3000).verify(PROBLEM.draw(7))
    assert verdict.reason == "gradient of bias off by 1.0e+00"


def test_a_step_leaves_no_gradients_behind():
    step = ENTRIES[1].method(PROBLEM).load()
    hidden, target = PROBLEM.draw(8)
    hidden.requires_grad_()
    taken = step(hidden, target)
    assert taken.hidden.shape == hidden.shape
    assert hidden.grad is None
    assert {each.grad for each in step.module.parameters()} == {None}


def test_targets_follow_zipfs_law():
    problem = Problem(200_000, 1, 1000, torch.float32, CPU)
    _, target = problem.draw(9)
    assert int(target.min()) >= 0
    assert int(target.max()) < 1000
    found = torch.bincount(target, minlength=1000).double() / len(target)
    expected = torch.from_numpy(zipf(1000) / zipf(1000).sum())
    # Five deviations of the most frequent ones.
    assert float((found - expected)[:20].abs().max()) < 5 * (0.13 / 200_000) ** 0.5
    assert torch.equal(target, problem.draw(9)[1])


@pytest.mark.parametrize("spread", top.SPREADS)
def test_nodes_of_trained_shape_follow_counts_and_spread(spread):
    problem = Problem(400, 64, 5000, torch.float64, CPU)
    head = seeded(lambda: top._hierarchical(problem, spread), CPU)
    tree = head.tree
    share = zipf(5000) / zipf(5000).sum()
    # Without a hidden state every class is as probable as it is frequent.
    log_prob = head.log_prob(torch.zeros(1, 64, dtype=torch.float64))
    np.testing.assert_allclose(log_prob.exp().squeeze(0).detach(), share, rtol=1e-9)
    scores = problem.draw(1)[0] @ head.weight.detach().t()
    assert scores.shape == (400, tree.n_inner)
    assert float(scores.std()) == pytest.approx(spread, rel=0.02)


def test_an_adaptive_head_of_trained_shape_follows_counts_at_the_top():
    head = seeded(lambda: top._adaptive(PROBLEM, 1.0), CPU)
    first, *others = np.split(zipf(3000), head.cutoffs.tolist())
    share = zipf(3000) / zipf(3000).sum()
    prob = head.log_prob(torch.zeros(1, 64, dtype=torch.float64)).exp().squeeze(0).detach()
    np.testing.assert_allclose(prob[: len(first)], share[: len(first)], rtol=1e-9)
    n = len(first)
    for each in others:
        assert float(prob[n : n + len(each)].sum()) == pytest.approx(share[n : n + len(each)].sum())
        n += len(each)


@pytest.mark.parametrize("name", [*builders.BUILDERS, *builders.CLUSTERED])
def test_built_trees_have_all_classes(name):
    prepare = {**builders.BUILDERS, **builders.CLUSTERED}[name]
    work = builders.Build(prepare(150), 150)
    verdict = work.verify((torch.from_numpy(zipf(150)),))
    assert verdict.ok, verdict
    assert "deep" in verdict.settings


def test_a_tree_of_other_classes_is_found():
    work = builders.Build(lambda counts: trees.balanced(len(counts) - 1), 9)
    assert work.verify((torch.ones(9, dtype=torch.float64),)).reason == "8 classes"


@pytest.mark.parametrize("method", draws.methods(300, CPU), ids=lambda method: method.name)
def test_draws_come_as_often_as_they_should(method):
    work = method.load()
    verdict = work.verify((torch.ones(300),))
    assert verdict.ok, verdict
    ids, log_prob = work(torch.ones(300))
    assert ids.shape == (draws.DRAWN,)
    assert (log_prob is None) == (method.name == draws.MULTINOMIAL)


def test_draws_of_another_distribution_are_found():
    probs = zipf(300) / zipf(300).sum()
    even = torch.full((300,), 1 / 300)

    def draw(n):
        return torch.multinomial(even, n, replacement=True), None

    assert "chi-square" in draws.Draws(draw, probs).verify((even,)).reason
    right = torch.from_numpy(probs)

    def told_wrong(n):
        ids = torch.multinomial(right, n, replacement=True)
        return ids, right.log()[ids] + 0.01

    assert "off by 1.0e-02" in draws.Draws(told_wrong, probs).verify((even,)).reason
    assert draws.Draws(lambda _: (torch.tensor([300]), None), probs).verify((even,)).reason == (
        "classes from 300 to 300"
    )


def test_automatic_cutoffs_of_torch_are_ours():
    ours, theirs = (
        next(e for e in ENTRIES if (e.name, e.source) == (entries.ADAPTIVE, source))
        for source in ("lastlayer", "torch")
    )
    assert entries.cutoffs_of(ours.build(PROBLEM)) == entries.cutoffs_of(theirs.build(PROBLEM))


def test_a_gpu_is_timed_from_idle_to_idle(monkeypatch):
    events = []
    monkeypatch.setattr(timers.torch.cuda, "synchronize", lambda: events.append("idle"))
    clock = iter([1.0, 1.3])
    monkeypatch.setattr(timers.time, "perf_counter", lambda: next(clock))
    timer = CudaWallTimer(budget_s=1.0)
    assert timer.milliseconds(lambda: events.append("call"), 3) == pytest.approx(100.0)
    assert events == ["idle", "call", "call", "call", "idle"]


def test_a_step_of_an_optimiser_ends_a_call_but_not_what_is_verified():
    (entry,) = [e for e in ENTRIES if e.name == entries.SAMPLED + entries.UPDATED]
    step = entry.method(PROBLEM).load()
    before = step.module.weight.detach().clone()
    hidden, target = PROBLEM.draw(6)
    assert step.verify((hidden, target)).ok
    assert torch.equal(step.module.weight, before)
    for call in (step, step.captured):
        call(hidden.detach().requires_grad_(), target)
        assert not torch.equal(step.module.weight, before)
        assert all(parameter.grad is None for parameter in step.module.parameters())
        before = step.module.weight.detach().clone()


def test_nothing_is_replayed_on_a_cpu():
    assert replay.replayed_ms([lambda: 1 / 0], CPU) is None


@pytest.mark.gpu
def test_a_call_is_replayed_unless_the_host_waits():
    cuda = torch.device("cuda", 0)
    numbers = torch.randn(1000, device=cuda)
    assert 0 < replay.replayed_ms([lambda: numbers.exp().sum()] * 3, cuda) < 5
    assert replay.replayed_ms([lambda: numbers.sum().item()], cuda) is None
    assert torch.randn(3, device=cuda).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [entries.HUFFMAN, entries.SAMPLED, entries.SAMPLED + entries.UPDATED]
)
def test_sparse_steps_are_replayed(name):
    (entry,) = [e for e in ENTRIES if e.name == name]
    cuda = torch.device("cuda", 0)
    problem = Problem(200, 64, 3000, torch.bfloat16, cuda)
    step = entry.method(problem).load()
    hidden, target = problem.draw(7)
    assert step.verify((hidden, target)).ok
    leaf = hidden.detach().requires_grad_()
    assert replay.replayed_ms([lambda: step.captured(leaf, target)] * 2, cuda) is not None
