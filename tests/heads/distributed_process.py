"""Processes that share a batch, under DDP and under FSDP2: they compute what one process does.

``python distributed_process.py PROCESSES FOLDER HEAD...``; says what is wrong and fails. Shards
that were saved in FOLDER by another number of processes are loaded from there.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lastlayer import fused, heads
from tests.heads.every_head import LABELS, OWN_DRAWS, SPARSE, WIDTH, batch, make
from tests.processes import main

INPUT, ROWS = 5, 8


class Model(torch.nn.Module):
    def __init__(self, name: str, **given) -> None:
        super().__init__()
        head = make(name, **given)
        self.body, self.head = torch.nn.Linear(INPUT, WIDTH, dtype=torch.float64), head

    def forward(self, inputs, target):
        return self.head(self.body(inputs), target)


def problem(name: str, rank: int, processes: int):
    """Inputs and targets of all, and the rows of this process."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(ROWS, INPUT, dtype=torch.float64, generator=generator)
    size = ROWS // processes
    return inputs, batch(name, ROWS)[1], slice(rank * size, (rank + 1) * size)


def dense(gradient):
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    return gradient.to_dense() if gradient.is_sparse else gradient


def same_gradients(model, expected) -> None:
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradients = dense(one.grad), dense(other.grad)
        assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12), (name, *gradients)


def step(model, inputs, target) -> None:
    model(inputs, target).backward()


def refused(*words: str):
    return pytest.raises((RuntimeError, ValueError), match=".*".join(map(re.escape, words)))


def check_ddp(name: str, rank: int, processes: int, sparse: bool) -> None:
    given = {"sparse": True} if sparse else {}
    model = Model(name, **given)
    alone = copy.deepcopy(model)
    inputs, target, mine = problem(name, rank, processes)
    if sparse:
        with refused("sparse", "heads.prepare_ddp(model)"):
            DistributedDataParallel(copy.deepcopy(model))(inputs[mine], target[mine])
    names = heads.prepare_ddp(model)
    wrapped = DistributedDataParallel(model)
    broadcast = [key for key in wrapped.named_module_buffers if "_here" not in key]
    assert not broadcast, broadcast
    assert ("head.weight" in names) == sparse, names
    step(wrapped, inputs[mine], target[mine])
    if sparse:
        assert model.head.weight.grad.is_sparse
    if name not in OWN_DRAWS:
        step(alone, inputs, target)
        same_gradients(model, alone)
        # Accumulated: the second time without, the third time with a reduction.
        with wrapped.no_sync():
            step(wrapped, inputs[mine], target[mine])
        step(wrapped, inputs[mine], target[mine])
        for _ in range(2):
            step(alone, inputs, target)
        same_gradients(model, alone)
    whole = [dense(each.grad) for each in model.parameters()]
    for each in whole:
        other = each.clone()
        dist.broadcast(other, 0)
        assert torch.equal(each, other), "processes have different gradients"


def check_fsdp(name: str, rank: int, processes: int) -> None:
    model = Model(name)
    alone = copy.deepcopy(model)
    inputs, target, mine = problem(name, rank, processes)
    fully_shard(model.head)
    fully_shard(model)
    torch.manual_seed(3)
    step(model, inputs[mine], target[mine])
    if name not in OWN_DRAWS:
        step(alone, inputs, target)
        same_gradients(model, alone)
    with torch.no_grad():
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        if name not in OWN_DRAWS:
            expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
            torch.testing.assert_close(total, expected)
    if name not in OWN_DRAWS:
        for each in (model, alone):
            torch.optim.AdamW(each.parameters(), lr=0.1).step()
    hidden, classes = batch(name, 4)
    classes = classes[:, 0] if name in LABELS else classes
    sharded, other = model.head, alone.head
    if name in OWN_DRAWS:
        other.load_state_dict(
            get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
        )
    for one, expected in zip(sharded.topk(hidden, 3), other.topk(hidden, 3), strict=True):
        torch.testing.assert_close(one, expected)
    torch.testing.assert_close(sharded.log_prob(hidden), other.log_prob(hidden))
    torch.testing.assert_close(sharded.log_prob(hidden, classes), other.log_prob(hidden, classes))
    if name not in LABELS:
        seeds = (torch.Generator().manual_seed(4) for _ in range(2))
        drawn = [each.sample(hidden, 5, generator=next(seeds)) for each in (sharded, other)]
        assert torch.equal(*drawn)
    # A loss on log-probabilities is a training step too.
    for each, rows in ((sharded, mine), (other, slice(None))):
        each.zero_grad()
        some, ids = batch(name, ROWS)
        ids = ids[:, 0] if name in LABELS else ids
        each.log_prob(some[rows], ids[rows]).mean().backward()
    same_gradients(sharded, other)


def check_shards(name: str, folder: Path, processes: int) -> None:
    """Saved by one number of processes, loaded by another one, on meta, bit by bit."""
    expected, own = make(name).state_dict(), folder / f"{name}-{processes}"
    for path in sorted({*folder.glob(f"{name}-*")} - {own}):
        with torch.device("meta"):
            head = make(name)
        fully_shard(head)
        head.to_empty(device="cpu")
        state = get_model_state_dict(head)
        checkpoint.load(state, checkpoint_id=path / "shards")
        set_model_state_dict(head, state)
        whole = get_model_state_dict(head, options=StateDictOptions(full_state_dict=True))
        for key, value in whole.items():
            assert torch.equal(value, expected[key]), (key, path.name)
        hidden, target = batch(name, 4)
        assert head(hidden, target).isfinite().all()
        loaded = heads.Head.load(path / "head")
        torch.testing.assert_close(head.log_prob(hidden), loaded.log_prob(hidden))
    head = fully_shard(make(name))
    checkpoint.save(get_model_state_dict(head), checkpoint_id=own / "shards")
    head.save(own / "head")
    dist.barrier()


def check_refusals() -> None:
    class Wrong(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(7, WIDTH))

        def forward(self, hidden, target):
            into = torch.zeros_like(self.weight)
            return fused.linear_cross_entropy(hidden, self.weight, target, weight_grad=into)

    given = torch.randn(2, WIDTH), torch.tensor([1, 2])
    with refused("weight_grad: expected None inside DistributedDataParallel", "leave it out"):
        DistributedDataParallel(Wrong())(*given)
    Wrong()(*given).backward()
    hidden, target = batch("huffman", 2)
    with refused("sparse: expected False for a head inside fully_shard"):
        fully_shard(make("huffman", sparse=True))(hidden, target)
    model = fully_shard(Model("full"))
    with refused("hidden: expected a head with full parameters", "fully_shard(head)"):
        model.head.topk(hidden, 2)


def process(rank: int, processes: int, folder: Path, *names: str) -> None:
    for name in names:
        try:
            check_ddp(name, rank, processes, sparse=False)
            if name in SPARSE:
                check_ddp(name, rank, processes, sparse=True)
            check_fsdp(name, rank, processes)
            check_shards(name, folder, processes)
        except Exception as wrong:
            raise AssertionError(f"rank {rank}, {name}: {wrong}") from wrong
    check_refusals()


if __name__ == "__main__":
    main(process)
