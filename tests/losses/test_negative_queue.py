"""The queue of past keys holds the last ones, whatever the sizes of batches."""

import pytest
import torch

from lastlayer.losses.contrastive import info_nce
from lastlayer.losses.queue import NegativeQueue

DIM = 3


def keys_from(first: int, n: int) -> torch.Tensor:
    return torch.arange(first, first + n).float().unsqueeze(1).expand(n, DIM)


@pytest.mark.parametrize("size", [1, 7, 10])
def test_holds_the_last_keys_in_order(size):
    queue = NegativeQueue(size, DIM)
    pushed = 0
    assert queue.keys().shape == (0, DIM), "nothing is made up"
    for n in torch.randint(0, 2 * size + 3, (12,)).tolist():
        new = keys_from(pushed, n)
        queue.push(new, new[:, 0].long())
        pushed += n
        held = min(size, pushed)
        assert len(queue) == held
        assert torch.equal(queue.keys(), keys_from(pushed - held, held))
        assert held == 0 or torch.equal(queue.groups(), torch.arange(pushed - held, pushed))


def test_goes_on_where_it_was_saved():
    queue, resumed = NegativeQueue(7, DIM), NegativeQueue(7, DIM)
    queue.push(keys_from(0, 5))
    queue.push(keys_from(5, 4))
    resumed.load_state_dict(queue.state_dict())
    for each in (queue, resumed):
        each.push(keys_from(9, 3))
        assert torch.equal(each.keys(), keys_from(5, 7))
        assert each.groups() is None
        assert torch.equal(each.position, torch.tensor([5, 7, 0]))
    assert "held=7" in repr(resumed)
    resumed.clear()
    assert len(resumed) == 0
    assert not resumed.position.any()


def test_keys_stay_as_they_were_pushed():
    queue = NegativeQueue(4, DIM, dtype=torch.bfloat16)
    key = torch.ones(2, DIM, requires_grad=True)
    queue.push(key)
    before = queue.keys()
    assert not before.requires_grad
    assert before.dtype == torch.bfloat16
    queue.push(2 * key)
    assert torch.equal(before, torch.ones(2, DIM, dtype=torch.bfloat16))


def test_its_keys_are_negatives_and_know_their_groups():
    query, key = torch.randn(4, DIM, requires_grad=True), torch.randn(4, DIM)
    groups = torch.arange(4)
    queue = NegativeQueue(16, DIM)
    first = info_nce(query, key, queue.keys(), groups=groups)
    torch.testing.assert_close(first, info_nce(query, key))
    queue.push(key, groups)
    options = dict(groups=groups, negative_groups=queue.groups())
    ignored = info_nce(query, key, queue.keys(), **options, same_group="ignore")
    expected = info_nce(query, key, torch.cat([key]), **options, same_group="ignore")
    torch.testing.assert_close(ignored, expected)
    # The old copy of a pair's key is no negative of it.
    alone = info_nce(query[:1], key[:1], queue.keys()[:1], groups=groups[:1],
                     negative_groups=queue.groups()[:1], same_group="ignore")  # fmt: skip
    torch.testing.assert_close(alone, torch.zeros_like(alone))
