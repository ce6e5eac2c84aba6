"""Lists of positives in one form, against sets."""

import math
from types import SimpleNamespace

import pytest
import torch

from lastlayer import debug
from lastlayer.fused.label_lists import check_lists, sorted_lists


def positive_lists(
    positives, offsets=None, *, batch, n_classes, ignore_index=-100, values=None,
    label_smoothing=0.0,
):  # fmt: skip
    options = ignore_index, label_smoothing
    given = check_lists(torch.zeros(*batch, 1), n_classes, positives, offsets, values, *options)
    values = None if values is None else values.reshape(given[0].shape)
    found = sorted_lists(*given[:2], values, math.prod(batch), n_classes, *options).flat()
    return SimpleNamespace(**dict(zip(("classes", "rows", "starts", "values"), found, strict=True)))


def as_csr(padded):
    kept = [[c for c in row if c != -100] for row in padded.tolist()]
    offsets = torch.tensor([0, *(len(row) for row in kept)]).cumsum(0)
    return torch.tensor([c for row in kept for c in row], dtype=torch.int64), offsets


def drawn(n_rows=6, m=7, n=9):
    padded = torch.randint(-4, n, (n_rows, m))
    padded[padded < 0] = -100
    padded[2] = -100
    return padded


def check(lists, padded):
    n_rows = len(padded)
    assert lists.starts.shape == (n_rows + 1,)
    for row, wanted in enumerate(padded.tolist()):
        here = slice(int(lists.starts[row]), int(lists.starts[row + 1]))
        assert (lists.rows[here] == row).all()
        found = lists.classes[here]
        assert found[found >= 0].tolist() == sorted(set(wanted) - {-100})


def test_padded_lists_and_csr_are_sorted_sets():
    padded = drawn()
    check(positive_lists(padded, batch=(6,), n_classes=9), padded)
    check(positive_lists(*as_csr(padded), batch=(6,), n_classes=9), padded)
    check(positive_lists(padded.reshape(2, 3, 7), batch=(2, 3), n_classes=9), padded)


def test_the_first_of_duplicates_keeps_its_value():
    padded = drawn()
    values = torch.rand(padded.shape, requires_grad=True)
    lists = positive_lists(padded, batch=(6,), n_classes=9, values=values)
    valid = lists.classes >= 0
    for place in valid.nonzero().flatten().tolist():
        row, named = int(lists.rows[place]), int(lists.classes[place])
        first = padded[row].tolist().index(named)
        assert lists.values[place] == values[row, first]
    lists.values[valid].sum().backward()
    assert int((values.grad != 0).sum()) == int(valid.sum())


def test_smoothing_gives_what_is_listed_the_rest():
    lists = positive_lists(drawn(), batch=(6,), n_classes=9, label_smoothing=0.1)
    assert (lists.values == 0.9).all()


def test_any_integer_dtype_and_no_padding():
    padded = drawn()
    expected = positive_lists(padded, batch=(6,), n_classes=9)
    for dtype in (torch.int8, torch.int16, torch.int32):
        found = positive_lists(padded.to(dtype), batch=(6,), n_classes=9)
        assert torch.equal(found.classes, expected.classes)
        ids, offsets = as_csr(padded)
        found = positive_lists(ids.to(dtype), offsets.to(dtype), batch=(6,), n_classes=9)
        for row in range(6):
            here, there = (found.rows == row), (expected.rows == row)
            ours, theirs = found.classes[here], expected.classes[there]
            assert torch.equal(ours[ours >= 0], theirs[theirs >= 0])
    for padding in (9, 100):
        other = padded.masked_fill(padded == -100, padding)
        found = positive_lists(other, batch=(6,), n_classes=9, ignore_index=padding)
        check(found, padded)
    full = torch.randint(9, (6, 4))
    none = positive_lists(full, batch=(6,), n_classes=9, ignore_index=None)
    assert torch.equal(none.classes, positive_lists(full, batch=(6,), n_classes=9).classes)
    with pytest.raises(ValueError, match="positives: expected class ids from 0 to 8, got -100"):
        positive_lists(padded, batch=(6,), n_classes=9, ignore_index=None)


def test_nothing_is_listed():
    none = torch.zeros(0, dtype=torch.int64)
    for batch, lists in {
        (3,): positive_lists(none.reshape(3, 0), batch=(3,), n_classes=2),
        (3, 1): positive_lists(none, torch.zeros(4).long(), batch=(3, 1), n_classes=2),
        (0,): positive_lists(none, torch.zeros(1).long(), batch=(0,), n_classes=2),
    }.items():
        assert lists.classes.shape == lists.rows.shape == (0,)
        assert lists.starts.tolist() == [0] * (batch[0] + 1)


IDS = torch.tensor([[0, 1], [2, -100]])


@pytest.mark.parametrize(
    ("kind", "message", "positives", "options"),
    [
        (TypeError, "positives: expected a torch.Tensor, got list", [[1]], {}),
        (TypeError, r"positives: .*float32; pass dense labels.*zlpr_loss", IDS.float(), {}),
        (TypeError, r"positives: expected integer class ids, got torch.bool", IDS > 0, {}),
        (ValueError, r"positives: expected shape \(2, m\)", IDS.t()[:1], {}),
        (ValueError, "positives: .* from 0 to 3, .*-100.* got 4", IDS + 2, {}),
        (ValueError, "positives: .* got -7", IDS - 7, {}),
        (ValueError, r"values: .*shape of positives", IDS, {"values": torch.ones(2)}),
        (ValueError, r"values: .*\[0, 1\], got 1.5", IDS, {"values": torch.full((2, 2), 1.5)}),
        (
            ValueError,
            r"values: .*\[0, 1\], got nan",
            IDS,
            {"values": torch.full((2, 2), torch.nan)},
        ),
        (TypeError, "values: .*floating.*int64", IDS, {"values": IDS}),
        (ValueError, "smoothing: .*0.5, .*got 0.5", IDS, {"label_smoothing": 0.5}),
        (TypeError, "smoothing: .*number, got str", IDS, {"label_smoothing": "a"}),
        (TypeError, "ignore_index: .*int, .*got float", IDS, {"ignore_index": 1.0}),
        (ValueError, r"offsets: expected shape \(3,\)", IDS[0], {"offsets": torch.arange(2)}),
        (ValueError, "offsets: .*increase from 0 to 2", IDS[0], {"offsets": torch.arange(3) + 1}),
        (ValueError, "offsets: .*increase", IDS[0], {"offsets": torch.tensor([0, 3, 2])}),
        (TypeError, "offsets: .*integer", IDS[0], {"offsets": torch.ones(3)}),
        (ValueError, r"positives: expected shape \(k,\)", IDS, {"offsets": torch.arange(3)}),
    ],
)
def test_bad_lists(kind, message, positives, options):
    with debug(), pytest.raises(kind, match=message):
        positive_lists(
            positives,
            options.get("offsets"),
            batch=(2,),
            n_classes=4,
            **{name: each for name, each in options.items() if name != "offsets"},
        )
