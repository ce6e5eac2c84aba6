"""Rows gathered from all processes, with gradients that go back to the process they came from."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

GATHERS = (False, True, "even")


class Shares(NamedTuple):
    """How many rows each process has.

    ``counts`` are in the order of ranks; ``first`` is where the rows of this process begin. With
    ``even`` the caller promised equal counts, and they were not exchanged.
    """

    counts: tuple[int, ...]
    rank: int
    group: Any
    even: bool

    @property
    def first(self) -> int:
        return sum(self.counts[: self.rank])

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def processes(self) -> int:
        return len(self.counts)


def check_gather(gather: Any, process_group: Any) -> None:
    """False, True or "even", and processes to gather from."""
    if not (isinstance(gather, bool) or gather == "even"):
        raise ValueError(f"gather: expected one of {GATHERS}, got {gather!r}")
    if not gather:
        if process_group is not None:
            raise ValueError(
                "process_group: expected None without gather=True, got a group; ask for gather=True"
            )
        return
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"gather: expected False where torch.distributed is not initialised, got {gather!r}; "
            "call torch.distributed.init_process_group first"
        )


def shares(rows: Tensor, gather: bool | str, group: Any) -> Shares:
    """How many rows each process has; asking the others waits for the device."""
    processes, rank = dist.get_world_size(group), dist.get_rank(group)
    n = rows.shape[0]
    if gather == "even":
        return Shares((n,) * processes, rank, group, True)
    mine = torch.tensor([n], device=rows.device)
    found = [torch.empty_like(mine) for _ in range(processes)]
    dist.all_gather(found, mine, group=group)
    return Shares(tuple(torch.cat(found).tolist()), rank, group, False)


def gathered(rows: Tensor, of: Shares) -> Tensor:
    """The rows of all processes, those of rank 0 first.

    The gradient of a process's rows is the sum of what all processes have for them.
    """
    result: Tensor = _Gathered.apply(rows, of)
    return result


def summed(number: Tensor, of: Shares) -> Tensor:
    """The sum over processes, without a gradient."""
    total = number.detach().clone()
    dist.all_reduce(total, group=of.group)
    return total


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, of: Shares) -> Tensor:
        ctx.of = of
        most = max(of.counts)
        found = rows.new_empty(of.processes, most, *rows.shape[1:])
        dist.all_gather(list(found.unbind()), _padded(rows, most), group=of.group)
        return torch.cat([each[:n] for each, n in zip(found, of.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        of: Shares = ctx.of
        most = max(of.counts)
        parts = [_padded(part, most) for part in grad.split(of.counts)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=of.group)
        return mine[: of.counts[of.rank]], None


def _padded(rows: Tensor, most: int) -> Tensor:
    if rows.shape[0] == most:
        return rows.contiguous()
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded
