"""Errors between processes: which rank does not answer, and which arguments disagree."""

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lastlayer._processes import all_gathered
from lastlayer._torch import debugging, values_are_checked

# After a collective call has failed, processes report within this many seconds that they are alive.
_GRACE = 5.0
# Key of these reports in the store of the process group.
_KEY = "lastlayer/alive"


@contextmanager
def named_errors(group: Any) -> Iterator[None]:
    """A context that turns a failed collective call into an error that names the missing ranks."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if not _is_of_the_network(error):
            raise
        raise RuntimeError(
            f"ClassParallel: expected all {dist.get_world_size(group)} processes to take part, got "
            f"no answer from {_missing(group)} (seen by process {dist.get_rank(group)}); resume "
            f"from the last checkpoint, with any number of processes. {error}"
        ) from error


def _is_of_the_network(error: Exception) -> bool:
    words = ("onnection", "imed out", "imeout", "gloo", "NCCL", "peer", "Socket")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _missing(group: Any) -> str:
    """Names the ranks that do not report within a few seconds."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_KEY}/{group.group_name}/{rank}", "1")
        waited, missing = 0.0, [*range(size)]
        while missing and waited < _GRACE:
            missing = [
                each for each in missing if not store.check([f"{_KEY}/{group.group_name}/{each}"])
            ]
            if missing:
                time.sleep(0.2)
                waited += 0.2
    except (RuntimeError, dist.DistError):
        return "the process that hosts the store, usually rank 0"
    if not missing:
        return "a process in time, although all of them are alive: one has stalled"
    return f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"


def agree(module: Any, rows: Tensor, ids: Tensor) -> None:
    """Inside ``lastlayer.debug()``, raises an error in all processes if their arguments disagree.

    Compares the options of the head and, with shared rows, the targets; hidden states must be
    finite.
    """
    if not debugging() or not values_are_checked(ids):
        return
    config = module.head.config().items()
    told_of = sorted((key, str(each)) for key, each in config if not isinstance(each, Tensor))
    options = zlib.crc32(str(told_of).encode())
    finite = bool(rows.isfinite().all())
    digest = int((ids * torch.arange(1, ids.numel() + 1, device=ids.device).view(ids.shape)).sum())
    mine = torch.tensor(
        [options, int(finite), digest if module.rows == "shared" else 0], device=ids.device
    )
    told = all_gathered(mine, module.group).tolist()
    wrong = [rank for rank, (_, is_finite, _) in enumerate(told) if not is_finite]
    if wrong:
        raise ValueError(
            f"hidden: expected finite numbers in every process, got inf or NaN in rank {wrong[0]}"
        )
    for place, name in ((0, "options of the head"), (2, "targets")):
        values = [each[place] for each in told]
        other = [rank for rank, value in enumerate(values) if value != values[0]]
        if other:
            raise ValueError(
                f"{'head' if place == 0 else 'target'}: expected the same {name} in every process, "
                f"got different ones in rank {other[0]} than in rank 0"
            )
