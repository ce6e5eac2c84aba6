"""Processes that share a batch: their averaged gradients are those of one process with all of it.

``python info_nce_process.py PROCESSES FOLDER SEED``; says what is wrong and fails.
"""

import itertools
from pathlib import Path

import torch
from torch import distributed as dist

from lastlayer.losses.contrastive import info_nce
from lastlayer.losses.queue import NegativeQueue
from tests.processes import main

UNEVEN, EVEN = (5, 3, 0, 4), (3, 3, 3, 3)
MORE = (2, 0, 3, 1)
INPUT, WIDTH = 7, 5


def parameters(seed: int) -> list[torch.Tensor]:
    """Two encoders and a temperature, the same everywhere."""
    torch.manual_seed(seed)
    encoders = [torch.randn(INPUT, WIDTH, dtype=torch.float64) for _ in range(2)]
    return [p.requires_grad_() for p in (*encoders, torch.tensor(0.3, dtype=torch.float64))]


def part(counts: tuple[int, ...], rank: int) -> slice:
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def run(inputs, mine, further, gather, options, seed):
    """Loss and gradients with the rows ``mine`` of the batch."""
    query, key, negatives, own_negatives, groups, key_groups, negative_groups = inputs
    first, second, temperature = leaves = parameters(seed)
    given = dict(options)
    kind = given.pop("groups", None)
    if kind is not None:
        given["groups"] = groups[mine] if kind == "one" else (groups[mine], key_groups[mine])
    extra = None
    if given.pop("own_negatives", False):
        extra = own_negatives[mine] @ second
    if given.pop("negatives", False):
        extra = negatives[further] @ second
        if kind is not None:
            given["negative_groups"] = negative_groups[further]
    loss = info_nce(
        query[mine] @ first,
        key[mine] @ second,
        extra,
        temperature=temperature,
        gather=gather,
        **given,
    )
    return loss, torch.autograd.grad(loss.sum(), leaves)


def cases():
    for symmetric, groups in itertools.product((True, False), (None, "one", "two")):
        for same_group in ("positive", "ignore") if groups else ("positive",):
            more = dict(negatives=True) if groups == "two" else {}
            yield True, dict(symmetric=symmetric, groups=groups, same_group=same_group, **more)
    yield "even", dict(symmetric=True)
    yield True, dict(symmetric=True, reduction="sum")
    yield True, dict(negatives=True, in_batch=False)
    yield True, dict(negatives=True, gather_negatives=False)
    yield True, dict(own_negatives=True, groups="one")
    yield True, dict(symmetric=True, reduction="none")


def compare(rank: int, processes: int, gather, options, seed: int) -> None:
    counts = EVEN if gather == "even" else UNEVEN
    torch.manual_seed(seed + 1)
    n, m = sum(counts), sum(MORE)
    shapes = (n,), (n,), (m,), (n, 2)
    inputs = [torch.randn(*shape, INPUT, dtype=torch.float64) for shape in shapes]
    inputs += [torch.randint(3, (k,)) for k in (n, n, m)]
    shared = options.get("gather_negatives") is False
    further = slice(None) if shared else part(MORE, rank)
    loss, gradients = run(inputs, part(counts, rank), further, gather, options, seed)
    one_each = options.get("reduction") == "none"
    for each in gradients:
        dist.all_reduce(each)
        # Losses that each process adds up itself are not those of an average.
        each.div_(1 if one_each else processes)
    alone = {name: value for name, value in options.items() if name != "gather_negatives"}
    expected_loss, expected = run(inputs, slice(None), slice(None), False, alone, seed)
    if one_each:
        expected_loss = expected_loss[part(counts, rank)]
    torch.testing.assert_close(loss, expected_loss, rtol=1e-10, atol=1e-10)
    for one, other in zip(gradients, expected, strict=True):
        # Shares of a softmax, of which most cancels.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10 * n)


def check_queue(rank: int) -> None:
    """Every process holds the keys of all, in the order of ranks."""
    queue = NegativeQueue(20, WIDTH)
    keys = torch.arange(sum(UNEVEN)).float().unsqueeze(1).expand(-1, WIDTH)
    queue.push(keys[part(UNEVEN, rank)], gather=True)
    assert torch.equal(queue.keys(), keys), queue.keys()


def process(rank: int, processes: int, _folder: Path, seed: str) -> None:
    for gather, options in cases():
        try:
            compare(rank, processes, gather, options, int(seed))
        except AssertionError as wrong:
            raise AssertionError(f"rank {rank}, gather={gather}, {options}: {wrong}") from wrong
    check_queue(rank)


if __name__ == "__main__":
    main(process)
