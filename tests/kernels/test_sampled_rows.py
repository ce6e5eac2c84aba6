"""Rows of drawn classes, and what surrounds them, against plain torch in float64."""

import itertools
import math

import pytest
import torch
from implementations import every_implementation, place

from lastlayer.kernels import sampled_rows, touched_rows


def problem(n, m, p, device, apart=False, n_exact=0):
    generator = torch.Generator().manual_seed(n * 1000 + m)

    def numbers(*shape):
        return torch.randn(*shape, generator=generator)

    shape = (n, m) if apart else (m,)
    ids = torch.randint(0, max(2, m // 2), shape, generator=generator)
    offset = numbers(*shape) - 1.0
    offset[..., m // 3] = -math.inf
    target = torch.randint(0, max(2, m // 2), (n, p), generator=generator)
    if p > 1:
        target[::2, -1] = -1
    given = [3 * numbers(n, m), offset, ids, target, numbers(n), numbers(n), numbers(n)]
    return [each.to(device) for each in given]


def run(impl, scores, gradient, *rest, parts=1):
    """Both results, and the sums of columns, set and then added to."""
    n, m = scores.shape
    first, second = scores.new_empty(2, n, dtype=torch.float32).unbind()
    columns = scores.new_empty(parts, m, dtype=torch.float32)
    before = scores.clone()
    sampled_rows.forward_(impl, scores, gradient, first, second, columns, *rest, False)
    once = columns.sum(0)
    again = before.clone()
    sampled_rows.forward_(impl, again, again, first, second, columns, *rest, True)
    torch.testing.assert_close(columns.sum(0), 2 * once, rtol=1e-5, atol=1e-6, equal_nan=True)
    return first, second, once


def expected(scores, offset, ids, target, shift, exact, factor, n_exact, logistic, drop, average):
    """The value whose derivative by scores is the gradient, in float64."""
    scores = scores.cpu().double().requires_grad_()
    offset, shift, exact = (each.cpu().double() for each in (offset, shift, exact))
    keep = (offset > -math.inf).expand_as(scores)
    if drop:
        hits = (ids.cpu()[..., None] == target.cpu()[:, None, :]).any(-1)
        keep = keep & ~hits
    drawn = torch.arange(scores.shape[1]) >= n_exact
    x = scores * factor + offset + torch.where(drawn, shift[:, None], 0.0)
    if average:
        left = (keep & drawn).sum(-1, keepdim=True).clamp(min=1)
        x = x - torch.where(drawn, left.double().log(), 0.0)
    x = x.masked_fill(~keep, -math.inf)
    if logistic:
        loss = torch.nn.functional.softplus(x).sum(-1)
        return loss, torch.sigmoid(x).sum(-1), loss, scores
    lse = torch.logsumexp(x, -1)
    r = torch.where(drawn, x, -math.inf).exp()
    ess = torch.where(r.sum(-1) > 0, r.sum(-1).square() / r.square().sum(-1), 0.0)
    return lse, ess, torch.logaddexp(lse, exact), scores


CASES = list(itertools.product((False, True), (False, True), (False, True)))


@pytest.mark.thin(3)
@every_implementation
@pytest.mark.parametrize(("logistic", "drop", "average"), CASES)
@pytest.mark.parametrize(
    ("n", "m", "p", "n_exact"), [(5, 7, 1, 0), (3, 40, 3, 6), (2, 5000, 1, 100)]
)
def test_losses_and_gradients(impl, logistic, drop, average, n, m, p, n_exact):
    device = place(impl)
    apart = m == 40
    scores, offset, ids, target, shift, exact, scale = problem(n, m, p, device, apart)
    rest = 0.7, n_exact, logistic, drop, average
    first, second, loss, leaf = expected(scores, offset, ids, target, shift, exact, *rest)
    (gradient,) = torch.autograd.grad((loss * scale.cpu().double()).sum(), leaf)
    made = scores.clone()
    one, two, columns = run(
        impl, made, made, offset, ids, target, shift, exact, scale, *rest, parts=1 + n // 2
    )
    torch.testing.assert_close(columns.cpu().double(), gradient.sum(0), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(one.cpu().double(), first.detach(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(two.cpu().double(), second.detach(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(made.cpu().double(), gradient, rtol=2e-5, atol=1e-6)


@every_implementation
def test_long_rows_are_read_in_pieces(impl):
    device = place(impl)
    scores, offset, ids, target, shift, exact, scale = problem(2, 16_400, 1, device)
    for logistic in (False, True):
        rest = 1.0, 3, logistic, True, True
        first, second, loss, leaf = expected(scores, offset, ids, target, shift, exact, *rest)
        (gradient,) = torch.autograd.grad((loss * scale.cpu().double()).sum(), leaf)
        made = scores.clone()
        one, two, columns = run(impl, made, made, offset, ids, target, shift, exact, scale, *rest)
        torch.testing.assert_close(columns.cpu().double(), gradient.sum(0), rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(one.cpu().double(), first.detach(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(two.cpu().double(), second.detach(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(made.cpu().double(), gradient, rtol=2e-5, atol=1e-7)


@every_implementation
def test_a_row_without_draws_and_a_row_with_nan(impl):
    device = place(impl)
    scores = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [0.5, 0.5]], device=device)
    offset, ids = torch.zeros(2, device=device), torch.tensor([4, 4], device=device)
    target = torch.tensor([[4], [5], [5]], device=device)
    scale, exact = torch.ones(3, device=device), torch.zeros(3, device=device)
    rest = offset, ids, target, None, exact, scale, 1.0, 0, False, True, True
    first, ess, _ = run(impl, scores, scores, *rest)
    assert first[0] == -math.inf
    assert ess[0] == 0.0
    assert scores[0].tolist() == [0.0, 0.0]
    assert first[1].isnan()
    assert scores[1].isnan().all()
    assert abs(float(first[2]) - 0.5) < 1e-6
    assert abs(float(ess[2]) - 2.0) < 1e-6
    share = math.exp(0.5) / 2 / (1 + math.exp(0.5))
    torch.testing.assert_close(scores[2].cpu(), torch.tensor([share, share]))


@every_implementation
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("c", "n", "q"), [(6, 5, 1), (0, 4, 3), (300, 2, 2)])
def test_entries_of_a_class_are_added_up(impl, wanted, c, n, q):
    device = place(impl)
    generator = torch.Generator().manual_seed(c + n)
    columns, biases = torch.randn(c, 11, generator=generator), torch.randn(c, generator=generator)
    slopes, hidden = torch.randn(n, q, generator=generator), torch.randn(n, 11, generator=generator)
    classes = torch.randint(0, 3, (c + n * q,), generator=generator)
    order = classes.sort(stable=True).indices
    starts = torch.tensor([0, *torch.bincount(classes, minlength=4).cumsum(0).tolist()])
    vectors = torch.cat([columns, (slopes[..., None] * hidden[:, None]).reshape(-1, 11)])
    expected_weight = torch.zeros(4, 11).index_add_(0, classes, vectors)
    expected_bias = torch.zeros(4).index_add_(0, classes, torch.cat([biases, slopes.flatten()]))
    given = columns if wanted[0] else columns[:0], biases if wanted[1] else biases[:0]
    given = *given, slopes, hidden, order, starts, torch.tensor(0.5)
    weight, bias = touched_rows.forward(impl, *(each.to(device) for each in given), *wanted)
    if wanted[0]:
        torch.testing.assert_close(weight.cpu(), 0.5 * expected_weight, rtol=1e-5, atol=1e-5)
    if wanted[1]:
        torch.testing.assert_close(bias.cpu(), 0.5 * expected_bias, rtol=1e-5, atol=1e-5)
    assert weight.shape == ((4, 11) if wanted[0] else (0,))
    assert bias.shape == ((4,) if wanted[1] else (0,))


@pytest.mark.parametrize("impl", ["cpu", "triton"])
def test_thousands_of_entries_of_a_class_do_not_add_up_their_rounding(impl):
    # The last column of each row is its target; one by one float32 would be off by 4e-5.
    slopes = torch.rand(400, 20) * 1e-4
    slopes[:40, -1] = -1 / 255
    given = torch.empty(0), torch.empty(0), slopes, torch.zeros(400, 1), torch.arange(8000)
    given = [each.to(place(impl)) for each in (*given, torch.tensor([0, 8000]), torch.tensor(1.0))]
    _, bias = touched_rows.forward(impl, *given, False, True)
    torch.testing.assert_close(bias.cpu().double(), slopes.double().sum()[None], rtol=0, atol=3e-8)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(("c", "n", "q"), [(6, 5, 1), (0, 4, 3), (90, 30, 1), (1, 0, 1)])
def test_entries_are_added_up_in_the_first_slot_of_their_class(impl, scattered, c, n, q):
    device, v, d = place(impl), 40, 11
    generator = torch.Generator().manual_seed(c + n)
    columns, biases = torch.randn(c, d, generator=generator), torch.randn(c, generator=generator)
    slopes, hidden = torch.randn(n, q, generator=generator), torch.randn(n, d, generator=generator)
    # Runs that are cut where they start, in the middle and nowhere.
    classes = (v * torch.rand(c + n * q, generator=generator) ** 4).int()
    keys, order = classes.sort(stable=True)
    vectors = torch.cat([columns, (slopes[..., None] * hidden[:, None]).reshape(-1, d)])
    levels = torch.cat([biases, slopes.flatten()])
    rows = v if scattered else len(keys)
    places = keys
    if not scattered:
        places = torch.searchsorted(keys, keys)
    expected_weight = torch.zeros(rows, d).index_add_(0, places, vectors[order])
    expected_bias = torch.zeros(rows).index_add_(0, places, levels[order])
    given = levels, hidden, columns, c, order, keys, torch.tensor(0.5)
    given = [each if each is c else each.to(device) for each in given]
    fill = torch.zeros if scattered else torch.empty
    weight, bias = fill(rows, d, device=device), fill(rows, device=device)
    known = torch.empty(1, len(keys), dtype=torch.int64, device=device)
    touched_rows.slots_(impl, *given, weight, bias, known, scattered)
    assert torch.equal(known[0].cpu(), keys.long())
    torch.testing.assert_close(weight.cpu(), 0.5 * expected_weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.cpu(), 0.5 * expected_bias, rtol=1e-5, atol=1e-5)
    alone = fill(rows, d, device=device)
    touched_rows.slots_(impl, *given, alone, bias[:0], None, scattered)
    assert torch.equal(alone, weight)
