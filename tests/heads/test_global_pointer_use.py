"""Spans: decoding, saving, options and errors."""

import copy
import math

import pytest
import torch

from lastlayer import debug
from lastlayer.fused.scores import BYTES, spans_at_a_time
from lastlayer.fused.spans import tiles
from lastlayer.heads.spans import GlobalPointer, Span
from waits import no_waits

MASK = torch.arange(7) < torch.tensor([[7], [0], [4]])
each_form = pytest.mark.parametrize("efficient", [False, True], ids=["full", "efficient"])


def made(**options):
    head = GlobalPointer(3, 2, 4, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return head, torch.randn(3, 7, 3, dtype=torch.float64)


def above(scores, threshold):
    """Spans by start, end and type, found one by one."""
    n_types, n, _ = scores.shape
    return [
        Span(kind, start, end, scores[kind, start, end].item())
        for start in range(n)
        for end in range(n)
        for kind in range(n_types)
        if scores[kind, start, end] > threshold
    ]


def close(ours, right):
    assert [[each[:3] for each in spans] for spans in ours] == [
        [each[:3] for each in spans] for spans in right
    ]
    torch.testing.assert_close(
        *([s.score for spans in each for s in spans] for each in (ours, right))
    )


@each_form
@pytest.mark.parametrize("chunk_spans", [1, 50, "auto"])
@pytest.mark.parametrize("threshold", [0.0, 0.7, -math.inf, math.inf])
def test_decoded_spans_are_those_above_the_threshold(efficient, chunk_spans, threshold):
    head, hidden = made(efficient=efficient, chunk_spans=chunk_spans)
    right = [above(scores, threshold) for scores in head.scores(hidden, MASK)]
    close(head.decode(hidden, MASK, threshold), right)
    for max_spans in (1, 3, 1000):
        best = [sorted(spans, key=lambda span: -span.score)[:max_spans] for spans in right]
        best = [sorted(spans, key=lambda span: span[1:3] + span[:1]) for spans in best]
        close(head.decode(hidden, MASK, threshold, max_spans), best)


@pytest.mark.parametrize("chunk_spans", [1, 30, "auto"])
def test_of_equal_spans_the_first_are_kept(chunk_spans):
    head = GlobalPointer(3, 2, 4, chunk_spans=chunk_spans)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    (found,) = head.decode(torch.randn(5, 3), threshold=-1.0, max_spans=12)
    order = [(start, end, kind) for start in range(5) for end in range(start, 5) for kind in (0, 1)]
    assert [(span.start, span.end, span.type) for span in found] == order[:12]
    assert head.decode(torch.randn(5, 3)) == [[]]


@pytest.mark.parametrize("chunk_spans", [1, 30, "auto"])
def test_a_nan_takes_no_place_among_the_best(chunk_spans):
    head = GlobalPointer(3, 2, 4, chunk_spans=chunk_spans)
    hidden = torch.randn(6, 3)
    hidden[2] = math.nan
    (every,) = head.decode(hidden, threshold=-math.inf)
    assert len(every) == 2 * 15  # of 21 spans, those that neither start nor end there
    (best,) = head.decode(hidden, threshold=-math.inf, max_spans=3)
    ranked = sorted((span.score for span in every), reverse=True)
    assert sorted((span.score for span in best), reverse=True) == ranked[:3]


def test_what_is_decoded_is_a_target():
    head, hidden = made(chunk_spans=50)
    found = head.decode(hidden, MASK, 0.2)
    lists = [torch.tensor([span[:3] for span in spans]).reshape(-1, 3) for spans in found]
    padded = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-100)
    dense = head.scores(hidden, MASK) > 0.2
    torch.testing.assert_close(head(hidden, padded, MASK), head(hidden, dense, MASK))


def test_decoding_records_no_gradient():
    head, hidden = made()
    found = head.decode(hidden.requires_grad_(), MASK, -math.inf)
    assert isinstance(found[0][0].score, float)
    assert isinstance(found[0][0], Span)


@each_form
@pytest.mark.parametrize(("n_texts", "n", "n_spans"), [(3, 9, 1), (3, 9, 100), (5, 130, 20_000)])
def test_tiles_have_each_span_once_and_keep_to_their_size(efficient, n_texts, n, n_spans):
    n_types = 1 if efficient else 3
    seen = torch.zeros(n_texts, n, n, dtype=torch.int64)
    for texts, starts, ends in tiles(n_texts, n_types, n, n_spans):
        cells = seen[texts, starts, ends]
        cells += 1
        assert cells.numel() * n_types <= n_spans or cells.shape[:2] == (1, 1)
    assert bool((seen.triu() == torch.ones_like(seen).triu()).all())


def test_default_tiles():
    vectors = torch.empty(0)
    assert spans_at_a_time(17, vectors) == 17
    assert spans_at_a_time("low", vectors) < spans_at_a_time("auto", vectors)
    for device in ("cpu", "cuda"):
        auto, low = BYTES["spans", device]
        assert low < auto


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"efficient": True, "rope": False, "bias": False},
        {"reduction": "none", "ignore_index": -1, "chunk_spans": 99},
    ],
)
def test_saved_and_loaded(tmp_path, options):
    head = GlobalPointer(3, 2, 4, **options)
    head.save(tmp_path)
    hidden, spans = torch.randn(2, 7, 3), torch.tensor([[[0, 1, 5], [-1, -1, -1]]] * 2)
    spans = torch.where(spans < 0, head.ignore_index, spans)
    for other in (GlobalPointer.load(tmp_path), copy.deepcopy(head)):
        assert repr(other) == repr(head)
        assert other.config() == head.config()
        assert torch.equal(other(hidden, spans), head(hidden, spans))


def test_another_saved_head_is_refused(tmp_path):
    class OtherPointer(GlobalPointer):
        pass

    GlobalPointer(3, 2, 4).save(tmp_path)
    with pytest.raises(ValueError, match="expected a saved OtherPointer, got 'GlobalPointer'"):
        OtherPointer.load(tmp_path)


def test_a_loaded_head_keeps_its_dtype(tmp_path):
    GlobalPointer(3, 2, 4, dtype=torch.float64).save(tmp_path)
    assert GlobalPointer.load(tmp_path).project.weight.dtype == torch.float64


def test_options_show():
    head = GlobalPointer(3, 2, rope=False)
    assert head.extra_repr() == "in_features=3, n_types=2, head_size=64, rope=False"


def test_a_config_makes_the_same_head():
    head = GlobalPointer(3, 2, 4, rope=False, ignore_index=-1, reduction="sum", chunk_spans="low")
    other = GlobalPointer(**head.config())
    assert other.config() == head.config()
    assert repr(other) == repr(head)


def test_there_are_no_biases_to_start_from_counts():
    with pytest.raises(NotImplementedError, match="got GlobalPointer, which has none"):
        GlobalPointer(3, 2, 4).init_bias_from_counts([1, 2])


def test_efficient_has_few_parameters():
    def size(**options):
        return sum(each.numel() for each in GlobalPointer(768, 50, **options).parameters())

    assert 20 * size(efficient=True) < size()


def test_fresh_parameters():
    for efficient in (False, True):
        head = GlobalPointer(3, 2, 4, efficient=efficient, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.fill_(math.nan)
        head.reset_parameters()
        assert all(bool(each.isfinite().all()) for each in head.parameters())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"in_features": 0}, ValueError, "in_features: expected at least 1"),
        ({"n_types": 2.0}, TypeError, "n_types: expected an int"),
        ({"head_size": 5}, ValueError, "head_size: expected an even number.*got 5.*rope=False"),
        ({"ignore_index": 0}, ValueError, "ignore_index: expected at most -1, which is no type"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index: expected an int"),
        ({"reduction": "max"}, ValueError, "reduction: expected one of"),
        ({"chunk_spans": 0}, ValueError, "chunk_spans: expected at least 1"),
        ({"chunk_spans": "all"}, TypeError, "chunk_spans: expected an int"),
        ({"chunk_spans": True}, TypeError, "chunk_spans: expected an int"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        GlobalPointer(**{"in_features": 3, "n_types": 2, "head_size": 4} | options)


def test_an_odd_size_needs_no_pairs_without_rope():
    assert GlobalPointer(3, 2, 5, rope=False).scores(torch.randn(4, 3)).shape == (2, 4, 4)


@pytest.mark.parametrize(
    ("hidden", "error", "words"),
    [
        ([[0.0]], TypeError, "hidden: expected a torch.Tensor"),
        (torch.zeros(7, 3, dtype=torch.int64), TypeError, "hidden: expected a floating dtype"),
        (torch.zeros(3), ValueError, r"hidden: expected shape \(\*batch, n, 3\)"),
        (torch.zeros(2, 7, 4), ValueError, r"hidden: expected shape.*got \(2, 7, 4\)"),
        (torch.zeros(2, 0, 3), ValueError, "hidden: expected shape.*at least one token"),
        (torch.zeros(2, 7, 3).double(), TypeError, "hidden: expected the dtype of the head"),
        (torch.zeros(2, 7, 3, device="meta"), ValueError, "hidden: expected the device"),
    ],
)
def test_bad_hidden(hidden, error, words):
    head = GlobalPointer(3, 2, 4)
    with pytest.raises(error, match=words):
        head(hidden, torch.zeros(2, 1, 3, dtype=torch.int64))
    for method in (head.scores, head.decode):
        with pytest.raises(error, match=words):
            method(hidden)


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        ([True] * 7, TypeError, "mask: expected a bool tensor"),
        (torch.ones(2, 7), TypeError, r"mask: expected.*torch\.float32.*mask\.bool"),
        (torch.ones(7, dtype=torch.bool), ValueError, r"mask: expected shape \(2, 7\)"),
        (torch.ones(2, 7, 7, dtype=torch.bool), ValueError, r"got \(2, 7, 7\)"),
        (
            torch.ones(2, 7, dtype=torch.bool, device="meta"),
            ValueError,
            "mask: expected the device",
        ),
    ],
)
def test_bad_masks(mask, error, words):
    head, hidden = GlobalPointer(3, 2, 4), torch.zeros(2, 7, 3)
    for call in (head.scores, head.decode):
        with pytest.raises(error, match=words):
            call(hidden, mask)
    with pytest.raises(error, match=words):
        head(hidden, torch.zeros(2, 1, 3, dtype=torch.int64), mask)


def backward():
    target = torch.zeros(2, 2, 7, 7, dtype=torch.bool)
    target[1, 0, 5, 3] = True
    return target


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ([[[0, 1, 2]]], TypeError, "target: expected a torch.Tensor"),
        (torch.zeros(2, 1, 3), TypeError, "target: expected integer lists"),
        (torch.zeros(2, 2, 7, 7), TypeError, r"target\.bool"),
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"expected shape \(2, m, 3\)"),
        (torch.zeros(2, 1, 4, dtype=torch.int64), ValueError, r"got \(2, 1, 4\)"),
        (
            torch.zeros(2, 2, 7, 7, dtype=torch.int64),
            ValueError,
            "for one label per span use torch.bool",
        ),
        (torch.zeros(2, 7, 7, dtype=torch.bool), ValueError, r"expected shape \(2, 2, 7, 7\)"),
        (backward(), ValueError, r"spans that end where they start or later.*\(0, 5, 3\)"),
        (torch.tensor([[[0, 1, 2]], [[1, 4, 3]]]), ValueError, r"or later.*\(1, 4, 3\)"),
        (torch.tensor([[[0, 1, 2]], [[1, 4, 7]]]), ValueError, r"ends from 0 to 6.*\(1, 4, 7\)"),
        (
            torch.tensor([[[0, -1, 2]], [[1, 4, 6]]]),
            ValueError,
            r"starts from 0 to 6.*\(0, -1, 2\)",
        ),
        (torch.tensor([[[0, 1, 2]], [[2, 4, 6]]]), ValueError, r"types from 0 to 1.*\(2, 4, 6\)"),
        (torch.zeros(2, 1, 3, dtype=torch.int64, device="meta"), ValueError, "expected the device"),
    ],
)
def test_bad_targets(target, error, words):
    with pytest.raises(error, match=words):
        GlobalPointer(3, 2, 4)(torch.zeros(2, 7, 3), target)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"threshold": "0"}, TypeError, "threshold: expected a number"),
        ({"threshold": True}, TypeError, "threshold: expected a number"),
        ({"threshold": math.nan}, ValueError, "threshold: expected a number, got nan"),
        ({"max_spans": 0}, ValueError, "max_spans: expected at least 1"),
        ({"max_spans": 1.5}, TypeError, "max_spans: expected an int"),
    ],
)
def test_bad_options_of_decoding(options, error, words):
    with pytest.raises(error, match=words):
        GlobalPointer(3, 2, 4).decode(torch.zeros(7, 3), **options)


@pytest.mark.gpu
@each_form
def test_on_a_gpu(efficient):
    head, hidden = made(efficient=efficient, chunk_spans=50)
    spans = torch.tensor([[[0, 1, 2], [1, 0, 6], [0, 1, 2]], [[-100] * 3] * 3, [[1, 2, 3]] * 3])
    there = copy.deepcopy(head).cuda()
    results = []
    for each, device in ((head, "cpu"), (there, "cuda")):
        states, target, mask = (given.to(device) for given in (hidden, spans, MASK))
        loss = each(states.requires_grad_(), target, mask)
        gradients = torch.autograd.grad(loss, [states, *each.parameters()])
        results.append([loss.cpu(), *(gradient.cpu() for gradient in gradients)])
        close(each.decode(states, mask), head.decode(hidden, MASK))
    torch.testing.assert_close(*results)
    wrong = torch.tensor([[[0, 5, 2]]] * 3, device="cuda")
    assert bool(there(hidden.cuda(), wrong).isfinite())
    with debug(), pytest.raises(ValueError, match="or later"):
        there(hidden.cuda(), wrong)


@pytest.mark.gpu
def test_training_does_not_wait():
    head = GlobalPointer(8, 3, 4, device="cuda", chunk_spans=500)
    hidden = torch.randn(4, 30, 8, device="cuda", requires_grad=True)
    spans = torch.tensor([[[0, 3, 9]]] * 4, device="cuda")
    mask = torch.ones(4, 30, dtype=torch.bool, device="cuda")
    head(hidden, spans, mask).backward()
    with no_waits():
        head(hidden, spans, mask).backward()
