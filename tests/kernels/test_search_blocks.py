"""Peaks and levels of blocks of classes, and the best classes that are found by them.

There is a Triton kernel only; on a machine without a GPU it runs in Triton's interpreter.
"""

import pytest
import torch

from lastlayer import kernels
from lastlayer.heads import AdaptiveSoftmax, adaptive

pytest.importorskip("triton")
if kernels.available()["triton"] is not None:
    pytest.skip(kernels.available()["triton"], allow_module_level=True)

from lastlayer.kernels.search import triton as class_blocks
from lastlayer.kernels.search.triton import CLASSES, largest, peaks_and_levels_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def peaks_and_levels(hidden, weight):
    blocks = -(-len(weight) // CLASSES)
    # A column more than there are blocks, which is left alone.
    made = torch.full((2, len(hidden), blocks + 1), 7.0, device=DEVICE)
    peaks_and_levels_(hidden, weight, *made)
    assert (made[..., -1] == 7.0).all()
    return made[..., :-1]


@pytest.mark.parametrize(("n", "n_classes", "depth"), [(1, 1, 1), (70, 300, 20), (3, 128, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_of_all_scores(n, n_classes, depth, dtype):
    hidden = torch.randn(n, depth, device=DEVICE).to(dtype)
    weight = (2 * depth**-0.5 * torch.randn(n_classes, depth, device=DEVICE)).to(dtype)
    peaks, levels = peaks_and_levels(hidden, weight)
    blocks = (hidden.double() @ weight.double().t()).split(CLASSES, -1)
    right = torch.stack([some.amax(-1) for some in blocks], -1).float()
    torch.testing.assert_close(peaks, right, rtol=1e-5, atol=1e-5)
    right = torch.stack([some.logsumexp(-1) for some in blocks], -1).float()
    torch.testing.assert_close(levels, right, rtol=1e-5, atol=1e-5)


def test_a_nan_has_its_whole_row():
    hidden = torch.randn(4, 8, device=DEVICE)
    hidden[2, 3] = torch.nan
    peaks, levels = peaks_and_levels(hidden, torch.randn(200, 8, device=DEVICE))
    assert peaks[2].isnan().all()
    assert levels[2].isnan().all()
    assert peaks[[0, 1, 3]].isfinite().all()


def truth(values, ids, k):
    """The k largest numbers of each row and their ids; NaN first, the lower id where equal."""
    if ids is None:
        ids = torch.arange(values.shape[1], device=DEVICE).expand(values.shape)
    by_id = ids.sort(dim=-1, stable=True)
    values = values.gather(-1, by_id.indices)
    # Of a NaN, +inf and -0 there is one kind each, so that ids decide.
    keys = (values + 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = keys.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return values.gather(-1, best), by_id.values.gather(-1, best)


@pytest.mark.parametrize("widest", [16, 8192])
def test_the_largest_of_each_row(widest, monkeypatch):
    monkeypatch.setattr(class_blocks, "WIDEST", widest)
    values = torch.randint(-3, 4, (4, 45), device=DEVICE).float()
    values[0, ::4], values[1, 7], values[1, 30] = -0.0, torch.nan, -torch.nan
    values[2] = -torch.inf
    values[2, 40] = torch.inf
    # By other ids: of equal ones the last columns.
    backwards = torch.arange(44, -1, -1, device=DEVICE).expand(4, -1)
    for k in (1, 6):
        for ids in (None, backwards):
            found, chosen = largest(values, ids, k)
            right, right_ids = truth(values, ids, k)
            assert torch.equal(chosen, right_ids)
            torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def head_of_ties(**options) -> AdaptiveSoftmax:
    """Many classes have the same vector, and their order is none of frequency."""
    head = AdaptiveSoftmax(
        12, cutoffs=[9, 700], n_classes=1500, order=torch.randperm(1500), device=DEVICE, **options
    )
    with torch.no_grad():
        head.head_weight[-2:] += 1.0
        for tail in head.tails:
            tail.mul_(3.0)
            tail[::7] = tail[0]
            tail[5::130] *= 2.0
    return head


def test_the_best_classes_are_those_of_a_sort(monkeypatch):
    head, hidden = head_of_ties(head_bias=True), torch.randn(6, 12, device=DEVICE)
    # Products in whole numbers: the score of a class is the same however it is made.
    with torch.no_grad():
        for each in (head.head_weight, *head.projections, *head.tails):
            each.mul_(8).round_()
        hidden = hidden.mul(2).round()
    right = head.log_prob(hidden).sort(dim=-1, descending=True, stable=True)
    monkeypatch.setattr(adaptive, "selected", lambda *_: "triton")
    # Scores of hundreds: their last bit is what a logarithm near zero can be off by.
    within = {"rtol": 1e-6, "atol": 2e-4}
    for k in (1, 4):
        found = head.topk(hidden, k)
        torch.testing.assert_close(found.values, right.values[:, :k], **within)
        torch.testing.assert_close(
            head.log_prob(hidden).gather(-1, found.classes), right.values[:, :k], **within
        )
        for values, classes in zip(found.values.tolist(), found.classes.tolist(), strict=True):
            pairs = [(-value, chosen) for value, chosen in zip(values, classes, strict=True)]
            assert pairs == sorted(pairs)


def test_of_equal_classes_the_lower_ids_are_taken(monkeypatch):
    monkeypatch.setattr(adaptive, "selected", lambda *_: "triton")
    head = AdaptiveSoftmax(12, cutoffs=[3], n_classes=2000, device=DEVICE)
    with torch.no_grad():
        head.tails[0].zero_()
        head.head_weight.zero_()
        head.head_weight[3] = 1.0
    found = head.topk(torch.full((2, 12), 10.0, device=DEVICE), 3)
    assert found.classes.tolist() == [[3, 4, 5]] * 2


def test_a_row_of_nan(monkeypatch):
    monkeypatch.setattr(adaptive, "selected", lambda *_: "triton")
    head, hidden = head_of_ties(), torch.randn(3, 12, device=DEVICE)
    hidden[1, 0] = torch.nan
    found = head.topk(hidden, 2)
    assert found.values[1].isnan().all()
    assert found.classes[1].tolist() == [0, 1]
    assert found.values[[0, 2]].isfinite().all()
