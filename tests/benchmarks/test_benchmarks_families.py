"""Each family: its reference is right, its methods are verified by it, its plan is whole."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

from benchmarks import (
    contrastive,
    driver,
    fused,
    heads,
    heads_reference,
    llama,
    maps,
    multilabel,
    plain,
    sweep,
)
from benchmarks.driver import Case, Method
from benchmarks.heads import ENTRIES, Problem, huffman, zipf
from benchmarks.targets import TARGETS
from lastlayer import losses, trees
from lastlayer import maps as our_maps
from lastlayer.heads import AdaptiveSoftmax, HierarchicalSoftmax

CPU = torch.device("cpu")
FAMILIES = [
    module.FAMILY for module in (fused, multilabel, contrastive, heads, maps, plain, llama, sweep)
]
PROBLEM, WORDS = Problem(20, 64, 3000, torch.float64, CPU), Problem(5, 8, 12, torch.float64, CPU)


def judged(case, method):
    """Fields of the record of one method on a case."""
    inputs = case.draw(CPU, 3)
    return driver._verify(case, method, case.work(method), inputs, {})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [False, True])
def test_a_plan_has_unique_cases_with_the_baseline_and_ours_first(family, device, quick):
    cases = family.cases(torch.device(device), quick)
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles)
    for case in cases:
        labels = [method.label for method in case.methods]
        assert len(set(labels)) == len(labels)
        assert any(method.source == "lastlayer" for method in case.methods)
    if not quick:
        planned = {(case.section, m.label) for case in cases for m in case.methods}
        for target in TARGETS:
            which = target.which
            if (which.family, which.device_type) == (family.name, device):
                assert (which.section, f"{which.source} {which.method}") in planned


@pytest.mark.parametrize("computes", ["cross_entropy", *fused.LOSSES])
def test_the_reference_of_fused_losses_is_the_loss_on_stored_scores(computes, monkeypatch):
    monkeypatch.setattr(
        driver, "row_parts", lambda rows, *_: [slice(i, i + 4) for i in range(0, rows, 4)]
    )
    on_scores = {
        "cross_entropy": functional.cross_entropy,
        "sparsemax": losses.sparsemax_loss,
        "entmax 1.5": losses.entmax_loss,
        fused.TOPK: lambda scores, target: losses.topk_softmax_loss(scores, target, maps.K),
    }
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(70, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(70, (9,))
    loss = on_scores[computes](hidden @ weight.T, target)
    expected = torch.autograd.grad(loss, (hidden, weight))
    found = fused.reference(computes, (hidden.detach(), weight.detach(), target))
    torch.testing.assert_close(found["loss"], loss.detach())
    torch.testing.assert_close((found["hidden"], found["weight"]), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("section", [multilabel.LINEAR_ZLPR, multilabel.LINEAR_BCE])
def test_the_reference_of_many_labels_is_torchs_loss(section, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    positives = torch.stack([torch.randperm(40)[:3] for _ in range(6)])
    loss = multilabel.LOSSES[section][1](hidden, weight, positives)
    expected = torch.autograd.grad(loss, (hidden, weight))
    found = multilabel.reference(section, (hidden.detach(), weight.detach(), positives))
    torch.testing.assert_close(found["loss"], loss.detach())
    torch.testing.assert_close((found["hidden"], found["weight"]), expected)
    scores = torch.randn(6, 40, dtype=torch.float64, requires_grad=True)
    on = torch.rand(6, 40) < 0.1
    loss = multilabel.LOSSES[multilabel.DENSE_ZLPR][1](scores, on)
    found = multilabel.reference(multilabel.DENSE_ZLPR, (scores.detach(), on))
    torch.testing.assert_close(found["loss"], loss.detach())
    torch.testing.assert_close(found["scores"], torch.autograd.grad(loss, scores)[0])


@pytest.mark.parametrize("section", [contrastive.SYMMETRIC, contrastive.ONE_WAY])
def test_the_reference_of_pairs_is_the_loss_on_stored_similarities(section, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    query, key = (torch.randn(11, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    stored = {
        contrastive.SYMMETRIC: contrastive._both_ways,
        contrastive.ONE_WAY: contrastive._one_way,
    }
    loss = stored[section](query, key, temperature)
    expected = torch.autograd.grad(loss, (query, key, temperature))
    inputs = tuple(each.detach() for each in (query, key, temperature))
    found = contrastive.reference(section, inputs)
    torch.testing.assert_close(found["loss"], loss.detach())
    gradients = tuple(found[name] for name in ("query", "key", "temperature"))
    torch.testing.assert_close(gradients, expected)


def map_case(shape=(6, 96), direction="forward"):
    return maps._case("shapes", shape, "float32", direction, "cpu", quick=True)


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_the_maps_of_a_case_are_right(direction):
    case = map_case(direction=direction)
    for method in case.methods:
        if method.source in ("torch", "lastlayer"):
            facts = judged(case, method)
            assert facts["verified"], (method.label, facts)


def wrong(function, direction="forward", computes="sparsemax", shape=(6, 96)):
    call = maps._loaded(lambda: function, direction)
    case = map_case(shape, direction)
    return judged(case, Method("sparsemax", "lastlayer", lambda: call, computes))


def test_wrong_maps_are_found():
    def one_bad_row(scores):
        result = our_maps.sparsemax(scores)
        result[150] *= 1.01
        return result

    # At most 64 of these rows are compared with the reference.
    assert wrong(one_bad_row, shape=(300, 1024))["errors"]["sums"] == pytest.approx(0.01, rel=1e-2)
    softmax = wrong(lambda scores: torch.softmax(scores, -1))
    assert softmax["status"].startswith("entries off by")
    other_support = wrong(lambda scores: torch.softmax(scores, -1), "forward+backward")
    assert other_support["status"] == "gradient off by inf"
    assert not wrong(lambda scores: our_maps.sparsemax(scores) * float("nan"))["verified"]


def test_of_tied_scores_any_may_be_kept_but_no_smaller_one():
    tied = torch.randint(0, 3, (6, 96), generator=torch.Generator().manual_seed(1)).float()
    exact = maps.reference(maps.TOPK, (tied,))
    for side in (False, True):
        seen = tied.flip(-1) if side else tied
        order = seen.argsort(dim=-1, descending=True, stable=True)[..., : maps.K]
        kept = torch.zeros_like(seen, dtype=torch.bool).scatter_(-1, order, True)
        made = seen.masked_fill(~kept, -torch.inf).softmax(-1)
        made = made.flip(-1) if side else made
        method = Method(maps.TOPK, "torch", lambda: None, maps.TOPK)
        errors = maps.compare(method, {"entries": made}, exact, (tied,))
        assert errors["entries"] < 1e-6
        errors = maps.compare(method, {"entries": made.roll(1, -1)}, exact, (tied,))
        assert errors["entries"] > 1e-3


@pytest.mark.parametrize("kind", fused.KINDS)
@pytest.mark.parametrize("section", [fused.LARGE, fused.SPARSE])
def test_fused_losses_of_a_case_are_right(section, kind):
    case = fused._case(section, (12, 8, 90), kind, "cpu", True)
    for method in case.methods:
        try:
            facts = judged(case, method)
        except driver.PeerMissing:
            continue
        assert facts["verified"], (method.label, facts)
        if method.name == "entmax 1.5":
            assert 1 <= facts["support_mean"] <= facts["support_max"] <= 90


def test_chunks_and_float32_sums_are_the_same_loss(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(fused, "CHUNK_ROWS", 5)
    case = fused._case(fused.LARGE, (12, 8, 90), fused.FLAT, "cpu", True)
    for load in (fused._on_chunks, fused._into_float32):
        facts = judged(case, Method("x", "torch", load, fused.CROSS_ENTROPY))
        assert facts["verified"], facts


@pytest.mark.parametrize("section", multilabel.MAIN)
def test_losses_of_many_labels_are_right(section):
    shape = (6, 64) if section == multilabel.DENSE_ZLPR else (6, 8, 64)
    for direction in ("forward", "forward+backward"):
        case = multilabel._case(section, shape, direction, "cpu")
        for method in case.methods:
            if method.source in ("torch", "lastlayer"):
                facts = judged(case, method)
                assert facts["verified"], (method.label, facts)


def head_case(problem, method):
    shape = problem.rows, problem.width, problem.classes
    return Case("step", shape, "float64", "forward+backward", (method,), problem.draw, ("hidden",),
                results_count=True)  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.source} {entry.name}")
def test_a_step_in_float64_is_the_reference(entry):
    problem = WORDS if entry.name == "char_cnn" else PROBLEM
    method = entry.method(problem)
    facts = judged(head_case(problem, method), method)
    assert facts["verified"], facts
    assert facts["errors"]["loss"] < 1e-12
    assert facts["errors"]["weight"] < 1e-10
    assert facts["parameters"] > 0


FORMULAS = (heads_reference.flat, heads_reference.paths, heads_reference.clusters,
            heads_reference.bands)  # fmt: skip


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.losses in FORMULAS], ids=lambda e: f"{e.source} {e.name}"
)
def test_the_formulas_of_heads_are_their_log_probabilities(entry):
    module = heads.seeded(lambda: entry.build(PROBLEM), CPU)
    hidden, target = PROBLEM.draw(CPU, 5)
    one, other = (
        heads_reference.step(module, losses, 3000, hidden, target)
        for losses in (entry.losses, heads_reference.by_log_prob)
    )
    for name, expected in other.items():
        torch.testing.assert_close(one[name], expected, rtol=1e-9, atol=1e-13)


def test_gathered_paths_are_a_hierarchical_softmax():
    ours = HierarchicalSoftmax(64, huffman(3000), dtype=torch.float64)
    plain = heads.GatheredPaths(huffman(3000), PROBLEM)
    with torch.no_grad():
        plain.weight.weight.copy_(ours.weight)
        plain.bias.weight.copy_(ours.bias.unsqueeze(-1))
    inputs = PROBLEM.draw(CPU, 6)
    torch.testing.assert_close(plain(*inputs), ours(*inputs), rtol=1e-12, atol=0)


def test_an_update_ends_a_timed_step_but_not_what_is_verified():
    (entry,) = [e for e in ENTRIES if e.optimizer is not None]
    module = entry.build(PROBLEM)
    before = module.weight.detach().clone()
    work = heads.Entry("x", lambda _: module, losses=entry.losses, optimizer=entry.optimizer)
    work = work.load(PROBLEM)
    hidden, target = PROBLEM.draw(CPU, 7)
    work.verified(hidden.clone().requires_grad_(), target)
    assert torch.equal(module.weight, before)
    for call in (work.call, work.captured):
        call(hidden.clone().requires_grad_(), target)
        assert not torch.equal(module.weight, before)
        assert all(parameter.grad is None for parameter in module.parameters())
        before = module.weight.detach().clone()


@pytest.fixture
def top_case(monkeypatch):
    monkeypatch.setitem(driver.USUAL_DTYPE, "cpu", "float64")
    return heads._top_case((32, 64, 2000), CPU)


def test_best_classes_are_right(top_case):
    for method in top_case.methods:
        assert judged(top_case, method)["verified"], method.label


def test_second_best_and_doubled_classes_are_found(top_case, monkeypatch):
    right = AdaptiveSoftmax.topk
    monkeypatch.setattr(
        AdaptiveSoftmax,
        "topk",
        lambda self, hidden, k: [x[:, 1:] for x in right(self, hidden, k + 1)],
    )
    assert judged(top_case, top_case.methods[-1])["status"].startswith("log_prob off by")

    def doubled(self, hidden, k):
        best = right(self, hidden, k)
        best.classes[..., 1] = best.classes[..., 0]
        return best

    monkeypatch.setattr(AdaptiveSoftmax, "topk", doubled)
    assert judged(top_case, top_case.methods[-1])["status"] == "log_prob off by inf"


def test_heads_of_trained_shape_follow_the_counts():
    share = zipf(3000) / zipf(3000).sum()
    nothing = torch.zeros(1, 64, dtype=torch.float64)
    build = heads._TOP_HEADS[heads.TREE_TOP]
    head = heads.seeded(lambda: heads._trained(PROBLEM, build, 2.0), CPU)
    # Without a hidden state every class is as probable as it is frequent.
    np.testing.assert_allclose(head.log_prob(nothing).exp()[0].detach(), share, rtol=1e-9)
    scores = torch.randn(400, 64, dtype=torch.float64) @ head.weight.detach().t()
    assert float(scores.std()) == pytest.approx(2.0, rel=0.05)


def test_draws_come_as_often_as_they_should_and_others_are_found():
    case = heads._draws_case(300, CPU)
    for method in case.methods:
        assert judged(case, method)["verified"], method.label
    probs = zipf(300) / zipf(300).sum()
    even, right = torch.full((300,), 1 / 300), torch.from_numpy(probs)

    def told_wrong(n):
        ids = torch.multinomial(right, n, replacement=True)
        return ids, right.log()[ids] + 0.01

    def errors(draw):
        return heads.draw_work(draw, probs).errors({}, ())

    assert errors(lambda n: (torch.multinomial(even, n, True), None))["chi_square"] > 1000
    assert errors(told_wrong)["log_prob"] == pytest.approx(0.01)
    assert errors(lambda n: (torch.tensor([300]), None))["chi_square"] == np.inf


@pytest.mark.parametrize("name", [*heads.BUILDERS, *heads.CLUSTERED])
def test_built_trees_have_all_classes(name):
    builders = {**heads.BUILDERS, **heads.CLUSTERED}
    case = heads._trees_case(150, {name: builders[name]})
    facts = judged(case, case.methods[0])
    assert facts["verified"], facts
    assert "deep" in facts["settings"]


def test_a_tree_of_other_classes_is_found():
    work = heads.tree_work(lambda _: lambda counts: trees.balanced(len(counts) - 1), 9)
    assert work.errors(work.call(torch.ones(9)), ()) == {"sums": np.inf}


@pytest.mark.parametrize("place", [0, 1])
def test_every_way_to_the_loss_of_a_model_shares_its_parameters_and_leaves_them_as_they_are(place):
    case = llama.FAMILY.cases(CPU, True)[place]
    section, shape = llama.PLAN["cpu", True][place]
    gpt2 = section in llama.GPT2_SECTIONS
    model, _ = llama._trained(gpt2, shape._replace(batch=1), case.dtype, CPU)
    before = [each.detach().clone() for each in model.parameters()]
    assert case.facts["parameters"] == sum(each.numel() for each in before if each.dim() == 2)
    inputs = case.draw(CPU, 3)
    for method in case.methods:
        assert judged(case, method)["verified"]
        assert case.work(method).call(*inputs) == {}
    for each, was in zip(model.parameters(), before, strict=True):
        assert each.grad is None
        assert torch.equal(each, was)


def test_a_wrong_loss_of_a_model_is_found():
    shape = llama.PLAN["cpu", True][0][1]
    case = llama._case(llama.EAGER, shape, CPU)
    for wrong in (
        lambda model: lambda tokens: 1.001 * llama._by_model(model)(tokens),
        lambda model: lambda tokens: llama._by_model(model)(tokens.flip(0, 1)),
    ):
        load = partial(llama._work, shape, case.dtype, CPU, llama.EAGER, wrong)
        method = Method("wrong", "torch", load, tolerances=case.methods[0].tolerances)
        assert not judged(case, method)["verified"]


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
def test_a_compiled_step_of_a_model_is_verified(monkeypatch):
    # Inductor takes a CPU long.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    case = llama._case(llama.COMPILED, llama.PLAN["cpu", True][0][1], CPU)
    assert [method.name for method in case.methods] == [llama.STOCK, llama.SWAPPED]
    for method in case.methods:
        assert judged(case, method)["verified"]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_small_cases_on_a_gpu_are_right(family, monkeypatch, tmp_path, capsys):
    from benchmarks.__main__ import main

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    part = {"maps": "shapes", "heads": "step", "fused": "sparse", "sweep": "_loss"}
    case = part.get(family.name, "")
    options = ["--quick", "--device", "cuda", "--no-peers", "--only", case]
    assert main([family.name, *options]) == 0, capsys.readouterr().err
