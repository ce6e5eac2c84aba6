"""Row-wise optimisers against torch's, on the rows that are touched and on those that are not."""

import copy
import io

import pytest
import torch

from lastlayer.kernels import touched_rows
from lastlayer.optim import RowAdagrad, RowAdam
from waits import no_waits

V, D = 30, 7
MAKERS = {
    "adagrad": lambda params, **options: RowAdagrad(params, lr=0.1, **options),
    "skip": lambda params, **options: RowAdam(params, lr=0.1, **options),
    "decay": lambda params, **options: RowAdam(params, lr=0.1, missed="decay", **options),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
both_adams = pytest.mark.parametrize("missed", ["skip", "decay"])


@pytest.fixture(autouse=True)
def _checked():
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def table(dtype=torch.float64, shape=(V, D)):
    return torch.nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype))


def set_gradient(parameter, ids, values, coalesced=True):
    gradient = torch.sparse_coo_tensor(
        torch.as_tensor(ids).unsqueeze(0), values.to(parameter), parameter.shape
    )
    parameter.grad = gradient.coalesce() if coalesced else gradient


def random_step(parameter, n=6):
    ids = torch.randperm(V)[:n]
    values = torch.randn(n, *parameter.shape[1:], dtype=torch.float64)
    set_gradient(parameter, ids, values)
    return ids


@pytest.mark.parametrize("shape", [(V, D), (V,), (V, 3, 2), ()], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@both_adams
def test_with_dense_gradients_adam_is_that_of_torch(shape, weight_decay, missed):
    ours = table(shape=shape)
    theirs = copy.deepcopy(ours)
    options = dict(lr=0.03, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)
    optimizers = RowAdam([ours], missed=missed, **options), torch.optim.AdamW([theirs], **options)
    for _ in range(5):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        for each in optimizers:
            each.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@both_adams
@pytest.mark.parametrize("coalesced", [True, False])
def test_rows_that_are_always_touched_move_as_by_dense_adam(missed, coalesced):
    ours = table()
    theirs = torch.nn.Parameter(ours.detach()[:4].clone())
    optimizers = RowAdam([ours], lr=0.02, missed=missed), torch.optim.Adam([theirs], lr=0.02)
    before = ours.detach().clone()
    for _ in range(6):
        values = torch.randn(8, D, dtype=torch.float64)
        ids = torch.arange(4).repeat(2) if not coalesced else torch.arange(4)
        values = values[: len(ids)]
        set_gradient(ours, ids, values, coalesced)
        theirs.grad = values[:4] + (0 if coalesced else values[4:])
        for each in optimizers:
            each.step()
    torch.testing.assert_close(ours[:4], theirs)
    assert torch.equal(ours[4:], before[4:])


def test_skip_is_adam_on_the_steps_that_a_row_is_in():
    parameter = table()
    rows = [torch.nn.Parameter(row.clone()) for row in parameter.detach()]
    optimizer = RowAdam([parameter], lr=0.05, weight_decay=0.01)
    alone = [torch.optim.AdamW([row], lr=0.05, weight_decay=0.01) for row in rows]
    for _ in range(12):
        ids = random_step(parameter).tolist()
        dense = parameter.grad.to_dense()
        for i in ids:
            rows[i].grad = dense[i].clone()
            alone[i].step()
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.stack([r.detach() for r in rows]))


def test_decay_has_the_moments_of_adam_with_gradients_of_zero():
    parameter = table()
    dense = copy.deepcopy(parameter)
    optimizer = RowAdam([parameter], missed="decay")
    theirs = torch.optim.Adam([dense])
    for _ in range(12):
        ids = random_step(parameter)
        dense.grad = parameter.grad.to_dense()
        optimizer.step()
        theirs.step()
        for name in ("exp_avg", "exp_avg_sq"):
            ours, expected = optimizer.state[parameter][name], theirs.state[dense][name]
            torch.testing.assert_close(ours[ids], expected[ids])


@pytest.mark.parametrize(("missed", "length"), [("skip", 1.0), ("decay", 0.1 / 0.001**0.5)])
def test_a_row_that_first_comes_late_moves_as_far_as_documented(missed, length):
    parameter = table()
    optimizer = RowAdam([parameter], lr=0.01, missed=missed, eps=0.0)
    for _ in range(10_000 if missed == "decay" else 10):
        set_gradient(parameter, [0], torch.ones(1, D, dtype=torch.float64))
        optimizer.step()
    before = parameter.detach().clone()
    set_gradient(parameter, [1], torch.randn(1, D, dtype=torch.float64))
    optimizer.step()
    moved = (parameter.detach() - before)[1].abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01 * length), rtol=1e-4, atol=0)


def test_adagrad_has_one_sum_a_row():
    parameter = table()
    weight, sums = parameter.detach().clone(), torch.full((V,), 0.25, dtype=torch.float64)
    optimizer = RowAdagrad(
        [parameter], lr=0.1, weight_decay=0.3, eps=1e-4, initial_accumulator_value=0.25
    )
    for _ in range(5):
        ids = random_step(parameter)
        gradient = parameter.grad.to_dense()[ids]
        sums[ids] += gradient.square().mean(1)
        weight[ids] -= 0.1 * 0.3 * weight[ids]
        weight[ids] -= 0.1 * gradient / (sums[ids].sqrt() + 1e-4)[:, None]
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), weight)
    torch.testing.assert_close(optimizer.state[parameter]["sum"], sums)


@pytest.mark.parametrize("sparse", [True, False])
def test_of_a_bias_adagrad_is_that_of_torch(sparse):
    ours = table(shape=(V,))
    theirs = copy.deepcopy(ours)
    optimizers = RowAdagrad([ours], lr=0.1), torch.optim.Adagrad([theirs], lr=0.1)
    for _ in range(5):
        random_step(ours)
        theirs.grad = ours.grad.clone()
        ours.grad = ours.grad if sparse else ours.grad.to_dense()
        for each in optimizers:
            each.step()
    torch.testing.assert_close(ours, theirs)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_untouched_rows_do_not_change_by_a_bit(make, dtype):
    parameter = table(dtype)
    optimizer = make([parameter])
    for _ in range(4):
        before = parameter.detach().clone()
        state = copy.deepcopy(optimizer.state[parameter])
        ids = random_step(parameter)
        optimizer.step()
        others = torch.ones(V, dtype=torch.bool)
        others[ids] = False
        assert torch.equal(parameter[others], before[others])
        assert (parameter[ids] != before[ids]).any(1).all()
        for name, value in state.items():
            if name != "step":
                assert torch.equal(optimizer.state[parameter][name][others], value[others])


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_a_step(make, dtype):
    parameter = table(dtype)
    before = parameter.detach().clone()
    exact = torch.nn.Parameter(before.double())
    random_step(parameter)
    exact.grad = parameter.grad.double()
    optimizer = make([parameter])
    optimizer.step()
    make([exact]).step()
    torch.testing.assert_close(parameter.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)
    floats = [v for v in optimizer.state[parameter].values() if v.is_floating_point()]
    assert {each.dtype for each in floats} == {torch.float32}


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_to_the_bit(make, dtype):
    parameter, bias = table(dtype), table(dtype, (V,))
    optimizer = make([parameter, bias])

    def steps(optimizer, parameter, bias, seed):
        torch.manual_seed(seed)
        for _ in range(4):
            random_step(parameter)
            random_step(bias)
            optimizer.step()

    steps(optimizer, parameter, bias, 1)
    file = io.BytesIO()
    torch.save({"p": parameter, "b": bias, "o": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = make([saved["p"], saved["b"]])
    other.load_state_dict(saved["o"])
    for name, value in optimizer.state[parameter].items():
        assert other.state[saved["p"]][name].dtype == value.dtype
    steps(optimizer, parameter, bias, 2)
    steps(other, saved["p"], saved["b"], 2)
    assert torch.equal(parameter, saved["p"])
    assert torch.equal(bias, saved["b"])


def test_a_loaded_state_is_a_copy():
    parameter = table()
    optimizer = RowAdagrad([parameter])
    random_step(parameter)
    optimizer.step()
    state = optimizer.state_dict()
    other = RowAdagrad([copy.deepcopy(parameter)])
    other.load_state_dict(state)
    (made,) = other.state.values()
    made["sum"].zero_()
    assert optimizer.state[parameter]["sum"].any()


@every_optimizer
def test_a_closure_is_called_with_gradients_on(make):
    layer = torch.nn.Embedding(V, D, sparse=True)
    optimizer = make(layer.parameters())

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.tensor([1, 2, 1])).square().sum()
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(5)]
    assert losses[-1] < losses[0]


@every_optimizer
def test_groups_have_options_of_their_own(make):
    slow, fast = table(), table()
    optimizer = make([{"params": [slow], "lr": 0.0}, {"params": [fast]}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    before = slow.detach().clone(), fast.detach().clone()
    for parameter in (slow, fast):
        random_step(parameter)
    optimizer.step()
    assert torch.equal(slow, before[0])
    assert not torch.equal(fast, before[1])
    schedule.step()
    assert optimizer.param_groups[1]["lr"] == 0.05


@every_optimizer
def test_sparse_and_dense_gradients_can_take_turns(make):
    parameter = table()
    expected = copy.deepcopy(parameter)
    optimizers = make([parameter]), make([expected])
    everything = torch.arange(V)
    for i in range(4):
        values = torch.randn(V, D, dtype=torch.float64)
        expected.grad = values
        if i % 2:
            set_gradient(parameter, everything, values)
        else:
            parameter.grad = values.clone()
        for each in optimizers:
            each.step()
    torch.testing.assert_close(parameter, expected)


@every_optimizer
def test_a_gradient_without_rows_changes_nothing(make):
    parameter = table(torch.float32)
    before = parameter.detach().clone()
    optimizer = make([parameter])
    set_gradient(parameter, torch.empty(0, dtype=torch.int64), torch.empty(0, D))
    optimizer.step()
    parameter.grad = None
    optimizer.step()
    assert torch.equal(parameter, before)


@every_optimizer
def test_a_table_without_rows(make):
    """As in a process that has none of the rows of a sharded table."""
    parameter = table(shape=(0, D))
    set_gradient(parameter, torch.zeros(0, dtype=torch.long), torch.zeros(0, D))
    make([parameter]).step()
    assert parameter.shape == (0, D)


@every_optimizer
def test_a_nan_stays_in_its_row(make):
    parameter = table(torch.float32)
    values = torch.randn(3, D)
    values[1, 2] = torch.nan
    set_gradient(parameter, [4, 5, 6], values)
    make([parameter]).step()
    assert torch.equal(parameter.isnan().any(1).nonzero().flatten(), torch.tensor([5]))


def test_bad_options_are_named():
    parameter = table()
    for name, value in (("lr", -1.0), ("eps", -1.0), ("weight_decay", float("nan"))):
        for kind in (RowAdagrad, RowAdam):
            with pytest.raises(
                ValueError, match=f"{name}: expected a finite number of at least 0, got"
            ):
                kind([parameter], **{name: value})
    with pytest.raises(TypeError, match="lr: expected a number, got Tensor"):
        RowAdam([parameter], lr=torch.tensor(0.1))
    with pytest.raises(ValueError, match="betas: expected a number from 0 to less than 1"):
        RowAdam([parameter], betas=(0.9, 1.0))
    with pytest.raises(TypeError, match="betas: expected two numbers, got"):
        RowAdam([parameter], betas=0.9)
    with pytest.raises(ValueError, match=r"missed: expected one of .*, got 'forget'"):
        RowAdam([parameter], missed="forget")
    with pytest.raises(ValueError, match="initial_accumulator_value: expected a finite"):
        RowAdagrad([{"params": [parameter], "initial_accumulator_value": -1.0}])


def test_bad_gradients_are_named():
    parameter = table()
    parameter.grad = torch.randn(V, D, dtype=torch.float64).to_sparse()
    with pytest.raises(ValueError, match="one sparse dimension, got"):
        RowAdagrad([parameter]).step()
    turned = torch.nn.Parameter(torch.randn(D, V).t())
    set_gradient(turned, [1], torch.randn(1, D))
    with pytest.raises(ValueError, match="contiguous parameters for sparse gradients"):
        RowAdam([turned]).step()


@pytest.mark.gpu
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_duplicates_of_an_embedding_are_added_up_on_a_gpu(make, dtype):
    there = torch.nn.Embedding(V, D, sparse=True, device="cuda", dtype=dtype)
    here = torch.nn.Embedding(V, D, sparse=True, dtype=torch.float64)
    here.load_state_dict({"weight": there.weight.detach().cpu().double()})
    optimizers = make(there.parameters()), make(here.parameters())
    for _ in range(1 if dtype == torch.bfloat16 else 4):
        # Runs that are longer than what a program adds up.
        ids = (V * torch.rand(700) ** 4).long()
        scale = torch.randint(1, 4, (700, 1)).double()
        for table, optimizer in zip((there, here), optimizers, strict=True):
            optimizer.zero_grad()
            rows = table(ids.to(table.weight.device))
            (rows * scale.to(rows)).sum().backward()
        assert not there.weight.grad.is_coalesced()
        with no_waits():
            optimizers[0].step()
        optimizers[1].step()
    rtol = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(there.weight.cpu().double(), here.weight, rtol=rtol, atol=1e-5)


@pytest.mark.gpu
@every_optimizer
def test_a_weight_and_its_bias_are_sorted_once_on_a_gpu(make, monkeypatch):
    weight = torch.nn.Parameter(torch.randn(V, D, device="cuda"))
    bias = torch.nn.Parameter(torch.randn(V, device="cuda"))
    ids = torch.tensor([[3, 1, 3, 2]], device="cuda")
    for parameter in (weight, bias):
        values = torch.randn(4, *parameter.shape[1:], device="cuda")
        parameter.grad = torch.sparse_coo_tensor(
            ids, values, parameter.shape, check_invariants=False
        )
    expected = [torch.nn.Parameter(each.detach().clone()) for each in (weight, bias)]
    for each, other in zip((weight, bias), expected, strict=True):
        other.grad = each.grad.coalesce()
    calls, sort = [], touched_rows.sort_ids
    monkeypatch.setattr(touched_rows, "sort_ids", lambda *a: calls.append(1) or sort(*a))
    make([weight, bias]).step()
    assert len(calls) == 1
    make(expected).step()
    for each, other in zip((weight, bias), expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-5, atol=1e-6)
