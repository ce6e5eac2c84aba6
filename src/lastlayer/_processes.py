"""Collectives of torch.distributed for gathered rows, and for classes sharded over processes."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

GATHERS = (False, True, "even")
# The local target of a row whose class is in another process, and of an ignored row.
ELSEWHERE, IGNORED = -1, -100
_GOLDEN = (1.0 + 5.0**0.5) / 2.0
# The gradient of hidden states that all processes have: the sum over processes, or each process's
# own part of that sum.
HIDDEN_GRADS = ("sum", "part")
# torch 2.13 renamed these; they are None if torch was built without distributed.
_all_gather_single: Any = getattr(
    dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None)
)
_reduce_scatter_single: Any = getattr(
    dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None)
)
# Callbacks for each collective call, with its name and the bytes that this process receives. Not a
# context variable, which autograd's threads would not see.
LISTENERS: list[Callable[[str, float], None]] = []


def received_bytes(call: str, nbytes: float, processes: int) -> float:
    """Bytes that a process receives in a collective call with a ring algorithm.

    ``nbytes`` is the size of one process's input: for "all_gather" its own part, otherwise the
    whole tensor. An "all_reduce" is a reduce-scatter followed by an all-gather.
    """
    others = processes - 1
    if call == "all_gather":
        return nbytes * others
    return nbytes * others / processes * (2 if call == "all_reduce" else 1)


def tell(call: str, nbytes: float, group: Any) -> None:
    """Reports a call to the listeners."""
    if LISTENERS:
        received = received_bytes(call, nbytes, dist.get_world_size(group))
        for listener in LISTENERS:
            listener(call, received)


def exchanged(
    found: Tensor, sent: Tensor, group: Any, asked: list[int] | None = None,
    told: list[int] | None = None,
) -> None:  # fmt: skip
    """An all-to-all into ``found``: receives ``asked`` rows from each process, sends ``told``."""
    if LISTENERS:
        rank, rows = dist.get_rank(group), len(found)
        mine = rows // dist.get_world_size(group) if asked is None else asked[rank]
        for listener in LISTENERS:
            listener("all_to_all", found.nbytes / max(1, rows) * (rows - mine))
    if _is_through_host(sent, group):
        on_host = found.cpu()
        dist.all_to_all_single(on_host, sent.cpu(), asked, told, group=group)
        found.copy_(on_host)
    else:
        dist.all_to_all_single(found, sent, asked, told, group=group)


def _is_through_host(tensor: Tensor, group: Any) -> bool:
    """Whether to copy through CPU memory, for gloo, which tests on one GPU use."""
    return tensor.device.type != "cpu" and dist.get_backend(group) == "gloo"


class Shares(NamedTuple):
    """The number of rows of each process.

    ``counts`` are in the order of ranks; ``first`` is the index of this process's first row. With
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

    @property
    def mine(self) -> slice:
        """The rows of this process among those of all processes."""
        return slice(self.first, self.first + self.counts[self.rank])


def check_gather(gather: Any, process_group: Any) -> None:
    """Checks that gather is False, True or "even", and that processes are initialised for it."""
    if not (isinstance(gather, bool) or gather == "even"):
        raise ValueError(f"gather: expected one of {GATHERS}, got {gather!r}")
    if not gather:
        if process_group is not None:
            raise ValueError(
                "process_group: expected None without gather=True, got a group; set gather=True"
            )
        return
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"gather: expected False if torch.distributed is not initialised, got {gather!r}; "
            "call torch.distributed.init_process_group first"
        )


def shares(rows: Tensor, gather: bool | str, group: Any) -> Shares:
    """The number of rows of each process; unless "even", exchanging it waits for the device."""
    processes, rank = dist.get_world_size(group), dist.get_rank(group)
    n = rows.shape[0]
    if gather == "even":
        return Shares((n,) * processes, rank, group, True)
    counts = all_gathered(torch.tensor([n], device=rows.device), group)
    return Shares(tuple(counts.flatten().tolist()), rank, group, False)


def all_gathered(numbers: Tensor, group: Any) -> Tensor:
    """The tensors of all processes, of equal shape, stacked: ``(processes, *shape)``."""
    tell("all_gather", numbers.nbytes, group)
    given = numbers.cpu() if _is_through_host(numbers, group) else numbers
    found = given.new_empty(dist.get_world_size(group), *given.shape)
    _all_gather_single(found.view(-1), given.reshape(-1), group=group)
    return found.to(numbers.device)


def gathered(rows: Tensor, of: Shares) -> Tensor:
    """The rows of all processes, in the order of ranks.

    The gradient of a process's rows is the sum of the gradients of these rows in all processes.
    """
    result: Tensor = _Gathered.apply(rows, of)
    return result


def summed(number: Tensor, group: Any) -> Tensor:
    """The sum over processes, not differentiable."""
    tell("all_reduce", number.nbytes, group)
    through_host = _is_through_host(number, group)
    total = number.detach().clone(memory_format=torch.contiguous_format)
    total = total.cpu() if through_host else total
    dist.all_reduce(total, group=group)
    return total.to(number.device)


def summed_part(parts: Tensor, group: Any) -> Tensor:
    """This process's part of the sum over processes (reduce-scatter), not differentiable.

    Args:
        parts: ``(processes, *shape)``, contiguous: this process's addend to the part of each.
        group: the process group.
    """
    tell("reduce_scatter", parts.nbytes, group)
    given = parts.cpu() if _is_through_host(parts, group) else parts
    mine = given.new_empty(given.shape[1:])
    _reduce_scatter_single(mine.view(-1), given.view(-1), group=group)
    return mine.to(parts.device)


def sum_of_parts(part: Tensor, group: Any) -> Tensor:
    """The sum over processes; each process passes the gradient on to its own part unchanged."""
    result: Tensor = _SumOfParts.apply(part, group)
    return result


class _SumOfParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return summed(part, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, of: Shares) -> Tensor:
        ctx.of = of
        found = all_gathered(_padded(rows, max(of.counts)), of.group)
        if min(of.counts) == max(of.counts):
            return found.flatten(0, 1)
        return torch.cat([each[:n] for each, n in zip(found, of.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        of: Shares = ctx.of
        most = max(of.counts)
        parts = grad.contiguous()
        if min(of.counts) < most:
            parts = torch.cat([_padded(part, most) for part in grad.split(of.counts)])
        mine = summed_part(parts.unflatten(0, (of.processes, most)), of.group)
        return mine[: of.counts[of.rank]], None


def _padded(rows: Tensor, most: int) -> Tensor:
    if rows.shape[0] == most:
        return rows.contiguous()
    padded = rows.new_zeros(most, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    return padded


def in_all(values: Tensor, group: Any) -> Tensor:
    """Returns replicated values unchanged; their gradient is summed over processes."""
    result: Tensor = _InAll.apply(values, group)
    return result


class _InAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class Shards(NamedTuple):
    """Classes that are sharded over the processes of a group, a range of them in each.

    The fields are plain values, so that a registered operation can take them as options. Inside
    such an operation, a target is the index of a class in this process, or :data:`ELSEWHERE`.
    """

    group_name: str
    n_classes: int
    """Number of classes of all processes."""
    most: int
    """Largest number of classes of a process; all processes derive the same chunks from it."""
    first: int
    """The first class of this process."""
    here: int
    """Number of classes of this process."""

    @classmethod
    def even(cls, group: Any, n_classes: int) -> "Shards":
        """Sharded like a DTensor with ``Shard(0)``: ceil(n / processes) per process, fewer last."""
        most = -(-n_classes // dist.get_world_size(group))
        first = min(n_classes, most * dist.get_rank(group))
        here = min(most, n_classes - first)
        return cls(group.group_name, n_classes, most, first, here)

    @classmethod
    def of_parts(cls, group: Any, part: Tensor) -> "Shards":
        """From the class vectors of each process, whose numbers are exchanged."""
        counts = all_gathered(torch.tensor([part.shape[0]], device=part.device), group)
        sizes, rank = counts.flatten().tolist(), dist.get_rank(group)
        return cls(group.group_name, sum(sizes), max(sizes), sum(sizes[:rank]), sizes[rank])

    @property
    def shares(self) -> Shares:
        """The number of classes of each process."""
        counts = [
            max(0, min(self.most, self.n_classes - self.most * rank))
            for rank in range(self.processes)
        ]
        return Shares(tuple(counts), self.rank, self.group, False)

    @property
    def group(self) -> Any:
        found: Any = dist.distributed_c10d
        return found._resolve_process_group(self.group_name)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def processes(self) -> int:
        return dist.get_world_size(self.group)

    def local(self, target: Tensor, ignore_index: int | None) -> Tensor:
        """Class ids as indices in this process, or :data:`ELSEWHERE` or :data:`IGNORED`."""
        place = target - self.first
        place = torch.where((place >= 0) & (place < self.here), place, ELSEWHERE)
        if ignore_index is None:
            return place
        return torch.where(target == ignore_index, IGNORED, place)

    def seen(self, hidden: Tensor, hidden_grad: str) -> Tensor:
        """Hidden states that all processes have, with the gradient ``hidden_grad``."""
        if hidden_grad == "part" or not hidden.requires_grad:
            return hidden
        return in_all(hidden, self.group)

    def gathered(self, numbers: Tensor) -> Tensor:
        """The numbers of all processes, ``(processes, *shape)``."""
        return all_gathered(numbers, self.group)

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over processes."""
        return summed(numbers, self.group)

    def logsumexp(self, numbers: Tensor) -> Tensor:
        """log Σ e^x over processes, with one all-gather."""
        return self.gathered(numbers).logsumexp(0)


class Layout(NamedTuple):
    """The order of classes in a table whose rows are sharded into ranges, one per process.

    With ``step`` 1, class c is row c. Otherwise it is row ``c * step mod n_classes``, with a step
    near n / 1.618 that is coprime to n. Neighbouring class ids are then far apart, so that frequent
    classes are distributed evenly over any number of processes.
    """

    n_classes: int
    step: int = 1

    @classmethod
    def spread(cls, n_classes: int) -> "Layout":
        step = max(1, round(n_classes / _GOLDEN))
        while math.gcd(step, n_classes) != 1:
            step += 1
        return cls(n_classes, step % n_classes or 1)

    def rows_of(self, classes: Tensor) -> Tensor:
        """Rows of class ids; negative ids are returned unchanged."""
        if self.step == 1:
            return classes
        return torch.where(classes < 0, classes, classes * self.step % self.n_classes)

    def classes_at(self, rows: Tensor) -> Tensor:
        """Class ids of rows."""
        if self.step == 1:
            return rows
        return rows * pow(self.step, -1, self.n_classes) % self.n_classes


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, tested in a way that torch.compile can trace."""
    return getattr(tensor, "placements", None) is not None


def shards_of(weight: Any) -> Shards:
    """How the rows of a DTensor are sharded.

    Raises:
        ValueError: if they are not sharded by rows over one dimension of a mesh.
    """
    placements = weight.placements
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise ValueError(
            "weight: expected a DTensor with its rows sharded over one dimension of a mesh, "
            f"(Shard(0),), got {tuple(placements)}; convert it with "
            "weight.redistribute(mesh, [Shard(0)]), or to a plain tensor with weight.full_tensor()"
        )
    return Shards.even(weight.device_mesh.get_group(), weight.shape[0])


def local_part(tensor: Any) -> Any:
    """This process's part of a DTensor, differentiable; other values are returned unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
