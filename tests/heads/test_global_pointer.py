"""Spans: scores, their loss and the fused path against loops and dense arithmetic."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lastlayer.heads.spans import GlobalPointer, rotated
from lastlayer.kernels.span_sums import reference
from lastlayer.losses.zlpr import zlpr_loss

PAD = -100
FEATURES, TYPES, TOKENS = 5, 3, 6
MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [False, True, True, False, True, True]])
SPANS = torch.tensor(
    [
        [[0, 1, 2], [2, 0, 5], [0, 1, 2], [0, 4, 4]],
        [[1, 3, 3], [PAD, 0, 0], [1, 0, 2], [PAD, PAD, PAD]],
        [[PAD, PAD, PAD]] * 4,
    ]
)
each_form = pytest.mark.parametrize("efficient", [False, True], ids=["full", "efficient"])


def made(efficient=False, **options):
    head = GlobalPointer(
        FEATURES, TYPES, 4, **{"efficient": efficient, "dtype": torch.float64} | options
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    hidden = torch.randn(3, TOKENS, FEATURES, dtype=head.project.weight.dtype)
    return head, hidden.requires_grad_()


def made_like(head):
    """The same head, whose lists are padded."""
    other = GlobalPointer(**{**head.config(), "ignore_index": PAD}, dtype=torch.float64)
    other.load_state_dict(head.state_dict())
    return other


def dense(spans, n=TOKENS, n_types=TYPES):
    target = torch.zeros(len(spans), n_types, n, n, dtype=torch.bool)
    for text, of_text in zip(target, spans.tolist(), strict=True):
        for kind, start, end in of_text:
            if kind != PAD:
                text[kind, start, end] = True
    return target


def spans_of(mask):
    """Every (text, start, end) that is a span."""
    for text, tokens in enumerate(mask.tolist()):
        places = [place for place, there in enumerate(tokens) if there]
        for start, end in itertools.combinations_with_replacement(places, 2):
            yield text, start, end


def dense_loss(head, hidden, target, mask, reduction="mean"):
    counts = torch.zeros(*hidden.shape[:2], hidden.shape[1], dtype=torch.bool)
    for text, start, end in spans_of(mask):
        counts[text, start, end] = True
    counts = counts.unsqueeze(1).expand(target.shape)
    scores = head.scores(hidden, mask).flatten(-2)
    return zlpr_loss(scores, target.flatten(-2), mask=counts.flatten(-2), reduction=reduction)


def rotation(vector, place):
    """By the definition: pairs of numbers, turned one after the other."""
    turned = vector.clone()
    for pair in range(len(vector) // 2):
        angle = place * 10_000 ** (-2 * pair / len(vector))
        x, y = vector[2 * pair : 2 * pair + 2].tolist()
        turned[2 * pair] = x * math.cos(angle) - y * math.sin(angle)
        turned[2 * pair + 1] = x * math.sin(angle) + y * math.cos(angle)
    return turned


@each_form
@pytest.mark.parametrize("rope", [True, False])
@torch.no_grad()
def test_scores_are_those_of_the_formula(efficient, rope):
    head, hidden = made(efficient, rope=rope)
    scores = head.scores(hidden, MASK)
    right = torch.full_like(scores, -math.inf)
    turn = rotation if rope else lambda vector, _: vector
    for text, start, end in spans_of(MASK):
        first, last = (head.project(hidden[text, place]) for place in (start, end))
        for kind in range(TYPES):
            at = 0 if efficient else 8 * kind
            query, key = turn(first[at : at + 4], start), turn(last[at + 4 : at + 8], end)
            score = query @ key / 2
            if efficient:
                score = score + head.type_bias(first)[kind] + head.type_bias(last)[TYPES + kind]
            right[text, kind, start, end] = score
    torch.testing.assert_close(scores, right)


@torch.no_grad()
def test_the_loss_is_two_log_sums_over_spans():
    head, hidden = made(reduction="none")
    scores, target = head.scores(hidden, MASK), dense(SPANS)
    for text, kind in itertools.product(range(3), range(TYPES)):
        wrong, right = 0.0, 0.0
        for _, start, end in (each for each in spans_of(MASK) if each[0] == text):
            score = scores[text, kind, start, end]
            if target[text, kind, start, end]:
                right = right + torch.exp(-score)
            else:
                wrong = wrong + torch.exp(score)
        expected = math.log1p(wrong) + math.log1p(right)
        assert head(hidden, SPANS, MASK)[text, kind].item() == pytest.approx(expected)


@each_form
@pytest.mark.parametrize("chunk_spans", [1, 30, 100, "auto"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_tiles_are_the_dense_loss(efficient, chunk_spans, reduction):
    head, hidden = made(efficient, chunk_spans=chunk_spans, reduction=reduction)
    target = dense(SPANS)
    right = dense_loss(head, hidden, target, MASK, reduction)
    upstream = torch.randn_like(right)
    leaves = [hidden, *head.parameters()]
    gradients = torch.autograd.grad((right * upstream).sum(), leaves)
    for given in (SPANS, target):
        ours = head(hidden, given, MASK)
        torch.testing.assert_close(ours, right)
        torch.testing.assert_close(torch.autograd.grad((ours * upstream).sum(), leaves), gradients)


@each_form
@pytest.mark.parametrize("given", [SPANS, dense(SPANS)], ids=["listed", "dense"])
def test_gradients_are_derivatives(efficient, given):
    head, hidden = made(efficient, chunk_spans=40)
    given, mask = given[:2], MASK[:2]
    assert torch.autograd.gradcheck(lambda states: head(states, given, mask), (hidden[:2],))


@each_form
def test_without_a_mask_all_are_tokens(efficient):
    head, hidden = made(efficient, chunk_spans=40)
    everywhere = torch.ones_like(MASK)
    torch.testing.assert_close(head(hidden, SPANS), head(hidden, SPANS, everywhere))
    assert torch.equal(head.scores(hidden), head.scores(hidden, everywhere))


@each_form
@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e12])
def test_padding_may_hold_anything(efficient, junk):
    head, hidden = made(efficient, chunk_spans=40)
    spoiled = hidden.detach().masked_fill(~MASK.unsqueeze(-1), junk).requires_grad_()
    results = []
    for states in (hidden, spoiled):
        loss = head(states, SPANS, MASK)
        results.append((loss, torch.autograd.grad(loss, [states, *head.parameters()])))
        assert torch.equal(head.scores(states, MASK), head.scores(hidden, MASK))
        assert head.decode(states, MASK) == head.decode(hidden, MASK)
    torch.testing.assert_close(*results)
    assert bool((results[1][1][0][~MASK] == 0).all())


def test_a_text_cut_to_its_tokens_has_the_same_loss():
    head, hidden = made(reduction="none")
    whole = head(hidden, SPANS, MASK)
    torch.testing.assert_close(whole[1], head(hidden[1, :4], SPANS[1]))
    torch.testing.assert_close(whole[:1], head(hidden[:1], SPANS[:1]))


def test_texts_without_tokens_have_no_loss_and_do_not_count():
    head, hidden = made()
    mask = MASK.clone()
    mask[1] = False
    # What is right in padding counts no more than what is wrong there.
    for given in (SPANS, dense(SPANS)):
        loss = head(hidden, given, mask)
        torch.testing.assert_close(loss, head(hidden[[0, 2]], given[[0, 2]], mask[[0, 2]]))
        (gradient,) = torch.autograd.grad(loss, hidden)
        assert bool((gradient[1] == 0).all())
    assert head(hidden, SPANS, torch.zeros_like(mask)) == 0
    assert head.decode(hidden, torch.zeros_like(mask)) == [[], [], []]


@each_form
def test_a_nan_stays_in_its_text(efficient):
    head, hidden = made(efficient, reduction="none")
    spoiled = hidden.detach().clone()
    spoiled[0, 3, 1] = math.nan
    losses = head(spoiled, SPANS, MASK)
    assert bool(losses[0].isnan().all())
    torch.testing.assert_close(losses[1:], head(hidden, SPANS, MASK)[1:])


@pytest.mark.parametrize("batch", [(), (1,), (0,), (2, 3)])
@each_form
def test_batch_dimensions(efficient, batch):
    head, _ = made(efficient, reduction="none")
    hidden = torch.randn(*batch, TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)
    spans = torch.tensor([[0, 1, 2], [2, 3, 3]]).expand(*batch, 2, 3)
    losses = head(hidden, spans)
    assert losses.shape == (*batch, TYPES)
    assert head.scores(hidden).shape == (*batch, TYPES, TOKENS, TOKENS)
    losses.sum().backward()
    assert hidden.grad.shape == hidden.shape
    texts = hidden.reshape(-1, TOKENS, FEATURES)
    assert head.decode(hidden) == head.decode(texts)
    head.reduction = "mean"
    expected = losses.mean() if losses.numel() else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(head(hidden, spans), expected)


@each_form
def test_no_right_spans_at_all(efficient):
    head, hidden = made(efficient)
    nothing = head(hidden, torch.empty(3, 0, 3, dtype=torch.int64), MASK)
    torch.testing.assert_close(nothing, head(hidden, torch.full((3, 2, 3), PAD), MASK))
    torch.testing.assert_close(nothing, head(hidden, torch.zeros_like(dense(SPANS)), MASK))


def test_scores_depend_on_distances_not_on_places():
    states = torch.randn(4, FEATURES, dtype=torch.float64)
    for efficient in (False, True):
        head, _ = made(efficient)
        texts = torch.randn(2, 50, FEATURES, dtype=torch.float64)
        texts[0, :4], texts[1, 41:45] = states, states
        first, second = head.scores(texts)
        torch.testing.assert_close(first[:, :4, :4], second[:, 41:45, 41:45])
    # And on distances they do depend.
    same = head.scores(states[:1].expand(9, FEATURES))[0, 0]
    assert len(set(same.tolist())) == 9


def test_rotations_far_into_a_text_keep_their_digits():
    vectors = torch.randn(20_001, 8)
    far = rotated(vectors)[-1].double()
    torch.testing.assert_close(far, rotation(vectors[-1].double(), 20_000), atol=2e-6, rtol=0)


def test_tiny_losses_keep_their_digits():
    head = GlobalPointer(1, 1, 1, rope=False, efficient=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.type_bias.bias[0] = -20.0
    loss = head(torch.zeros(4, 1), torch.empty(0, 3, dtype=torch.int64))
    assert loss.item() == pytest.approx(math.log1p(10 * math.exp(-20)), rel=1e-5)


@pytest.mark.parametrize("score", [-1e4, 1e4])
def test_very_wrong_and_very_right_spans(score):
    head = GlobalPointer(1, 1, 1, rope=False, efficient=True, chunk_spans=1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.type_bias.bias[0] = score
    hidden = torch.zeros(3, 1)
    every = torch.ones(1, 3, 3, dtype=torch.bool).triu()
    listed = torch.tensor(
        [[0, *pair] for pair in itertools.combinations_with_replacement(range(3), 2)]
    )
    for target in (every, listed):
        loss = head(hidden, target)
        # Six spans share what is lost, and then each has a sixth of the pull.
        expected = 0.0 if score > 0 else 1e4 + math.log(6)
        torch.testing.assert_close(loss, torch.tensor(expected))
        (pull,) = torch.autograd.grad(loss, head.type_bias.bias)
        assert pull[0].item() == pytest.approx(0.0 if score > 0 else -1.0, abs=1e-3)


@each_form
def test_memory_is_that_of_a_tile(efficient):
    n, chunk = 64, 1024
    head = GlobalPointer(8, 2, 4, efficient=efficient, chunk_spans=chunk)
    hidden = torch.randn(2, n, 8, requires_grad=True)
    spans = torch.tensor([[[0, 3, 9], [1, 50, 63]]] * 2)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        head(hidden, spans).backward()
        head.decode(hidden, threshold=math.inf)
        head.decode(hidden, threshold=math.inf, max_spans=3)
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    # A tile in int64, as its order is found, and its places; all scores would be 65536 bytes.
    assert 0 < largest <= 2 * chunk * 8 + 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    head, hidden = made(dtype=dtype)
    hidden = hidden.detach().requires_grad_()
    loss = head(hidden, SPANS, MASK)
    assert loss.dtype == head.scores(hidden).dtype == torch.float32
    loss.backward()
    assert hidden.grad.dtype == dtype
    exact = made(dtype=torch.float64)[0]
    exact.load_state_dict({name: value.double() for name, value in head.state_dict().items()})
    right = exact(hidden.double(), SPANS, MASK)
    torch.testing.assert_close(loss.double(), right, rtol=0.05, atol=0.05)


@each_form
def test_autocast(efficient):
    head, hidden = made(efficient, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(hidden, SPANS, MASK)
        scores = head.scores(hidden, MASK)
        found = head.decode(hidden, MASK)
    assert loss.dtype == scores.dtype == torch.float32
    loss.backward()
    assert all(each.grad.dtype == torch.float32 for each in (hidden, *head.parameters()))
    torch.testing.assert_close(loss, head(hidden, SPANS, MASK), rtol=0.1, atol=0.1)
    # The same rounded vectors, and then float32 for all of them.
    assert sum(map(len, found)) == int((scores > 0).sum())
    right = zlpr_loss(scores.flatten(-2), dense(SPANS).flatten(-2))
    torch.testing.assert_close(loss, right)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiling_changes_nothing():
    torch.compiler.reset()
    # The form with everything in it.
    head, hidden = made(efficient=True, chunk_spans=40)
    loss = partial(head, target=SPANS, mask=MASK)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = [hidden, *head.parameters()]
    results = [
        (each(hidden), torch.autograd.grad(each(hidden), leaves)) for each in (loss, compiled)
    ]
    torch.testing.assert_close(*results)


@each_form
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_kernels_in_place_of_tiles(efficient, reduction, monkeypatch):
    """The way of a GPU, with the kernels' reference."""
    head, hidden = made(efficient, reduction=reduction)
    leaves = [hidden, *head.parameters()]
    results = []
    for suit in (False, True):
        monkeypatch.setattr("lastlayer.fused.spans._kernels_suit", lambda _, suit=suit: suit)
        monkeypatch.setattr("lastlayer.kernels.span_sums.triton", reference, raising=False)
        loss = head(hidden, SPANS, MASK)
        results.append((loss, torch.autograd.grad(loss.square().sum(), leaves)))
    torch.testing.assert_close(*results)


@each_form
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_operation_is_as_the_compiler_sees_it(efficient, reduction):
    head, hidden = made(efficient)
    with torch.no_grad():
        parts = head._parts(hidden, MASK)
    wanted = [each is not None for each in parts[:4]]
    for upstream in (None, torch.rand(3, TYPES).double()) if reduction == "none" else (None,):
        for target in (dense(SPANS), torch.tensor([[8, -1], [40, 3], [-1, -1]])):
            torch.library.opcheck(
                torch.ops.lastlayer.span_loss.default,
                ([*parts, target], upstream, TYPES, 50, reduction, wanted),
                test_utils=["test_schema", "test_faketensor"],
            )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_kept_graph_can_be_walked_again(reduction):
    head, hidden = made(chunk_spans=40, reduction=reduction)
    loss = head(hidden, SPANS, MASK).sum()
    leaves = [hidden, *head.parameters()]
    first, second, third = (
        torch.autograd.grad(factor * loss, leaves, retain_graph=True) for factor in (1.0, 3.0, 1.0)
    )
    torch.testing.assert_close([3.0 * each for each in first], list(second))
    torch.testing.assert_close(first, third)


def test_a_reduction_that_does_not_exist_is_refused():
    head, hidden = made()
    head.reduction = "avg"
    with pytest.raises(ValueError, match="reduction: expected one of"):
        head(hidden, SPANS, MASK)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8])
def test_lists_of_any_integers(dtype):
    head, hidden = made()
    assert head(hidden, SPANS.to(dtype), MASK) == head(hidden, SPANS, MASK)


def test_without_an_ignore_index_nothing_is_padding():
    head, hidden = made(ignore_index=None)
    listed = SPANS[:1, :2]
    assert head(hidden[:1], listed) == made_like(head)(hidden[:1], listed)
    with pytest.raises(ValueError, match=r"target: expected types from 0 to 2, got .*-100"):
        head(hidden, SPANS, MASK)


def test_the_scores_of_one_tile_are_made_once():
    head, hidden = made(efficient=False)
    products = {}
    for chunk_spans in (60, "auto"):
        head.chunk_spans = chunk_spans
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            head(hidden, SPANS, MASK).backward()
        products[chunk_spans] = sum(event.name == "aten::bmm" for event in seen.events())
    assert products["auto"] == 3
    assert products[60] > 3


def test_second_derivatives_are_refused_here_and_found_by_scores():
    head, hidden = made()
    with pytest.raises(RuntimeError, match=r"no second derivatives.*head\.scores"):
        torch.autograd.grad(head(hidden, SPANS, MASK), hidden, create_graph=True)
    right = zlpr_loss(head.scores(hidden, MASK).flatten(-2), dense(SPANS).flatten(-2))
    (slope,) = torch.autograd.grad(right, hidden, create_graph=True)
    slope.square().sum().backward()
    assert bool(hidden.grad.isfinite().all())


def test_it_learns():
    torch.manual_seed(0)
    head = GlobalPointer(16, TYPES, 8)
    hidden = torch.randn(3, TOKENS, 16)
    optimiser = torch.optim.Adam(head.parameters(), 0.05)
    for _ in range(60):
        optimiser.zero_grad()
        head(hidden, SPANS, MASK).backward()
        optimiser.step()
    found = [{each[:3] for each in spans} for spans in head.decode(hidden, MASK)]
    assert found == [{tuple(span) for span in spans if span[0] != PAD} for spans in SPANS.tolist()]
